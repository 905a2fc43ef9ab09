"""Folders and files become models that compute what transformers' own do; what cannot be loaded is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import VOCAB_SIZE, make_tokenizer, write_folder, write_gguf

from kvlab.attention.store import KVStore
from kvlab.attention.torch_paged import TorchPagedAttention
from kvlab.errors import InputError, LoadError
from kvlab.models import loading, memory, registry
from kvlab.models.loading import load_text_model, open_checkpoint, read_tensors
from kvlab.models.memory import GIB, check_memory, container_bytes
from kvlab.models.places import sha256_file
from kvlab.models.text import TextModel
from kvlab.spec import RowInputs, StepRow, StepTables, chat

pytestmark = pytest.mark.usefixtures("own_cache")

NOISE_FLOOR = 2.5e-5  # largest difference over standard deviation, float32, two orders of the same sums


def quiet(line: str) -> None:
    pytest.fail(f"a local load has nothing to announce: {line}")


def logits_of(model: TextModel, ids: list[int]) -> torch.Tensor:
    """Logits of every token of one cold prefill."""
    page_size = 16
    num_pages = -(-len(ids) // page_size)
    attention = TorchPagedAttention(KVStore(model.kv_layout(page_size), num_pages + 1), num_heads=model.num_heads)
    row = StepRow("r", "main", range(1, num_pages + 1), len(ids), len(ids))
    attention.begin(StepTables(page_size, (row,)))
    (logits,) = model.forward("prefill", [RowInputs(ids, range(len(ids)), 0)], attention)
    assert logits is not None
    return logits


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.std()).item()


@torch.no_grad()
def their_logits(net: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = net(torch.tensor([ids])).logits[0]
    return logits


# -- what loads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_folder_computes_what_transformers_does(family: str, tied: bool, shard_size: str, tmp_path: Path) -> None:
    net = write_folder(tmp_path / "tiny", family, tied=tied, shard_size=shard_size)
    assert (tmp_path / "tiny" / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    model = load_text_model(tmp_path / "tiny", device="cpu", say=quiet)
    ids = list(range(3, 60))
    assert difference(logits_of(model, ids), their_logits(net, ids)) <= NOISE_FLOOR


def test_a_gguf_file_loads_and_is_named_by_its_own_bytes(tmp_path: Path) -> None:
    net = write_gguf(tmp_path / "tiny.gguf", tied=False)
    model = load_text_model(str(tmp_path / "tiny.gguf"), device="cpu", say=lambda line: None)
    digest = sha256_file(tmp_path / "tiny.gguf")
    assert (model.name, model.identity) == ("tiny", f"tiny sha256:{digest[:16]}")
    assert (model.checkpoint_path(), model.pinned_sha256) == (str(tmp_path / "tiny.gguf"), digest)
    ids = list(range(3, 40))
    assert difference(logits_of(model, ids), their_logits(net, ids)) <= NOISE_FLOOR


def test_a_folder_is_named_by_its_weights_and_changes_name_with_one_byte(tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny")
    file = tmp_path / "tiny" / "model.safetensors"
    before = open_checkpoint(tmp_path / "tiny", say=quiet)
    assert before.identity == f"tiny sha256:{sha256_file(file)[:16]}"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert open_checkpoint(tmp_path / "tiny", say=quiet).identity != before.identity


def test_a_chat_goes_in_and_the_stop_ids_of_every_config_come_along(tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny")
    (tmp_path / "tiny" / "generation_config.json").write_text('{"eos_token_id": [7, 5]}', encoding="utf-8")
    model = load_text_model(tmp_path / "tiny", device="cpu")
    assert model.processor.stop_ids == (2, 5, 7)
    assert model.processor.vocab_size == VOCAB_SIZE
    assert model.processor.process_prompt(chat("Hanzi"), {}).text == "<s>[user]Hanzi[assistant]"


def test_a_folder_without_a_tokenizer_takes_ids_and_refuses_text(tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny", tokenizer=False)
    processor = load_text_model(tmp_path / "tiny", device="cpu").processor
    assert list(processor.process_prompt([1, 2], {}).tensors["tokens"]) == [1, 2]
    with pytest.raises(InputError, match="no tokenizer"):
        processor.process_prompt("text", {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_weights_are_cast_on_the_way_in(dtype: str, tmp_path: Path) -> None:
    net = write_folder(tmp_path / "tiny")
    model = load_text_model(tmp_path / "tiny", dtype=dtype, device="cpu")
    wanted = net.model.norm.weight.to(getattr(torch, dtype))
    assert torch.equal(model.net.norm.weight, wanted)
    assert open_checkpoint(tmp_path / "tiny").weights_bytes(dtype) == sum(p.numel() * wanted.itemsize for p in net.parameters())


def test_max_seq_len_bounds_the_context(tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny")
    assert load_text_model(tmp_path / "tiny", device="cpu", max_seq_len=100).max_seq_len == 100
    with pytest.raises(InputError, match="257"):
        load_text_model(tmp_path / "tiny", device="cpu", max_seq_len=257)


def test_reading_maps_a_file_anew_and_yields_every_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "tiny")
    file = tmp_path / "tiny" / "model.safetensors"
    opened = []
    original = loading._opened
    monkeypatch.setattr(loading, "_opened", lambda f: opened.append(f) or original(f))
    monkeypatch.setattr(loading, "MAPPED_BYTES", 10_000)
    found = {name: tensor.clone() for name, tensor in read_tensors((file,))}
    assert len(opened) > 3
    whole = load_file(file)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_name_of_kvlab_models_loads_under_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "models" / "my-tiny")
    monkeypatch.setenv("KVLAB_MODELS", str(tmp_path / "models"))
    assert load_text_model("my-tiny", device="cpu", say=quiet).name == "my-tiny"


# -- what does not -----------------------------------------------------------------------------------------------------


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def cut_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def lead_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "config no json": (lambda f: (f / "config.json").write_text("{", encoding="utf-8"), "config.json is no JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]", encoding="utf-8"), "holds a JSON list"),
    "another model": (lambda f: edit_config(f, architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "quantised": (lambda f: edit_config(f, quantization_config={"bits": 4}), "quantised"),
    "config of another size": (lambda f: edit_config(f, hidden_size=64), "shape"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "truncated": (cut_weights, "not a whole safetensors file"),
    "no safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 64), "not a whole safetensors file"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "(0 bytes) is not a whole safetensors file"),
    "missing tensor": (drop_tensor, "model.layers.1.mlp.up_proj.weight"),
    "missing shard": (lose_a_shard, "first model-1.safetensors"),
    "index leads outside": (lead_outside, "not a file of this folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_with_its_name_and_what_is_wrong(damage: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny")
    spoil, words = DAMAGES[damage]
    spoil(tmp_path / "tiny")
    with pytest.raises(LoadError) as refusal:
        load_text_model(tmp_path / "tiny", device="cpu")
    assert words in str(refusal.value)
    assert str(tmp_path / "tiny") in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rms_norm_eps", "x"), ("hidden_size", "x"), ("max_position_embeddings", 0), ("eos_token_id", "x"), ("architectures", 3),
     ("eos_token_id", [2, 1.5])],
)  # fmt: skip
def test_a_field_of_the_config_that_cannot_be_is_named_and_not_blamed_on_the_tokenizer(
    field: str, value: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    write_folder(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, field: value}), encoding="utf-8")
    with pytest.raises(LoadError) as refusal:
        load_text_model(folder, device="cpu")
    assert f"field {field} is {value!r}" in str(refusal.value)
    assert "tokenizer" not in str(refusal.value)


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("./nowhere", LoadError, "does not exist"),
        ("nowhere.gguf", LoadError, "does not exist"),
        (__file__, LoadError, "neither a folder nor a .gguf file"),
        ("", InputError, "give a name"),
        (7, InputError, "give a name"),
    ],
)
def test_a_source_that_is_nothing_is_refused(source: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as refusal:
        load_text_model(source)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float16"}, "known are float32, bfloat16, float64"),
        ({"dtype": "int8"}, "'int8'"),
        ({"device": "abacus"}, "'abacus'"),
    ],
)
def test_unknown_options_are_refused_before_anything_is_read(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as refusal:
        load_text_model("./nowhere", **options)
    assert words in str(refusal.value)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_too_much_is_refused_with_both_numbers_and_the_remedy() -> None:
    with pytest.raises(LoadError) as refusal:
        check_memory({"weights": GIB, "KV pages": 3 * GIB}, available=2 * GIB)
    for words in ("4.00 GiB", "2.00 GiB", "num_pages", "dtype"):
        assert words in str(refusal.value)


def test_what_just_fits_is_allowed() -> None:
    check_memory({"KV pages": GIB}, available=GIB)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "tiny")
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(loading, "read_tensors", lambda files: pytest.fail("weights were read"))
    with pytest.raises(LoadError, match="weights"):
        load_text_model(tmp_path / "tiny", device="cpu")


def test_this_machine_has_some_memory() -> None:
    assert memory.available_bytes("cpu") > 0


def test_a_container_limit_counts_and_its_file_cache_is_free(tmp_path: Path) -> None:
    for name, text in {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 500\ninactive_file 150"}.items():
        (tmp_path / name).write_text(text + "\n", encoding="ascii")
    assert container_bytes(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert container_bytes(tmp_path) is None
    assert container_bytes(tmp_path / "nowhere") is None


# -- the real model ----------------------------------------------------------------------------------------------------


@pytest.fixture
def smollm2(users_cache: None) -> TextModel:
    if registry.find("smollm2-135m") is None:
        pytest.skip("the weights of smollm2-135m are not on this machine; run: kvlab fetch smollm2-135m")
    return load_text_model("smollm2-135m", dtype="float32", device="cpu")


def test_smollm2_computes_what_transformers_does(smollm2: TextModel) -> None:
    from transformers import LlamaForCausalLM

    checkpoint = open_checkpoint("smollm2-135m")
    assert smollm2.identity == "smollm2-135m sha256:b179c9523d0e6a0f"
    theirs = LlamaForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()
    prompt = chat("What is a KV cache, and why do requests share its pages?", system="Answer in one sentence. " * 8)
    ids = list(smollm2.processor.process_prompt(prompt, {}).tensors["tokens"])
    assert len(ids) > 64
    assert difference(logits_of(smollm2, ids), their_logits(theirs, ids)) <= NOISE_FLOOR


def test_smollm2_answers_sensibly(smollm2: TextModel) -> None:
    ids = list(smollm2.processor.process_prompt(chat("What is the capital of France?"), {}).tensors["tokens"])
    reply: list[int] = []
    while len(reply) < 12 and not (reply and reply[-1] in smollm2.processor.stop_ids):
        reply.append(int(logits_of(smollm2, ids + reply)[-1].argmax()))
    assert smollm2.processor.decode(reply) == "The capital of France is Paris."


def test_the_toy_tokenizer_fits_the_tiny_network() -> None:
    assert len(make_tokenizer()) == VOCAB_SIZE
