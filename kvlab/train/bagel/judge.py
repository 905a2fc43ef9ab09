"""The judge of pictures: the nearest palette colour of every pixel, and the best overlap with the shapes, place by place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kvlab.train.bagel.scenes import BACKGROUNDS, COLOURS, PLACES, SHAPES, SIDE, Pixels, Scene, Thing, coverage

_NAMES = (*COLOURS, *BACKGROUNDS)
_PALETTE = np.array([*COLOURS.values(), *BACKGROUNDS.values()], np.float32)
_MARGIN = 4
_SHIFTS = (-3.0, -1.5, 0.0, 1.5, 3.0)
_GROWTHS = (-1.5, 0.0, 1.5)
#: Less of a shape's outline than this fits none.
LEAST_OVERLAP = 0.6
#: More of other colours than this beside the places is something that nobody asked for.
MOST_STRAY_SHARE = 0.04

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Found:
    """What the judge sees at the places of an arrangement; None for a place with nothing it knows."""

    background: str
    things: tuple[Thing | None, ...]
    stray_share: float


def look(pixels: Pixels, arrangement: str) -> Found:
    """Return what a picture shows, read as this arrangement."""
    names = _nearest(_blurred(pixels))
    ground = _background(names)
    things, rest = [], names != ground
    for column, row, radius in PLACES[arrangement]:
        window = _window(column, row, radius)
        things.append(_thing(names[window], ground, arrangement, (column, row, radius)))
        rest[window] = False
    return Found(_NAMES[ground], tuple(things), float(rest.mean()))


def shows(pixels: Pixels, scene: Scene) -> bool:
    """Return whether a picture shows just this scene."""
    found = look(pixels, scene.arrangement)
    is_clean = found.stray_share <= MOST_STRAY_SHARE
    return is_clean and found.things == scene.things and found.background == scene.background


def share(pictures: Sequence[Pixels], asked: Sequence[Scene]) -> float:
    """Return the share of pictures that show what was asked."""
    return sum(shows(pixels, scene) for pixels, scene in zip(pictures, asked, strict=True)) / len(asked)


def _blurred(pixels: Pixels) -> NDArray[np.float32]:
    padded = np.pad(pixels.astype(np.float32), ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    blurred = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
    return np.asarray(blurred / 9, np.float32)


def _nearest(pixels: NDArray[np.float32]) -> Places:
    distance = np.square(pixels[:, :, None] - _PALETTE).sum(-1)  # [rows, columns, palette]
    return np.asarray(distance.argmin(-1), np.int64)


def _background(names: Places) -> int:
    edge = np.concatenate([names[0], names[-1], names[:, 0], names[:, -1]])
    return int(np.bincount(edge, minlength=len(_NAMES)).argmax())


def _window(column: float, row: float, radius: float) -> tuple[slice, slice]:
    reach = int(radius) + _MARGIN
    return slice(max(0, int(row) - reach), int(row) + reach), slice(max(0, int(column) - reach), int(column) + reach)


def _thing(names: Places, ground: int, arrangement: str, place: tuple[float, float, float]) -> Thing | None:
    """Return the thing in one window: its commonest shape colour, and the shape that the colour's pixels overlap best."""
    counts = np.bincount(names[names != ground], minlength=len(_NAMES))[: len(COLOURS)]
    colour = int(counts.argmax())
    mask = (names == colour).ravel().astype(np.float32)
    if not mask.any():
        return None
    best = {shape: _overlap(mask, _templates(shape, *place)) for shape in SHAPES}
    shape = max(best, key=best.__getitem__)
    return Thing(_NAMES[colour], shape) if best[shape] >= LEAST_OVERLAP else None


def _overlap(mask: NDArray[np.float32], templates: NDArray[np.float32]) -> float:
    both = templates @ mask
    return float((both / (templates.sum(1) + mask.sum() - both)).max())


@cache
def _templates(shape: str, column: float, row: float, radius: float) -> NDArray[np.float32]:
    """Return a shape's outlines around its place, a little moved and grown, [outlines, pixels of the window]."""
    window = _window(column, row, radius)
    drawn = [
        coverage(shape, column + right, row + down, radius + growth)[window].ravel() > 0.5
        for right, down, growth in product(_SHIFTS, _SHIFTS, _GROWTHS)
    ]
    return np.stack(drawn).astype(np.float32)


def noisy(pixels: Pixels, deviation: float, seed: int) -> Pixels:
    """Return the picture under noise, to see what the judge bears."""
    noise = np.random.default_rng(seed).normal(0, deviation, (SIDE, SIDE, 3))
    return np.asarray((pixels + noise).clip(0, 255), np.uint8)
