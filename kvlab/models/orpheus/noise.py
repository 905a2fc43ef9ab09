"""The noise of the codec's decoder: a function of seed and place, so that equal codes give equal samples in any chunks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvlab.errors import InputError

_BLOCK = 4096  # values drawn at once; any request is cut out of whole blocks
_BLOCKS_KEPT = 64


class NoiseSource(Protocol):
    """Gives the noise of one decoder stage: ``length`` values from place ``start``, which counts in that stage's own rate."""

    def __call__(self, stage: int, start: int, length: int) -> Tensor:
        """Return the values.

        Shapes:
            result: [length] float32.
        """
        ...


class SeededNoise:
    """Standard normal noise that depends on (seed, stage, place) and on nothing else; draws from no shared generator.

    >>> noise = SeededNoise(0)
    >>> torch.equal(noise(1, 100, 8000)[4000:], noise(1, 4100, 4000))
    True
    """

    def __init__(self, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"the noise seed is {seed!r}; it must be a whole number")
        self.seed = seed
        self._block = lru_cache(_BLOCKS_KEPT)(self._draw)

    def __call__(self, stage: int, start: int, length: int) -> Tensor:
        first, last = start // _BLOCK, (start + max(length, 1) - 1) // _BLOCK
        values = np.concatenate([self._block(stage, block) for block in range(first, last + 1)])
        begin = start - first * _BLOCK
        return torch.from_numpy(values[begin : begin + length].copy())

    def _draw(self, stage: int, block: int) -> np.ndarray:
        key = sha256(repr(("kvlab codec noise", self.seed, stage, block)).encode("utf-8")).digest()[:16]
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        return generator.standard_normal(_BLOCK, dtype=np.float32)


class NoNoise:
    """Silence in every stage."""

    def __call__(self, stage: int, start: int, length: int) -> Tensor:
        return torch.zeros(length)


class GivenNoise:
    """Noise that was recorded: stage -> values from place 0 on."""

    def __init__(self, stages: Mapping[int, Tensor]) -> None:
        self._stages = {stage: values.flatten() for stage, values in stages.items()}

    def __call__(self, stage: int, start: int, length: int) -> Tensor:
        values = self._stages.get(stage)
        if values is None or start < 0 or start + length > len(values):
            have = 0 if values is None else len(values)
            raise InputError(f"noise of stage {stage} at {start}..{start + length} was asked for, and {have} values were given")
        return values[start : start + length]
