"""Identity of a deployment: what, when it changes, must make every old key unreachable.

>>> base = base_root(["toy"], preprocess="ToyModel", kv_fields={"page_size": 16}, planned=[("positions", {"theta": 1e4})])
>>> stream_root(base, "main", "") == stream_root(base, "main", None)      # an empty salt is no salt
True
>>> stream_root(base, "main", "a") == stream_root(base, "a", "main")      # and fields are tagged
False
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvlab.cache.keys import encode_field
from kvlab.errors import LoadError

#: Part of every root: keys of another format are other keys.
KEY_FORMAT = "kvlab keys v1"

_MIB = 1 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".gguf")
_CONFIG_PATTERNS = ("config.json", "llm_config.json", "vit_config.json", "*.safetensors.index.json")


def fingerprint(*fields: object) -> bytes:
    """SHA-256 over ``fields``: bytes as they are, anything else as its text, each behind its length.

    >>> fingerprint("ab", "c") == fingerprint("a", "bc"), fingerprint("1") == fingerprint(1)
    (False, True)
    """
    return sha256(b"".join(encode_field(f if isinstance(f, bytes) else str(f).encode()) for f in fields)).digest()


def base_root(
    identity: Sequence[bytes | str],
    preprocess: str,
    kv_fields: Mapping[str, Any],
    planned: Iterable[tuple[str, Mapping[str, Any]]],
) -> bytes:
    """Fold what determines the bytes of a page: weights, prompt building, the KV resource and all planned against it.

    A field that is None or "" is no field: a salt of "" and an option that is off leave the root as it was without them.

    Args:
        identity: from ``checkpoint_identity``, or another name of the weights.
        kv_fields: layout, page size, dtypes, exact grid, world size and salt of the KV resource.
        planned: (key, configuration) of every resource that depends on it, in any order.

    Raises:
        LoadError: a value has no stable text, for example an object or a tensor.
    """
    resources = [part for key, fields in sorted(planned, key=lambda pair: pair[0]) for part in (key, _fold(fields, key))]
    return fingerprint(
        KEY_FORMAT,
        *("checkpoint", fingerprint(*identity)),
        *("preprocess", preprocess),
        *("kv", _fold(kv_fields, "kv")),
        *("planned", fingerprint(*resources)),
    )


def stream_root(base: bytes, label: str, salt: str | None = "") -> bytes:
    """Root of one label's keys: equal tokens under two labels or two salts are different pages."""
    return fingerprint(base, "label", label, "salt", salt or "")


def _fold(fields: Mapping[str, Any], where: str) -> bytes:
    """Fingerprint of named values, whatever order they stand in."""
    parts: list[str | bytes] = []
    for name in sorted(fields):
        if fields[name] is not None and fields[name] != "":
            parts += [name, _fold_value(fields[name], f"{where}.{name}")]
    return fingerprint(*parts)


def _fold_value(value: Any, where: str) -> bytes:
    if isinstance(value, Mapping):
        return fingerprint("map", _fold(value, where))
    if isinstance(value, (list, tuple)):
        return fingerprint("list", *(_fold_value(v, where) for v in value))
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return fingerprint(type(value).__name__, value)  # 1, "1" and True are three values
    raise LoadError(
        f"{where} is a {type(value).__name__}, which cannot be part of a root; "
        "name it by numbers, strings, lists and mappings of these"
    )


# -- fold 1: the checkpoint --------------------------------------------------------------------------------------------


def checkpoint_identity(path: str | Path, pinned_sha256: str | None = None) -> list[bytes | str]:
    """What tells a checkpoint from every other: its configuration, and of each weight file name, size and content.

    Content is sampled: header, first and last MiB. That is quick for any size and tells a fine-tune of equal size apart.

    Args:
        path: a folder, or one GGUF file.
        pinned_sha256: hash of all weights where it is known; it stands instead of the sampling.

    Raises:
        LoadError: nothing there, no weights in it, or a damaged header.
    """
    path = Path(path)
    if not path.exists():
        raise LoadError(f"no checkpoint at {path}; give an existing folder or a GGUF file")
    parts: list[bytes | str] = []
    if path.is_dir():
        for file in [f for pattern in _CONFIG_PATTERNS for f in sorted(path.glob(pattern))]:
            parts += [file.name, fingerprint(file.read_bytes())]
    if pinned_sha256:
        return [*parts, "pinned", pinned_sha256.lower()]
    for file in _weight_files(path):
        parts += [file.name, str(file.stat().st_size), *_sampled(file)]
    return parts


def _weight_files(path: Path) -> list[Path]:
    candidates = path.iterdir() if path.is_dir() else [path]
    files = sorted((f for f in candidates if f.suffix in _WEIGHT_SUFFIXES and f.is_file()), key=lambda f: f.name)
    if not files:
        raise LoadError(f"no weights at {path}; a checkpoint is a folder with *.safetensors or *.gguf, or one such file")
    return files


def _sampled(file: Path) -> list[bytes]:
    """SHA-256 of the header, the first MiB and the last MiB of a weight file."""
    size = file.stat().st_size
    with open(file, "rb") as f:
        header_bytes = _MIB if file.suffix == ".gguf" else _header_bytes(file, size, f.read(8))
        samples = []
        for start, count in ((0, header_bytes), (0, _MIB), (max(0, size - _MIB), _MIB)):
            f.seek(start)
            samples.append(sha256(f.read(count)).digest())
    return samples


def _header_bytes(file: Path, size: int, first: bytes) -> int:
    count = 8 + int.from_bytes(first, "little")
    if len(first) < 8 or count > size:
        raise LoadError(f"{file} has {size} bytes and its header claims {count}; the file is truncated or no safetensors")
    return count
