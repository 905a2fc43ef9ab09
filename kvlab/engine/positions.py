"""Rope ids: where along its stream each token stands. They differ from KV slots once a picture is in the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvlab.spec import (
    SEQUENTIAL,
    Match,
    RequestConfig,
    RequestId,
    Resource,
    Segment,
    Step,
    StepContext,
    StreamKey,
    WalkInputs,
)


class Positions(Resource):
    """One counter a stream: the rope id of the next token.

    A hit raises the counter to the matched positions, so that the tail is rotated as in an uncached run. Planning changes
    nothing; only ``commit`` moves a counter on, so a step that was refused or that raised needs no undoing.

    Args:
        rope: what the rotation is made of (rope_theta, scaling, ...). Keys are stored rotated, so all of it is in the root.
        scheme: how ids grow along a stream; only SEQUENTIAL ones can stand over a keyed cache.

    >>> positions = Positions({"rope_theta": 10000.0})
    >>> positions.apply_cached_prefix(1, "LLM", "prefill", WalkInputs({"main": range(7)}), {"main": Match(4, 4)})
    >>> from kvlab.spec import Segment
    >>> step = Step(0, "LLM", "prefill", (Segment(1, "main", 3),))
    >>> list(positions.plan(step, StepContext(frozenset({1})))[1, "main"])
    [4, 5, 6]
    """

    key = "positions"
    depends_on = ("kv",)
    prefix_skip_safe: ClassVar[bool] = True

    def __init__(self, rope: Mapping[str, Any] | None = None, *, scheme: str = SEQUENTIAL) -> None:
        self.position_scheme = scheme
        self._rope = dict(rope or {})
        self._counters: dict[RequestId, dict[str, int]] = {}

    def root_fields(self) -> Mapping[str, Any]:
        return {"scheme": self.position_scheme, **_flat(self._rope)}

    def counter(self, rid: RequestId, label: str = "main") -> int:
        """Rope id of the next token of stream (rid, label)."""
        return self._counters.get(rid, {}).get(label, 0)

    def ingest_request(self, rid: RequestId, config: RequestConfig) -> None:
        self._counters.setdefault(rid, {})

    def remove_request(self, rid: RequestId) -> None:
        self._counters.pop(rid, None)

    def reset_request(self, rid: RequestId, free: bool = False) -> None:
        if rid in self._counters:
            self._counters[rid] = {}

    def apply_cached_prefix(
        self, rid: RequestId, node: str, walk: str, inputs: WalkInputs, matches: Mapping[str, Match]
    ) -> None:
        for label, match in matches.items():
            # never lowered: a stale, smaller match must not rotate what follows back over earlier tokens
            self._set(rid, label, max(self.counter(rid, label), match.positions))

    def plan(self, step: Step, ctx: StepContext) -> dict[StreamKey, Sequence[int]]:
        """Return the rope ids of each segment, in order; those of a block are all the same."""
        starts = self._after_forks(step, "pre")
        return {(s.rid, s.label): self._ids(s, starts) for s in step.segments}

    def _ids(self, segment: Segment, starts: Mapping[StreamKey, int]) -> Sequence[int]:
        stream = (segment.rid, segment.label)
        start = starts.get(stream, self.counter(*stream)) if segment.prefix is None else segment.prefix.positions
        return range(start, start + segment.span) if segment.advance is None else [start] * segment.span

    def commit(self, step: Step, ctx: StepContext) -> None:
        if not step.commit or ctx.capture:
            return
        self._apply_forks(step, ctx, "pre")
        for segment in step.segments:
            if segment.rid in ctx.request_ids:
                advance = segment.span if segment.advance is None else segment.advance
                self._set(segment.rid, segment.label, self.counter(segment.rid, segment.label) + advance)
        self._apply_forks(step, ctx, "post")

    def publish(self, rid: RequestId) -> dict[str, int]:
        return dict(self._counters.get(rid, {}))

    def admit_retrieve(self, rid: RequestId, node: str, walk: str, published: Mapping[str, int]) -> None:
        for label, counter in published.items():
            self._set(rid, label, max(self.counter(rid, label), counter))  # never lowered

    def cleanup(self) -> None:
        self._counters.clear()

    def _set(self, rid: RequestId, label: str, value: int) -> None:
        self._counters.setdefault(rid, {})[label] = value

    def _after_forks(self, step: Step, when: str) -> dict[StreamKey, int]:
        forks = (fork for fork in step.forks if fork.when == when)
        return {(fork.rid, fork.target): self.counter(fork.rid, fork.source) for fork in forks}

    def _apply_forks(self, step: Step, ctx: StepContext, when: str) -> None:
        for (rid, label), value in self._after_forks(step, when).items():
            if rid in ctx.request_ids:
                self._set(rid, label, value)


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings become dotted names, so that the order of their keys does not reach the root."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value})
    return flat
