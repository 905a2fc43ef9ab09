"""From a checkpoint folder to a model that reads and draws: network, autoencoder, tokenizer, and how much memory they take."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kvlab.errors import InputError, LoadError
from kvlab.models.bagel.config import BagelConfig, SpecialIds
from kvlab.models.bagel.prompting import BagelProcessor
from kvlab.models.bagel.spec import BagelModel
from kvlab.models.bagel.weights import load_bagel, tensor_shapes
from kvlab.models.folders import AUTOENCODER, NETWORK, part_files, weight_files, weights_digest
from kvlab.models.loading import default_dtype, torch_device, torch_dtype
from kvlab.models.memory import check_memory
from kvlab.models.prompting import load_tokenizer
from kvlab.options import whole

NOT_OF_ONE = "the files are not of the same checkpoint"
#: Tokens with a meaning by their names in the release's tokenizer.
SPECIAL_TOKENS = {
    "bos": "<|im_start|>",
    "eos": "<|im_end|>",
    "start_of_image": "<|vision_start|>",
    "end_of_image": "<|vision_end|>",
}


def load_bagel_model(
    folder: Path,
    name: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    max_seq_len: int | None = None,
) -> BagelModel:
    """Return the model in a checkpoint folder with its weights on ``device``.

    Args:
        name: What the user asked for.
        dtype: Of the network; the autoencoder computes in float32.
        device, max_seq_len: As ``load_text_model``.

    Raises:
        InputError: an unknown dtype or device, or a context longer than the model's.
        LoadError: damaged or incomplete files, the autoencoder's among them, or too little memory.
        MissingExtraError: ``diffusers`` is not installed.
    """
    place = torch_device(device)
    computed = torch_dtype(dtype or default_dtype(place))
    files = weight_files(folder)
    check_memory(weights_bytes(folder, computed), place)
    net, autoencoder = load_bagel(folder, dtype=computed, device=place)
    config = replace(net.config, autoencoder=autoencoder.config)
    _check_sizes(folder, config)
    tokenizer = load_tokenizer(folder, reads_config=False)
    _check_tokenizer(folder, tokenizer, config.special)
    sha256 = weights_digest(files)
    return BagelModel(
        net,
        autoencoder,
        BagelProcessor(tokenizer, config, max_seq_len=_context(config, name, max_seq_len)),
        name=name,
        identity=f"{name} sha256:{sha256[:16]}",
        checkpoint_path=str(folder),
        pinned_sha256=sha256,
    )


def weights_bytes(folder: Path, dtype: torch.dtype) -> dict[str, int]:
    """Return the memory of a checkpoint's weights once loaded, by part.

    Raises:
        LoadError: a file is missing or damaged.
    """
    exact = torch.promote_types(dtype, torch.float32)
    parts = {"network": (NETWORK, dtype.itemsize), "autoencoder": (AUTOENCODER, exact.itemsize)}
    return {what: size * _num_values(folder, part) for what, (part, size) in parts.items()}


def _num_values(folder: Path, part: str) -> int:
    return sum(torch.Size(shape).numel() for shape in tensor_shapes(part_files(folder, part)).values())


def _context(config: BagelConfig, name: str, max_seq_len: int | None) -> int:
    limit = config.text.max_seq_len
    if max_seq_len is not None and whole("max_seq_len", max_seq_len, 1) > limit:
        raise InputError(f"max_seq_len is {max_seq_len}, and {name} has {limit} positions; give at most these")
    return limit if max_seq_len is None else int(max_seq_len)


def _check_sizes(folder: Path, config: BagelConfig) -> None:
    for field, token in asdict(config.special).items():
        if token >= config.text.vocab_size:
            raise LoadError(f"{folder}: {field} is id {token} and the vocabulary has {config.text.vocab_size}; {NOT_OF_ONE}")
    vision = config.vision
    tables = (
        ("vision tower", config.vit_rule, vision.side * vision.patch_size),
        ("autoencoder", config.vae_rule, config.max_latent_side * config.latent_stride),
    )
    for reader, rule, most in tables:
        if rule.max_side > most:
            raise LoadError(
                f"{folder}: pictures are resized to {rule.max_side} pixels a side for the {reader} and its table of positions "
                f"holds {most}; {NOT_OF_ONE}"
            )


def _check_tokenizer(folder: Path, tokenizer: Any, special: SpecialIds) -> None:
    known = {} if tokenizer is None else tokenizer.get_vocab()
    for field, token in SPECIAL_TOKENS.items():
        expected = getattr(special, field)
        if known.get(token, expected) != expected:
            raise LoadError(
                f"{folder}: the tokenizer's {token} is id {known[token]} and the config's {field} is {expected}; {NOT_OF_ONE}"
            )
