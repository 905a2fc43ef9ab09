"""What a BAGEL network and its requests take, told from the config alone: no weights are read and none are made."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch

from kvlab.errors import MissingExtraError
from kvlab.models.bagel.autoencoder import Autoencoder
from kvlab.models.bagel.config import BagelConfig
from kvlab.models.bagel.network import BagelNet
from kvlab.models.bagel.plan import MARKERS
from kvlab.models.bagel.resizing import default_size, resized_size

#: Where the released network lies; its shapes are BagelConfig().
RELEASE = "ByteDance-Seed/BAGEL-7B-MoT"
TEXT_TOKENS = 100  # of a prompt whose size is told


def weight_values(config: BagelConfig) -> dict[str, int]:
    """Return how many values the weights have, by part; the autoencoder's only where ``diffusers`` is installed."""
    with torch.device("meta"):
        parts: dict[str, torch.nn.Module] = {"network": BagelNet(config)}
        with suppress(MissingExtraError):
            parts["autoencoder"] = Autoencoder(config.autoencoder)
    return {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}


def picture_slots(config: BagelConfig, size: tuple[int, int]) -> dict[str, int]:
    """Return the KV slots of a picture of (height, width) pixels that is given, by the walk that writes them."""
    seen = resized_size(config.vae_rule, *size)
    rows, columns = config.latent_grid(*seen)
    height, width = (side // config.vision.patch_size for side in resized_size(config.vit_rule, *seen))
    return {"prefill_vae": rows * columns + MARKERS, "prefill_vit": height * width + MARKERS}


def request_slots(config: BagelConfig, size: tuple[int, int] | None = None) -> Mapping[str, int]:
    """Return the KV slots of whole requests with a text of TEXT_TOKENS tokens and pictures of ``size``, guided as released."""
    picture = picture_slots(config, size or default_size(config))
    text = TEXT_TOKENS + MARKERS
    return {
        "text to image": 2 * text,  # main and cfg_img
        "edit of one picture": picture["prefill_vae"] + picture["prefill_vit"] + 2 * text,
        "question about one picture": picture["prefill_vit"] + text,
    }
