"""A step of streams: what it reserves, the tables it runs on, and what its writes leave behind."""

from __future__ import annotations

import logging

from kvlab import events
from kvlab.cache.arena import SINK
from kvlab.cache.counters import KVCounters
from kvlab.cache.filing import Filing
from kvlab.cache.forks import Forks, OpenFork, length_before
from kvlab.cache.ledger import MissLedger
from kvlab.cache.pool import PagePool
from kvlab.cache.remote import Remote
from kvlab.cache.stream import CacheStream
from kvlab.cache.table import StreamTable
from kvlab.cache.windows import Windows
from kvlab.errors import InputError, IntegrityError
from kvlab.spec import Refusal, RequestOffloading, Segment, Step, StepContext, StepRow, StreamKey

log = logging.getLogger("kvlab.cache")

Row = tuple[CacheStream, int]  # a stream and the tokens its step adds to it, none where it does not commit


class Stepper:
    """Admits, tables and commits steps. Callers hold the lock of the KV resource."""

    def __init__(
        self,
        pool: PagePool,
        filing: Filing,
        table: StreamTable,
        forks: Forks,
        remote: Remote,
        ledger: MissLedger,
        counters: KVCounters,
    ) -> None:
        self._pool, self._filing, self._table, self._forks = pool, filing, table, forks
        self._remote, self._ledger, self._counters = remote, ledger, counters
        self._windows = Windows(pool)

    # -- admit: reservation only

    def admit(self, step: Step, ctx: StepContext) -> Refusal | None:
        """Turn leases into pages, reserve what the step writes, and mark its streams; or say who lacks pages.

        Conversions and pages that were made stay with their streams, so that the next try makes none twice.
        """
        rows = self._rows(step, ctx)
        forks = self._forks.of_step(step, ctx)
        for stream in (*(stream for stream, _ in rows), *(stream for fork in forks for stream in fork[1:])):
            if unsettled := self._remote.settle(stream):
                return unsettled
            if stream.offloaded:
                return RequestOffloading(stream.rid)
        for stream, span in rows:
            self._convert(stream)
            if stream.key in step.windows:
                self._windows.check(stream, step.windows[stream.key], stream.stored_len + span)
        refusal = self._reserve(step, rows, forks)
        if refusal is not None:
            self._counters.refused_admits += 1
            return refusal
        for stream in (*(stream for stream, _ in rows), *(fork.target for fork in forks)):
            stream.step_in_flight = True
        for stream, _ in rows:
            self._ledger.admitted(self._table.requests[stream.rid], stream, self._counters)
        return None

    def _rows(self, step: Step, ctx: StepContext) -> list[Row]:
        """The real rows; the others are padding.

        Raises:
            InputError: a negative span, an unknown request, or one stream twice.
            IntegrityError: a stream whose last step has neither committed nor been aborted.
        """
        segments = [s for s in step.segments if s.rid in ctx.request_ids]
        keys = [(s.rid, s.label) for s in segments]
        if len(set(keys)) < len(keys):
            raise InputError(f"step {step.index} names a stream twice: {keys}")
        for segment in segments:
            if segment.span < 0:
                what = f"extends stream {segment.rid, segment.label} by {segment.span} tokens"
                raise InputError(f"step {step.index} {what}; give 0 or more")
            if segment.prefix is not None and step.commit:
                raise InputError(
                    f"step {step.index} commits, and its row {segment.rid, segment.label} would read another stream"
                )
        if step.commit:
            rows = [(self._table.stream_of(*key), s.span) for key, s in zip(keys, segments, strict=True)]
        else:  # rows that read one stream are one
            rows = [(self._table.stream_of(*key), 0) for key in dict.fromkeys(map(_read_key, segments))]
        for stream, _ in rows:
            if stream.step_in_flight:
                raise IntegrityError(f"stream {stream.key} is in a step already; commit or abort that first")
        return rows

    def _convert(self, stream: CacheStream) -> None:
        if not stream.is_fresh:
            return
        if stream.lease is None and stream.lease_agreed:
            raise IntegrityError(f"the step of {stream.key} was cut to a lease that is gone since; probe again and cut anew")
        if stream.lease is not None and not stream.lease_agreed:
            self._cut_unagreed(stream)
        if stream.lease is not None:
            self._pool.convert_lease(stream)
            if stream.chain is not None:
                stream.chain.cursor = stream.hits

    def _cut_unagreed(self, stream: CacheStream) -> None:
        """The step was not cut to the lease: keep what served earlier walks."""
        if stream.walked == self._pool.leased_slots(stream):
            return
        if stream.walked % self._pool.page_size:
            raise IntegrityError(
                f"the step of {stream.key} was not cut to its lease, of which earlier walks were served {stream.walked} slots, "
                "not whole pages; apply the match before admitting"
            )
        self._pool.cut_lease(stream, stream.walked // self._pool.page_size, "not agreed")

    def _reserve(self, step: Step, rows: list[Row], forks: list[OpenFork]) -> Refusal | None:
        """Fork targets, then segments; each stream gets all it needs or nothing, and earlier ones keep what they got."""
        growth: dict[StreamKey, int] = {stream.key: span for stream, span in rows}
        for fork in forks:
            if refusal := self._forks.reserve(fork, growth, step.index):
                return refusal
        starts = {f.target.key: length_before(f.source) for f in forks if f.fork.when == "pre"}
        for stream, span in rows:
            if span and (refusal := self._pool.grow(stream, starts.get(stream.key, stream.stored_len) + span, step.index)):
                return refusal
        return None

    # -- plan

    def tables(self, step: Step, ctx: StepContext) -> tuple[StepRow, ...]:
        """Carry out the forks that come before the write, and list each row's pages."""
        for fork in self._forks.of_step(step, ctx):
            if fork.fork.when == "pre":
                self._forks.copy(fork)
        row = self._row if step.commit else self._reading_row
        return tuple(row(segment, ctx) for segment in step.segments)

    def _reading_row(self, segment: Segment, ctx: StepContext) -> StepRow:
        """What a row reads that stores nothing: its stream as it is, or the beginning of another one, in place."""
        rid, label, span, prefix = segment.rid, segment.label, segment.span, segment.prefix
        if rid not in ctx.request_ids:
            return StepRow(rid, label, [], 0, span)
        stream = self._table.stream_of(*_read_key(segment))
        length = stream.stored_len if prefix is None else prefix.slots
        if prefix is not None and (length > stream.stored_len or stream.released):
            raise InputError(
                f"a row of {rid!r}, {label!r} reads the first {length} slots of stream {stream.key}, which stores "
                f"{stream.stored_len} and has released {stream.released}; a prefix is read while all of it is there"
            )
        return StepRow(rid, label, stream.page_indices[: self._pool.pages_for(length)], length, span)

    def _row(self, segment: Segment, ctx: StepContext) -> StepRow:
        rid, label, span = segment.rid, segment.label, segment.span
        if rid not in ctx.request_ids:  # padding writes to the sink
            return StepRow(rid, label, [SINK] * self._pool.pages_for(span), span, span)
        stream = self._table.stream_of(rid, label)
        length = stream.stored_len + span
        num_pages = self._pool.pages_for(length)
        if len(stream.page_indices) < num_pages:
            raise IntegrityError(
                f"stream {stream.key} has {len(stream.page_indices)} pages for {length} slots; admit a step before planning it"
            )
        return StepRow(rid, label, stream.page_indices[:num_pages], length, span)  # the list may be longer than the length

    # -- commit, abort

    def commit(self, step: Step, ctx: StepContext) -> None:
        """The writes happened: lengths grow, full pages are filed, and forks of what was written are carried out."""
        landed = self._land(step, ctx)
        for rid, _ in landed:
            if (request := self._table.requests[rid]).served:
                request.end_walk()
        if not step.commit:
            for read in landed.values():
                read.converted = False
            return
        for segment in step.segments:
            stream = landed.get((segment.rid, segment.label))
            if stream is not None and segment.span:
                self._commit(stream, step, segment.span, ctx)
        for fork in step.forks:
            target = landed.get((fork.rid, fork.target))
            if target is not None and fork.when == "post":
                self._forks.copy(OpenFork(fork, self._table.stream_of(fork.rid, fork.source), target))

    def _land(self, step: Step, ctx: StepContext) -> dict[StreamKey, CacheStream]:
        """Take the marks off; streams that were rewound or removed since are not in the step any more."""
        named = (*map(_read_key, step.segments), *((f.rid, f.target) for f in step.forks))
        streams = [self._table.in_flight(rid, label, ctx) for rid, label in named]
        landed = {stream.key: stream for stream in streams if stream is not None}
        for stream in landed.values():
            stream.step_in_flight = False
        return landed

    def _commit(self, stream: CacheStream, step: Step, span: int, ctx: StepContext) -> None:
        walk = step.walk
        if stream.offloaded:  # the host copy was made before the write
            self._counters.dropped_commits += 1
            log.warning("stream %r was offloaded during a step of walk %r: its %d tokens are dropped", stream.key, walk, span)
            return
        stream.stored_len += span
        stream.converted = False
        stream.generation += 1
        self._counters.committed_tokens += span
        if self._pool.record is not None:
            self._pool.record(events.StreamCommitted(stream.rid, stream.label, walk, span, stream.stored_len))
        if stream.key in step.windows:
            self._windows.adopt(stream, step.windows[stream.key])
        if not ctx.capture:
            self._filing.after_commit(stream, walk, span)
        self._windows.apply(stream)

    def abort(self, step: Step, ctx: StepContext) -> None:
        """The writes did not happen: nothing is filed, and the streams may be admitted again."""
        self._land(step, ctx)


def _read_key(segment: Segment) -> StreamKey:
    """The stream whose pages a row reads."""
    return segment.rid, segment.label if segment.prefix is None else segment.prefix.label
