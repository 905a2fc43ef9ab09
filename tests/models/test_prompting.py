"""Text to ids over turns: kept ids stay, begin tokens are single, and what cannot be served is refused by name."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
from tiny_checkpoints import WITH_BEGIN, WITHOUT_BEGIN, make_tokenizer
from transformers import PreTrainedTokenizerFast

from kvlab.errors import InputError, LoadError
from kvlab.models.prompting import TextProcessor, load_tokenizer
from kvlab.spec import Chat, Continued, HistoryFork, ask, chat


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def processor(tokenizer: PreTrainedTokenizerFast) -> TextProcessor:
    return TextProcessor(tokenizer)


def ids_of(processor: TextProcessor, prompt: object) -> list[int]:
    return list(processor.process_prompt(prompt, {}).tensors["tokens"])


# -- K15 ---------------------------------------------------------------------------------------------------------------


def test_k15_1_kept_ids_extend_and_the_report_names_index_21_and_both_ids() -> None:
    tokenizer = make_tokenizer("{{ bos_token }}{% for m in messages %}{{ m['content'] }}.{% endfor %}")
    processor = TextProcessor(tokenizer)
    asked = "q" * 14
    prompt = ids_of(processor, chat(asked))
    token = tokenizer.convert_tokens_to_ids
    reply = [*map(token, "abcde"), token("Han"), token("zi"), *map(token, "fghij")]
    assert (len(prompt), len(reply)) == (16, 12)

    text = processor.decode(reply)
    history = (("user", asked), ("assistant", text), ("user", "more"))
    kept = processor.process_prompt(Chat(history, tuple(prompt + reply), 2), {})
    plain = processor.process_prompt(Chat(history), {})

    assert list(kept.tensors["tokens"][:28]) == prompt + reply
    assert kept.fork == HistoryFork(21, token("Han"), token("H"))
    assert plain.fork is None
    assert len(plain.tensors["tokens"]) == len(kept.tensors["tokens"])
    assert list(plain.tensors["tokens"][:21]) == list(kept.tensors["tokens"][:21])
    assert plain.tensors["tokens"][21] != kept.tensors["tokens"][21]


@pytest.mark.parametrize("template", [WITH_BEGIN, WITHOUT_BEGIN], ids=["template with BOS", "template without"])
def test_k15_3_chat_and_prerendered_chat_are_equal_with_one_begin_token(template: str) -> None:
    processor = TextProcessor(make_tokenizer(template))
    record = processor.process_prompt(chat("Hanzi?", system="Be brief."), {})
    assert list(record.tensors["tokens"]) == ids_of(processor, record.text)
    assert record.tensors["tokens"][0] == 1
    assert list(record.tensors["tokens"]).count(1) == 1


@pytest.mark.parametrize("text", ["plain", "<s>plain", "<s><s>plain"])
def test_k15_3_raw_text_has_one_begin_token(processor: TextProcessor, text: str) -> None:
    assert ids_of(processor, text) == ids_of(processor, "plain")
    assert ids_of(processor, text).count(1) == 1


def test_a_tokenizer_that_adds_no_begin_token_gets_none() -> None:
    assert 1 not in ids_of(TextProcessor(make_tokenizer(WITHOUT_BEGIN, adds_begin=False)), "plain")


# -- follow-ups --------------------------------------------------------------------------------------------------------


def follow_up(processor: TextProcessor, *, ended: bool) -> tuple[list[int], Chat]:
    start = chat("ab", system="sys")
    prompt = ids_of(processor, start)
    reply = [*processor.tokenizer.encode("cd", add_special_tokens=False), *([2] if ended else [])]
    return prompt + reply, Chat((*start.messages, ("assistant", "cd"), ("user", "ef")), tuple(prompt + reply), 3)


@pytest.mark.parametrize("ended", [False, True], ids=["reply cut short", "reply with its end token"])
def test_a_follow_up_equals_the_plain_rendering_where_nothing_forks(processor: TextProcessor, ended: bool) -> None:
    kept, turn = follow_up(processor, ended=ended)
    record = processor.process_prompt(turn, {})
    assert record.fork is None
    assert list(record.tensors["tokens"][: len(kept)]) == kept
    assert list(record.tensors["tokens"]) == ids_of(processor, Chat(turn.messages))


def test_kept_ids_stay_though_the_text_given_back_differs(processor: TextProcessor) -> None:
    kept, turn = follow_up(processor, ended=False)
    changed = Chat((*turn.messages[:2], ("assistant", "xy"), turn.messages[3]), turn.kept_ids, 3)
    record = processor.process_prompt(changed, {})
    assert list(record.tensors["tokens"]) == ids_of(processor, turn)
    assert record.fork is not None
    assert record.fork.index == len(kept) - 2


def test_a_reply_holding_the_mark_is_cut_at_the_right_place(processor: TextProcessor) -> None:
    _, turn = follow_up(processor, ended=False)
    tricky = Chat((("system", "kvlab0mark"), *turn.messages[1:3], ("user", "kvlab1mark")), turn.kept_ids, 3)
    rest = processor.process_prompt(tricky, {}).tensors["tokens"][len(turn.kept_ids) :]
    assert processor.tokenizer.decode(rest) == "</s>[user]kvlab1mark[assistant]"


def test_a_template_that_rewrites_replies_is_refused_for_kept_ids() -> None:
    processor = TextProcessor(
        make_tokenizer("{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }}{% endfor %}")
    )
    with pytest.raises(InputError, match="writes message 1 0 times"):
        processor.process_prompt(Chat((("user", "a"), ("assistant", "b"), ("user", "c")), (5, 6), 2), {})


def test_a_continuation_keeps_its_ids_and_reports_its_fork(
    processor: TextProcessor, tokenizer: PreTrainedTokenizerFast
) -> None:
    token = tokenizer.convert_tokens_to_ids
    kept = (1, token("Han"), token("zi"))
    record = processor.process_prompt(Continued(kept, " b"), {})
    assert list(record.tensors["tokens"]) == [*kept, *map(token, " b")]
    assert record.fork == HistoryFork(1, token("Han"), token("H"))
    assert processor.process_prompt(Continued((1, token("H"), token("anzi")), "b"), {}).fork is None


# -- ids and refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[3, 4, 5], (3, 4, 5), range(3, 6), np.array([3, 4, 5]), [np.int64(3), 4, 5]])
def test_ids_in_any_container_are_the_same_prompt(processor: TextProcessor, ids: object) -> None:
    found = ids_of(processor, ids)
    assert found == [3, 4, 5]
    assert all(type(i) is int for i in found)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([3, -1], "prompt id 1 is -1"),
        ([3, 102], "prompt id 1 is 102; ids are ints from 0 to 101"),
        ([True, 3], "prompt id 0 is True"),
        ([3, 4.0], "prompt id 1 is 4.0"),
        ([[3]], "prompt id 0 is"),
        ([np.bool_(True)], "prompt id 0 is"),
        ([], "prompt is empty"),
        ("", "text is empty"),
        (b"bytes", "got bytes"),
        (None, "got NoneType"),
        ({"role": "user"}, "got dict; a conversation is kvlab.Chat"),
        ("ab\ud800", "character 2"),
        (Chat(()), "no message"),
        (Chat((("system", "s"),)), "'system' turn"),
        (Chat((("user", "a"), ("assistant", "b"))), "'assistant' turn"),
        (Chat((("user", 3),)), "message 0"),  # type: ignore[arg-type]
        (Chat((("user", "a\udfff"),)), "lone surrogate"),
        (Chat((("user", "a"), ("assistant", "b"), ("user", "c")), (3,), 0), "keep both or neither"),
        (Chat((("user", "a"), ("assistant", "b"), ("user", "c")), (), 2), "keep both or neither"),
        (Chat((("user", "a"), ("assistant", "b"), ("user", "c")), (3,), 3), "keeps 3 of 3"),
        (Chat((("user", "a"), ("user", "b")), (3,), 1), "'user' turn"),
        (Chat((("user", "a"), ("assistant", "b"), ("user", "c")), (999,), 2), "kept id 0 is 999"),
        (Continued((), "x"), "kept is empty"),
        (Continued((3,), ""), "text is empty"),
        (Continued((3,), None), "give a str"),  # type: ignore[arg-type]
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_by_name(processor: TextProcessor, prompt: object, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        processor.process_prompt(prompt, {})
    assert words in str(refusal.value)


def test_unknown_fields_are_refused(processor: TextProcessor) -> None:
    with pytest.raises(InputError, match="'picture'"):
        processor.process_prompt("a", {"picture": 1})


def test_a_chat_without_a_template_is_refused() -> None:
    with pytest.raises(InputError, match="no chat template"):
        TextProcessor(make_tokenizer(None)).process_prompt(chat("a"), {})


def test_a_template_that_refuses_says_its_own_words() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="roles must alternate"):
        TextProcessor(make_tokenizer(template)).process_prompt(chat("a"), {})


def test_without_a_tokenizer_ids_are_served_and_text_is_refused() -> None:
    processor = TextProcessor(None, vocab_size=10, stop_ids=[7, 7])
    assert ids_of(processor, [1, 9]) == [1, 9]
    assert processor.stop_ids == (7,)
    assert processor.decode([1, 2]) == ""
    for prompt in ("text", chat("a")):
        with pytest.raises(InputError, match="no tokenizer"):
            processor.process_prompt(prompt, {})


def test_stop_ids_default_to_the_end_token(processor: TextProcessor) -> None:
    assert processor.stop_ids == (2,)


def test_decode_leaves_special_tokens_out(processor: TextProcessor) -> None:
    assert processor.decode([1, *map(processor.tokenizer.convert_tokens_to_ids, "ab"), 2]) == "ab"


# -- travel ------------------------------------------------------------------------------------------------------------


def test_a_pickled_processor_gives_the_same_ids_in_a_fresh_process(processor: TextProcessor, tmp_path) -> None:
    packed = tmp_path / "processor.pickle"
    packed.write_bytes(pickle.dumps(processor))
    code = (
        "import pickle, pathlib, sys; from kvlab.spec import chat\n"
        "p = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "print(p.process_prompt(chat('Hanzi?'), {}).tensors['tokens'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(packed)], capture_output=True, text=True, encoding="utf-8", check=True
    )
    assert done.stdout.strip() == str(ids_of(processor, chat("Hanzi?")))


def test_a_saved_tokenizer_is_found_in_its_folder(tokenizer: PreTrainedTokenizerFast, tmp_path) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = TextProcessor(load_tokenizer(tmp_path))
    assert ids_of(again, chat("Hanzi?")) == ids_of(TextProcessor(tokenizer), chat("Hanzi?"))


def test_a_folder_without_a_tokenizer_gives_none_and_a_damaged_one_is_refused(tmp_path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{ not json", encoding="utf-8")
    with pytest.raises(LoadError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_prompt_of_texts_and_pictures_is_refused_by_a_model_of_text(processor: TextProcessor) -> None:
    with pytest.raises(InputError, match="texts and pictures"):
        processor.process_prompt(ask("How many?"), {"seed": None})
