"""What `kvlab doctor --model` tells: the memory that a model and its requests take, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.errors import InputError

DTYPE = "bfloat16"  # what released weights are stored in


def needs(name_or_path: str | Path, *, dtype: str = DTYPE) -> dict[str, Any]:
    """Return, as plain values, the bytes of a model's weights, of one KV slot, and of typical requests; fetches nothing.

    Args:
        name_or_path: A name whose files are here, the released BAGEL's name, or a folder that holds at least the config.
        dtype: Of weights and pages: float32, bfloat16 or float64.

    Raises:
        InputError: nothing of this name is here, or an unknown dtype.
        LoadError: a config that is damaged or of no model that kvlab runs.
    """
    from kvlab.models.folders import is_bagel
    from kvlab.models.loading import torch_dtype

    torch_dtype(dtype)
    folder = _folder(name_or_path)
    if folder is None or is_bagel(folder):
        return _bagel_needs(str(name_or_path), folder, dtype)
    return _text_needs(str(name_or_path), folder, dtype)


def _folder(name_or_path: str | Path) -> Path | None:
    """Return the folder with the config; None for the released BAGEL, whose config is known."""
    from kvlab.models import registry
    from kvlab.models.bagel.sizing import RELEASE

    path = Path(name_or_path).expanduser()
    found = path if path.is_dir() else registry.locate(str(name_or_path)) if isinstance(name_or_path, str) else None
    if found is not None and found.is_dir():
        return found
    if name_or_path == RELEASE:
        return None
    raise InputError(
        f"{name_or_path} is no checkpoint folder on this machine; give a folder with its config, a name whose folder is here "
        f"({', '.join(name for name, at in registry.known().items() if at and at.is_dir()) or 'none'}), or {RELEASE}"
    )


def _bagel_needs(name: str, folder: Path | None, dtype: str) -> dict[str, Any]:
    from kvlab.models.bagel.config import BagelConfig
    from kvlab.models.bagel.resizing import default_size
    from kvlab.models.bagel.sizing import picture_slots, request_slots, weight_values
    from kvlab.models.bagel.weights import sized_config
    from kvlab.models.folders import AUTOENCODER, NETWORK, part_files
    from kvlab.models.loading import torch_dtype

    config = BagelConfig() if folder is None else BagelConfig.from_folder(folder)
    if folder is not None and all(any(folder.glob(f"{part}*.safetensors")) for part in (NETWORK, AUTOENCODER)):
        config = sized_config(folder, {part: part_files(folder, part) for part in (NETWORK, AUTOENCODER)})
    size = default_size(config)
    blocks = {f"one picture, {walk}": count for walk, count in picture_slots(config, size).items()}
    slots = {**blocks, **request_slots(config, size)}
    size_each = {"network": torch_dtype(dtype).itemsize, "autoencoder": 4}
    weights = {part: values * size_each[part] for part, values in weight_values(config).items()}
    return _told(name, dtype, weights, config.text, slots) | {"picture": list(size)}


def _text_needs(name: str, folder: Path, dtype: str) -> dict[str, Any]:
    from kvlab.models.folders import read_config
    from kvlab.models.loading import torch_dtype
    from kvlab.models.textlm import TextConfig, TextLM

    config = TextConfig.from_hf(read_config(folder))
    values = sum(p.numel() for p in TextLM.allocate(config, device="meta").parameters())
    return _told(name, dtype, {"network": values * torch_dtype(dtype).itemsize}, config, {"whole context": config.max_seq_len})


def _told(name: str, dtype: str, weights: Mapping[str, int], config: Any, slots: Mapping[str, int]) -> dict[str, Any]:
    from kvlab.models.loading import torch_dtype
    from kvlab.models.memory import available_bytes
    from kvlab.models.text import decoder_layout

    itemsize = torch_dtype(dtype).itemsize
    slot_bytes = decoder_layout(config, torch_dtype(dtype), page_size=1).bytes_per_page(itemsize)
    requests = {what: {"slots": count, "kv_bytes": count * slot_bytes} for what, count in slots.items()}
    return {
        "model": name,
        "dtype": dtype,
        "weights_bytes": dict(weights),
        "kv_bytes_per_slot": slot_bytes,
        "kv": requests,
        "available_bytes": available_bytes(),
    }


def render(findings: Mapping[str, Any]) -> str:
    """Return what ``needs`` found as text for a person."""
    picture = "" if "picture" not in findings else ", pictures of {} x {} pixels".format(*findings["picture"])
    room = _size(findings["available_bytes"])
    lines = [f"{findings['model']} in {findings['dtype']}{picture}; {room} of memory can be taken here"]
    lines += [f"  weights of the {part}: {_size(size)}" for part, size in findings["weights_bytes"].items()]
    lines.append(f"  KV of one slot: {findings['kv_bytes_per_slot']:,} bytes")
    lines += [f"  KV of {what}: {_size(kv['kv_bytes'])} ({kv['slots']:,} slots)" for what, kv in findings["kv"].items()]
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB" if mib >= 1 else f"{num_bytes / 1024:.0f} KiB"
