"""Any leaf, by lot."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence

from kvlab.cache.policies.base import IndexView

_NOWHERE = -1
_BITS = 64
_MASK = (1 << _BITS) - 1


class Random:
    """Every leaf is as likely to go as any other.

    A lot is drawn when a page goes and decides which goes next, and next after it if that one may not: asked twice, it proposes
    the same.

    Args:
        seed: another seed, another order.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def attach(self, index: IndexView) -> None:
        self._num_children = index.num_children
        self._lots = random.Random(self._seed)
        self._lot = self._lots.getrandbits(_BITS)
        self._places = [_NOWHERE] * index.num_pages  # by page: its place in the list
        self._leaves: list[int] = []  # and pages that have children since they joined

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        pass

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        pass

    def became_leaf(self, page: int) -> None:
        if self._places[page] == _NOWHERE:
            self._places[page] = len(self._leaves)
            self._leaves.append(page)

    def removed(self, page: int) -> None:
        self._lot = self._lots.getrandbits(_BITS)
        self._drop(page)

    def _drop(self, page: int) -> None:
        """Take ``page`` out of the list; the last one takes its place."""
        place, last = self._places[page], self._leaves.pop()
        self._places[page] = _NOWHERE
        if last != page:
            self._leaves[place], self._places[last] = last, place

    def candidates(self) -> Generator[int, None, None]:
        leaves, num_children = self._leaves, self._num_children
        while leaves:
            lot = self._lot
            page = leaves[lot % len(leaves)]
            if not num_children[page]:
                yield page
                if self._lot != lot:
                    continue
            yield from self._others(lot)
            if self._lot == lot:
                return

    def _others(self, lot: int) -> Generator[int, None, None]:
        """The rest of the list in random order until a page goes: a shuffle that moves nothing."""
        leaves, size, inner = self._leaves, len(self._leaves), list[int]()
        moved: dict[int, int] = {}  # place -> the place whose page would be there by now
        try:
            for drawn in range(size):
                place = drawn + (_mix(lot, drawn) if drawn else lot) % (size - drawn)
                page = leaves[moved.get(place, place)]
                moved[place] = moved.pop(drawn, drawn)
                if self._num_children[page]:
                    inner.append(page)
                elif drawn:
                    yield page
                if self._lot != lot:
                    return
        finally:
            for page in inner if self._lot != lot else ():
                if self._num_children[page]:  # its last child may have gone since
                    self._drop(page)


def _mix(lot: int, number: int) -> int:
    """A draw that follows from a lot."""
    x = (lot ^ lot >> 30) + number * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
