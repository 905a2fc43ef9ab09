"""Leases of the naive twin: what a look-up takes, where it may end, and how it becomes what a stream stores."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.cache.naive_pool import NaiveEntry, NaivePool, NaiveStream
from kvlab.cache.naive_prompts import Slot, Slots, is_end, part_at
from kvlab.errors import InputError


class NaiveLeases(NaivePool):
    """A pool whose streams lease what is cached."""

    def _lent(self, stream: NaiveStream) -> int:
        return stream.stored if stream.converted else self.leased(stream)

    def _look_up(self, stream: NaiveStream, known: list[Slot]) -> None:
        matched = []
        entries = self.entries.get(stream.root, {})
        for end in range(self.page_size, len(known) + 1, self.page_size):
            if tuple(known[:end]) not in entries:
                break
            matched.append(entries[tuple(known[:end])])
        self._touch(matched)
        whole = bool(stream.layout) and is_end(known, len(known))  # no logits are wanted of a picture
        matched = matched[: (len(known) - (not whole)) // self.page_size]
        keep, at = self._end_well(stream, known, len(matched))
        stream.lease = [entry.page for entry in matched][:keep]
        if at is not None and (pages := self._page_beside(entries[at].page)) is not None:
            stream.lease += pages
            stream.own = len(at) % self.page_size

    def _touch(self, entries: Sequence[NaiveEntry]) -> None:
        self.clock += bool(entries)
        for entry in entries:
            entry.stamp = self.clock

    def _end_well(self, stream: NaiveStream, known: list[Slot], num_pages: int) -> tuple[int, Slots | None]:
        """Whole pages to lend, and the entry that lends what comes after them up to a picture's end."""
        entries = self.entries.get(stream.root, {})
        while True:
            begin = num_pages * self.page_size
            for stop in range(min(begin + self.page_size - 1, len(known)), begin, -1):
                if is_end(known, stop) and tuple(known[:stop]) in entries:
                    return num_pages, tuple(known[:stop])
            part = part_at(known, begin)
            if part is None:
                return num_pages, None
            num_pages = (begin - part.offset) // self.page_size

    def _page_beside(self, page: int) -> list[int] | None:
        """A page to copy ``page`` to, or that page itself where no other is left."""
        self._touch([e for entries in self.entries.values() for e in entries.values() if e.page == page])
        self.held = [page]
        pages = self._take(1)
        self.held = []
        return self._take(1) if pages is None else pages

    def _trim(self, stream: NaiveStream, count: int, agreed: int) -> None:
        if not stream.layout:
            self._drop_lease(stream, -(-agreed // self.page_size))
            return
        target = stream.walked + agreed
        if target >= min(self.leased(stream), stream.walked + count):
            return
        if target % self.page_size or part_at(stream.prompt, target):
            raise InputError("agreed slots end inside a page")
        self._drop_lease(stream, target // self.page_size)

    def _convert(self, stream: NaiveStream) -> None:
        if stream.stored or not stream.lease:
            return
        if not stream.agreed and stream.walked != self.leased(stream):
            self._drop_lease(stream, stream.walked // self.page_size)
        if stream.lease:
            self._become_stored(stream)

    def _become_stored(self, stream: NaiveStream) -> None:
        if not stream.lease:
            return
        self._drop_pages(stream)
        stream.stored = self.leased(stream)
        stream.pages, stream.lease, stream.own = stream.lease, [], 0
        stream.cursor, stream.converted = stream.stored // self.page_size, True
