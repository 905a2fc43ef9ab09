"""Whole requests on host pages, and back.

    offload   claim (under the lock) -> copy (without it) -> commit (under the lock): all claimed streams, or none
    reload    pages are taken, the copies brought back, the lengths restored: on any page ids, all private

What a stream holds on the host is what it stored; its chain, its place in the index and its counters elsewhere stay.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

from kvlab.cache.counters import KVCounters
from kvlab.cache.pool import PagePool
from kvlab.cache.stream import CacheStream
from kvlab.cache.table import StreamTable
from kvlab.errors import InputError
from kvlab.spec import PageStore, RequestId

log = logging.getLogger("kvlab.cache")


class _Claim(NamedTuple):
    """A stream as it was when its offload began."""

    stream: CacheStream
    generation: int
    pages: list[int]  # those that hold something
    host_pages: list[int]


class Offloading:
    """Moves requests between the device and the host pages of ``pool.host``.

    Args:
        key: name of the KV resource, for log lines.
        lock: the KV resource's own; it is not held while bytes go to the host.
    """

    def __init__(
        self,
        key: str,
        pool: PagePool,
        table: StreamTable,
        store: PageStore | None,
        counters: KVCounters,
        lock: threading.RLock,
    ) -> None:
        if store is None and pool.host.num_pages:
            raise InputError(
                f"{key}: cpu_offload_pages is {pool.host.num_pages} and there is no PageStore to copy pages with; give it one"
            )
        self._key, self._pool, self._table, self._store = key, pool, table, store
        self._counters, self._lock = counters, lock
        self._warned_full = False

    def is_offloaded(self, rid: RequestId) -> bool:
        """True from the claim on."""
        return any(stream.offloaded for stream in self._table.streams_of(rid).values())

    def priority(self, rid: RequestId) -> int:
        """Device pages it holds; 0 when it cannot be offloaded now. Sharers free a page only together, so all of them count."""
        streams = self._table.streams_of(rid).values()
        if not self._pool.host.num_pages or any(stream.offloaded or _is_busy(stream) for stream in streams):
            return 0
        return sum(len(stream.page_indices) for stream in streams)

    # -- to the host

    def offload(self, rid: RequestId) -> int:
        """Move every stream of ``rid`` that has pages and fits; returns the device pages that are free now.

        A request with a step in flight is left alone, and so is one that changed while it was copied.
        """
        with self._lock:
            claims = self._claim(rid)
        try:
            for claim in claims:
                if claim.pages and self._store is not None:
                    self._store.to_host(claim.pages, claim.host_pages)
        except BaseException:
            with self._lock:
                self._undo(claims)
            raise
        with self._lock:
            return self._commit(rid, claims)

    def _claim(self, rid: RequestId) -> list[_Claim]:
        streams = self._table.streams_of(rid).values()
        if not self._pool.host.num_pages or any(_is_busy(stream) for stream in streams):
            return []
        claims = []
        for stream in streams:
            if stream.offloaded or not stream.page_indices:
                continue
            pages = stream.page_indices[: self._pool.pages_for(stream.stored_len)]
            host_pages = self._pool.host.take(len(pages))
            if host_pages is None:
                self._warn_full(stream, len(pages))
                continue
            stream.offloaded = True
            claims.append(_Claim(stream, stream.generation, pages, host_pages))
        return claims

    def _warn_full(self, stream: CacheStream, num_pages: int) -> None:
        """Said again only after something was offloaded."""
        if not self._warned_full:
            self._warned_full = True
            log.warning(
                "%s: the host pool is exhausted: stream %r needs %d host pages, and %d of %d are free (cpu_offload_pages)",
                *(self._key, stream.key, num_pages, self._pool.host.num_free, self._pool.host.num_pages),
            )

    def _commit(self, rid: RequestId, claims: list[_Claim]) -> int:
        streams = self._table.streams_of(rid)
        if any(streams.get(c.stream.label) is not c.stream or c.stream.generation != c.generation for c in claims):
            self._undo(claims)
            return 0
        before = self._pool.arena.num_free
        for claim in claims:
            self._pool.to_host(claim.stream, claim.host_pages)
        if claims:
            self._warned_full = False
            self._counters.offloads += 1
            self._counters.offloaded_pages += sum(len(claim.pages) for claim in claims)
        return self._pool.arena.num_free - before

    def _undo(self, claims: list[_Claim]) -> None:
        for claim in claims:
            claim.stream.offloaded = False
            self._pool.host.give(claim.host_pages)

    # -- back

    def reload(self, rid: RequestId) -> bool:
        """Bring every stream of ``rid`` back, evicting for what is short; False and nothing moved when it does not fit.

        Callers hold the lock.
        """
        streams = [stream for stream in self._table.streams_of(rid).values() if stream.offloaded]
        if any(stream.page_indices for stream in streams):
            return False  # on its way to the host
        pages = self._pool.take(sum(len(stream.host_pages) for stream in streams), rid)
        if pages is None:
            return False
        host_pages = [page for stream in streams for page in stream.host_pages]
        try:
            if pages and self._store is not None:
                self._store.from_host(host_pages, pages)
        except BaseException:
            self._pool.arena.release(pages)
            raise
        for stream in streams:
            count = len(stream.host_pages)
            self._pool.from_host(stream, pages[:count])
            pages = pages[count:]
        self._counters.reloads += bool(streams)
        return True


def _is_busy(stream: CacheStream) -> bool:
    """True while bytes of ``stream`` are being written, or are not what they should be."""
    return stream.step_in_flight or stream.read is not None or bool(stream.read_error)
