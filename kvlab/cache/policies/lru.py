"""Least recently used leaf first."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from heapq import heappop, heappush, heapreplace

from kvlab.cache.policies.base import IndexView

_PAGE_BITS = 32
_PAGE_MASK = (1 << _PAGE_BITS) - 1


class LRU:
    """A heap of leaves by the stamp they had when they were pushed.

    A lookup pushes nothing. An entry older than its page is pushed back under the page's stamp when it surfaces, so ten
    thousand reads of one leaf leave one entry, and there is never more than one entry a page: the entry of a page that
    got children is older than theirs, hence gone before the page can be a leaf again.
    """

    name = "lru"

    def __init__(self) -> None:
        self._heap: list[int] = []  # stamp << 32 | page: one int an entry

    def __len__(self) -> int:
        return len(self._heap)

    def attach(self, index: IndexView) -> None:
        self._num_children, self._stamps = index.num_children, index.stamps
        self._heap.clear()

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        pass

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        pass

    def became_leaf(self, page: int) -> None:
        heappush(self._heap, self._stamps[page] << _PAGE_BITS | page)

    def removed(self, page: int) -> None:
        pass

    def candidates(self) -> Generator[int, None, None]:
        heap, num_children, stamps = self._heap, self._num_children, self._stamps
        passed_over: list[int] = []
        try:
            while heap:
                entry = heap[0]
                page = entry & _PAGE_MASK
                if num_children[page]:
                    heappop(heap)
                    continue
                current = stamps[page] << _PAGE_BITS | page
                if entry != current:
                    heapreplace(heap, current)
                    continue
                passed_over.append(heappop(heap))
                yield page
                if num_children[page]:
                    passed_over.pop()  # it was evicted
        finally:
            for entry in passed_over:
                if not num_children[entry & _PAGE_MASK]:
                    heappush(heap, entry)
