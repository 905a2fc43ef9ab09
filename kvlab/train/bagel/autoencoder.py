"""The autoencoder: FLUX's in small, trained on drawn scenes without an adversary, its latents brought to one scale."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab.models.bagel.autoencoder import Autoencoder, from_uint8
from kvlab.models.bagel.config import AutoencoderConfig
from kvlab.train.bagel import scenes
from kvlab.train.loop import mixed_precision

CONFIG = AutoencoderConfig(channels=16, multipliers=(1, 2, 4, 4), num_res_blocks=1, latent_channels=16, norm_groups=8)
BATCH = 8
PEAK_LR = 2e-3
DECODER_PEAK_LR = 1e-3
L1_WEIGHT, KL_WEIGHT = 0.5, 1e-4


def pictures(num: int, draw: random.Random) -> Tensor:
    """Return pictures of random training scenes as the network takes them, [num, 3, 64, 64] from -1 to 1."""
    drawn = [scenes.drawing(scenes.any_scene(draw), draw).pixels() for _ in range(num)]
    return from_uint8(torch.from_numpy(np.stack(drawn)))


class AutoencoderTask:
    """Trains encoder and decoder together; see ``kvlab.train.loop.Task``."""

    name = "autoencoder"
    peak_lr = PEAK_LR

    def __init__(self, *, config: AutoencoderConfig = CONFIG, batch: int = BATCH, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.autoencoder = Autoencoder(config)
        self.net: Any = self.autoencoder.net
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.net.parameters(), lr=PEAK_LR, betas=(0.9, 0.98))
        self.batch = batch

    def losses(self, step_index: int) -> dict[str, Tensor]:
        """Fresh pictures through the network."""
        true = pictures(self.batch, random.Random(int(torch.randint(2**31, ()))))
        with mixed_precision():
            mean, log_variance = (part.float() for part in self.autoencoder.moments(true))
            made = self.net.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()).float()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return {**distance(made, true), "kl": KL_WEIGHT * kl}

    def after(self, step_index: int) -> None:
        """Nothing follows."""

    def state(self) -> dict[str, Any]:
        """All is in the network and the optimizer."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """All is in the network and the optimizer."""


class DecoderTask(AutoencoderTask):
    """Trains the decoder alone, on a fixed encoder whose latents are even: what follows ``even_out``."""

    name = "decoder"
    peak_lr = DECODER_PEAK_LR

    def __init__(self, autoencoder: Autoencoder, *, batch: int = BATCH) -> None:
        self.autoencoder = autoencoder
        self.net = autoencoder.net
        self.net.encoder.requires_grad_(False)
        decoder = self.net.decoder.parameters()
        self.optimizer = torch.optim.AdamW(decoder, lr=DECODER_PEAK_LR, betas=(0.9, 0.98))
        self.batch = batch

    def losses(self, step_index: int) -> dict[str, Tensor]:
        """Fresh pictures through the network."""
        true = pictures(self.batch, random.Random(int(torch.randint(2**31, ()))))
        with torch.no_grad():
            mean, log_variance = self.autoencoder.moments(true)
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return distance(self.net.decoder(z), true)


def distance(made: Tensor, true: Tensor) -> dict[str, Tensor]:
    """Return the terms by which two pictures differ."""
    off = made - true
    return {"l1": L1_WEIGHT * off.abs().mean(), "mse": off.square().mean()}


@torch.no_grad()
def even_out(autoencoder: Autoencoder, planes: Tensor) -> None:
    """Move and stretch each latent channel so that, after the release's shift and scale, it has mean 0 and deviation 1.

    The encoder's last layer and the decoder's first take the change between them; only at the pictures' border, where
    the decoder pads with zeros, what it sees is not quite what it was.
    """
    config, net = autoencoder.config, autoencoder.net
    mean, log_variance = autoencoder.moments(planes)
    variance = mean.var(dim=(0, 2, 3)) + log_variance.exp().mean(dim=(0, 2, 3))
    middle, stretch = mean.mean(dim=(0, 2, 3)), 1 / (variance.sqrt() * config.scale)
    shift = config.shift - stretch * middle
    last, first, channels = net.encoder.conv_out, net.decoder.conv_in, config.latent_channels
    last.weight[:channels] *= stretch[:, None, None, None]
    last.bias[:channels] = last.bias[:channels] * stretch + shift
    last.bias[channels:] += 2 * stretch.log()
    first.weight /= stretch[None, :, None, None]
    first.bias -= (first.weight.sum((2, 3)) * shift).sum(1)


def signal_to_noise_db(autoencoder: Autoencoder, planes: Tensor) -> float:
    """Return the peak signal-to-noise ratio of pictures through the network, over all of them."""
    with torch.no_grad():
        made = autoencoder.decode(autoencoder.encode(planes)).clamp(-1, 1)
    return float(10 * torch.log10(4 / (made - planes).square().mean()))
