"""The noise of pictures: each has its own generator, named by the seed, what it is for, and the number of the picture.

So a picture served from pages, which draws no noise, changes no other draw, and neither does a batch, a device or a text
sampled before.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab.errors import InputError
from kvlab.options import is_whole

START, VAE = "start", "vae"  # what noise is for: the picture to be drawn, or the encoding of one that was given
MEAN = "mean"  # the identity of no noise


def read_seed(seed: Any) -> int:
    """Return a request's seed, a fresh one where it has none.

    Raises:
        InputError: it is no whole number.
    """
    if seed is None:
        return secrets.randbits(63)
    if not is_whole(seed):
        raise InputError(f"the seed is {seed!r}; give a whole number, or None for a picture that nobody can draw again")
    return int(seed)


def normal(seed: int, purpose: str, number: int, shape: Sequence[int]) -> Tensor:
    """Return standard normal noise that depends on these arguments and on nothing else.

    Args:
        purpose: START or VAE.
        number: Which picture of the request, in the order written; the one to be drawn is the last.

    >>> torch.equal(normal(7, START, 0, [12, 64]), normal(7, START, 0, [12, 64]))
    True
    """
    # not torch.Generator: on a CPU it reads 32 bits of its seed, and this reads all of them
    key = sha256(repr(("kvlab picture noise", seed, purpose, number)).encode("utf-8")).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))


def read_noise(name: str, noise: Any, shape: Sequence[int]) -> Tensor:
    """Return noise that a client gave, as float32.

    Raises:
        InputError: no numbers, another shape, or values that are not finite.
    """
    try:
        values = torch.as_tensor(noise, dtype=torch.float32).detach().cpu().clone()
    except (TypeError, ValueError, RuntimeError) as e:
        raise InputError(f"{name} is {noise!r:.60}, which is no tensor ({e}); give numbers of shape {list(shape)}") from e
    if tuple(values.shape) != tuple(shape):
        raise InputError(f"{name} has shape {list(values.shape)}; this picture's noise has shape {list(shape)}")
    if not bool(values.isfinite().all()):
        raise InputError(f"{name} holds values that are not finite")
    return values


@dataclass(frozen=True, eq=False)
class PictureNoise:
    """The noise of one picture for one purpose: what a client gave, else what seed and number say."""

    seed: int
    purpose: str
    number: int
    given: Tensor | None = None

    @property
    def identity(self) -> Any:
        """What names these values: the digest of given ones, else what they are drawn from."""
        return (self.seed, self.number) if self.given is None else sha256(self.given.numpy().tobytes()).digest()

    def values(self, shape: Sequence[int]) -> Tensor:
        """Return the noise, float32."""
        return normal(self.seed, self.purpose, self.number, shape) if self.given is None else self.given
