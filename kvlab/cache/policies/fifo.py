"""First in, first out."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import count

from kvlab.cache.policies.base import IndexView
from kvlab.cache.policies.leaves import RankHeap, propose


class FIFO:
    """The leaf that entered first goes first; uses change nothing.

    A page enters before those behind it, so a chain goes from its tail back to its first page before a younger leaf goes.
    """

    name = "fifo"

    def attach(self, index: IndexView) -> None:
        self._num_children = index.num_children
        self._arrivals = count(1)
        self._arrived = [0] * index.num_pages
        self._leaves = RankHeap(index.num_children, self._arrived.__getitem__)

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        for page in pages:
            self._arrived[page] = next(self._arrivals)

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        pass

    def became_leaf(self, page: int) -> None:
        self._leaves.add(page)

    def removed(self, page: int) -> None:
        pass

    def candidates(self) -> Generator[int, None, None]:
        return propose(self._leaves.pop, self._leaves.add, self._num_children)
