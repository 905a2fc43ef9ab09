"""What the media tracer reads: texts of numbers and small arrays for pictures, laid out as a model of pictures has them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from kvlab.errors import InputError
from kvlab.models.tracer import ToyProcessor
from kvlab.spec import Block, Kept, Mixed, Prefix, PromptRecord, Span

SYSTEM = (5, 6, 7)  # what a request that is to think is told first
DEFAULTS: dict[str, Any] = {
    "size": None, "num_timesteps": 4, "cfg_text_scale": 4.0, "cfg_img_scale": 1.0, "cfg_interval": (0.0, 1.0),
    "vae_sample": "sample",
}  # fmt: skip


@dataclass(frozen=True)
class Write:
    """One write of a prompt: a text, into every label of texts, or a picture into main."""

    walk: str
    ids: tuple[int, ...] = ()
    block: Block | None = None

    @property
    def span(self) -> Span:
        if self.block is None:
            return Span("ids", self.walk, len(self.ids), len(self.ids), "tokens")
        return Span("digest", self.walk, self.block.slots, self.block.advance, self.block.digest)


@dataclass(frozen=True)
class Plan:
    """A prompt as the model runs it; ``context`` is what main held before the latest text, or all of it after a picture."""

    writes: tuple[Write, ...]
    draws: bool
    thinks: bool
    guided: bool
    noise: int
    size: tuple[int, int]
    context: Prefix
    settings: Mapping[str, Any] = field(default_factory=dict)


class MediaProcessor(ToyProcessor):
    """Texts are numbers, framed by a begin and an end id; pictures are arrays [height, width, channels].

    A picture has one slot a pixel and two more where it is looked at, and one for each 2 x 2 pixels and two more where it is
    drawn from.
    """

    BOS, EOS = 1, 2

    def __init__(self, vocab_size: int = 64) -> None:
        super().__init__(vocab_size, (self.EOS,))

    def process_prompt(self, prompt: Any, fields: Mapping[str, Any]) -> PromptRecord:
        mixed = prompt if isinstance(prompt, Mixed) else Mixed((Kept(tuple(self._ids(prompt))),))
        unknown = sorted(set(mixed.settings) - set(DEFAULTS))
        if unknown:
            raise InputError(f"the tracer draws with no setting {', '.join(unknown)}; known are {', '.join(DEFAULTS)}")
        settings = DEFAULTS | dict(mixed.settings)
        seed = fields.get("seed")
        parts = [*([Kept(SYSTEM)] if mixed.think else []), *mixed.parts]
        writes = tuple(w for number, part in enumerate(parts) for w in self._writes(part, number, seed, mixed.output, settings))
        if not writes:
            raise InputError("the prompt is empty; give a text or a picture")
        plan = self._plan(mixed, writes, settings, _noise("start", seed, 0))
        ids = [i for w in writes for i in w.ids]
        tensors = {"tokens": ids} | ({"cfg_img": ids} if plan.guided and ids else {})
        layouts = {"kv": _layouts(writes, "cfg_img" in tensors)} if len(writes) > 1 or writes[0].block else {}
        return PromptRecord(tensors, layouts, {"plan": plan})

    def _writes(self, part: Any, number: int, seed: Any, output: str, settings: Mapping[str, Any]) -> list[Write]:
        if isinstance(part, str | Kept):
            ids = list(part.ids) if isinstance(part, Kept) else self._ids(part)
            return [Write("prefill_text", (self.BOS, *ids, self.EOS))]
        pixels = np.ascontiguousarray(part, dtype=np.uint8)
        height, width = pixels.shape[:2]
        picture = sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
        looked_at = Write("prefill_vit", block=Block(height * width + 2, 1, picture, sha256(b"vit" + picture).digest()))
        if output == "text":
            return [looked_at]
        is_mean = settings["vae_sample"] == "mean"
        noise = 0 if is_mean else _noise("vae", seed, number)
        content = sha256(picture + noise.to_bytes(8, "little")).digest()
        digest = None if seed is None and not is_mean else sha256(b"vae" + content).digest()
        slots = -(-height // 2) * -(-width // 2) + 2
        return [Write("prefill_vae", block=Block(slots, 1, content, digest)), looked_at]

    def _plan(self, mixed: Mixed, writes: tuple[Write, ...], settings: Mapping[str, Any], noise: int) -> Plan:
        draws = mixed.output == "picture"
        sizes = [np.shape(part)[:2] for part in mixed.parts if not isinstance(part, str | Kept)]
        size = settings["size"] or (sizes[0] if sizes else (4, 4))
        before = writes if writes[-1].block else writes[:-1]
        context = Prefix("main", sum(w.span.length for w in before), sum(w.span.advance for w in before))
        guided = draws and settings["cfg_text_scale"] > 1
        return Plan(writes, draws, mixed.think and draws, guided, noise, (int(size[0]), int(size[1])), context, settings)


def _layouts(writes: Sequence[Write], guided: bool) -> dict[str, tuple[Span, ...]]:
    texts = tuple(w.span for w in writes if w.block is None)
    return {"main": tuple(w.span for w in writes)} | ({"cfg_img": texts} if guided else {})


def _noise(kind: str, seed: Any, number: int) -> int:
    """Stands for a draw: the same for the same (seed, kind, number), fresh without a seed."""
    if seed is None:
        return secrets.randbits(63)
    return int.from_bytes(sha256(repr((kind, seed, number)).encode()).digest()[:8], "little") >> 1
