"""Copies of one label's pages onto another label of the same request.

    pre   before the write: target := the source as it was before this walk (never the pages a hit just lent it)
    post  after the write:  target := the source with what this step wrote

A target's pages are its own: its bytes are overwritten, so nobody else may read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvlab import events
from kvlab.cache.chain import FORK_TARGET
from kvlab.cache.filing import Filing
from kvlab.cache.pool import PagePool
from kvlab.cache.stream import CacheStream
from kvlab.cache.table import StreamTable
from kvlab.errors import InputError, IntegrityError
from kvlab.spec import Fork, PageStore, Refusal, RequestOffloading, Step, StepContext, StreamKey


class OpenFork(NamedTuple):
    """A fork with its streams."""

    fork: Fork
    source: CacheStream
    target: CacheStream


class Forks:
    """Reserves and carries out the forks of a step.

    Args:
        store: moves the bytes.
    """

    def __init__(self, pool: PagePool, filing: Filing, table: StreamTable, store: PageStore | None) -> None:
        self._pool, self._filing, self._table, self._store = pool, filing, table, store

    def of_step(self, step: Step, ctx: StepContext) -> list[OpenFork]:
        """Forks of real rows, checked.

        Raises:
            InputError: a fork that cannot be carried out.
            IntegrityError: a target lists pages that others may read.
        """
        forks = [f for f in step.forks if f.rid in ctx.request_ids]
        stream_of = self._table.stream_of
        opened = [OpenFork(f, stream_of(f.rid, f.source), stream_of(f.rid, f.target)) for f in forks]
        for fork in opened:
            self._check(fork)
        return opened

    def _check(self, opened: OpenFork) -> None:
        fork, source, target = opened
        if fork.when not in ("pre", "post"):
            raise InputError(f"fork of {source.key} is {fork.when!r}; it is done 'pre' or 'post' the write")
        if source is target:
            raise InputError(f"stream {source.key} cannot be forked onto itself")
        if self._store is None:
            raise InputError(
                f"stream {source.key} is forked and the KV resource has no PageStore to copy pages with; give it one"
            )
        if self._pool.arena.any_sealed(target.page_indices):
            raise IntegrityError(
                f"fork target {target.key} lists pages that others may read: {target.page_indices}; "
                "fork onto a label of its own"
            )

    def reserve(self, opened: OpenFork, growth: Mapping[StreamKey, int], step_index: int) -> Refusal | None:
        """Give the target pages for what it will hold; it has no keyed history from now on."""
        fork, source, target = opened
        if source.offloaded or target.offloaded:
            return RequestOffloading(source.rid)
        self._pool.cut_lease(target, 0, "fork target")
        target.walked = 0
        self._filing.end(target, FORK_TARGET, "", target.stored_len)
        total = length_before(source) if fork.when == "pre" else source.stored_len + growth.get(source.key, 0)
        return self._pool.grow(target, total, step_index)

    def copy(self, opened: OpenFork) -> None:
        """Copy whole pages of the source and set the target's length."""
        fork, source, target = opened
        length = length_before(source) if fork.when == "pre" else source.stored_len
        pages = self._pool.pages_for(length)
        if pages and self._store is not None:
            self._store.copy_pages(source.page_indices[:pages], target.page_indices[:pages])
        target.generation += 1
        target.reset_generation = self._pool.next_epoch()
        target.converted = False
        if self._pool.record is not None:
            self._pool.record(events.PagesForked(source.rid, source.label, target.label, target.page_indices[:pages]))
        self._pool.set_length(target, length, "fork")


def length_before(stream: CacheStream) -> int:
    """Slots stored before the walk that is being admitted: a lease counts as far as it served earlier walks."""
    return stream.walked if stream.converted else stream.stored_len
