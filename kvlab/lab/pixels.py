"""Two pictures compared: exact equality first, then the largest difference, then the share of pixels over a threshold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import InputError
from kvlab.lab.picture_results import FULL, MAX_THRESHOLD, DifferenceMap, Picture, PixelDrift

Pixels: TypeAlias = NDArray[np.uint8]

MAX_SIDE_PX = 256  # of a picture in a figure


def as_pixels(picture: Any) -> Pixels:
    """Return a picture as bytes [height, width, 3].

    Args:
        picture: a result with ``pixels``, a tensor or array [height, width, 3] of bytes, or a PIL image.

    Raises:
        InputError: no picture, another shape or another number format.
    """
    given = getattr(picture, "pixels", picture)
    if given is None:
        raise InputError(f"{picture!r} holds no picture; ask for one with kvlab.draw")
    if hasattr(given, "getbands"):  # a PIL image
        given = given.convert("RGB")
    pixels = np.asarray(given)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InputError(f"a picture of {pixels.dtype} and shape {list(pixels.shape)}; give bytes [height, width, 3]")
    return pixels


def differences(first: Any, second: Any) -> NDArray[np.int16]:
    """Return ``second`` minus ``first`` by channel, [height, width, 3].

    Raises:
        InputError: pictures of different sizes.
    """
    a, b = as_pixels(first), as_pixels(second)
    if a.shape != b.shape:
        raise InputError(f"the pictures have {_size(a)} and {_size(b)} pixels; compare pictures of one size")
    return b.astype(np.int16) - a.astype(np.int16)


def _size(pixels: Pixels) -> str:
    return f"{pixels.shape[0]} x {pixels.shape[1]}"


def compare_pictures(first: Any, second: Any, name: str = "") -> PixelDrift:
    """Compare two pictures of one size (see ``as_pixels``); figures call the pair ``name``.

    >>> black, dark = np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2, 3), np.uint8)
    >>> dark[0, 0, 1] = 40
    >>> compare_pictures(black, dark)
    PixelDrift(3 of 4 pixels are equal, the others differ by up to 40 of 255, 1 (25.00%) by more than 32)
    """
    apart = np.abs(differences(first, second)).astype(np.int64)  # [height, width, 3]
    moved = np.bincount(apart.max(axis=2).ravel(), minlength=FULL + 1)  # [256]
    mean_square = float(np.mean(apart**2))
    psnr_db = 10 * math.log10(FULL**2 / mean_square) if mean_square else None
    height, width, _ = apart.shape
    return PixelDrift(height, width, tuple(moved.tolist()), float(apart.mean()), psnr_db, name)


def share_curve(drift: PixelDrift, thresholds: Iterable[int] = range(MAX_THRESHOLD + 1)) -> list[tuple[int, float]]:
    """Return (threshold, share of pixels over it) for each threshold.

    >>> share_curve(PixelDrift(1, 4, (2, 1, 1), 0.25, 50.0), [0, 1, 2])
    [(0, 0.5), (1, 0.25), (2, 0.0)]
    """
    return [(threshold, drift.share_over(threshold)) for threshold in thresholds]


# -- what figures draw -------------------------------------------------------------------------------------------------


def to_draw(picture: Any, name: str, *, max_side_px: int = MAX_SIDE_PX) -> Picture:
    """Return a picture for a figure; one that is larger than ``max_side_px`` is shrunk by a whole number, to its means."""
    pixels = as_pixels(picture)
    times = _times_smaller(pixels.shape, max_side_px)
    means = _cells(pixels, times).mean(axis=(1, 3)).round().astype(np.uint8) if times > 1 else pixels
    return Picture(name, means.shape[0], means.shape[1], means.tobytes(), times)


def difference_map(
    first: Any, second: Any, name: str = "difference", *, signed: bool = False, max_side_px: int = MAX_SIDE_PX
) -> DifferenceMap:
    """Return where two pictures differ, and by how much.

    Args:
        signed: second minus first, of the channel furthest off; else magnitudes.
        max_side_px: a larger picture is cut into squares, and each shows its pixel that is furthest off.
    """
    channels = differences(first, second)
    apart = _furthest(channels, axes=(2,))  # [height, width]
    times = _times_smaller(apart.shape, max_side_px)
    if times > 1:
        apart = _furthest(_cells(apart, times), axes=(1, 3))
    values = apart if signed else np.abs(apart)
    return DifferenceMap(name, tuple(map(tuple, values.tolist())), signed, times)


def _times_smaller(shape: tuple[int, ...], max_side_px: int) -> int:
    if max_side_px < 1:
        raise InputError(f"max_side_px is {max_side_px}; give 1 or more")
    return -(-max(shape[:2]) // max_side_px)


def _cells(values: NDArray[Any], times: int) -> NDArray[Any]:
    """Cut [height, width, ...] into [rows, times, columns, times, ...]; the last row and column are repeated to fill a cell."""
    height, width = values.shape[:2]
    short = [(0, -height % times), (0, -width % times), *[(0, 0)] * (values.ndim - 2)]
    full = np.pad(values, short, mode="edge")
    return full.reshape(full.shape[0] // times, times, full.shape[1] // times, times, *values.shape[2:])


def _furthest(values: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
    """Along ``axes``, the value of the largest magnitude, with its sign."""
    low, high = values.min(axis=axes), values.max(axis=axes)
    return np.where(-low > high, low, high)
