"""S3-FIFO: a small queue for newcomers, a main queue, and ghosts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from itertools import count

from kvlab.cache.policies.base import IndexView
from kvlab.cache.policies.leaves import ELSEWHERE, RankHeap, propose
from kvlab.errors import InputError

_MAX_HITS = 3  # two bits a page


class S3FIFO:
    """Newcomers wait in a small queue; only those hit again before its end reach the main queue.

    A page enters the small queue, or the main one if its key is a ghost. While the small queue has its share of the pool or
    more, its oldest leaf is looked at: with more than one hit it moves to the young end of main, else it goes and leaves a
    ghost. Otherwise main's oldest leaf is: with a hit it moves to the young end for one hit less, else it goes.

    No queue's end ever reaches an inner page, so that one moves to main at its second hit; it counts in its queue like any
    other. Hits are counted up to 3 and forgotten on the way to main. There are as many ghosts as main has room for pages;
    they are named by page key, whatever their root.

    Args:
        small_share: size of the small queue, as a share of the pool.

    Source:
        Yang, Zhang, Qiu, Yue, Rashmi: FIFO Queues are All You Need for Cache Eviction, SOSP 2023.
    """

    name = "s3fifo"

    def __init__(self, small_share: float = 0.1) -> None:
        if not 0 < small_share < 1:
            raise InputError(f"small_share is {small_share!r}; give a share of the pool between 0 and 1")
        self._small_share = small_share

    def attach(self, index: IndexView) -> None:
        self._keys, self._num_children = index.keys, index.num_children
        self._small_pages = max(1, int(self._small_share * (index.num_pages - 1)))
        self._max_ghosts = index.num_pages - 1 - self._small_pages
        self._num_small = 0
        self._arrivals = count(1)
        self._queued = [0] * index.num_pages
        self._hits = [0] * index.num_pages
        self._in_main = [0] * index.num_pages
        self._small = RankHeap(index.num_children, self._small_rank)
        self._main = RankHeap(index.num_children, self._main_rank)
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._spared: list[tuple[int, int, int, int]] = []  # (page, queued, hits, in_main) as they were

    def _small_rank(self, page: int) -> int:
        return ELSEWHERE if self._in_main[page] else self._queued[page]

    def _main_rank(self, page: int) -> int:
        return self._queued[page] if self._in_main[page] else ELSEWHERE

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        keys, ghosts, arrivals = self._keys, self._ghosts, self._arrivals
        queued, hits, in_main = self._queued, self._hits, self._in_main
        num_new = len(pages)
        for page in pages:
            queued[page], hits[page], in_main[page] = next(arrivals), 0, 0
            if keys[page] in ghosts:
                del ghosts[keys[page]]
                in_main[page] = 1
                num_new -= 1
        self._num_small += num_new

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        hits, in_main = self._hits, self._in_main
        for page in pages:
            if hits[page] < _MAX_HITS:
                if in_main[page] or not hits[page]:
                    hits[page] += 1
                elif self._num_children[page]:
                    self._promote(page)
                else:
                    hits[page] = 2  # in the small queue more say no more

    def _promote(self, page: int) -> None:
        self._in_main[page], self._hits[page], self._queued[page] = 1, 0, next(self._arrivals)
        self._num_small -= 1

    def became_leaf(self, page: int) -> None:
        (self._main if self._in_main[page] else self._small).add(page)

    def removed(self, page: int) -> None:
        self._spared.clear()
        if self._in_main[page]:
            return
        self._num_small -= 1
        key, ghosts = self._keys[page], self._ghosts
        ghosts[key] = None
        ghosts.move_to_end(key)  # it may be there: another root's page of the same key
        if len(ghosts) > self._max_ghosts:
            ghosts.popitem(last=False)

    def _pop(self) -> int | None:
        while True:
            is_small_full = self._num_small >= self._small_pages
            page = (self._small if is_small_full else self._main).pop()
            if page is None:
                page = (self._main if is_small_full else self._small).pop()
            if page is None or self._hits[page] <= (not self._in_main[page]):
                return page
            self._spare(page)

    def _spare(self, page: int) -> None:
        """Move a leaf that was hit to the young end of main."""
        self._spared.append((page, self._queued[page], self._hits[page], self._in_main[page]))
        if self._in_main[page]:
            self._hits[page] -= 1
            self._queued[page] = next(self._arrivals)
        else:
            self._promote(page)
        self._main.add(page)

    def candidates(self) -> Generator[int, None, None]:
        return propose(self._pop, self.became_leaf, self._num_children, self._take_back)

    def _take_back(self) -> None:
        """Nothing went since these were spared, so they were not."""
        spared, self._spared = self._spared, []
        for page, queued, hits, in_main in reversed(spared):
            self._num_small += self._in_main[page] - in_main
            self._queued[page], self._hits[page], self._in_main[page] = queued, hits, in_main
        for page, *_ in spared:
            self.became_leaf(page)
