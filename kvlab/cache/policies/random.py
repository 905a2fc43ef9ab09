"""Any leaf, by lot."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from kvlab.cache.policies.base import IndexView

_MASK = (1 << 64) - 1


class Random:
    """Every leaf is as likely to go as any other.

    The draws are a function of the seed and of how many pages went before: asked twice, it proposes the same.

    Args:
        seed: another seed, another order.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def attach(self, index: IndexView) -> None:
        self._num_children = index.num_children
        self._num_removed = 0
        self._places: dict[int, int] = {}  # page -> its place in the list
        self._leaves: list[int] = []  # and pages that have children since they joined

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        pass

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        pass

    def became_leaf(self, page: int) -> None:
        if page not in self._places:
            self._places[page] = len(self._leaves)
            self._leaves.append(page)

    def removed(self, page: int) -> None:
        self._num_removed += 1
        self._drop(page)

    def _drop(self, page: int) -> None:
        """Take ``page`` out of the list; the last one takes its place."""
        place, last = self._places.pop(page), self._leaves.pop()
        if last != page:
            self._leaves[place], self._places[last] = last, place

    def _drop_inner(self, pages: list[int]) -> None:
        for page in pages:
            if self._num_children[page]:  # its last child may have gone since
                self._drop(page)

    def candidates(self) -> Generator[int, None, None]:
        while True:
            num_removed, inner = self._num_removed, []
            try:
                for page in self._shuffled():
                    if self._num_children[page]:
                        inner.append(page)
                        continue
                    yield page
                    if self._num_removed != num_removed:
                        break
                else:
                    return
            finally:
                if self._num_removed != num_removed:
                    self._drop_inner(inner)

    def _shuffled(self) -> Generator[int, None, None]:
        """The list in random order, one draw a page: a shuffle that moves nothing."""
        leaves, size = self._leaves, len(self._leaves)
        moved: dict[int, int] = {}  # place -> the place whose page would be there by now
        for drawn in range(size):
            place = drawn + self._draw(drawn) % (size - drawn)
            yield leaves[moved.get(place, place)]
            moved[place] = moved.pop(drawn, drawn)

    def _draw(self, number: int) -> int:
        x = (self._seed * 0xD1342543DE82EF95 + self._num_removed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) & _MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        return x ^ x >> 31
