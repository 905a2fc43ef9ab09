"""Segmented least recently used."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import count

from kvlab.cache.policies.base import IndexView
from kvlab.cache.policies.leaves import ELSEWHERE, RankHeap, propose
from kvlab.errors import InputError

_ORDER_BITS = 64
_LAST = (1 << _ORDER_BITS) - 1


class SLRU:
    """Pages used once are on probation, pages used again are protected; those on probation go first.

    A use protects every page of the chain it matched. While too many pages are protected, the one used longest ago goes back to
    the young end of probation, of a chain its last page first. Each segment gives up its leaves in its own order: probation by
    arrival there, protected by last use.

    Args:
        protected_share: most protected pages, as a share of the pool.

    Source:
        Karedla, Love, Wherry: Caching Strategies to Improve Disk System Performance, IEEE Computer 27(3), 1994.
    """

    name = "slru"

    def __init__(self, protected_share: float = 0.8) -> None:
        if not 0 <= protected_share <= 1:
            raise InputError(f"protected_share is {protected_share!r}; give a share of the pool from 0 to 1")
        self._protected_share = protected_share

    def attach(self, index: IndexView) -> None:
        self._stamps = index.stamps
        self._max_protected = int(self._protected_share * (index.num_pages - 1))
        self._num_protected = 0
        self._unprotected = [1] * index.num_pages
        self._moves = count(1)
        self._arrived = [0] * index.num_pages  # in the index
        self._queued = [0] * index.num_pages  # on probation
        self._protected = RankHeap(self._unprotected, self._demotion_rank)
        self._protected_leaves = RankHeap(index.num_children, self._protected_rank)
        self._probation_leaves = RankHeap(index.num_children, self._probation_rank)

    def _demotion_rank(self, page: int) -> int:
        return self._stamps[page] << _ORDER_BITS | _LAST - self._arrived[page]  # what is behind a page arrived after it

    def _protected_rank(self, page: int) -> int:
        return ELSEWHERE if self._unprotected[page] else self._stamps[page]

    def _probation_rank(self, page: int) -> int:
        return self._queued[page] if self._unprotected[page] else ELSEWHERE

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        arrived, queued, moves = self._arrived, self._queued, self._moves
        for page in pages:
            arrived[page] = queued[page] = next(moves)

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        unprotected = self._unprotected
        for page in pages:
            if unprotected[page]:
                unprotected[page] = 0
                self._num_protected += 1
                self._protected.add(page)
                self._protected_leaves.add(page)
        while self._num_protected > self._max_protected and (page := self._protected.pop()) is not None:
            unprotected[page], self._queued[page] = 1, next(self._moves)
            self._num_protected -= 1
            self._probation_leaves.add(page)

    def became_leaf(self, page: int) -> None:
        (self._probation_leaves if self._unprotected[page] else self._protected_leaves).add(page)

    def removed(self, page: int) -> None:
        self._num_protected -= not self._unprotected[page]
        self._unprotected[page] = 1

    def _pop(self) -> int | None:
        page = self._probation_leaves.pop()
        return self._protected_leaves.pop() if page is None else page

    def candidates(self) -> Generator[int, None, None]:
        return propose(self._pop, self.became_leaf)
