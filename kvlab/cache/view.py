"""What one may ask of a KV resource without changing it, and what an admission gate asks of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from kvlab.cache.arena import PageArena
from kvlab.cache.index import PrefixIndex
from kvlab.cache.pool import PagePool
from kvlab.cache.probing import Prober
from kvlab.cache.stream import CacheStream
from kvlab.cache.table import StreamTable
from kvlab.errors import InputError
from kvlab.spec import RequestId, Resource


class PoolView(Resource):
    """The reading side of KVResource, which makes the parts it reads."""

    _pool: PagePool
    _table: StreamTable
    _prober: Prober
    _lock: threading.RLock

    @property
    def arena(self) -> PageArena:
        """The pages."""
        return self._pool.arena

    @property
    def index(self) -> PrefixIndex | None:
        """The prefix index, None while it is shut."""
        return self._pool.index

    @property
    def usable_pages(self) -> int:
        """Pages of the pool less the sink."""
        return self.arena.num_pages - 1

    def pages_needed(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` slots of one stream need."""
        return self._pool.pages_for(num_tokens)

    # -- what an admission gate asks

    def guard_grants(
        self, may_grant: Callable[[RequestId, int], bool], may_recall: Callable[[RequestId, int], bool] | None = None
    ) -> None:
        """Ask ``may_grant(rid, num_pages)`` before fresh pages go to a stream; a no is a GrantDeferred.

        Before cached pages come back from the host ``may_recall`` is asked, the same when None; a no leaves them there.
        """
        self._pool.may_grant = may_grant
        self._pool.may_recall = may_grant if may_recall is None else may_recall

    def supply_pages(self, excluding: Sequence[int] = ()) -> int:
        """Free pages and those eviction could reach, ``excluding`` left out."""
        with self._lock:
            evictable = 0 if self.index is None else self.index.evictable_count(excluding)
            return self.arena.num_free + evictable

    def supply_mark(self) -> tuple[int, ...]:
        """A value that stays the same while ``supply_pages`` cannot have changed."""
        return self.arena.num_free, self.arena.owner_changes

    def peek_prefix(self, rid: RequestId) -> list[int]:
        """Pages of the index that a request would be lent now, all labels; touches nothing."""
        with self._lock:
            return [page for stream in self.streams_of(rid).values() for page in self._prober.peek(stream)]

    def lease_prefix(self, rid: RequestId) -> int:
        """Hold those pages for the request until its first step is admitted; returns their number."""
        with self._lock:
            return sum(self._prober.lease(stream) for stream in self.streams_of(rid).values())

    def pages_taken(self, rid: RequestId) -> tuple[int, int]:
        """Pages of a request: (taken from the free list, lent by the index or leased)."""
        fresh, lent = 0, 0
        with self._lock:
            for stream in self.streams_of(rid).values():
                fresh += len(stream.page_indices) - stream.hits + (stream.end_slots > 0)
                lent += stream.hits + stream.lent_pages
        return fresh, lent

    # -- streams

    def stream(self, rid: RequestId, label: str = "main") -> CacheStream:
        """The stream of (rid, label), to read.

        Raises:
            InputError: there is none.
        """
        with self._lock:
            streams = self.streams_of(rid)
            if label not in streams:
                raise InputError(f"request {rid!r} has no stream {label!r}; it has {sorted(streams)}")
            return streams[label]

    def streams_of(self, rid: RequestId) -> Mapping[str, CacheStream]:
        """Streams of a request by label; none for an unknown request."""
        return self._table.streams_of(rid)

    def stored_tokens(self, rid: RequestId, label: str = "main") -> int:
        """Slots of (rid, label) that are written."""
        return self.stream(rid, label).stored_len

    def page_keys(self, rid: RequestId, label: str = "main") -> list[bytes]:
        """Keys of the stream's whole pages, generated ones included; empty when it has no chain."""
        chain = self.stream(rid, label).chain
        return [] if chain is None else chain.keys[: chain.keyed_pages]
