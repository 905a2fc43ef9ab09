"""SIEVE: one queue, one bit a page, and a hand."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import count

from kvlab.cache.policies.base import IndexView
from kvlab.cache.policies.leaves import RankHeap, propose

_LAP = 1 << 64


class SIEVE:
    """A hand goes from the oldest page to the youngest, and round again: it takes the mark off used pages, and an unused one goes.

    A use marks every page of the chain it matched. Pages never move; new ones join at the young end. The hand stops at leaves only,
    so an inner page keeps its mark until it is a leaf; one that became a leaf behind the hand waits for the next lap. A leaf that
    is in use is passed like one that is not there.

    A page's turn is lap x 2^64 + its arrival: the turns of all leaves in order are the way of the hand.

    Source:
        Zhang, Yang, Yue, Vigfusson, Rashmi: SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches,
        NSDI 2024.
    """

    name = "sieve"

    def attach(self, index: IndexView) -> None:
        self._arrivals = count(1)
        self._is_marked = [0] * index.num_pages
        self._turns = [0] * index.num_pages
        self._hand = 0  # turn of the page that went last
        self._leaves = RankHeap(index.num_children, self._turns.__getitem__)
        self._unmarked: list[int] = []

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        lap = self._hand - self._hand % _LAP
        for page in pages:
            self._turns[page] = lap + next(self._arrivals)
            self._is_marked[page] = 0

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        is_marked = self._is_marked
        for page in pages:
            is_marked[page] = 1

    def became_leaf(self, page: int) -> None:
        turn = self._turns[page]
        if turn < self._hand:
            turn = self._hand - self._hand % _LAP + turn % _LAP
            self._turns[page] = turn + _LAP if turn < self._hand else turn
        self._leaves.add(page)

    def removed(self, page: int) -> None:
        self._unmarked.clear()
        self._hand = self._turns[page]

    def _pop(self) -> int | None:
        while (page := self._leaves.pop()) is not None and self._is_marked[page]:
            self._unmarked.append(page)
            self._is_marked[page] = 0
            self._turns[page] += _LAP
            self._leaves.add(page)
        return page

    def candidates(self) -> Generator[int, None, None]:
        try:
            yield from propose(self._pop, self.became_leaf)
        finally:
            self._take_back()

    def _take_back(self) -> None:
        """Nothing went since the hand took these marks off, so it did not."""
        unmarked, self._unmarked = self._unmarked, []
        for page in unmarked:
            self._is_marked[page] = 1
            self._turns[page] -= _LAP
            self._leaves.add(page)
