"""Pages, entries and victims of the naive twin: owners are counted by looking at every list that names a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvlab.cache.arena import SINK
from kvlab.cache.naive_prompts import Slot, Slots, is_end
from kvlab.spec import AllocationFailed, RequestId, Span, StreamKey

Root = tuple[bytes, str, str]  # base root, label, salt


@dataclass
class NaiveEntry:
    """A cached page. ``parent`` is the entry it counts as a child of."""

    page: int
    stamp: int
    parent: Slots | None


@dataclass
class NaiveStream:
    """A stream. ``known`` = every slot the keys cover, None without a chain; ``grows`` = generated ids join it.

    ``own`` = slots used on the last leased page where it is a private copy. ``walked`` = slots of walks served whole,
    ``served`` = those of the walk under way.
    """

    pages: list[int] = field(default_factory=list)
    stored: int = 0
    lease: list[int] = field(default_factory=list)
    agreed: bool = False
    converted: bool = False
    in_flight: bool = False
    root: Root = (b"", "", "")
    known: list[Slot] | None = None
    prompt: list[Slot] = field(default_factory=list)
    layout: tuple[Span, ...] = ()
    own: int = 0
    walked: int = 0
    served: int = 0
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
        self.entries: dict[Root, dict[Slots, NaiveEntry]] = {}
        self.pins: dict[str, list[int]] = {}
        self.held: list[int] = []  # a page that is about to be copied
        self.sealed: set[int] = set()  # pages that were cached since they were taken: never to be written again

    def owners(self, page: int) -> int:
        """How many lists name ``page``."""
        lists = [[SINK], [e.page for entries in self.entries.values() for e in entries.values()]]
        lists += [*self.pins.values(), self.held]
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
        stream.own = 0 if surplus else stream.own
        self._let_go(surplus)

    def leased(self, stream: NaiveStream) -> int:
        """Slots that the lease covers."""
        return len(stream.lease) * self.page_size - (self.page_size - stream.own if stream.own else 0)

    def _drop_pages(self, stream: NaiveStream) -> None:
        pages, stream.pages = stream.pages, []
        self._let_go(pages)

    def _grow(self, rid: RequestId, label: str, total: int) -> AllocationFailed | None:
        stream = self.streams[rid, label]
        need = -(-total // self.page_size) - len(stream.pages)
        if need <= 0:
            return None
        pages = self._take(need)
        if pages is None:
            return AllocationFailed(need - len(self.free) - len(self._evictable()), rid, label)
        stream.pages += pages
        return None

    def _take(self, need: int) -> list[int] | None:
        short = need - len(self.free)
        if short > 0:
            if len(self._evictable()) < short:
                return None
            self.evict(short)
        pages = self.free[:need]
        del self.free[:need]
        return pages

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

    def _chosen(self, choose: Callable[[Sequence[int]], int]) -> tuple[Root, Slots]:
        """Ask which of the leaves goes; anything else is a KeyError."""
        leaves = {self.entries[root][ids].page: (root, ids) for root, ids in self._leaves()}
        return leaves[choose(list(leaves))]

    def _age(self, root: Root, ids: Slots) -> tuple[int, int]:
        entry = self.entries[root][ids]
        return entry.stamp, entry.page

    def _leaves(self) -> list[tuple[Root, Slots]]:
        """Entries that may go now."""
        return [
            (root, ids)
            for root, entries in self.entries.items()
            for ids, entry in entries.items()
            if self.owners(entry.page) == 1 and not any(e.parent == ids for e in entries.values())
        ]

    def _evictable(self) -> list[tuple[Root, Slots]]:
        """Entries that could go in some order: nobody names them, nor an entry behind them."""
        pinned = set()
        for root, entries in self.entries.items():
            for ids, entry in entries.items():
                at: Slots | None = ids if self.owners(entry.page) > 1 else None
                while at is not None:
                    pinned.add((root, at))
                    at = entries[at].parent
        return [(root, ids) for root, entries in self.entries.items() for ids in entries if (root, ids) not in pinned]

    def _file(self, stream: NaiveStream, known: list[Slot]) -> None:
        filled = min(stream.stored, len(known)) // self.page_size
        if stream.cursor >= filled:
            return
        entries = self.entries.get(stream.root, {})

        def prefix(num_pages: int) -> Slots:
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

    def _keep_end(self, stream: NaiveStream, known: list[Slot]) -> None:
        """A picture was just written that ends inside a page: keep a copy of the page, if one is free."""
        stop = stream.stored
        position = stop // self.page_size
        entries = self.entries.get(stream.root, {})
        before = tuple(known[: position * self.page_size])
        if not stop % self.page_size or stop > len(stream.prompt) or not is_end(known, stop):
            return
        if not self.free or tuple(known[:stop]) in entries or (position and before not in entries):
            return
        is_counted = position > 0 and self.owners(entries[before].page) > 1
        self.clock += 1
        entry = NaiveEntry(self.free.pop(0), self.clock, before if is_counted else None)
        self.entries.setdefault(stream.root, {})[tuple(known[:stop])] = entry
        self.sealed.add(entry.page)
