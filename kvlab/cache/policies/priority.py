"""Least recently used within priorities that requests ask for, for a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from kvlab.cache.policies.base import IndexView
from kvlab.cache.policies.leaves import ELSEWHERE, RankHeap, propose
from kvlab.errors import InputError
from kvlab.spec import DEFAULT_PRIORITY, MAX_PRIORITY

_STAMP_BITS = 64


class Priority:
    """The leaf of the lowest priority goes first, of equals the one used longest ago.

    A page has the default priority unless ``retain`` gave it another, which counts until it expires; the latest call decides.
    An inner page goes after what is behind it, whatever their priorities. A page that goes takes its priority with it.

    Args:
        clock: seconds, monotone; read when pages are retained and when room is made.
        default: priority of pages nobody asked to retain.
    """

    name = "priority"

    def __init__(self, clock: Callable[[], float] = time.monotonic, default: int = DEFAULT_PRIORITY) -> None:
        if not 0 <= default <= MAX_PRIORITY:
            raise InputError(f"the default priority is {default!r}; give a whole number from 0 to {MAX_PRIORITY}")
        self._clock, self._default = clock, default

    def attach(self, index: IndexView) -> None:
        self._num_children = index.num_children
        self._stamps, self._keys = index.stamps, index.keys
        self._start_s = self._clock()
        self._priorities = [self._default] * index.num_pages
        self._is_timeless = [1] * index.num_pages
        self._expires_ns = [ELSEWHERE] * index.num_pages
        self._expiries = RankHeap(self._is_timeless, self._expires_ns.__getitem__)
        self._leaves = RankHeap(index.num_children, self._rank)

    def _rank(self, page: int) -> int:
        return self._priorities[page] << _STAMP_BITS | self._stamps[page]

    def _now_ns(self) -> int:
        return int((self._clock() - self._start_s) * 1e9)

    def retain(self, pages: Sequence[int], priority: int, duration_s: float | None) -> None:
        until_ns = ELSEWHERE if duration_s is None else self._now_ns() + int(duration_s * 1e9)
        for page in pages:
            if self._keys[page]:
                self._expires_ns[page], self._is_timeless[page] = until_ns, int(duration_s is None)
                self._expiries.add(page)
                self._set_priority(page, priority)

    def _set_priority(self, page: int, priority: int) -> None:
        self._priorities[page] = priority
        self._leaves.add(page)

    def _expire(self) -> None:
        now_ns = self._now_ns()
        while (page := self._expiries.pop()) is not None:
            if self._expires_ns[page] > now_ns:
                self._expiries.add(page)
                return
            self._is_timeless[page] = 1
            self._set_priority(page, self._default)

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        pass

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        pass

    def became_leaf(self, page: int) -> None:
        self._leaves.add(page)

    def removed(self, page: int) -> None:
        self._priorities[page], self._is_timeless[page] = self._default, 1

    def candidates(self) -> Generator[int, None, None]:
        self._expire()
        return propose(self._leaves.pop, self._leaves.add, self._num_children)
