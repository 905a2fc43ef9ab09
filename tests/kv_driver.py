"""Drives a KV resource the way an engine does, and keeps the truth about bytes: what a cold run would hold in every slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.cache.keys import chain, chain_ids, cut_layout
from kvlab.spec import Fork, KeyedPrompt, Match, PrefixStream, RequestConfig, Segment, Span, Step, StepContext, WalkInputs

NODE = "LLM"
TEXT = {"main": PrefixStream("tokens", walk="prefill", decode_walk="decode")}


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
