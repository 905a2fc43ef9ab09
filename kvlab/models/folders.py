"""What a Hugging Face checkpoint folder holds: its config and its weight files, complete or refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvlab.errors import LoadError
from kvlab.models.fields import list_field
from kvlab.models.places import sha256_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Parts of a BAGEL checkpoint: NAME.safetensors, or shards with NAME.safetensors.index.json.
NETWORK, AUTOENCODER = "ema", "ae"
BAGEL_CONFIG = "llm_config.json"
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        LoadError: the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise LoadError(f"{path} cannot be read ({e.strerror}); a checkpoint folder needs it") from e
    except ValueError as e:
        raise LoadError(f"{path} is no JSON ({e}); get it again") from e
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds a JSON {type(value).__name__}, not an object; get it again")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json, refusing what the text models here cannot run.

    Raises:
        LoadError: no config, another architecture, or quantised weights.
    """
    config = read_json(folder / "config.json")
    require_runnable(config, str(folder))
    return config


def require_runnable(config: dict[str, Any], whose: str) -> None:
    """Check that a config asks for a decoder that kvlab has.

    Raises:
        LoadError: it asks for something else.
    """
    named = list_field(config, "architectures") or [f"of type {config.get('model_type')!r}"]
    if named[0] not in ARCHITECTURES:
        raise LoadError(f"{whose} is a model {named[0]}; kvlab runs {' and '.join(ARCHITECTURES)} as text models")
    if config.get("quantization_config"):
        raise LoadError(f"{whose} holds quantised weights; load the model's plain safetensors or its GGUF file instead")


def weight_map(folder: Path) -> dict[str, list[str]] | None:
    """Return file -> tensor names of a sharded folder, None for a folder with one weight file.

    Raises:
        LoadError: the index is damaged or names files outside the folder.
    """
    if not (folder / INDEX).is_file():
        return None
    entries = read_json(folder / INDEX).get("weight_map")
    if not isinstance(entries, dict) or not all(isinstance(file, str) for file in entries.values()):
        raise LoadError(f"{folder / INDEX} has no weight_map of tensor names to files; get it again")
    files: dict[str, list[str]] = {}
    for tensor, file in entries.items():
        if Path(file).name != file:
            raise LoadError(f"{folder / INDEX} puts {tensor!r} into {file!r}, which is not a file of this folder; get it again")
        files.setdefault(file, []).append(tensor)
    return files


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder in order of name; in a BAGEL folder the network's, then the autoencoder's.

    Raises:
        LoadError: there are none, or a shard is missing.
    """
    if is_bagel(folder):
        return [*part_files(folder, NETWORK), *part_files(folder, AUTOENCODER)]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    shards = weight_map(folder)
    if shards is None:
        raise LoadError(f"{folder} has neither {WEIGHTS} nor {INDEX}; kvlab reads safetensors folders and GGUF files")
    missing = [name for name in sorted(shards) if not (folder / name).is_file()]
    if missing:
        raise LoadError(f"{folder} lacks {len(missing)} of {len(shards)} weight files, first {missing[0]}; get the rest")
    return [folder / name for name in sorted(shards)]


def is_bagel(folder: Path) -> bool:
    """True for a folder with the config of BAGEL's decoder, which no other checkpoint has under this name."""
    return (folder / BAGEL_CONFIG).is_file()


def part_files(folder: Path, part: str) -> tuple[Path, ...]:
    """Return the weight files of one part of a checkpoint, "ema" or "ae".

    Raises:
        LoadError: There are none, or a shard is missing.
    """
    whole, index = folder / f"{part}.safetensors", folder / f"{part}.safetensors.index.json"
    if whole.is_file():
        return (whole,)
    if not index.is_file():
        what = "the network's weights" if part == NETWORK else "the autoencoder's weights, without which no picture is drawn"
        raise LoadError(f"{folder} has neither {whole.name} nor {index.name}, {what}; get the rest of the checkpoint")
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries or not all(isinstance(name, str) for name in entries.values()):
        raise LoadError(f"{index} has no weight_map of tensor names to files; get it again")
    shards = [folder / name for name in sorted(set(entries.values()))]
    for shard in shards:
        if shard.parent != folder or not shard.is_file():
            raise LoadError(f"{folder} lacks the weight file {shard.name} that {index.name} names; get the rest")
    return tuple(shards)


def is_complete(folder: Path) -> bool:
    """True when config and every weight file are there."""
    try:
        return ((folder / "config.json").is_file() or is_bagel(folder)) and bool(weight_files(folder))
    except LoadError:
        return False


def weights_digest(files: list[Path]) -> str:
    """Return one SHA-256 for all weights: that of the only file, or of the names and digests of several."""
    digests = [(path.name, sha256_file(path)) for path in files]
    if len(digests) == 1:
        return digests[0][1]
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in digests).encode()).hexdigest()
