"""What the network learns from: requests of every kind over the pool's pictures, drawn by lot."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlab.models.bagel.prompting import THINK_THEN_DRAW
from kvlab.train.bagel import packing, questions, scenes
from kvlab.train.bagel.packing import Part
from kvlab.train.bagel.pool import Pool
from kvlab.train.bagel.vocabulary import Texts

#: How often guidance's other contexts are learned: without the text, and without the picture.
NO_TEXT, NO_PICTURE = 0.1, 0.1
TEXT_FIRST = 0.15
DESCRIBES = 0.35
#: Requests of a kind in one step.
COUNTS = {"draw": 8, "edit": 16, "ask": 24, "chat": 4, "think": 1}
#: Kinds of about one length are packed together.
GROUPS = (("draw",), ("edit",), ("ask",), ("chat",), ("think",))


@dataclass(frozen=True)
class Teacher:
    """Makes requests over a pool."""

    pool: Pool
    texts: Texts

    def lessons(self, kind: str, num: int, draw: random.Random) -> list[list[Part]]:
        """Return requests of one kind."""
        return [self._make(kind)(draw) for _ in range(num)]

    def _make(self, kind: str) -> Callable[[random.Random], list[Part]]:
        return {"draw": self._draw, "edit": self._edit, "ask": self._ask, "chat": self._chat, "think": self._think}[kind]

    def _text(self, text: str, *, is_answer: bool = False) -> Part:
        return packing.text(self.texts.ids(text), is_answer=is_answer)

    def _any_picture(self, draw: random.Random) -> int:
        return draw.randrange(len(self.pool.pixels))

    def _draw(self, draw: random.Random) -> list[Part]:
        picture = self._any_picture(draw)
        caption = draw.choice(scenes.captions(self.pool.scene(picture)))
        said = [] if draw.random() < NO_TEXT else [self._text(caption)]
        return [*said, Part("made", picture=picture)]

    def _edit(self, draw: random.Random) -> list[Part]:
        i = draw.randrange(len(self.pool.edits))
        said, given = [self._text(self.pool.edits[i].text)], list(packing.pictured(2 * i))
        left_out = draw.random()
        if left_out < NO_TEXT:
            said = []
        elif left_out < NO_TEXT + NO_PICTURE:
            given = []
        asked = [*said, *given] if draw.random() < TEXT_FIRST else [*given, *said]
        return [*asked, Part("made", picture=2 * i + 1)]

    def _ask(self, draw: random.Random) -> list[Part]:
        picture = self._any_picture(draw)
        scene = self.pool.scene(picture)
        turn = questions.description(scene) if draw.random() < DESCRIBES else questions.any_question(scene, draw)
        return [Part("vit", picture=picture), *self._turn(turn)]

    def _chat(self, draw: random.Random) -> list[Part]:
        return [part for turn in questions.any_chat(draw) for part in self._turn(turn)]

    def _turn(self, turn: questions.Turn) -> Sequence[Part]:
        return self._text(turn.asked), self._text(turn.answer, is_answer=True)

    def _think(self, draw: random.Random) -> list[Part]:
        picture = self._any_picture(draw)
        scene = self.pool.scene(picture)
        asked = [self._text(THINK_THEN_DRAW), self._text(draw.choice(scenes.captions(scene)))]
        return [*asked, self._text(questions.plan(scene), is_answer=True), Part("made", picture=picture)]
