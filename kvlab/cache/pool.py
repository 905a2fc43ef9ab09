"""Every movement of a page between the free list, the streams, the leases and the index, each told to the recorder.

free --grow--> stream --release--> free, or cached if the index is an owner
cached --lease--> lease --convert--> leading pages of the stream
                      \\--cut-----> cached
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import takewhile

from kvlab import events
from kvlab.cache.arena import PageArena
from kvlab.cache.chain import PictureEnd, PrefixChain
from kvlab.cache.host import HostPages
from kvlab.cache.index import PrefixIndex
from kvlab.cache.misses import MissLog
from kvlab.cache.policies import EvictionPolicy, RetentionPolicy, make_policy
from kvlab.cache.stream import CacheStream
from kvlab.cache.tier import HostTier
from kvlab.errors import IntegrityError
from kvlab.spec import AllocationFailed, GrantDeferred, Refusal, RequestId, RequestOffloading


class PagePool:
    """An arena, and the index that is a second owner of its pages once it is open.

    Callers hold the lock of the KV resource. ``record`` None: no event is built.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        policy: EvictionPolicy | str,
        record: Callable[[events.Event], None] | None,
        miss_log: MissLog | None,
        cpu_offload_pages: int = 0,
    ) -> None:
        self.arena = PageArena(num_pages)
        self.page_size = page_size
        self.host = HostPages(cpu_offload_pages, name="cpu_offload_pages")
        self.index: PrefixIndex | None = None
        self.record = record
        self.miss_log = miss_log
        self.tier: HostTier | None = None
        self.may_grant: Callable[[RequestId, int], bool] | None = None
        self.may_recall: Callable[[RequestId, int], bool] | None = None
        self._policy = make_policy(policy)
        self._epochs = itertools.count(1)

    def next_epoch(self) -> int:
        """Return a number for the content of a stream that no other content has had."""
        return next(self._epochs)

    def open_index(self) -> PrefixIndex:
        """Open an empty index."""
        self.index = PrefixIndex(self.arena, self._policy)
        return self.index

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` slots need."""
        return -(-num_tokens // self.page_size)

    # -- streams and the free list

    def grow(self, stream: CacheStream, total_len: int, step_index: int | None) -> Refusal | None:
        """Append fresh pages until ``stream`` holds ``total_len`` slots, evicting if that helps; all or nothing."""
        if stream.offloaded:
            return RequestOffloading(stream.rid)
        need = self.pages_for(total_len) - len(stream.page_indices)
        if need <= 0:
            return None
        if self.may_grant is not None and not self.may_grant(stream.rid, need):
            return GrantDeferred(stream.rid)
        pages = self.take(need, stream.rid, step_index)
        if pages is None:
            return AllocationFailed(need - self.arena.num_free - self.num_evictable, stream.rid, stream.label)
        stream.page_indices.extend(pages)
        stream.generation += 1
        if self.record is not None:
            self.record(events.PagesAcquired(stream.rid, stream.label, pages))
        return None

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free."""
        return 0 if self.index is None else self.index.evictable_count()

    def take(self, num_pages: int, rid: RequestId, step_index: int | None = None) -> list[int] | None:
        """Take fresh pages, evicting for what is short; None, and nothing evicted, when that would not help."""
        pages = self.arena.acquire(num_pages)
        if pages is not None:
            return pages
        short, evictable = num_pages - self.arena.num_free, self.num_evictable
        if evictable < short:
            return None
        self.evict(short, rid, step_index)
        pages = self.arena.acquire(num_pages)
        if pages is None:
            raise IntegrityError(
                f"{evictable} pages were said to be evictable; {num_pages} are needed, {self.arena.num_free} are free"
            )
        return pages

    def release_pages(self, stream: CacheStream, why: str) -> None:
        """The stream lets go of all its pages."""
        if not stream.page_indices:
            return
        pages, stream.page_indices = stream.page_indices, []
        self.arena.release(pages)
        stream.generation += 1
        if self.record is not None:
            self.record(events.PagesReleased(stream.rid, stream.label, pages, why))

    def release_run(self, stream: CacheStream, first: int, count: int) -> None:
        """The stream lets go of ``count`` stored pages from page ``first`` on, and what is behind them moves up."""
        pages = stream.page_indices[first : first + count]
        del stream.page_indices[first : first + count]
        stream.hits -= max(0, min(stream.hits, first + count) - first)
        stream.released += count * self.page_size
        stream.generation += 1
        self.arena.release(pages)
        if self.record is not None:
            self.record(events.PagesReleased(stream.rid, stream.label, pages, "window"))
        self.set_length(stream, stream.stored_len - count * self.page_size, "window")

    def set_length(self, stream: CacheStream, stored_len: int, why: str) -> None:
        """Set a length that no commit wrote."""
        if stream.stored_len == stored_len:
            return
        stream.stored_len = stored_len
        if self.record is not None:
            self.record(events.StreamLengthSet(stream.rid, stream.label, stored_len, why))

    # -- host pages

    def to_host(self, stream: CacheStream, host_pages: list[int]) -> None:
        """What the stream stores is on ``host_pages`` now: it lets go of its device pages."""
        pages, stream.page_indices = stream.page_indices, []
        stream.host_pages, stream.host_len = host_pages, stream.stored_len
        stream.stored_len = stream.hits = 0
        self.arena.release(pages)
        stream.generation += 1
        if self.record is not None:
            self.record(events.PagesOffloaded(stream.rid, stream.label, pages, host_pages))

    def from_host(self, stream: CacheStream, pages: list[int]) -> None:
        """What the stream had on the host is on ``pages`` now, which are its own."""
        host_pages, stream.host_pages = stream.host_pages, []
        stream.page_indices, stream.stored_len = pages, stream.host_len
        stream.offloaded, stream.host_len = False, 0
        self.host.give(host_pages)
        stream.generation += 1
        if self.record is not None:
            self.record(events.PagesReloaded(stream.rid, stream.label, pages, host_pages, stream.stored_len))

    def drop_host_copy(self, stream: CacheStream, why: str) -> None:
        """What the stream has on the host is not wanted any more."""
        host_pages, stream.host_pages = stream.host_pages, []
        stream.offloaded, stream.host_len = False, 0
        self.host.give(host_pages)
        if self.record is not None and host_pages:
            self.record(events.HostPagesFreed(host_pages, why))

    # -- leases

    def lease(self, stream: CacheStream, pages: Sequence[int]) -> None:
        """Hold indexed pages for a stream that is not admitted yet."""
        self.arena.retain(pages)
        stream.lease, stream.lease_agreed = list(pages), False
        if self.record is not None:
            self.record(events.PagesLeased(stream.rid, stream.label, list(pages)))

    def leased_slots(self, stream: CacheStream) -> int:
        """Slots that the lease of ``stream`` covers."""
        return stream.lent_pages * self.page_size + stream.end_slots

    def recall(self, stream: CacheStream, chain: PrefixChain, index: PrefixIndex, limit: int) -> None:
        """Lengthen the lease of ``stream``, up to ``limit`` pages, by cached pages on the host that follow it."""
        begin = len(stream.lease or ())
        stream.recalled_from = None
        if self.tier is None:
            return
        keys = chain.keys[begin:limit]
        room = self.arena.num_free + self.num_evictable - 1  # what is computed needs a page too
        keys = keys[: max(0, min(self.tier.run_of(stream.root, keys), room))]
        keys = list(takewhile(lambda key: index.page_for(stream.root, key) is None, keys))
        if not keys or (self.may_recall is not None and not self.may_recall(stream.rid, len(keys))):
            return
        host_pages = self.tier.hold(stream.root, keys)
        pages: list[int] = []
        try:
            pages = self.take(len(keys), stream.rid) or []
            self.tier.read(host_pages, pages)
        except BaseException:
            self.arena.release(pages)
            self.tier.put_back(stream.root, keys, host_pages)
            raise
        index.insert_run(stream.root, keys, pages, stream.lease[-1] if stream.lease else None)
        for position, page in enumerate(pages, begin):
            self.tell_indexed(stream, chain, page, position)
        stream.lease, stream.lease_agreed, stream.recalled_from = [*(stream.lease or ()), *pages], False, begin
        if self.record is not None:
            self.record(events.PagesRecalled(stream.rid, stream.label, pages, host_pages))

    def cut_lease(self, stream: CacheStream, keep: int, why: str) -> None:
        """Keep the first ``keep`` leased pages and release the rest."""
        if stream.lease is None or keep >= len(stream.lease):
            return
        surplus = stream.lease[keep:]
        stream.lease, stream.end_slots = stream.lease[:keep] or None, 0
        self.arena.release(surplus)
        if self.record is not None:
            self.record(events.LeaseReleased(stream.rid, stream.label, surplus, why))

    def convert_lease(self, stream: CacheStream) -> None:
        """Make the lease the stream's own leading pages; empty pages that a refused admit left go back first."""
        lease, slots, hits = stream.lease or [], self.leased_slots(stream), stream.lent_pages
        self.release_pages(stream, "empty")
        stream.page_indices, stream.lease, stream.end_slots = lease, None, 0
        stream.hits, stream.converted = hits, True
        stream.generation += 1
        self.retain(stream, lease[:hits], 0)
        if self.record is not None:
            self.record(events.LeaseConverted(stream.rid, stream.label, list(lease)))
        self.set_length(stream, slots, "lease")

    # -- the index

    @property
    def is_told(self) -> bool:
        """True when somebody wants to hear of single pages."""
        return self.record is not None or self.miss_log is not None

    @property
    def keeps_retention(self) -> bool:
        """True when the policy can be asked to keep pages for a time."""
        return isinstance(self._policy, RetentionPolicy)

    def retain(self, stream: CacheStream, pages: Sequence[int], position: int) -> None:
        """Ask for what ``stream`` wants of indexed ``pages``, the first of which lies at ``position``; the last wish counts."""
        if self.index is None:
            return
        for wish in stream.retention:
            span = wish.pages(self.page_size, position + len(pages))
            if chosen := pages[max(span.start - position, 0) : max(span.stop - position, 0)]:
                self.index.retain(chosen, wish.priority, wish.duration_s)

    def tell_indexed(
        self, stream: CacheStream, chain: PrefixChain, page: int, position: int, end: PictureEnd | None = None
    ) -> None:
        """A page of ``stream`` entered the index, or the copy of one that is cut at the ``end`` of a picture."""
        key = chain.keys[position] if end is None else end.key
        if self.miss_log is not None:
            parent_key = chain.keys[position - 1] if position else b""
            ids = chain.ids_of_page(position) if end is None else end.ids
            self.miss_log.filed(stream.root, stream.root_name, parent_key, key, ids)
        if self.record is not None and self.index is not None:
            root, parent = stream.root.hex()[:16], self.index.parent_of(page)
            self.record(events.PageIndexed(stream.rid, stream.label, page, key.hex()[:16], root, parent, position))

    def tell_race_lost(self, stream: CacheStream, page: int, winner: int) -> None:
        """Another page holds the key; ``page`` stays private."""
        if self.record is not None:
            self.record(events.IndexRaceLost(stream.rid, stream.label, page, winner))

    def evict(self, num_pages: int, for_rid: RequestId | None = None, step_index: int | None = None) -> int:
        """Ask the index to free ``num_pages``; returns how many it freed."""
        if self.index is None:
            return 0
        when = "outside a step" if step_index is None else f"at step {step_index}"
        why = "evicted when asked" if for_rid is None else f"evicted {when} for request {for_rid!r}"

        victims: list[tuple[int, bytes, bytes]] = []

        def tell(page: int, root: bytes, key: bytes) -> None:
            victims.append((page, root, key))
            if self.miss_log is not None:
                self.miss_log.gone(root, key, why)
            if self.record is not None:
                self.record(events.PageEvicted(page, key.hex()[:16], for_rid))

        freed = self.index.evict(num_pages, on_evicted=tell if self.is_told or self.tier is not None else None)
        if self.tier is not None:
            self.tier.keep(victims)
        return freed

    def clear_index(self, reason: str, epoch: int) -> None:
        """Drop every entry; pages that streams own stay theirs."""
        if self.index is None:
            return
        pages = self.index.clear()
        if self.tier is not None:
            self.tier.clear(reason)
        if self.miss_log is not None:
            self.miss_log.all_gone(f"dropped by a reset ({reason})")
        if self.record is not None:
            self.record(events.IndexReset(reason, epoch, pages))
