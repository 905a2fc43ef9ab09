"""Roots: everything that changes the bytes of a page must move the root, and nothing else may."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlab.cache.roots import KEY_FORMAT, base_root, checkpoint_identity, fingerprint, stream_root
from kvlab.errors import LoadError

MIB = 1 << 20
KV = {"layout": "NHD", "page_size": 16, "dtype": "float32", "compute_dtype": "float32", "exact_grid": None, "world_size": 1}
POSITIONS = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 32.0}}


def root(
    identity: Any = ("toy",), preprocess: str = "TextModel", kv: Any = KV, planned: Any = (("positions", POSITIONS),)
) -> bytes:
    return base_root(list(identity), preprocess, kv, planned)


def write_safetensors(path: Path, data: bytes, metadata: str = "x") -> Path:
    header = json.dumps({"__metadata__": {"note": metadata}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder of two weight files, the larger one longer than the two MiB that are sampled."""
    (tmp_path / "config.json").write_text('{"hidden_size": 8}', encoding="utf-8")
    (tmp_path / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    write_safetensors(tmp_path / "model-2.safetensors", bytes(100))
    write_safetensors(tmp_path / "model-1.safetensors", bytes(3 * MIB))
    return tmp_path


def flip(path: Path, offset: int) -> None:
    """Change one byte, the size unchanged; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# -- fingerprints and folds


def test_fields_are_behind_their_length() -> None:
    assert len({fingerprint(*f) for f in (("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ())}) == 6


def test_the_same_build_has_the_same_root() -> None:
    assert root() == root(kv=dict(reversed(KV.items())), planned=iter([("positions", dict(reversed(POSITIONS.items())))]))


def test_the_order_in_which_planned_resources_are_named_does_not_matter() -> None:
    planned = [("positions", POSITIONS), ("attention", {"backend": "torch_paged"})]
    assert root(planned=planned) == root(planned=planned[::-1])


def test_k2_1_untagged_fields_do_not_collide() -> None:
    pairs = [("X", None), (None, "X"), ("ab", "c"), ("a", "bc"), ("", None), (None, None)]
    roots = [root(kv=KV | {"salt": salt, "adapter": adapter}) for salt, adapter in pairs]
    assert len(set(roots)) == 5
    assert roots[4] == roots[5] == root(), "an empty salt is no salt"


def test_k2_1_a_salt_and_a_label_of_one_text_do_not_collide() -> None:
    base = root()
    pairs = [("X", ""), ("", "X"), ("ab", "c"), ("a", "bc"), ("main", "X"), ("main", "")]
    assert len({stream_root(base, label, salt) for label, salt in pairs}) == 6
    assert stream_root(base, "main", "") == stream_root(base, "main", None) == stream_root(base, "main")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"page_size": 32},
        {"layout": "HND"},
        {"num_layers": 2},
        {"num_kv_heads": 4},
        {"compute_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_k2_3_another_dtype_page_size_or_shape_is_another_root(change: dict[str, Any]) -> None:
    assert root(kv=KV | change) != root()


B23_CHANGES: dict[str, Callable[[], bytes]] = {
    "rope_theta": lambda: root(planned=[("positions", POSITIONS | {"rope_theta": 1e5})]),
    "rope scaling": lambda: root(planned=[("positions", POSITIONS | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}})]),
    "page_size": lambda: root(kv=KV | {"page_size": 8}),
    "salt": lambda: root(kv=KV | {"salt": "tenant"}),
    "dtype": lambda: root(kv=KV | {"dtype": "float16"}),
    "weights": lambda: root(identity=["toy 2"]),
    "preprocessing": lambda: root(preprocess="OtherModel"),
    "exact grid": lambda: root(kv=KV | {"exact_grid": 128}),
    "attention backend": lambda: root(planned=[("positions", POSITIONS), ("attention", {"backend": "flashinfer"})]),
    "resource key": lambda: root(planned=[("rope", POSITIONS)]),
}


@pytest.mark.parametrize("change", B23_CHANGES)
def test_b23_each_of_these_moves_the_root(change: str) -> None:
    assert B23_CHANGES[change]() != root()


def test_b23_all_of_them_move_it_apart() -> None:
    assert len({make() for make in B23_CHANGES.values()}) == len(B23_CHANGES)


def test_the_format_is_part_of_every_root(monkeypatch: pytest.MonkeyPatch) -> None:
    before = root()
    assert KEY_FORMAT == "kvlab keys v1"
    monkeypatch.setattr("kvlab.cache.roots.KEY_FORMAT", "kvlab keys v2")
    assert root() != before


def test_values_of_different_types_are_different_values() -> None:
    values: list[Any] = [1, "1", True, 1.0, b"1", [1], {"1": 1}, [[1]], [1, 1]]
    assert len({root(kv=KV | {"option": value}) for value in values}) == len(values)


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 1, [object()], {"nested": {"deep": object()}}])
def test_a_value_without_a_stable_text_is_refused(value: Any) -> None:
    with pytest.raises(LoadError, match=r"kv\.option.* cannot be part of a root"):
        root(kv=KV | {"option": value})


# -- the checkpoint


def test_an_unchanged_checkpoint_keeps_its_identity(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for file in checkpoint.iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
    (elsewhere / "README.md").write_text("not part of it", encoding="utf-8")
    assert checkpoint_identity(checkpoint) == checkpoint_identity(str(elsewhere))


@pytest.mark.parametrize("offset", [-1, -MIB, 8 + 40, 9], ids=["last byte", "first of the last MiB", "first MiB", "header"])
def test_one_changed_byte_moves_the_identity(checkpoint: Path, offset: int) -> None:
    before = checkpoint_identity(checkpoint)
    flip(checkpoint / "model-1.safetensors", offset)
    assert checkpoint_identity(checkpoint) != before


def test_a_fine_tune_of_equal_size_differs(checkpoint: Path) -> None:
    before = checkpoint_identity(checkpoint)
    file = checkpoint / "model-1.safetensors"
    size = file.stat().st_size
    write_safetensors(file, b"\1" * 3 * MIB)
    assert file.stat().st_size == size
    assert checkpoint_identity(checkpoint) != before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "llm_config.json", "vit_config.json"])
def test_another_configuration_or_index_differs(checkpoint: Path, name: str) -> None:
    before = checkpoint_identity(checkpoint)
    (checkpoint / name).write_text('{"other": 1}', encoding="utf-8")
    assert checkpoint_identity(checkpoint) != before


def test_a_renamed_or_longer_weight_file_differs(checkpoint: Path) -> None:
    identities = [checkpoint_identity(checkpoint)]
    (checkpoint / "model-2.safetensors").rename(checkpoint / "model-3.safetensors")
    identities.append(checkpoint_identity(checkpoint))
    write_safetensors(checkpoint / "model-3.safetensors", bytes(101))
    identities.append(checkpoint_identity(checkpoint))
    assert len(set(map(tuple, identities))) == 3


def test_a_single_gguf_file_is_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(3 * MIB))
    before = checkpoint_identity(file)
    flip(file, -1)
    assert checkpoint_identity(file) != before


def test_a_pinned_hash_stands_instead_of_the_sampling(checkpoint: Path) -> None:
    before = checkpoint_identity(checkpoint, pinned_sha256="AB" * 32)
    flip(checkpoint / "model-1.safetensors", -1)
    assert checkpoint_identity(checkpoint, pinned_sha256="ab" * 32) == before
    assert checkpoint_identity(checkpoint, pinned_sha256="cd" * 32) != before
    assert checkpoint_identity(checkpoint) != before


def test_a_path_with_blanks_and_umlauts_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "größe eins"
    folder.mkdir()
    write_safetensors(folder / "modèle 1.safetensors", b"abc")
    assert "modèle 1.safetensors" in checkpoint_identity(folder)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no checkpoint at .*nowhere"):
        checkpoint_identity(tmp_path / "nowhere")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(LoadError, match="no weights at"):
        checkpoint_identity(tmp_path)


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("<Q", 1 << 40) + b"{}"])
def test_a_truncated_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadError, match=r"model\.safetensors has \d+ bytes and its header claims"):
        checkpoint_identity(tmp_path)
