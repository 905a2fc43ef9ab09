"""Drives a KV resource the way an engine does, and keeps the truth about bytes: what a cold run would hold in every slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.cache.keys import chain, chain_ids, cut_layout
from kvlab.cache.kv import KVResource
from kvlab.cache.misses import MissLog
from kvlab.spec import (
    Block,
    Fork,
    KeyedPrompt,
    KVLayout,
    Match,
    PrefixStream,
    RequestConfig,
    Segment,
    Span,
    Step,
    StepContext,
    WalkInputs,
)

NODE = "LLM"
TEXT = {"main": PrefixStream("tokens", walk="prefill", decode_walk="decode")}
MEDIA = {"main": PrefixStream("tokens", "ids", "prefill_text", "decode", ("prefill_vae", "prefill_vit"), trims_guided=True)}


def keyed(ids: Sequence[int], page_size: int, *, grows: bool = True) -> KeyedPrompt:
    """A prompt of one text span, as the preprocess worker ships it."""
    ids = list(ids)
    tail = ids[len(ids) // page_size * page_size :]
    return KeyedPrompt(ids, chain_ids(ids, page_size), tail, len(ids), "tokens" if grows else None)


def laid_out(spans: Sequence[Span], ids: Sequence[int], page_size: int) -> KeyedPrompt:
    """A prompt of several spans, as the preprocess worker ships it."""
    cut = cut_layout(spans, ids, page_size)
    slots = sum(span.length for span in spans)
    is_partial = slots % page_size > 0
    return KeyedPrompt(
        list(ids),
        chain(cut.ids, cut.items),
        cut.ids[-1] if is_partial else [],
        slots,
        "tokens",
        tuple(cut.items[-1]) if is_partial else (),
        tuple(spans),
    )


def step_of(
    walk: str, spans: Mapping[Any, int], *, index: int = 0, label: str = "main", forks: Iterable[Fork] = (), commit: bool = True
) -> tuple[Step, StepContext]:
    """A step that extends ``label`` of each request by so many tokens."""
    segments = tuple(Segment(rid, label, span) for rid, span in spans.items())
    return Step(index, NODE, walk, segments, tuple(forks), commit), StepContext(frozenset(spans))


@dataclass
class Driver:
    """One KV resource under an engine's hand."""

    kv: Any
    page_size: int
    prompts: dict[Any, list[int]] = field(default_factory=dict)
    generated: dict[Any, list[int]] = field(default_factory=dict)
    store: Any = None  # what the resource copies pages with

    def ingest(self, rid: Any, ids: Sequence[int], **config: Any) -> None:
        """Bring in a request with a keyed prompt."""
        self.prompts[rid], self.generated[rid] = list(ids), []
        self.kv.ingest_request(rid, RequestConfig({"main": keyed(ids, self.page_size)}, **config))

    def probe(self, rid: Any, walk: str = "prefill") -> int:
        """Probe and agree to the answer; returns the slots that need not run."""
        inputs = WalkInputs({"main": self.prompts[rid]})
        answer = self.kv.resolve_cached_prefix(rid, NODE, walk, inputs) or {}
        match = answer.get("main", Match(0, 0))
        if match.slots:
            self.kv.apply_cached_prefix(rid, NODE, walk, inputs, {"main": match})
        return match.slots

    def run(self, walk: str, spans: Mapping[Any, int], **options: Any) -> Any:
        """Admit, plan and commit one step; returns its tables, or the refusal."""
        step, ctx = step_of(walk, spans, **options)
        refusal = self.kv.admit(step, ctx)
        if refusal is not None:
            return refusal
        tables = self.kv.plan(step, ctx)
        self.kv.commit(step, ctx)
        return tables

    def prefill(self, *rids: Any) -> dict[Any, int]:
        """Probe and prefill whole prompts in one step; returns the hits."""
        hits = {rid: self.probe(rid) for rid in rids}
        tables = self.run("prefill", {rid: len(self.prompts[rid]) - hits[rid] for rid in rids})
        assert hasattr(tables, "rows"), tables
        return hits

    def sample(self, rid: Any, token: int) -> None:
        """The step of ``rid`` sampled ``token``, and it was read back at once."""
        self.generated[rid].append(token)
        self.kv.extend_prefix_chain(rid, NODE, "decode", {"tokens": [[token]]})

    def generate(self, rid: Any, tokens: Sequence[int]) -> None:
        """Generate ``tokens``: the first comes from the prefill's last row, the last one is sampled and never written."""
        for position, token in enumerate(tokens):
            if position:
                tables = self.run("decode", {rid: 1})
                assert hasattr(tables, "rows"), tables
            self.sample(rid, token)

    def serve(self, rid: Any, ids: Sequence[int], tokens: Sequence[int] = (), **config: Any) -> int:
        """A whole request, to its removal; returns its hit."""
        self.ingest(rid, ids, **config)
        hit = self.prefill(rid)[rid]
        self.generate(rid, tokens)
        self.kv.remove_request(rid)
        return hit


# -- texts and pictures


def text(length: int) -> Span:
    """A text of a laid-out prompt."""
    return Span("ids", "prefill_text", length, length, "tokens")


def picture(length: int, digest: bytes = b"red", walk: str = "prefill_vit") -> Span:
    """A picture of a laid-out prompt."""
    return Span("digest", walk, length, 1, digest)


def cold_slots(spans: Sequence[Span], ids: Sequence[int]) -> list[int]:
    """What a cold run holds in every slot: of a text all before it, of a picture all of the picture too."""
    held: list[int] = []
    rest = list(ids)
    for span in spans:
        before = held[-1] if held else 0
        if span.kind == "ids":
            taken, rest = rest[: span.length], rest[span.length :]
            for token in taken:
                held.append(hash((held[-1] if held else 0, token)))
        else:
            held += [hash((before, span.source, span.length, offset)) for offset in range(span.length)]
    return held


class SlotStore:
    """A page store that holds a value a slot."""

    def __init__(self) -> None:
        self.slots: dict[tuple[Any, int], Any] = {}
        self.copied: list[tuple[list[int], list[int]]] = []

    def _move(self, src: Sequence[Any], dst: Sequence[Any]) -> None:
        for here, there in zip(src, dst, strict=True):
            moved = {(there, slot): value for (page, slot), value in self.slots.items() if page == here}
            self.slots = {at: value for at, value in self.slots.items() if at[0] != there} | moved

    def copy_pages(self, src: list[int], dst: list[int]) -> None:
        self.copied.append((list(src), list(dst)))
        self._move(src, dst)

    def to_host(self, pages: list[int], host_pages: list[int]) -> None:
        self._move(pages, [f"host {page}" for page in host_pages])

    def from_host(self, host_pages: list[int], pages: list[int]) -> None:
        self._move([f"host {page}" for page in host_pages], pages)


@dataclass
class MediaDriver:
    """Laid-out requests, walk by walk, each slot that is read compared with a cold run's."""

    kv: Any
    store: SlotStore
    prompts: dict[Any, tuple[list[Span], list[int]]] = field(default_factory=dict)

    def ingest(self, rid: Any, spans: Sequence[Span], ids: Sequence[int] = (), **config: Any) -> None:
        """Bring in a laid-out prompt; ids that are not given are 0, 1, ..."""
        count = sum(span.length for span in spans if span.kind == "ids")
        self.prompts[rid] = list(spans), list(ids or range(count))
        self.kv.ingest_request(rid, RequestConfig({"main": laid_out(*self.prompts[rid], self.kv.page_size)}, **config))

    def inputs(self, rid: Any, index: int) -> WalkInputs:
        """What walk ``index`` of a request would run."""
        spans, ids = self.prompts[rid]
        if spans[index].kind != "ids":
            return WalkInputs({}, blocks={"main": Block(spans[index].length, 1)})
        begin = sum(span.length for span in spans[:index] if span.kind == "ids")
        return WalkInputs({"main": ids[begin : begin + spans[index].length]})

    def probe(self, rid: Any, index: int) -> Match:
        """Probe walk ``index`` and agree to the answer."""
        walk, inputs = self.prompts[rid][0][index].walk, self.inputs(rid, index)
        answer = self.kv.resolve_cached_prefix(rid, NODE, walk, inputs)
        if answer:
            self.kv.apply_cached_prefix(rid, NODE, walk, inputs, answer)
        return (answer or {}).get("main", Match(0, 0))

    def walk(self, rid: Any, index: int) -> int:
        """Run what is left of walk ``index``; returns the slots that were served."""
        span = self.prompts[rid][0][index]
        served = self.probe(rid, index).slots
        if served < span.length:
            self.run(rid, span.walk, span.length - served)
        return served

    def prefill(self, rid: Any) -> list[int]:
        """Every walk of the prompt; returns what was served of each."""
        return [self.walk(rid, index) for index in range(len(self.prompts[rid][0]))]

    def serve(self, rid: Any, spans: Sequence[Span], ids: Sequence[int] = (), **config: Any) -> list[int]:
        """A whole request, to its removal; returns what was served of each walk."""
        self.ingest(rid, spans, ids, **config)
        served = self.prefill(rid)
        self.kv.remove_request(rid)
        return served

    def run(self, rid: Any, walk: str, count: int) -> Any:
        """One step of one row."""
        step, ctx = step_of(walk, {rid: count})
        refusal = self.kv.admit(step, ctx)
        if refusal is not None:
            return refusal
        tables = self.kv.plan(step, ctx)
        (row,) = tables.rows
        cold = cold_slots(*self.prompts[rid])
        cold += [hash((rid, "generated", slot)) for slot in range(len(cold), row.length)]
        for slot, value in enumerate(cold[: row.length]):
            at = row.pages[slot // self.kv.page_size], slot % self.kv.page_size
            if slot >= row.length - row.to_compute:
                self.store.slots[at] = value
            assert self.store.slots.get(at) == value, f"slot {slot} of {rid} is not what a cold run holds"
        self.kv.commit(step, ctx)
        return tables


UNDERSTANDING = [text(20), picture(30), text(25)]


def media_driver(
    page_size: int = 16,
    num_pages: int = 24,
    walks: Mapping[str, PrefixStream] = MEDIA,
    store: SlotStore | None = None,
    **options: Any,
) -> MediaDriver:
    """A driver over a fresh pool that checks itself and explains its misses."""
    store = SlotStore() if store is None else store
    layout = KVLayout(1, 1, 8, page_size)
    kv = KVResource(layout, num_pages, store=store, miss_log=MissLog(num_pages), check_invariants=True, **options)
    kv.enable_prefix_cache(b"r" * 32, walks)
    return MediaDriver(kv, store)


def miss_ranges(d: MediaDriver, rid: Any) -> list[tuple[int, int, str]]:
    """What a request computed, and why."""
    return [(m.start, m.stop, m.cause) for m in d.kv.cached_misses(rid)]
