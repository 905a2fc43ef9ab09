"""A GGUF file becomes the very tensors it was made of, once, whole or not at all; what is damaged is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import write_gguf

from kvlab.errors import LoadError
from kvlab.models import dense, gguf, registry
from kvlab.models.dense import dense_folder, is_whole
from kvlab.models.folders import weight_files
from kvlab.models.gguf import convert
from kvlab.models.loading import read_tensors
from kvlab.models.places import PARTIAL, sha256_file

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare a test that is not about the child process its start."""
    monkeypatch.setattr(dense, "_convert_in_child", lambda source, folder: convert(source, folder, lambda name: None))


def converted(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    convert(source, folder, lambda name: None)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_gives_back_the_tensors_it_was_made_of(family: str, tied: bool, tmp_path: Path) -> None:
    net = write_gguf(tmp_path / "tiny.gguf", family, tied=tied)
    found = converted(tmp_path / "tiny.gguf", tmp_path / "dense")
    wanted = {name: t for name, t in net.state_dict().items() if not (tied and name == "lm_head.weight")}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_config_makes_transformers_compute_what_the_source_did(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    net = write_gguf(tmp_path / "tiny.gguf", family, tied=False)
    converted(tmp_path / "tiny.gguf", tmp_path / "dense")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(net(ids).logits, again(ids).logits)


def test_the_tokenizer_and_its_chat_template_come_along(tmp_path: Path) -> None:
    from kvlab.models.prompting import TextProcessor, load_tokenizer
    from kvlab.spec import chat

    write_gguf(tmp_path / "tiny.gguf")
    converted(tmp_path / "tiny.gguf", tmp_path / "dense")
    processor = TextProcessor(load_tokenizer(tmp_path / "dense"))
    record = processor.process_prompt(chat("Hanzi"), {})
    assert record.text == "[user]Hanzi[assistant]"
    assert processor.decode(record.tensors["tokens"]) == record.text
    assert processor.stop_ids == (2,)


def test_a_big_file_is_written_in_shards_that_hold_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf, "SHARD_BYTES", 20_000)
    (tmp_path / "dense").mkdir()
    convert(tmp_path / "tiny.gguf", tmp_path / "dense", lambda name: None)
    files = weight_files(tmp_path / "dense")
    assert len(files) > 2
    found = {name: tensor.clone() for name, tensor in read_tensors(tuple(files))}
    assert all(torch.equal(found[name], t) for name, t in net.state_dict().items() if name != "lm_head.weight")


def test_llama3_rotary_factors_become_the_four_numbers_behind_them(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    factors = (plain / scaled).numpy().astype(np.float32)
    write_gguf(tmp_path / "tiny.gguf", theta=500000.0, extra={"rope_freqs.weight": factors})
    converted(tmp_path / "tiny.gguf", tmp_path / "dense")
    written = json.loads((tmp_path / "dense" / "config.json").read_text(encoding="utf-8"))["rope_scaling"]
    assert written == {name: value for name, value in rope.items() if name != "rope_theta"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"leave_out": "blk.1.ffn_up.weight"}, "first 'blk.1.ffn_up.weight'"),
        ({"extra": {"blk.0.ffn_up_exps.weight": np.zeros((4, 4), np.float32)}}, "'blk.0.ffn_up_exps.weight'"),
        ({"extra": {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}}, "rotary factors"),
        ({"extra": {"output_norm.weight": np.full(32, np.nan, np.float32)}}, "no numbers"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "'yarn'"),
    ],
)
def test_a_file_that_would_run_wrong_is_refused_by_name(changes: dict, words: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(LoadError) as refusal:
        converted(tmp_path / "tiny.gguf", tmp_path / "dense")
    assert words in str(refusal.value)
    assert "tiny.gguf" in str(refusal.value)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    import gguf as library

    writer = library.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(LoadError, match="'mamba'"):
        converted(tmp_path / "other.gguf", tmp_path / "dense")


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -200])
def test_a_truncated_file_is_refused_wherever_it_ends(keep: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:keep])
    with pytest.raises(LoadError, match=r"cut\.gguf .* not a whole GGUF file"):
        converted(tmp_path / "cut.gguf", tmp_path / "dense")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model at all " * 100, encoding="utf-8")
    with pytest.raises(LoadError, match="not a whole GGUF file"):
        converted(tmp_path / "text.gguf", tmp_path / "dense")


# -- once, whole, checked ----------------------------------------------------------------------------------------------


def test_a_child_process_converts_and_the_record_lists_every_file(tmp_path: Path) -> None:
    source = tmp_path / "blanks and ümlauts.gguf"
    write_gguf(source)
    said: list[str] = []
    folder = dense_folder(source, sha256_file(source), said.append)
    assert len(said) == 1
    assert "converting" in said[0]
    record = json.loads((folder / dense.RECORD).read_text(encoding="utf-8"))
    assert record["source_sha256"] == sha256_file(source)
    assert set(record["files"]) == {p.name for p in folder.iterdir()} - {dense.RECORD}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(record["files"])


def test_what_the_child_refuses_is_said_in_its_words_and_nothing_is_left(tmp_path: Path, own_cache: Path) -> None:
    source = tmp_path / "cut.gguf"
    source.write_bytes(b"GGUF")
    with pytest.raises(LoadError, match=r"cut\.gguf \(4 bytes\) is not a whole GGUF file"):
        dense_folder(source, "0" * 64, lambda line: None)
    assert list((own_cache / "dense").iterdir()) == []


@pytest.mark.usefixtures("in_this_process")
def test_a_second_load_converts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    first = dense_folder(source, sha256_file(source), lambda line: None)
    monkeypatch.setattr(dense, "_convert_in_child", lambda *_: pytest.fail("converted twice"))
    said: list[str] = []
    assert dense_folder(source, sha256_file(source), said.append) == first
    assert said == []


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("damage", ["flip a byte", "drop a file", "drop the record"])
def test_a_damaged_dense_copy_is_made_anew(damage: str, tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    folder = dense_folder(source, sha256_file(source), lambda line: None)
    before = sha256_file(folder / "model.safetensors")
    if damage == "flip a byte":
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "model.safetensors").write_bytes(data)
    else:
        (folder / ("model.safetensors" if damage == "drop a file" else dense.RECORD)).unlink()
    said: list[str] = []
    dense_folder(source, sha256_file(source), said.append)
    assert any("converting again" in line for line in said)
    assert sha256_file(folder / "model.safetensors") == before


def test_a_killed_conversion_leaves_nothing_that_is_taken_for_whole(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    monkeypatch.setattr(dense, "_convert_in_child", killed)
    with pytest.raises(KeyboardInterrupt):
        dense_folder(source, sha256_file(source), lambda line: None)
    assert list((own_cache / "dense").iterdir()) == []


@pytest.mark.usefixtures("in_this_process")
def test_what_a_killed_process_left_is_ignored_and_swept_when_old(tmp_path: Path, own_cache: Path) -> None:
    old, fresh = (own_cache / "dense" / f"{PARTIAL}{name}" for name in ("old", "fresh"))
    for left in (old, fresh):
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"half")
    os.utime(old, (1, 1))
    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    folder = dense_folder(source, sha256_file(source), lambda line: None)
    assert is_whole(folder, sha256_file(source))
    assert not old.exists()
    assert fresh.exists()


def test_a_copy_of_another_source_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / dense.RECORD).write_text('{"format": 1, "source_sha256": "aa", "files": {}}', encoding="utf-8")
    assert is_whole(tmp_path, "aa")
    assert not is_whole(tmp_path, "bb")


# -- the real file -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("users_cache")
def test_smollm2_is_dequantised_as_transformers_does_it() -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    source = registry.find("smollm2-135m")
    if source is None:
        pytest.skip("the weights of smollm2-135m are not on this machine; run: kvlab fetch smollm2-135m")
    ours = load_file(dense_folder(source, sha256_file(source), lambda line: None) / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
