from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from kvlab.models.orpheus.tokens import FrameReader, OrpheusIds
from kvlab.train import loop
from kvlab.train.orpheus import corpus, speech, vocabulary

TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def lines() -> list[speech.Line]:
    """Lines whose codes follow from the words: a frame a word."""
    tokenizer = vocabulary.make_tokenizer()
    places = {word: place for place, word in enumerate(corpus.words())}
    return [
        speech.Line(
            vocabulary.prompt_ids(tokenizer, phrase.prompt),
            torch.tensor([[places[word] + slot for slot in range(7)] for word in phrase.text.split()]),
        )
        for phrase in corpus.phrases(24, seed=0)
    ]


def make_task(lines: list[speech.Line], seed: int = 0) -> speech.SpeechTask:
    return speech.SpeechTask(lines[4:], lines[:4], shape=TINY, batch=4, seed=seed)


def test_every_word_and_voice_is_one_token() -> None:
    tokenizer = vocabulary.make_tokenizer()
    assert all(len(tokenizer(word)["input_ids"]) == 2 for word in [*corpus.words(), *corpus.VOICES])


def test_a_text_begins_with_the_begin_token_once_and_reads_back() -> None:
    tokenizer = vocabulary.make_tokenizer()
    ids = tokenizer("Tara: three red stars?")["input_ids"]
    assert ids.count(vocabulary.BEGIN_OF_TEXT_ID) == 1
    assert ids[0] == vocabulary.BEGIN_OF_TEXT_ID
    assert tokenizer.decode(ids, skip_special_tokens=True) == "tara: three red stars?"


def test_special_tokens_have_the_names_of_the_release() -> None:
    tokenizer = vocabulary.make_tokenizer()
    assert tokenizer.convert_ids_to_tokens([254, 255, 256, 258, vocabulary.VOCAB_SIZE - 1]) == [
        "<|begin_of_text|>", "<|eot_id|>", "<custom_token_0>", "<custom_token_2>", "<custom_token_3593>",
    ]  # fmt: skip
    assert len(tokenizer) == vocabulary.VOCAB_SIZE


def test_a_prompt_has_the_order_of_the_release() -> None:
    ids = vocabulary.prompt_ids(vocabulary.make_tokenizer(), "leo: one")
    assert [ids[0], ids[1], *ids[-4:]] == [259, 254, 255, 260, 261, 257]


def test_audio_ids_are_read_back_by_kvlab() -> None:
    frames = torch.randint(512, (5, 7))
    ids = OrpheusIds.from_config(vocabulary.settings())
    reader = FrameReader(ids)
    read = [frame for token in vocabulary.audio_ids(frames) for frame in reader.push(token)]
    assert torch.equal(torch.tensor(read), frames)
    assert reader.bad == []


def test_the_penalty_in_training_is_that_of_sampling(lines: list[speech.Line]) -> None:
    ids, targets = speech._pad(lines[:3])
    is_answer = targets != speech._IGNORED
    torch.manual_seed(0)
    logits = torch.randn(int(is_answer.sum()), vocabulary.VOCAB_SIZE)
    penalties = torch.tensor([1.3, 1.0, 1.1])
    rows, places = is_answer.nonzero(as_tuple=True)
    expected = logits.clone()
    for n, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
        process = RepetitionPenaltyLogitsProcessor(float(penalties[row]))
        expected[n] = process(ids[row, : place + 1][None], logits[n][None])[0]
    assert torch.allclose(speech.penalised(logits, ids, is_answer, penalties), expected)


def test_the_loss_within_slots_is_the_whole_one_among_what_a_slot_can_hold(lines: list[speech.Line]) -> None:
    task, penalties = make_task(lines), [1.3, 1.0, 1.3, 1.0, 1.3]
    some = [
        speech.Line(line.ids[: line.answer_start].tolist(), line.frames[[0, 1, 0, *range(len(line.frames))]])
        for line in lines[:5]
    ]
    task.net.eval()
    ids, targets = speech._pad(some)
    is_answer = targets != speech._IGNORED
    logits = task.net(input_ids=ids).logits[is_answer].detach()
    logits = speech.penalised(logits, ids, is_answer, torch.tensor(penalties))
    said = targets[is_answer]
    slots = ((said - vocabulary.custom(vocabulary.FIRST_AUDIO)) // vocabulary.CODEBOOK_SIZE).clamp(min=0)
    first = vocabulary.custom(vocabulary.FIRST_AUDIO) + slots * vocabulary.CODEBOOK_SIZE
    every = torch.arange(vocabulary.VOCAB_SIZE)
    can_stand = (every >= first[:, None]) & (every < first[:, None] + vocabulary.CODEBOOK_SIZE)
    can_stand |= (slots == 0)[:, None] & (every == vocabulary.custom(vocabulary.END_OF_SPEECH))
    expected = torch.nn.functional.cross_entropy(logits.masked_fill(~can_stand, -torch.inf), said)
    assert task._nats_in_slots(some, penalties).item() == pytest.approx(expected.item(), rel=1e-5)


def test_only_audio_and_the_end_of_speech_are_learnt(lines: list[speech.Line]) -> None:
    _, targets = speech._pad(lines[:1])
    learnt = targets[0][targets[0] != speech._IGNORED].tolist()
    assert learnt == lines[0].ids[lines[0].answer_start :].tolist()
    assert learnt[-1] == vocabulary.custom(vocabulary.END_OF_SPEECH)


def test_unseen_lines_get_likelier(lines: list[speech.Line], tmp_path: Path) -> None:
    task = make_task(lines)
    first = task.unseen_nats()
    loop.train(task, tmp_path / "speech.pt", num_steps=40)
    assert task.unseen_nats() < first - 0.3


def test_a_killed_run_goes_on_to_the_same_weights(lines: list[speech.Line], tmp_path: Path) -> None:
    whole, killed = make_task(lines), make_task(lines)
    loop.train(whole, tmp_path / "whole.pt", num_steps=5)
    for step in range(3):
        torch.manual_seed(step)
        loop._set_lr(killed, loop.cosine(step, 5))
        loop._step(killed, step)
    loop.save(killed, tmp_path / "killed.pt", 3)
    resumed = make_task(lines, seed=7)
    loop.train(resumed, tmp_path / "killed.pt", num_steps=5)
    assert all(map(torch.equal, whole.net.state_dict().values(), resumed.net.state_dict().values()))


def test_the_network_is_declared_as_orpheus_is() -> None:
    config = speech.build(TINY).config.to_dict()
    assert config["orpheus"] == {
        "custom_token_base": 256, "codebook_size": 512, "begin_of_text_id": 254, "eot_id": 255,
        "voices": ["tara", "leo", "zoe"], "sample_rate": 24_000, "samples_per_frame": 2048, "codec": "snac",
    }  # fmt: skip
    assert config["rope_parameters"]["rope_type"] == "llama3"
