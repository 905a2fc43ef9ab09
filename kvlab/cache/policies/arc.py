"""Adaptive replacement."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence

from kvlab.cache.policies.base import IndexView
from kvlab.cache.policies.leaves import ELSEWHERE, RankHeap, propose


class ARC:
    """Pages used once (T1) and again (T2), each by last use, and a target size for T1 that follows regret.

    The keys of evicted pages are remembered as ghosts, B1 from T1 and B2 from T2. A page that returns while its key is in B1
    was given up too early: T1's target grows; in B2: it shrinks. Either way the page enters T2. T1 gives up its leaves first
    while it has more pages than its target, else T2; inner pages count in their list and are never proposed.

    As in the paper |T1| + |B1| is at most the pool and so is |B1| + |B2|. Room is made before it is known which page comes,
    so the tie for a page found in B2 is not broken. The target moves by whole pages. Ghosts are named by page key, whatever
    their root.

    Source:
        Megiddo, Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003.
    """

    name = "arc"

    def attach(self, index: IndexView) -> None:
        self._stamps, self._keys, self._num_children = index.stamps, index.keys, index.num_children
        self._capacity = index.num_pages - 1
        self.target = 0  # pages T1 should have
        self._num_t1 = 0
        self._in_t2 = [0] * index.num_pages
        self._t1 = RankHeap(index.num_children, self._t1_rank)
        self._t2 = RankHeap(index.num_children, self._t2_rank)
        self._b1: OrderedDict[bytes, None] = OrderedDict()
        self._b2: OrderedDict[bytes, None] = OrderedDict()

    def _t1_rank(self, page: int) -> int:
        return ELSEWHERE if self._in_t2[page] else self._stamps[page]

    def _t2_rank(self, page: int) -> int:
        return self._stamps[page] if self._in_t2[page] else ELSEWHERE

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        keys, in_t2, b1, b2 = self._keys, self._in_t2, self._b1, self._b2
        num_new = 0
        for page in pages:
            key = keys[page]
            if key in b1 or key in b2:
                self._adapt(key)
                in_t2[page] = 1
            else:
                in_t2[page] = 0
                num_new += 1
        self._num_t1 += num_new
        self._trim()

    def _adapt(self, key: bytes) -> None:
        """A ghost returns: move the target towards the list that lost it, in larger steps the shorter its own ghost list."""
        b1, b2 = self._b1, self._b2
        if key in b1:
            self.target = min(self._capacity, self.target + max(1, len(b2) // len(b1)))
            del b1[key]
        else:
            self.target = max(0, self.target - max(1, len(b1) // len(b2)))
            del b2[key]

    def _trim(self) -> None:
        b1, b2 = self._b1, self._b2
        while b1 and len(b1) + self._num_t1 > self._capacity:
            b1.popitem(last=False)
        while len(b1) + len(b2) > self._capacity:
            (b2 or b1).popitem(last=False)

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        in_t2, num_children = self._in_t2, self._num_children
        for page in pages:
            if not in_t2[page]:
                in_t2[page] = 1
                self._num_t1 -= 1
                if not num_children[page]:
                    self._t2.add(page)

    def became_leaf(self, page: int) -> None:
        (self._t2 if self._in_t2[page] else self._t1).add(page)

    def removed(self, page: int) -> None:
        key, b1, b2 = self._keys[page], self._b1, self._b2
        if key in b1 or key in b2:  # it is cached, or was, under another root too
            (b1 if key in b1 else b2).pop(key)
        if self._in_t2[page]:
            b2[key] = None
        else:
            b1[key] = None
            self._num_t1 -= 1
        self._trim()

    def _pop(self) -> int | None:
        first, second = (self._t1, self._t2) if self._num_t1 > self.target else (self._t2, self._t1)
        page = first.pop()
        return second.pop() if page is None else page

    def candidates(self) -> Generator[int, None, None]:
        return propose(self._pop, self.became_leaf, self._num_children)
