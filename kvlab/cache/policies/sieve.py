"""SIEVE: one queue, one bit a page, and a hand."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from kvlab.cache.policies.base import IndexView

_LAP = 1 << 48
_PAGE_BITS = 32
_PAGE_MASK = (1 << _PAGE_BITS) - 1


class SIEVE:
    """A hand goes from the oldest page to the youngest and round again; it takes marks off, and an unmarked leaf goes.

    A use marks every page of the chain it matched. Pages never move; new ones join at the young end. The hand stops at leaves
    only, so an inner page keeps its mark until it is a leaf; one that became a leaf behind the hand waits for the next lap. A
    leaf that is in use is passed like one that is not there.

    A page's turn is lap x 2^48 + its arrival: the turns of all leaves in order are the way of the hand.

    Source:
        Zhang, Yang, Yue, Vigfusson, Rashmi: SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches,
        NSDI 2024.
    """

    name = "sieve"

    def attach(self, index: IndexView) -> None:
        self._num_children = index.num_children
        self._arrivals = count(1)
        self._arrived = [0] * index.num_pages
        self._turns = [0] * index.num_pages
        self._is_marked = [0] * index.num_pages
        self._hand = 0  # turn of the page that went last
        self._lap = 0  # its lap x 2^48
        self._is_entered = [0] * index.num_pages
        self._heap: list[int] = []  # turn << 32 | page: one entry a leaf, and those of leaves that got children
        self._unmarked: list[int] = []  # by the hand since a page went

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        arrived, turns, is_marked, lap = self._arrived, self._turns, self._is_marked, self._lap
        for page in pages:
            arrived[page] = arrival = next(self._arrivals)
            turns[page] = lap + arrival
            is_marked[page] = 0

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        is_marked = self._is_marked
        for page in pages:
            is_marked[page] = 1

    def became_leaf(self, page: int) -> None:
        if self._is_entered[page]:
            return
        turn, hand = self._turns[page], self._hand
        if turn < hand:
            turn = self._lap + self._arrived[page]
            if turn < hand:
                turn += _LAP
            self._turns[page] = turn
        self._is_entered[page] = 1
        heappush(self._heap, turn << _PAGE_BITS | page)

    def removed(self, page: int) -> None:
        if self._unmarked:
            self._unmarked.clear()
        self._hand = turn = self._turns[page]
        self._lap = turn - self._arrived[page]

    def candidates(self) -> Generator[int, None, None]:
        heap, num_children, is_marked, is_entered = self._heap, self._num_children, self._is_marked, self._is_entered
        passed_over: list[int] = []
        try:
            while heap:
                page = heap[0] & _PAGE_MASK
                if is_marked[page] and not num_children[page]:
                    is_marked[page] = 0
                    self._unmarked.append(page)
                    self._turns[page] = turn = self._turns[page] + _LAP
                    heapreplace(heap, turn << _PAGE_BITS | page)
                    continue
                heappop(heap)
                is_entered[page] = 0
                if not num_children[page]:
                    passed_over.append(page)
                    yield page
                    if num_children[page] < 0:
                        passed_over.pop()
        finally:
            for page in passed_over:
                if not num_children[page]:
                    self.became_leaf(page)
            self._take_back()

    def _take_back(self) -> None:
        """Nothing went since the hand took these marks off, so it did not."""
        for page in self._unmarked:
            self._is_marked[page] = 1
            self._turns[page] -= _LAP
        if self._unmarked:
            self._unmarked.clear()
            self._heap[:] = [self._turns[page] << _PAGE_BITS | page for page in (entry & _PAGE_MASK for entry in self._heap)]
            heapify(self._heap)
