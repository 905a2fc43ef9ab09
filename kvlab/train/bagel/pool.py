"""Pictures of training in pairs, before and after an edit, drawn and encoded once."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvlab.models.bagel.autoencoder import Autoencoder, from_uint8
from kvlab.models.bagel.patches import patchify
from kvlab.models.bagel.resizing import resize, resized_size
from kvlab.progress import progress
from kvlab.train.bagel import edits, scenes
from kvlab.train.bagel.network import CONFIG

CHUNK = 32


@dataclass(frozen=True)
class Pool:
    """Edits and the pictures of both their ends: those of edit i are pictures 2i and 2i + 1.

    Shapes:
        pixels: [2 * edits, 64, 64, 3] uint8; mean, deviation: [2 * edits, latent tokens, 64], the posteriors' own.
    """

    edits: list[edits.Edit]
    pixels: Tensor
    mean: Tensor
    deviation: Tensor

    def drawing(self, picture: int) -> scenes.Drawing:
        """Return what a picture was drawn from."""
        edit = self.edits[picture // 2]
        return edit.target if picture % 2 else edit.source

    def scene(self, picture: int) -> scenes.Scene:
        """Return what a picture shows."""
        return self.drawing(picture).scene

    def latents(self, pictures: Tensor) -> Tensor:
        """Return latents drawn from pictures' posteriors, [pictures, latent tokens, 64]."""
        mean, deviation = self.mean[pictures].float(), self.deviation[pictures].float()
        return mean + deviation * torch.randn_like(mean)

    def seen(self, pictures: Tensor) -> Tensor:
        """Return pictures as the vision tower takes them, [pictures, 3, 70, 70]."""
        return for_vision(self.pixels[pictures])


def for_vision(pixels: Tensor) -> Tensor:
    """Return pictures resized for the vision tower.

    Shapes:
        pixels: [pictures, 64, 64, 3] uint8; result: [pictures, 3, 70, 70] from -1 to 1.
    """
    size = resized_size(CONFIG.vit_rule, *pixels.shape[1:3])
    if not len(pixels):
        return torch.empty(0, 3, *size)
    sized = [resize(picture, size) for picture in pixels.numpy()]
    return from_uint8(torch.from_numpy(np.stack(sized)))


@torch.no_grad()
def posteriors(autoencoder: Autoencoder, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of pictures' latents, shifted and scaled: [pictures, latent tokens, 64]."""
    mean, log_variance = autoencoder.moments(from_uint8(pixels))
    scale, shift, patch = autoencoder.config.scale, autoencoder.config.shift, CONFIG.latent_patch_size
    return patchify(scale * (mean - shift), patch), patchify(scale * (0.5 * log_variance).exp(), patch)


def make(autoencoder: Autoencoder, num_edits: int, *, seed: int) -> Pool:
    """Draw and encode the pictures of random training edits."""
    draw = random.Random(seed)
    drawn = [edits.any_edit(draw) for _ in progress(range(num_edits), "drawing")]
    pixels = torch.from_numpy(np.stack([end.pixels() for edit in drawn for end in (edit.source, edit.target)]))
    encoded = [posteriors(autoencoder, part) for part in progress(pixels.split(CHUNK), "encoding")]
    mean, deviation = (torch.cat(parts).half() for parts in zip(*encoded, strict=True))
    return Pool(drawn, pixels, mean, deviation)


def kept(path: Path, autoencoder: Autoencoder, num_edits: int, *, seed: int) -> Pool:
    """Return the pool of ``make``, its latents read from ``path`` if they are there and written to it if not."""
    if not path.is_file():
        made = make(autoencoder, num_edits, seed=seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save((made.mean, made.deviation), path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)
        return made
    mean, deviation = torch.load(path, weights_only=True)
    draw = random.Random(seed)
    drawn = [edits.any_edit(draw) for _ in range(num_edits)]
    pixels = torch.from_numpy(np.stack([end.pixels() for edit in drawn for end in (edit.source, edit.target)]))
    return Pool(drawn, pixels, mean, deviation)
