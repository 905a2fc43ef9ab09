"""Least frequently used."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from kvlab.cache.policies.base import IndexView
from kvlab.cache.policies.leaves import RankHeap, propose

_STAMP_BITS = 64


class LFU:
    """The leaf with the fewest uses goes first, of equals the one used longest ago.

    Uses are counted while a page is cached, its insertion as the first; there is no ageing. A use of a page is one of every
    page before it, so an inner page is never worth less than its leaves.
    """

    name = "lfu"

    def attach(self, index: IndexView) -> None:
        self._num_children = index.num_children
        self._stamps = index.stamps
        self._uses = [0] * index.num_pages
        self._leaves = RankHeap(index.num_children, self._rank)

    def _rank(self, page: int) -> int:
        return self._uses[page] << _STAMP_BITS | self._stamps[page]

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        for page in pages:
            self._uses[page] = 1

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        uses = self._uses
        for page in pages:
            uses[page] += 1

    def became_leaf(self, page: int) -> None:
        self._leaves.add(page)

    def removed(self, page: int) -> None:
        pass

    def candidates(self) -> Generator[int, None, None]:
        return propose(self._leaves.pop, self._leaves.add, self._num_children)
