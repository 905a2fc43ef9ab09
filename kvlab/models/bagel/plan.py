"""A prompt as the passes that will run: texts and pictures in the order they are written, by label.

main      every pass
cfg_img   the texts, where the picture is guided: what is left without pictures
cfg_text  the first slots of main, read in place: what is left without the latest text
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from kvlab.models.bagel.noise import PictureNoise
from kvlab.models.bagel.pictures import Pixels
from kvlab.models.bagel.settings import Drawing
from kvlab.spec import Block, Prefix, Span, WalkInputs

WRITE_TEXT, SHOW_PATCHES, SHOW_LATENTS = "prefill_text", "prefill_vit", "prefill_vae"
DECODE, CLOSE_TEXT, DRAW = "decode", "close_text", "image_gen"
MAIN, CFG_TEXT, CFG_IMG = "main", "cfg_text", "cfg_img"
TENSORS = {MAIN: "tokens", CFG_IMG: "cfg_img"}
MARKERS = 2  # slots that open and close a picture


@dataclass(frozen=True)
class TextPass:
    """One text between its begin and end tokens; a kept history may hold many."""

    ids: tuple[int, ...]
    walk: ClassVar[str] = WRITE_TEXT

    @property
    def slots(self) -> int:
        """KV slots it writes."""
        return len(self.ids)

    @property
    def advance(self) -> int:
        """Rope ids it takes."""
        return len(self.ids)

    def span(self) -> Span:
        """Return its write as the cache sees it."""
        return Span("ids", self.walk, self.slots, self.advance, TENSORS[MAIN])


@dataclass(frozen=True, eq=False)
class PicturePass:
    """A picture for one of the two encoders, which ``walk`` names; its pixels are resized by the autoencoder's rule.

    ``noise`` is that of a sampled encoding, None elsewhere. ``params`` say how the encoder's input is made.
    """

    walk: str
    number: int
    pixels: Pixels
    slots: int
    digest: bytes
    params: tuple[int, ...]
    noise: PictureNoise | None = None
    advance: ClassVar[int] = 1

    def span(self) -> Span:
        """Return its write as the cache sees it."""
        return Span("digest", self.walk, self.slots, self.advance, self.digest, self.params)

    def block(self) -> Block:
        """Return its inputs."""
        return Block(self.slots, self.advance, self, self.digest)


Pass: TypeAlias = TextPass | PicturePass


@dataclass(frozen=True, eq=False)
class Plan:
    """What one request runs: ``passes`` write its prompt, then it answers in words, or thinks and draws.

    ``drawing`` and ``start`` (the noise that the picture begins as) are None where the answer is words.
    """

    passes: tuple[Pass, ...]
    think: bool = False
    drawing: Drawing | None = None
    start: PictureNoise | None = None

    @property
    def is_guided(self) -> bool:
        """True when the picture is drawn with guidance."""
        return self.drawing is not None and self.drawing.guidance.uses_text

    def labels(self) -> tuple[str, ...]:
        """Labels that the prompt is written to."""
        return (MAIN, CFG_IMG) if self.is_guided else (MAIN,)

    def written(self, label: str) -> list[Pass]:
        """Return the passes that write ``label``, in order."""
        return [p for p in self.passes if label == MAIN or isinstance(p, TextPass)]

    def slots(self, label: str = MAIN) -> int:
        """KV slots of the prompt."""
        return sum(p.slots for p in self.written(label))

    def positions(self, label: str = MAIN) -> int:
        """Rope ids of the prompt: a picture takes one."""
        return sum(p.advance for p in self.written(label))

    def tensors(self) -> dict[str, list[int]]:
        """Return the ids of the texts of each label, by the name of their tensor."""
        texts = [i for p in self.passes if isinstance(p, TextPass) for i in p.ids]
        return {TENSORS[label]: list(texts) for label in self.labels()}

    def layouts(self) -> dict[str, dict[str, tuple[Span, ...]]]:
        """Return the writes of each label that is more than one text."""
        writes = {label: tuple(p.span() for p in self.written(label)) for label in self.labels()}
        return {"kv": {label: spans for label, spans in writes.items() if len(spans) > 1 or spans[0].kind != "ids"}}

    def without_latest_text(self) -> Prefix:
        """Return what of main stands before the latest text: all of it where a picture came after."""
        last = len(self.passes) - 1
        before = self.passes[:last] if isinstance(self.passes[last], TextPass) else self.passes
        return Prefix(MAIN, sum(p.slots for p in before), sum(p.advance for p in before))

    def schedule(self, max_tokens: int) -> tuple[str, ...]:
        """Names of the walks, in order; with no tokens to generate those that write the prompt."""
        prompt = tuple(p.walk for p in self.passes)
        if not max_tokens:
            return prompt
        if self.drawing is None:
            return (*prompt, DECODE)
        return (*prompt, DECODE, CLOSE_TEXT, DRAW) if self.think else (*prompt, DRAW)

    def reply_slots(self, max_tokens: int) -> int:
        """Most slots of main after the prompt: a begin token, all ids but the last, and of thoughts that and an end token."""
        if not max_tokens or (self.drawing is not None and not self.think):
            return 0
        return max_tokens + (0 if self.drawing is None else 2)

    def inputs(self, walk_index: int) -> WalkInputs:
        """Return the inputs of a pass of the prompt."""
        now = self.passes[walk_index]
        if isinstance(now, PicturePass):
            return WalkInputs({}, blocks={MAIN: now.block()})
        # the published system refuses to cut what carries this, see the engine's profile of that name
        step_info = {"requires_cfg": True} if self.is_guided else False
        return WalkInputs(dict.fromkeys(self.labels(), now.ids), step_info=step_info)


def closing(generated: Sequence[int], eos: int) -> list[int]:
    """Return what closes a text that was generated: its last id, which nothing has written yet, and the end token.

    >>> closing([5, 6], eos=2), closing([5, 2], eos=2)
    ([6, 2], [2])
    """
    return [eos] if generated[-1] == eos else [generated[-1], eos]
