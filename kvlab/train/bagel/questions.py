"""Questions about scenes and their short answers, asked of a picture or, in a chat, of a scene told in words."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvlab.train.bagel.edits import name_of
from kvlab.train.bagel.scenes import COLOURS, RELATIONS, SHAPES, Scene, any_scene, captions

NUMBERS = ("zero", "one", "two", "three")
DESCRIBE = "describe the picture"
MAX_TURNS = 3


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    asked: str
    answer: str
    kind: str


def any_question(scene: Scene, draw: random.Random, kind: str | None = None) -> Turn:
    """Return a random question that the scene answers."""
    while True:
        turn = _ASK[kind or draw.choice(KINDS)](scene, draw)
        if turn is not None:
            return turn


def description(scene: Scene) -> Turn:
    """Return the question that a scene's caption answers."""
    return Turn(DESCRIBE, captions(scene)[0], "describe")


def plan(scene: Scene) -> str:
    """Return what is thought before a scene is drawn.

    >>> from kvlab.train.bagel.scenes import every_scene
    >>> plan(next(every_scene("one")))
    '<think> a white background, and a red circle in the middle </think>'
    """
    spots = {"one": ("in the middle",), "row": ("left", "right"), "column": ("above", "below")}.get(
        scene.arrangement, ("left", "right", "below")
    )
    placed = [f"a {thing} {spot}" for thing, spot in zip(scene.things, spots, strict=True)]
    return f"<think> a {scene.background} background, and {', '.join(placed)} </think>"


def any_chat(draw: random.Random, *, held_out: bool = False, num_turns: int | None = None) -> list[Turn]:
    """Return a chat: a scene told in words with a first question, then more questions about it."""
    scene = any_scene(draw, held_out=held_out)
    turns = [any_question(scene, draw) for _ in range(num_turns or draw.randint(1, MAX_TURNS))]
    told = f"there is {draw.choice(captions(scene))}. {turns[0].asked}"
    return [Turn(told, turns[0].answer, turns[0].kind), *turns[1:]]


def _how_many(scene: Scene, draw: random.Random) -> Turn:
    # of shapes that are there as often as of any, or most answers would be "zero"
    shape = draw.choice([draw.choice(SHAPES), draw.choice(scene.things).shape])
    plural = f"{shape}es" if shape == "cross" else f"{shape}s"
    return Turn(f"how many {plural}?", NUMBERS[sum(thing.shape == shape for thing in scene.things)], "how many")


def _how_many_shapes(scene: Scene, draw: random.Random) -> Turn:
    return Turn("how many shapes?", NUMBERS[len(scene.things)], "how many shapes")


def _colour(scene: Scene, draw: random.Random) -> Turn | None:
    place = draw.randrange(len(scene.things))
    thing = scene.things[place]
    if sum(other.shape == thing.shape for other in scene.things) > 1:
        return None
    return Turn(f"what colour is the {thing.shape}?", thing.colour, "colour")


def _shape(scene: Scene, draw: random.Random) -> Turn | None:
    thing = draw.choice(scene.things)
    if sum(other.colour == thing.colour for other in scene.things) > 1:
        return None
    return Turn(f"what shape is {thing.colour}?", thing.shape, "shape")


def _background(scene: Scene, draw: random.Random) -> Turn:
    return Turn("what colour is the background?", scene.background, "background")


def _is_there(scene: Scene, draw: random.Random) -> Turn:
    thing = draw.choice(scene.things)
    colour, shape = thing.colour, thing.shape
    if draw.random() < 0.5:
        colour = draw.choice(list(COLOURS))
        shape = draw.choice(SHAPES)
    there = any((other.colour, other.shape) == (colour, shape) for other in scene.things)
    return Turn(f"is there a {colour} {shape}?", "yes" if there else "no", "is there")


def _where(scene: Scene, draw: random.Random) -> Turn | None:
    if scene.arrangement not in RELATIONS:
        return None
    forth, back = RELATIONS[scene.arrangement]
    first, second = scene.things
    if draw.random() < 0.5:
        return Turn(f"what is {forth} the {name_of(scene, 1, draw)}?", f"a {first}", "where")
    return Turn(f"what is {back} the {name_of(scene, 0, draw)}?", f"a {second}", "where")


_ASK: dict[str, Callable[[Scene, random.Random], Turn | None]] = {
    "how many": _how_many,
    "how many shapes": _how_many_shapes,
    "colour": _colour,
    "shape": _shape,
    "background": _background,
    "is there": _is_there,
    "where": _where,
}
KINDS = tuple(_ASK)
