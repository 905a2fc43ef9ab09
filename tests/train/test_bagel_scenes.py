from __future__ import annotations

import random

import numpy as np
import pytest

from kvlab.train.bagel import edits, judge, questions, scenes
from kvlab.train.bagel.scenes import Scene, Thing

RED_LEFT_OF_BLUE = Scene("row", (Thing("red", "circle"), Thing("blue", "square")), "white")


def some(num: int, *, held_out: bool = False) -> list[scenes.Drawing]:
    draw = random.Random(3)
    return [scenes.drawing(scenes.any_scene(draw, held_out=held_out), draw) for _ in range(num)]


def test_a_scene_is_said_from_both_sides() -> None:
    assert scenes.captions(RED_LEFT_OF_BLUE) == (
        "a red circle left of a blue square on a white background",
        "a blue square right of a red circle on a white background",
    )


def test_held_out_scenes_are_about_one_in_eight_and_have_every_colour_and_shape() -> None:
    held = [scene for scene in scenes.every_scene("row") if scene.held_out]
    assert len(held) == pytest.approx(24 * 23 * 4 / 8, rel=0.15)
    assert {thing for scene in held for thing in scene.things} == {Thing(c, s) for c in scenes.COLOURS for s in scenes.SHAPES}


def test_nothing_of_training_shows_or_leads_to_a_held_out_scene() -> None:
    draw = random.Random(0)
    seen = [scenes.any_scene(draw) for _ in range(300)]
    for edit in (edits.any_edit(draw) for _ in range(300)):
        seen += [edit.source.scene, edit.target.scene]
    assert not any(scene.held_out for scene in seen)


def test_no_wording_of_a_held_out_scene_is_a_wording_of_training() -> None:
    told: dict[bool, set[str]] = {True: set(), False: set()}
    for arrangement in ("one", "row", "column"):
        for scene in scenes.every_scene(arrangement):
            told[scene.held_out] |= set(scenes.captions(scene))
    assert not told[True] & told[False]


def test_a_drawing_has_the_palette_inside_and_the_background_at_the_edge() -> None:
    pixels = scenes.Drawing(RED_LEFT_OF_BLUE, ((17, 32, 13), (47, 32, 13))).pixels()
    assert pixels.shape == (64, 64, 3)
    assert tuple(pixels[32, 17]) == scenes.COLOURS["red"]
    assert tuple(pixels[32, 47]) == scenes.COLOURS["blue"]
    assert tuple(pixels[0, 0]) == scenes.BACKGROUNDS["white"]


# -- edits and questions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", edits.KINDS)
def test_an_edit_changes_one_attribute_and_moves_nothing(kind: str) -> None:
    draw = random.Random(0)
    for edit in (edits.any_edit(draw, kind=kind) for _ in range(50)):
        before, after = edit.source.scene, edit.target.scene
        pairs = list(zip(before.things, after.things, strict=True))
        changed = [
            *(["background"] if before.background != after.background else []),
            *("colour" for one, other in pairs if one.colour != other.colour),
            *("shape" for one, other in pairs if one.shape != other.shape),
        ]
        assert changed == [kind]
        assert edit.source.spots == edit.target.spots


def test_an_edit_names_one_thing_only() -> None:
    draw = random.Random(1)
    for edit in (edits.any_edit(draw, kind="colour") for _ in range(100)):
        named = edit.text.removeprefix("make the ").rsplit(" ", 1)[0]
        meant = [thing for thing in edit.source.scene.things if named in (thing.shape, str(thing))]
        assert len(meant) == 1


@pytest.mark.parametrize(
    ("kind", "asked", "answer"),
    [
        ("how many shapes", "how many shapes?", "two"),
        ("background", "what colour is the background?", "white"),
    ],
)
def test_a_question_has_the_answer_of_the_scene(kind: str, asked: str, answer: str) -> None:
    assert questions.any_question(RED_LEFT_OF_BLUE, random.Random(0), kind) == questions.Turn(asked, answer, kind)


def test_answers_follow_the_scene() -> None:
    draw = random.Random(0)
    answers = {turn.asked: turn.answer for turn in (questions.any_question(RED_LEFT_OF_BLUE, draw) for _ in range(400))}
    assert answers["how many circles?"] == "one"
    assert answers["how many crosses?"] == "zero"
    assert answers["what colour is the square?"] == "blue"
    assert answers["what shape is red?"] == "circle"
    assert answers["is there a red circle?"] == "yes"
    assert answers["is there a blue circle?"] == "no"
    assert answers["what is left of the square?"] == "a red circle"
    assert answers["what is right of the red circle?"] == "a blue square"


# -- judge -------------------------------------------------------------------------------------------------------------


def test_the_judge_finds_true_pictures_right() -> None:
    drawings = some(150)
    assert judge.share([drawing.pixels() for drawing in drawings], [drawing.scene for drawing in drawings]) >= 0.99


def test_the_judge_bears_noise() -> None:
    drawings = some(100)
    noisy = [judge.noisy(drawing.pixels(), 15, i) for i, drawing in enumerate(drawings)]
    assert judge.share(noisy, [drawing.scene for drawing in drawings]) >= 0.97


def test_the_judge_finds_pictures_of_other_scenes_wrong() -> None:
    drawings = some(150)
    asked = [drawing.scene for drawing in drawings]
    assert judge.share([drawing.pixels() for drawing in drawings], asked[1:] + asked[:1]) <= 0.02


def test_the_judge_sees_every_edit() -> None:
    draw = random.Random(5)
    for edit in (edits.any_edit(draw) for _ in range(60)):
        assert judge.shows(edit.target.pixels(), edit.target.scene)
        assert not judge.shows(edit.source.pixels(), edit.target.scene)


def test_a_thing_that_nobody_asked_for_is_wrong() -> None:
    one = Scene("one", (Thing("red", "circle"),), "white")
    pixels = scenes.Drawing(one, ((32, 32, 18),)).pixels()
    assert judge.shows(pixels, one)
    pixels[:10, :20] = scenes.COLOURS["blue"]
    assert not judge.shows(pixels, one)


def test_a_smear_has_no_shape() -> None:
    scene = Scene("one", (Thing("red", "square"),), "white")
    pixels = np.full((64, 64, 3), 250, np.uint8)
    pixels[28:32, 10:54] = scenes.COLOURS["red"]
    assert judge.look(pixels, "one").things == (None,)
    assert not judge.shows(pixels, scene)
