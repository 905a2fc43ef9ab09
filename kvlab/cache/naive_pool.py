"""Pages, entries and victims of the naive twin: owners are counted by looking at every list that names a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvlab.cache.arena import SINK
from kvlab.spec import AllocationFailed, RequestId, StreamKey

Root = tuple[bytes, str, str]  # base root, label, salt
Ids = tuple[int, ...]


@dataclass
class NaiveEntry:
    """A cached page. ``parent`` is the entry it counts as a child of."""

    page: int
    stamp: int
    parent: Ids | None


@dataclass
class NaiveStream:
    """A stream. ``known`` = every id the keys cover, None without a chain; ``grows`` = generated ids join it."""

    pages: list[int] = field(default_factory=list)
    stored: int = 0
    lease: list[int] = field(default_factory=list)
    agreed: bool = False
    converted: bool = False
    in_flight: bool = False
    root: Root = (b"", "", "")
    known: list[int] | None = None
    prompt_slots: int = 0
    grows: bool = False
    cursor: int = 0
    was_ended: bool = False


class NaivePool:
    """The free list, every list that names pages, and the cached entries by whole token tuples."""

    def __init__(self, page_size: int, num_pages: int, choose: Callable[[Sequence[int]], int] | None = None) -> None:
        self.page_size, self._choose = page_size, choose
        self.free = list(range(1, num_pages))
        self.clock = 0
        self.streams: dict[StreamKey, NaiveStream] = {}
        self.entries: dict[Root, dict[Ids, NaiveEntry]] = {}
        self.pins: dict[str, list[int]] = {}
        self.sealed: set[int] = set()  # pages that were cached since they were taken: never to be written again

    def owners(self, page: int) -> int:
        """How many lists name ``page``."""
        lists = [[SINK], [e.page for entries in self.entries.values() for e in entries.values()]]
        lists += self.pins.values()
        lists += [s.pages for s in self.streams.values()] + [s.lease for s in self.streams.values()]
        return sum(listed.count(page) for listed in lists)

    def _let_go(self, pages: Sequence[int]) -> None:
        """Put on the free list what nobody names any more; the caller took ``pages`` off its list before."""
        freed = [page for page in pages if self.owners(page) == 0]
        self.free += freed
        self.sealed -= set(freed)

    def unpin(self, name: str) -> int | None:
        """Drop a pin; None if there is none of that name."""
        pages = self.pins.pop(name, None)
        self._let_go(pages or [])
        return None if pages is None else len(pages)

    def _drop_lease(self, stream: NaiveStream, keep: int = 0) -> None:
        surplus = stream.lease[keep:]
        stream.lease = stream.lease[:keep]
        self._let_go(surplus)

    def _drop_pages(self, stream: NaiveStream) -> None:
        pages, stream.pages = stream.pages, []
        self._let_go(pages)

    def _grow(self, rid: RequestId, label: str, total: int) -> AllocationFailed | None:
        stream = self.streams[rid, label]
        need = -(-total // self.page_size) - len(stream.pages)
        if need <= 0:
            return None
        short = need - len(self.free)
        if short > 0:
            reachable = len(self._evictable())
            if reachable < short:
                return AllocationFailed(short - reachable, rid, label)
            self.evict(short)
        stream.pages += self.free[:need]
        del self.free[:need]
        return None

    # -- cached pages

    def evict(self, num_pages: int) -> int:
        """Drop one leaf nobody else names after another, the least recently used or the one chosen, until enough are gone."""
        victims = []
        for _ in range(min(num_pages, len(self._evictable()))):
            root, ids = (
                min(self._leaves(), key=lambda at: self._age(*at)) if self._choose is None else self._chosen(self._choose)
            )
            victims.append(self.entries[root].pop(ids).page)
            if not self.entries[root]:
                del self.entries[root]
        self._let_go(victims)
        return len(victims)

    def _chosen(self, choose: Callable[[Sequence[int]], int]) -> tuple[Root, Ids]:
        """Ask which of the leaves goes; anything else is a KeyError."""
        leaves = {self.entries[root][ids].page: (root, ids) for root, ids in self._leaves()}
        return leaves[choose(list(leaves))]

    def _age(self, root: Root, ids: Ids) -> tuple[int, int]:
        entry = self.entries[root][ids]
        return entry.stamp, entry.page

    def _leaves(self) -> list[tuple[Root, Ids]]:
        """Entries that may go now."""
        return [
            (root, ids)
            for root, entries in self.entries.items()
            for ids, entry in entries.items()
            if self.owners(entry.page) == 1 and not any(e.parent == ids for e in entries.values())
        ]

    def _evictable(self) -> list[tuple[Root, Ids]]:
        """Entries that could go in some order: nobody names them, nor an entry behind them."""
        pinned = set()
        for root, entries in self.entries.items():
            for ids, entry in entries.items():
                at: Ids | None = ids if self.owners(entry.page) > 1 else None
                while at is not None:
                    pinned.add((root, at))
                    at = entries[at].parent
        return [(root, ids) for root, entries in self.entries.items() for ids in entries if (root, ids) not in pinned]

    def _file(self, stream: NaiveStream, known: list[int]) -> None:
        filled = min(stream.stored, len(known)) // self.page_size
        if stream.cursor >= filled:
            return
        entries = self.entries.get(stream.root, {})

        def prefix(num_pages: int) -> Ids:
            return tuple(known[: num_pages * self.page_size])

        while stream.cursor and prefix(stream.cursor) not in entries:
            stream.cursor -= 1  # the page that won the race for this key is gone; offer ours again
        is_in_run = False
        for position in range(stream.cursor, filled):
            if prefix(position + 1) in entries:
                is_in_run = False
                continue
            self.clock += not is_in_run
            is_in_run = True
            behind = entries.get(prefix(position))
            is_counted = behind is not None and self.owners(behind.page) > 1
            entry = NaiveEntry(stream.pages[position], self.clock, prefix(position) if is_counted else None)
            entries = self.entries.setdefault(stream.root, {})
            entries[prefix(position + 1)] = entry
            self.sealed.add(entry.page)
        stream.cursor = filled
