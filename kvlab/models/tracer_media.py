"""MediaTracer: the tracer with pictures, guidance and drawing. Every slot's digest names all texts and pictures before it.

What it draws is a digest of all that its passes read out of the pages, so one wrongly reused slot changes every pixel.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from kvlab.models.tracer import TracerModel, _int64, _slot_bytes
from kvlab.models.tracer_prompts import MediaProcessor, Plan, Write
from kvlab.spec import Block, PrefixStream, PromptRecord, RowInputs, Walk, WalkInputs

WALKS = {
    "prefill_text": Walk("prefill_text"),
    "prefill_vit": Walk("prefill_vit", causal=False, encodes=True),
    "prefill_vae": Walk("prefill_vae", causal=False, encodes=True),
    "decode": Walk("decode", loops=True, samples=True, starts_with=MediaProcessor.BOS),
    "close_text": Walk("close_text"),
    "image_gen": Walk("image_gen", loops=True, commits=False, causal=False),
}


@dataclass
class Drawing:
    """A picture being drawn: ``value`` stands for its latents, after ``passes`` passes."""

    plan: Plan
    value: int
    passes: int = 0

    @property
    def time(self) -> float:
        return 1 - self.passes / (self.plan.settings["num_timesteps"] - 1)

    @property
    def branches(self) -> tuple[str, ...]:
        """Labels the next pass reads."""
        low, high = self.plan.settings["cfg_interval"]
        is_guided = self.plan.guided and low < self.time <= high
        return ("main", "cfg_text", "cfg_img") if is_guided else ("main",)


@dataclass(frozen=True)
class Branch:
    """The content of one block of a drawing pass."""

    drawing: Drawing
    label: str


class MediaTracer(TracerModel):
    """Texts and pictures in, words or a picture out; ``reply`` and ``picture`` compute what must come out, without pages."""

    def __init__(self, processor: MediaProcessor | None = None, **settings: Any) -> None:
        super().__init__(processor or MediaProcessor(), **settings)
        self.encoded: list[str] = []  # walks of the encoder calls made

    # -- what it declares

    def walks(self) -> Mapping[str, Walk]:
        return WALKS

    def kv_labels(self) -> Mapping[str, tuple[str, ...]]:
        return {"kv": ("main", "cfg_img")}

    def prefix_key_streams(self) -> Mapping[str, Mapping[str, PrefixStream]]:
        media = ("prefill_vit", "prefill_vae")
        main = PrefixStream("tokens", "ids", "prefill_text", "decode", media, trims_guided=True)
        return {"kv": {"main": main, "cfg_img": PrefixStream("cfg_img", "ids", "prefill_text", trims_guided=True)}}

    # -- its schedule

    def schedule(self, record: PromptRecord, max_tokens: int) -> tuple[str, ...]:
        plan = _plan(record)
        prompt = tuple(write.walk for write in plan.writes)
        if max_tokens == 0:
            return prompt
        words = ("decode",) if plan.thinks or not plan.draws else ()
        return (*prompt, *words, *(("close_text",) if plan.thinks else ()), *(("image_gen",) if plan.draws else ()))

    def slots(self, record: PromptRecord, max_tokens: int) -> Mapping[str, tuple[int, int]]:
        plan = _plan(record)
        prompt = sum(write.span.length for write in plan.writes)
        words = 0 if plan.draws and not plan.thinks else max_tokens + 2 * (plan.thinks and max_tokens > 0)
        slots = {"main": (prompt, prompt + words)}
        texts = len(record.tensors.get("cfg_img", ()))
        return slots | ({"cfg_img": (texts, texts)} if texts else {})

    def begin(self, record: PromptRecord) -> Drawing | None:
        plan = _plan(record)
        return Drawing(plan, plan.noise) if plan.draws else None

    def prepare_inputs(
        self, walk: str, record: PromptRecord, generated: Sequence[int], state: Any = None, walk_index: int = 0
    ) -> WalkInputs | None:
        plan, eos = _plan(record), MediaProcessor.EOS
        if walk == "decode":
            return WalkInputs({"main": generated[-1:]})
        if walk == "close_text":
            return WalkInputs({"main": [*(i for i in generated[-1:] if i != eos), eos]})
        if walk == "image_gen":
            return WalkInputs({}, blocks=self._drawing_blocks(state))
        write = plan.writes[walk_index]
        if write.block is not None:
            return WalkInputs({}, blocks={"main": write.block})
        labels = ("main", "cfg_img") if plan.guided else ("main",)
        return WalkInputs(dict.fromkeys(labels, write.ids), step_info=plan.guided)

    def _drawing_blocks(self, drawing: Drawing) -> dict[str, Block]:
        height, width = drawing.plan.size
        prefixes = {"cfg_text": drawing.plan.context}
        return {b: Block(height * width + 2, 0, Branch(drawing, b), prefix=prefixes.get(b)) for b in drawing.branches}

    # -- what it computes

    def encode(self, walk: str, content: Any) -> Tensor:
        self.encoded.append(walk)
        return torch.tensor([self.encoding(walk, content)])

    def encoding(self, walk: str, content: bytes) -> int:
        """Return what an encoder makes of a picture."""
        return _int64(hashlib.blake2b(walk.encode() + content, digest_size=8))

    def slot_values(self, walk: str, row: RowInputs, last: int) -> tuple[list[int], list[int]]:
        if row.block is None:
            return super().slot_values(walk, row, last)
        value = row.block.drawing.value if walk == "image_gen" else int(row.block[0])
        return self.block_values(walk, value, row.positions, last)

    def block_values(self, walk: str, value: int, positions: Sequence[int], last: int) -> tuple[list[int], list[int]]:
        """Return K and V of a block: each K names the whole block and all before it."""
        head = hashlib.blake2b(walk.encode(), digest_size=8)
        head.update(struct.pack(f"<qqq{len(positions)}q", self.seed, last, value, *positions))
        block = _int64(head)
        k = [_int64(hashlib.blake2b(struct.pack("<qq", block, i), digest_size=8)) for i in range(len(positions))]
        return k, [value] * len(positions)

    def answers(self, walk: str, rows: Sequence[RowInputs], seen: Sequence[Tensor]) -> list[Any]:
        if walk != "image_gen":
            return super().answers(walk, rows, seen)
        read: dict[int, dict[str, int]] = {}
        for row, hashes in zip(rows, seen, strict=True):
            read.setdefault(id(row.block.drawing), {})[row.block.label] = int(hashes[0])
        return [_drawn(read[id(row.block.drawing)]) if row.block.label == "main" else None for row in rows]

    def finish_pass(self, walk: str, state: Drawing, output: int) -> bool:
        state.value = output
        state.passes += 1
        return state.passes == state.plan.settings["num_timesteps"] - 1

    def outputs(self, state: Drawing | None) -> Mapping[str, Any]:
        return {} if state is None else {"pixels": _pixels(state)}

    # -- what must come out, without pages

    def reply(self, prompt: Any, max_tokens: int, seed: int | None = None) -> list[int]:
        """Return what greedy decoding answers to ``prompt``."""
        plan = _plan(self.processor.process_prompt(prompt, {"seed": seed}))
        return self._generated(self._written(plan.writes), max_tokens)

    def picture(self, prompt: Any, seed: int | None = None, max_tokens: int = 64) -> Tensor:
        """Return what is drawn for ``prompt``, uint8 [height, width, 3]."""
        plan = _plan(self.processor.process_prompt(prompt, {"seed": seed}))
        drawing = Drawing(plan, plan.noise)
        texts = tuple(w for w in plan.writes if w.block is None)
        streams = {
            "main": self._written(plan.writes),
            "cfg_text": self._written(_first(plan.writes, plan.context.slots)),
            "cfg_img": self._written(texts),
        }
        if plan.thinks:
            words = self._generated(streams["main"], max_tokens)
            closed = [MediaProcessor.BOS, *words, *([] if words[-1] == MediaProcessor.EOS else [MediaProcessor.EOS])]
            streams["main"].text(closed)
        done = False
        while not done:
            blocks = self._drawing_blocks(drawing)
            read = {label: streams[label].read(drawing, block.slots) for label, block in blocks.items()}
            done = self.finish_pass("image_gen", drawing, _drawn(read))
        return _pixels(drawing)

    def _written(self, writes: Sequence[Write]) -> _Stream:
        stream = _Stream(self)
        for write in writes:
            stream.text(write.ids) if write.block is None else stream.picture(write.walk, write.block)
        return stream

    def _generated(self, stream: _Stream, max_tokens: int) -> list[int]:
        stream, out = stream.copy(), [MediaProcessor.BOS]
        while len(out) <= max_tokens:
            stream.text(out[-1:])
            out.append(int(self.logits(torch.tensor([stream.hash()]))[0].argmax()))
            if out[-1] in self.processor.stop_ids:
                break
        return out[1:]


class _Stream:
    """The slots of one label as a cold run writes them."""

    def __init__(self, model: MediaTracer, k: Sequence[int] = (), v: Sequence[int] = (), position: int = 0) -> None:
        self._model, self.k, self.v, self.position = model, list(k), list(v), position

    def copy(self) -> _Stream:
        return _Stream(self._model, self.k, self.v, self.position)

    def text(self, ids: Sequence[int]) -> None:
        positions = range(self.position, self.position + len(ids))
        self._add(self._model.digests(ids, positions, self._last), ids, len(ids))

    def picture(self, walk: str, block: Block) -> None:
        value = self._model.encoding(walk, block.content)
        self._add(*self._model.block_values(walk, value, [self.position] * block.slots, self._last), block.advance)

    def read(self, drawing: Drawing, num_slots: int) -> int:
        """Return what a drawing pass sees here."""
        seen = self.copy()
        positions = [self.position] * num_slots
        seen._add(*self._model.block_values("image_gen", drawing.value, positions, self._last), 0)
        return seen.hash()

    def hash(self) -> int:
        return _int64(hashlib.blake2b(_slot_bytes(self.k, self.v), digest_size=8))

    @property
    def _last(self) -> int:
        return self.k[-1] if self.k else 0

    def _add(self, k: Sequence[int], v: Sequence[int], advance: int) -> None:
        self.k += k
        self.v += v
        self.position += advance


def _plan(record: PromptRecord) -> Plan:
    plan: Plan = record.metadata["plan"]
    return plan


def _first(writes: Sequence[Write], slots: int) -> list[Write]:
    """Return the writes that make up the first ``slots`` slots."""
    kept: list[Write] = []
    for write in writes:
        if sum(w.span.length for w in kept) == slots:
            break
        kept.append(write)
    return kept


def _drawn(read: Mapping[str, int]) -> int:
    return _int64(hashlib.blake2b(repr(sorted(read.items())).encode(), digest_size=8))


def _pixels(drawing: Drawing) -> Tensor:
    height, width = drawing.plan.size
    needed = height * width * 3
    rows = b"".join(sha256(struct.pack("<qq", drawing.value, i)).digest() for i in range(-(-needed // 32)))
    return torch.frombuffer(bytearray(rows[:needed]), dtype=torch.uint8).reshape(height, width, 3)
