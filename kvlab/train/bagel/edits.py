"""Edits of scenes: one attribute of a picture changes as a sentence asks, the rest of it stays where it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvlab.train.bagel.scenes import BACKGROUNDS, COLOURS, SHAPES, Drawing, Scene, Thing, any_scene, drawing

KINDS = ("colour", "shape", "background")


@dataclass(frozen=True)
class Edit:
    """A picture, what is asked, and the picture that comes of it; ``place`` is the thing changed, None for the background."""

    source: Drawing
    text: str
    target: Drawing
    kind: str
    place: int | None


def any_edit(draw: random.Random, *, held_out: bool = False, kind: str | None = None) -> Edit:
    """Return a random edit. In training neither picture is held out; of a held-out edit the source is."""
    while True:
        source = drawing(any_scene(draw, held_out=held_out), draw)
        edit = _CHANGES[kind or draw.choice(KINDS)](source, draw)
        changed = edit.target.scene
        if len(set(changed.things)) == len(changed.things) and (held_out or not changed.held_out):
            return edit


def name_of(scene: Scene, place: int, draw: random.Random) -> str:
    """Return words that mean one thing of a scene: its shape where no other has it, or colour and shape."""
    thing = scene.things[place]
    is_alone = sum(other.shape == thing.shape for other in scene.things) == 1
    return thing.shape if is_alone and draw.random() < 0.5 else str(thing)


def _other(choices: list[str], than: str, draw: random.Random) -> str:
    return draw.choice([choice for choice in choices if choice != than])


def _colour(source: Drawing, draw: random.Random) -> Edit:
    place = draw.randrange(len(source.scene.things))
    thing = source.scene.things[place]
    colour = _other(list(COLOURS), thing.colour, draw)
    target = _with_thing(source, place, replace(thing, colour=colour))
    return Edit(source, f"make the {name_of(source.scene, place, draw)} {colour}", target, "colour", place)


def _shape(source: Drawing, draw: random.Random) -> Edit:
    place = draw.randrange(len(source.scene.things))
    thing = source.scene.things[place]
    shape = _other(list(SHAPES), thing.shape, draw)
    target = _with_thing(source, place, replace(thing, shape=shape))
    return Edit(source, f"make the {name_of(source.scene, place, draw)} a {shape}", target, "shape", place)


def _background(source: Drawing, draw: random.Random) -> Edit:
    background = _other(list(BACKGROUNDS), source.scene.background, draw)
    target = Drawing(replace(source.scene, background=background), source.spots)
    return Edit(source, f"make the background {background}", target, "background", None)


def _with_thing(source: Drawing, place: int, thing: Thing) -> Drawing:
    things = list(source.scene.things)
    things[place] = thing
    return Drawing(replace(source.scene, things=tuple(things)), source.spots)


_CHANGES: dict[str, Callable[[Drawing, random.Random], Edit]] = {
    "colour": _colour,
    "shape": _shape,
    "background": _background,
}
