"""The sizes at which BAGEL looks at pictures and draws them, and the way from one size to another."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.errors import InputError
from kvlab.models.bagel.config import BagelConfig, ResizeRule
from kvlab.models.bagel.pictures import Pixels, require_pillow
from kvlab.options import is_whole


def resized_size(rule: ResizeRule, height: int, width: int) -> tuple[int, int]:
    """Return (height, width) of a picture of this size after resizing. Where it is too narrow for both, the longest side wins.

    >>> resized_size(ResizeRule(max_side=1024, min_side=512, stride=16), height=480, width=640)
    (512, 688)
    """
    shrink = min(rule.max_side / max(height, width), 1.0)
    size = _scaled(rule, (height, width), max(shrink, rule.min_side / min(height, width)))
    if size[0] * size[1] > rule.max_pixels:
        size = _scaled(rule, size, rule.max_pixels / (size[0] * size[1]))  # a ratio of areas for the sides, as released
    if max(size) > rule.max_side:
        size = _scaled(rule, size, rule.max_side / max(size))
    return size


def _scaled(rule: ResizeRule, size: tuple[int, int], scale: float) -> tuple[int, int]:
    # rounded twice, first to pixels, then to strides, halves to even: as released
    height, width = (max(rule.stride, round(round(side * scale) / rule.stride) * rule.stride) for side in size)
    return height, width


def resize(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Return the picture at another (height, width): bicubic, with a wider filter where it shrinks.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    if pixels.shape[:2] == size:
        return pixels
    pillow = require_pillow()
    return np.array(pillow.fromarray(pixels).resize(size[::-1], pillow.Resampling.BICUBIC))


# -- sizes that can be drawn -------------------------------------------------------------------------------------------


def default_size(config: BagelConfig) -> tuple[int, int]:
    """Return the (height, width) drawn when nobody says another: the largest square that pictures are resized to."""
    stride = config.latent_stride
    side = min(config.vae_rule.max_side, config.max_latent_side * stride) // stride * stride
    return side, side


def require_size(config: BagelConfig, size: Any) -> tuple[int, int]:
    """Return ``size`` as (height, width).

    Raises:
        InputError: it is none, or not a legal one; the message names the nearest that is.
    """
    if not isinstance(size, tuple | list) or len(size) != 2 or not all(map(is_whole, size)):
        raise InputError(f"size is {size!r}; give (height, width) in pixels")
    stride, limit = config.latent_stride, config.max_latent_side * config.latent_stride
    height, width = (min(max(stride, (side + stride // 2) // stride * stride), limit) for side in map(int, size))
    if tuple(size) != (height, width):
        raise InputError(
            f"size {tuple(size)} cannot be drawn: both sides are multiples of {stride} from {stride} to {limit} pixels; the "
            f"nearest size is {(height, width)}"
        )
    return height, width
