"""From a checkpoint folder to the network and the autoencoder, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlab.errors import LoadError
from kvlab.models.bagel.autoencoder import Autoencoder
from kvlab.models.bagel.config import BagelConfig
from kvlab.models.bagel.network import BagelNet
from kvlab.models.folders import AUTOENCODER, NETWORK, part_files
from kvlab.models.layers import Linear
from kvlab.models.loading import read_tensors


def load_bagel(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[BagelNet, Autoencoder]:
    """Return the network in ``dtype`` and its autoencoder in float32 (float64 beside a float64 network), ready to run.

    Raises:
        LoadError: A file is missing or damaged, or a tensor is missing, unknown or of another shape; its name is told.
        MissingExtraError: ``diffusers`` is not installed.
    """
    files = {part: part_files(folder, part) for part in (NETWORK, AUTOENCODER)}
    config = sized_config(folder, files)
    exact = torch.promote_types(dtype, torch.float32)
    try:
        autoencoder = allocate_autoencoder(config, dtype=exact, device=device)
        fill(dict(autoencoder.file_tensors()), read_tensors(files[AUTOENCODER]), "the autoencoder")
        net = allocate_network(config, dtype=dtype, device=device)
        fill(dict(net.named_parameters()), read_tensors(files[NETWORK]), "the network")
    except LoadError as e:
        raise LoadError(f"{folder}: {e}") from e
    return net, autoencoder


def tensor_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in some files, reading nothing else of them.

    Raises:
        LoadError: A file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as e:
            raise LoadError(f"{file} is not a whole safetensors file: {e}; get it again") from e
    return shapes


def sized_config(folder: Path, files: Mapping[str, tuple[Path, ...]]) -> BagelConfig:
    """Return the config of a folder with the sizes that only its tensors tell."""
    config = BagelConfig.from_folder(folder).with_shapes(tensor_shapes(files[NETWORK]))
    return replace(config, autoencoder=config.autoencoder.with_shapes(tensor_shapes(files[AUTOENCODER])))


# -- modules without values --------------------------------------------------------------------------------------------


@torch.inference_mode(False)  # inference tensors count no versions, and a change of weights must be seen
def allocate_network(
    config: BagelConfig, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> BagelNet:
    """Return a network whose weights take their memory once and hold nothing yet; it records no gradients."""
    with torch.device("meta"):
        net = BagelNet(config).to(dtype)
    net.to_empty(device=device)
    for module in net.modules():
        if isinstance(module, Linear):
            module.store_by_input()
    return net.requires_grad_(False).eval()


@torch.inference_mode(False)
def allocate_autoencoder(
    config: BagelConfig, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Autoencoder:
    """Return an autoencoder whose weights hold nothing yet; it records no gradients."""
    with torch.device("meta"):
        autoencoder = Autoencoder(config.autoencoder).to(dtype)
    return autoencoder.to_empty(device=device).requires_grad_(False).eval()


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], whose: str) -> None:
    """Copy tensors into the places of their names.

    Raises:
        LoadError: A tensor is missing, unknown, given twice, not of floats, or of another shape.

    Changes:
        ``targets``; after an error they are part old, part new.
    """
    missing = dict.fromkeys(targets)
    for name, tensor in tensors:
        if name not in targets:
            raise LoadError(f"tensor {name!r} has no place in {whose}; are the config files of the same checkpoint?")
        if name not in missing:
            raise LoadError(f"tensor {name!r} of {whose} comes twice")
        _copy(name, targets[name], tensor)
        del missing[name]
    if missing:
        shown = ", ".join(list(missing)[:4]) + (", ..." if len(missing) > 4 else "")
        raise LoadError(f"{len(missing)} of {len(targets)} tensors of {whose} are missing: {shown}")


def _copy(name: str, target: Tensor, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise LoadError(f"tensor {name!r} is {tensor.dtype}, not floats; load a checkpoint that is not quantised")
    if tensor.shape != target.shape:
        raise LoadError(f"tensor {name!r} has shape {list(tensor.shape)} where {list(target.shape)} is needed")
    target.copy_(tensor)


def save_bagel(folder: Path, net: BagelNet, autoencoder: Autoencoder, *, dtype: torch.dtype | None = None) -> None:
    """Write the files of a checkpoint as the release names them; the network in ``dtype``, None = as it is.

    Raises:
        LoadError: The folder cannot be written.
    """
    import json

    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, dict[str, Any]] = {
        NETWORK: {name: value.detach().to(dtype or value.dtype).contiguous() for name, value in net.named_parameters()},
        AUTOENCODER: {name: value.detach().contiguous() for name, value in autoencoder.file_tensors()},
    }
    for part, tensors in parts.items():
        save_file(tensors, folder / f"{part}.safetensors")
    config = replace(net.config, autoencoder=autoencoder.config)
    for name, content in config.files().items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
