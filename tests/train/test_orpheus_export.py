from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

import kvlab
from kvlab.errors import LoadError
from kvlab.train.orpheus import card, codec, export, run, speech, vocabulary

snac = pytest.importorskip("snac", reason="needs the extra audio")

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16,
}  # fmt: skip
CODEC: dict[str, Any] = {**codec.CONFIG, "encoder_dim": 2, "decoder_dim": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("orpheus") / "tiny"
    export.write(folder, speech.build(SHAPE), codec.build(CODEC), CODEC)
    return folder


def test_the_folder_holds_what_it_promises(folder: Path) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert names == [
        "config.json", "generation_config.json", "model.safetensors", "snac/config.json", "snac/model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_weights_are_bfloat16_and_tied_ones_stand_once(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors


def test_transformers_loads_network_tokenizer_and_sampling(folder: Path) -> None:
    net, tokenizer = LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = vocabulary.prompt_ids(tokenizer, "tara: one")
    assert ids == vocabulary.prompt_ids(vocabulary.make_tokenizer(), "tara: one")
    assert net(torch.tensor([ids])).logits.shape == (1, len(ids), vocabulary.VOCAB_SIZE)
    settings = net.generation_config
    assert (settings.temperature, settings.top_p, settings.repetition_penalty, settings.eos_token_id) == (0.6, 0.8, 1.3, 258)


def test_snac_itself_loads_the_codec_strictly(folder: Path) -> None:
    net = snac.SNAC.from_config(folder / "snac" / "config.json")
    net.load_state_dict(load_file(folder / "snac" / "model.safetensors"))


def test_kvlab_loads_it_and_asks_as_the_training_did(folder: Path) -> None:
    with kvlab.load(folder, num_pages=64, device="cpu") as engine:
        result = engine.generate("one blue star", fields={"voice": "zoe"}, max_tokens=8)
        assert engine.model.codec.codebook_size == 512
        assert result.prompt_tokens == len(vocabulary.prompt_ids(vocabulary.make_tokenizer(), "zoe: one blue star"))
        options = engine.model.default_options
    assert (options["temperature"], options["top_p"], options["repetition_penalty"]) == (0.6, 0.8, 1.3)


def test_the_readme_tells_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    found = {
        "phrases": 60, "words": 300, "original": None, "codec": 0.125, "synthesised": 0.25,
        "synthesised_by_voice": {"tara": 0.2}, "synthesised_against_other_texts": 0.9, "ended_by_themselves": 1.0,
    }  # fmt: skip
    card.write(tmp_path, run.Plan(tmp_path), found, num_parameters=3_100_000)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "not measured: espeak-ng is missing |" in text
    assert "| 12.5% |" in text
    assert "tara 20.0%" in text
    assert "Apache-2.0" in text


# -- a checkpoint to go on from ----------------------------------------------------------------------------------------


def test_training_goes_on_from_the_weights_of_a_checkpoint(folder: Path) -> None:
    torch.manual_seed(1)
    net = speech.build(SHAPE)
    export.read_into(net, folder)
    written = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor.bfloat16(), written[name]) for name, tensor in net.state_dict().items() if name in written)
    assert net.dtype == torch.float32


def test_a_checkpoint_of_another_shape_or_none_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="holds no speech model of this training's shape to start from"):
        export.read_into(speech.build(SHAPE | {"num_hidden_layers": 1}), folder)
    with pytest.raises(LoadError, match="holds no speech model"):
        export.read_into(speech.build(SHAPE), tmp_path)
    for wrong in (folder, tmp_path):
        with pytest.raises(LoadError, match="holds no codec of this training's shape to start from"):
            run.train_codec(run.Plan(tmp_path, start=wrong))


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")
def test_two_processes_encode_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy", reason="needs the extra audio")
    monkeypatch.setattr(run, "CHUNK", 2)
    monkeypatch.setattr(run, "NUM_UNSEEN", 1)
    torch.manual_seed(2)
    codec.quick.speed_up(net := codec.build())
    net.eval()
    made = []
    for num_threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
        made.append(run.lines(run.Plan(tmp_path / str(num_threads), speech_phrases=4), net)[0])
    assert [line.ids.tolist() for line in made[0]] == [line.ids.tolist() for line in made[1]]
