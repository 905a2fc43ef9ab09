"""Cached pages that eviction put on the host instead of dropping them.

What is looked up where: a prompt is matched on the device first; where that ends, the host is asked for the keys that follow,
and what it has is brought back to fresh device pages and filed again. Both happen at every look-up, however full the pool is,
so a hit does not depend on the load; only what no device page can be had for stays on the host. An admission gate counts pages
on the host as pages to be taken, not as pages lent.

    evicted -> (root, key) on a host page, least recently used goes first -> recalled: indexed again and leased
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile

from kvlab import events
from kvlab.cache.counters import KVCounters
from kvlab.cache.host import HostPages
from kvlab.spec import PageStore

Name = tuple[bytes, bytes]  # root, key


class HostTier:
    """Evicted pages by name. Callers hold the lock of the KV resource."""

    def __init__(
        self, host: HostPages, store: PageStore, counters: KVCounters, record: Callable[[events.Event], None] | None
    ) -> None:
        self.host = host
        self._store, self._counters, self._record = store, counters, record
        self._pages: OrderedDict[Name, int] = OrderedDict()  # the next to go first

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, name: Name) -> bool:
        return name in self._pages

    def keep(self, victims: Sequence[tuple[int, bytes, bytes]]) -> None:
        """Copy pages that were just evicted, (page, root, key) each, leaves first; their bytes are not overwritten yet."""
        known = [(root, key) for _, root, key in victims if (root, key) in self._pages]
        for name in known:
            self._pages.move_to_end(name)
        fresh = [victim for victim in victims if victim[1:] not in self._pages]
        self._drop(min(len(fresh) - self.host.num_free, len(self._pages)))
        fresh = fresh[max(0, len(fresh) - self.host.num_free) :]  # those nearest to the trunk, if not all fit
        host_pages = self.host.take(len(fresh)) or []
        try:
            self._store.to_host([page for page, _, _ in fresh], host_pages)
        except BaseException:
            self.host.give(host_pages)
            raise
        self._pages.update(((root, key), page) for (_, root, key), page in zip(fresh, host_pages, strict=True))
        self._counters.host_kept_pages += len(fresh)
        if self._record is not None and fresh:
            self._record(events.PagesCachedOnHost([key.hex()[:16] for _, _, key in fresh], host_pages))

    def _drop(self, count: int) -> None:
        dropped = [self._pages.popitem(last=False)[1] for _ in range(count)]
        self._free(dropped, "host tier full")
        self._counters.host_dropped_pages += len(dropped)

    def _free(self, host_pages: list[int], why: str) -> None:
        self.host.give(host_pages)
        if self._record is not None and host_pages:
            self._record(events.HostPagesFreed(host_pages, why))

    def run_of(self, root: bytes, keys: Sequence[bytes]) -> int:
        """How many of ``keys`` are here before the first that is not."""
        return sum(1 for _ in takewhile(lambda key: (root, key) in self._pages, keys))

    def hold(self, root: bytes, keys: Sequence[bytes]) -> list[int]:
        """Take names off the list, so that none of them is dropped while room is made for them."""
        return [self._pages.pop((root, key)) for key in keys]

    def put_back(self, root: bytes, keys: Sequence[bytes], host_pages: Sequence[int]) -> None:
        """Undo ``hold``."""
        self._pages.update(((root, key), page) for key, page in zip(reversed(keys), reversed(host_pages), strict=True))

    def read(self, host_pages: list[int], pages: list[int]) -> None:
        """Copy held pages to the device and let go of them."""
        self._store.from_host(host_pages, pages)
        self.host.give(host_pages)

    def copy_out(self, root: bytes, key: bytes, pages: list[int]) -> bool:
        """Copy what is here under ``key`` to the device and keep it; False when it is not here."""
        if (root, key) not in self._pages:
            return False
        self._pages.move_to_end((root, key))
        self._store.from_host([self._pages[root, key]], pages)
        return True

    def clear(self, reason: str) -> None:
        """Drop every page."""
        host_pages = list(self._pages.values())
        self._pages.clear()
        self._free(host_pages, reason)
