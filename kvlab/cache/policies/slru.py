"""Segmented least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from itertools import count

from kvlab.cache.policies.base import IndexView
from kvlab.cache.policies.leaves import ELSEWHERE, RankHeap, propose
from kvlab.errors import InputError


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
        self._num_children, self._stamps = index.num_children, index.stamps
        self._max_protected = int(self._protected_share * (index.num_pages - 1))
        self._protected: OrderedDict[int, None] = OrderedDict()  # the one used longest ago first
        self._queued = [0] * index.num_pages  # on probation
        self._turns = count(1)
        self._protected_leaves = RankHeap(index.num_children, self._protected_rank)
        self._probation_leaves = RankHeap(index.num_children, self._queued.__getitem__)

    def _protected_rank(self, page: int) -> int:
        return self._stamps[page] if page in self._protected else ELSEWHERE

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        queued, turns = self._queued, self._turns
        for page in pages:
            queued[page] = next(turns)

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        protected, queued, num_children = self._protected, self._queued, self._num_children
        use = protected.move_to_end
        for page in reversed(pages):
            if queued[page] == ELSEWHERE:
                use(page)
            else:
                queued[page] = ELSEWHERE
                protected[page] = None
                if not num_children[page]:
                    self._protected_leaves.add(page)
        while len(protected) > self._max_protected:
            page, _ = protected.popitem(last=False)
            queued[page] = next(self._turns)
            self._probation_leaves.add(page)

    def became_leaf(self, page: int) -> None:
        (self._protected_leaves if page in self._protected else self._probation_leaves).add(page)

    def removed(self, page: int) -> None:
        self._protected.pop(page, None)

    def _pop(self) -> int | None:
        page = self._probation_leaves.pop()
        return self._protected_leaves.pop() if page is None else page

    def candidates(self) -> Generator[int, None, None]:
        return propose(self._pop, self.became_leaf, self._num_children)
