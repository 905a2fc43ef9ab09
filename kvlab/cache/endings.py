"""Copies of pages that were cut where a picture ends.

A picture that ends inside a page shares it with the text that follows, and that page's key names the text too. So that the same
picture can be served before another text, the page is copied when the picture is written and filed under a key that stops at
the picture's end. Nobody writes on that copy; who repeats the picture gets a copy of the copy to go on writing.

    donor     [ text ][ text picture ][ picture | question ]
    kept                              [ picture ]             a leaf behind the page before
    repeat    [ text ][ text picture ][ picture | another question ]
"""

from __future__ import annotations

from kvlab import events
from kvlab.cache.chain import PictureEnd, PrefixChain
from kvlab.cache.counters import KVCounters
from kvlab.cache.index import PrefixIndex
from kvlab.cache.pool import PagePool
from kvlab.cache.stream import CacheStream
from kvlab.spec import PageStore


class EndCopies:
    """Keeps and lends them. Callers hold the lock of the KV resource.

    Args:
        store: moves the bytes; without one nothing is kept.
    """

    def __init__(self, pool: PagePool, store: PageStore | None, counters: KVCounters) -> None:
        self._pool, self._store, self._counters = pool, store, counters

    # -- the donor's side

    def keep(self, stream: CacheStream, chain: PrefixChain, index: PrefixIndex) -> None:
        """The last write of ``stream`` ended a picture inside a page: file a copy, if a page is free for it."""
        end = chain.ends.get(stream.stored_len)
        if end is None or self._store is None or index.page_for(stream.root, end.key) is not None:
            return
        parent = index.page_for(stream.root, chain.keys[end.position - 1]) if end.position else None
        if end.position and parent is None:
            return
        pages = self._pool.arena.acquire(1)
        if pages is None:
            return
        try:
            self._store.copy_pages(stream.page_indices[end.position : end.position + 1], pages)
            index.insert_run(stream.root, [end.key], pages, parent)
        finally:
            self._pool.arena.release(pages)  # it is the index's alone, or free again
        self._counters.ends_kept += 1
        self._pool.retain(stream, pages, end.position)
        if self._pool.is_told:
            self._pool.tell_indexed(stream, chain, pages[0], end.position, end)

    # -- the repeat's side

    def has(self, stream: CacheStream, end: PictureEnd) -> bool:
        """True when a copy of ``end`` is cached, on the device or on the host."""
        index, tier = self._pool.index, self._pool.tier
        is_indexed = index is not None and index.page_for(stream.root, end.key) is not None
        return is_indexed or (tier is not None and (stream.root, end.key) in tier)

    def lend(self, stream: CacheStream, end: PictureEnd) -> bool:
        """Lengthen the lease of ``stream`` by a page of its own that holds what the kept copy does; False = no page."""
        if self._pool.may_grant is not None and not self._pool.may_grant(stream.rid, 1):
            return False
        page = self._copied(stream, end)
        if page is None:
            return False
        stream.lease, stream.end_slots = [*(stream.lease or ()), page], end.slots
        self._counters.ends_lent += 1
        if self._pool.record is not None:
            self._pool.record(events.PictureEndCopied(stream.rid, stream.label, page, end.slots))
        return True

    def _copied(self, stream: CacheStream, end: PictureEnd) -> int | None:
        found = self._pool.index.lookup(stream.root, [end.key]) if self._pool.index is not None else []
        pages = self._page_beside(stream, found)
        if pages is None or self._store is None:
            return None
        is_copied = False
        try:
            if found and found != pages:
                self._store.copy_pages(found, pages)
            # from the host it may have gone while room was made
            is_copied = bool(found) or (self._pool.tier is not None and self._pool.tier.copy_out(stream.root, end.key, pages))
        finally:
            if not is_copied:
                self._pool.arena.release(pages)
        return pages[0] if is_copied else None

    def _page_beside(self, stream: CacheStream, found: list[int]) -> list[int] | None:
        """Take a page for what is copied from ``found``. Where no other is left, that page itself is evicted and taken."""
        self._pool.arena.retain(found)
        try:
            pages = self._pool.take(1, stream.rid)
        finally:
            self._pool.arena.release(found)
        return self._pool.take(1, stream.rid) if pages is None else pages
