"""The best there can be, for replays that know the future."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterable, Sequence

from kvlab.cache.policies.base import IndexView
from kvlab.cache.policies.leaves import RankHeap, propose
from kvlab.errors import InputError

_STAMP_BITS = 64


class Belady:
    """The leaf whose next use is farthest in the future goes first, of equals the one used longest ago.

    A use of a page is one of every page before it, so the page used farthest in the future is always found among the leaves,
    and the leaf rule costs nothing.

    Args:
        future: the page keys of each request to come, in order. The replay calls ``advance`` as each of them begins.

    Source:
        Belady: A Study of Replacement Algorithms for a Virtual-Storage Computer, IBM Systems Journal 5(2), 1966.
    """

    name = "belady"

    def __init__(self, future: Iterable[Sequence[bytes]] | None = None) -> None:
        if future is None:
            raise InputError(
                "policy belady must know the future, so its name alone makes none; pass Belady(future=[keys of each request, "
                "in order]) where a replay knows them, or take another policy, for example lru"
            )
        self._future = [tuple(keys) for keys in future]
        self._uses: dict[bytes, list[int]] = {}  # key -> numbers of the requests that use it
        for number, keys in enumerate(self._future):
            for key in dict.fromkeys(keys):
                self._uses.setdefault(key, []).append(number)
        self._now = 0  # number of the next request

    def attach(self, index: IndexView) -> None:
        self._num_children = index.num_children
        self._stamps, self._keys = index.stamps, index.keys
        self._next_use = [0] * index.num_pages
        self._pages: dict[bytes, set[int]] = {}  # one a root
        self._leaves = RankHeap(index.num_children, self._rank)

    def advance(self) -> None:
        """The next request begins: what it uses counts as used, and only later uses keep a page."""
        keys = self._future[self._now] if self._now < len(self._future) else ()
        self._now += 1
        for key in keys:
            for page in self._pages.get(key, ()):
                self._next_use[page] = self._use_after(key)
                self._leaves.add(page)

    def _use_after(self, key: bytes) -> int:
        uses = self._uses.get(key, [])
        place = bisect_left(uses, self._now)
        return uses[place] if place < len(uses) else len(self._future)

    def _rank(self, page: int) -> int:
        return len(self._future) - self._next_use[page] << _STAMP_BITS | self._stamps[page]

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        for page in pages:
            key = self._keys[page]
            self._pages.setdefault(key, set()).add(page)
            self._next_use[page] = self._use_after(key)

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        pass

    def became_leaf(self, page: int) -> None:
        self._leaves.add(page)

    def removed(self, page: int) -> None:
        key = self._keys[page]
        pages = self._pages[key]
        pages.discard(page)
        if not pages:
            del self._pages[key]

    def candidates(self) -> Generator[int, None, None]:
        return propose(self._leaves.pop, self._leaves.add, self._num_children)
