"""Latents as tokens of the decoder: the embedding of time, and the maps in and out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

NUM_FREQUENCIES = 128
MAX_PERIOD = 10000.0


def time_waves(t: Tensor) -> Tensor:
    """Return the cosines, then sines, of times from 0 to 1 at falling frequencies, [..., 256] float32.

    >>> time_waves(torch.tensor(0.0))[[0, 127, 128, 255]].tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    steps = torch.arange(NUM_FREQUENCIES, dtype=torch.float32, device=t.device) / NUM_FREQUENCIES
    angles = t.float()[..., None] * torch.exp(-math.log(MAX_PERIOD) * steps)  # [..., 128]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimeEmbedder(nn.Module):
    """What a latent token is told about how much of it is noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * NUM_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        """Return the embedding of times, [..., width]."""
        dtype = next(self.mlp.parameters()).dtype
        embedded: Tensor = self.mlp(time_waves(t).to(dtype))
        return embedded
