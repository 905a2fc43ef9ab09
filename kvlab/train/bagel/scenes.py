"""The pictures BAGEL in small learns from: one to three coloured shapes on a coloured background, drawn and described."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

SIDE = 64
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (245, 210, 50),
    "pink": (245, 130, 190),
    "cyan": (60, 200, 220),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (250, 250, 250),
    "black": (15, 15, 15),
    "gray": (128, 128, 128),
    "brown": (120, 75, 45),
}
SHAPES = ("circle", "square", "triangle", "cross")

#: Where the shapes of an arrangement stand: column, row and radius in pixels.
PLACES: dict[str, tuple[tuple[float, float, float], ...]] = {
    "one": ((32, 32, 18),),
    "row": ((17, 32, 13), (47, 32, 13)),
    "column": ((32, 17, 13), (32, 47, 13)),
    "three": ((17, 17, 12.5), (47, 17, 12.5), (32, 47, 12.5)),
}
MOVE = 1.5
GROW = 1.0
HELD_OUT_ONE_IN = 8

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Thing:
    """A coloured shape."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """What a picture shows; its things in the order of the arrangement's places."""

    arrangement: str
    things: tuple[Thing, ...]
    background: str

    @property
    def held_out(self) -> bool:
        """Whether no training may see this scene, however it is drawn or worded: one in eight, by a hash."""
        text = f"{self.arrangement}: {', '.join(map(str, self.things))} on {self.background}"
        return hashlib.sha256(text.encode("utf-8")).digest()[0] % HELD_OUT_ONE_IN == 0


# -- drawing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawing:
    """A scene and where its things really stand, each a little off its place."""

    scene: Scene
    spots: tuple[tuple[float, float, float], ...]

    def pixels(self) -> Pixels:
        """Return the picture, [64, 64, 3], edges smoothed."""
        canvas = np.broadcast_to(np.array(BACKGROUNDS[self.scene.background], np.float32), (SIDE, SIDE, 3))
        for thing, spot in zip(self.scene.things, self.spots, strict=True):
            cover = coverage(thing.shape, *spot)[:, :, None]
            canvas = canvas + cover * (np.array(COLOURS[thing.colour], np.float32) - canvas)
        return np.asarray(np.rint(canvas), np.uint8)


def drawing(scene: Scene, draw: random.Random) -> Drawing:
    """Return the scene with its things moved and grown a little."""
    spots = []
    for column, row, radius in PLACES[scene.arrangement]:
        moved = (column + draw.uniform(-MOVE, MOVE), row + draw.uniform(-MOVE, MOVE))
        spots.append((*moved, radius + draw.uniform(-GROW, GROW)))
    return Drawing(scene, tuple(spots))


@cache
def _grid() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    centres = np.arange(SIDE, dtype=np.float32) + 0.5
    return centres[None, :], centres[:, None]


def coverage(shape: str, column: float, row: float, radius: float) -> NDArray[np.float32]:
    """Return how much of each pixel a shape covers, [64, 64]."""
    columns, rows = _grid()
    x, y = columns - np.float32(column), rows - np.float32(row)
    inside = np.broadcast_to(_depth(shape, x, y, radius), (SIDE, SIDE))
    return np.clip(inside + np.float32(0.5), 0, 1)


def _depth(shape: str, x: NDArray[np.float32], y: NDArray[np.float32], radius: float) -> NDArray[np.float32]:
    """Return how far inside the outline each point lies, in pixels; below 0 outside."""
    if shape == "circle":
        return np.asarray(radius - np.sqrt(x * x + y * y), np.float32)
    across, down = np.abs(x), np.abs(y)
    if shape == "square":
        return np.asarray(0.88 * radius - np.maximum(across, down), np.float32)
    if shape == "cross":
        arm = radius / 3
        return np.asarray(
            np.maximum(np.minimum(radius - across, arm - down), np.minimum(arm - across, radius - down)), np.float32
        )
    # a triangle, point up: its base at the bottom, as wide as it is high
    slope = 0.5**0.5 * np.sqrt(np.float32(0.4))
    sides = ((y + radius) * 0.5 - across) * (2 * slope)
    return np.asarray(np.minimum(sides, 0.9 * radius - y), np.float32)


# -- drawing lots ------------------------------------------------------------------------------------------------------

ARRANGEMENT_SHARES = {"one": 0.25, "row": 0.3, "column": 0.3, "three": 0.15}


def any_scene(draw: random.Random, *, held_out: bool = False, arrangement: str | None = None) -> Scene:
    """Return a random scene, of training or of those held out; no two of its things are alike."""
    while True:
        kind = arrangement or draw.choices(list(ARRANGEMENT_SHARES), list(ARRANGEMENT_SHARES.values()))[0]
        things = tuple(Thing(draw.choice(list(COLOURS)), draw.choice(SHAPES)) for _ in PLACES[kind])
        scene = Scene(kind, things, draw.choice(list(BACKGROUNDS)))
        if len(set(things)) == len(things) and scene.held_out == held_out:
            return scene


def every_scene(arrangement: str) -> Iterator[Scene]:
    """Yield every scene of an arrangement."""
    things = [Thing(colour, shape) for colour in COLOURS for shape in SHAPES]
    for chosen in product(things, repeat=len(PLACES[arrangement])):
        if len(set(chosen)) == len(chosen):
            for background in BACKGROUNDS:
                yield Scene(arrangement, chosen, background)


# -- describing --------------------------------------------------------------------------------------------------------

RELATIONS = {"row": ("left of", "right of"), "column": ("above", "below")}


def captions(scene: Scene) -> tuple[str, ...]:
    """Return every wording of a scene.

    >>> captions(Scene("row", (Thing("red", "circle"), Thing("blue", "square")), "white"))[1]
    'a blue square right of a red circle on a white background'
    """
    named = [f"a {thing}" for thing in scene.things]
    if scene.arrangement == "one":
        wordings = [named[0]]
    elif scene.arrangement == "three":
        wordings = [f"{named[0]} and {named[1]} above {named[2]}"]
    else:
        forth, back = RELATIONS[scene.arrangement]
        wordings = [f"{named[0]} {forth} {named[1]}", f"{named[1]} {back} {named[0]}"]
    return tuple(f"{wording} on a {scene.background} background" for wording in wordings)
