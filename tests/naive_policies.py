"""The eviction policies done the slow, obvious way: plain lists, looked through from the front, and one victim at a time.

A twin is told what the policy is told, and asked which of the leaves goes next; ``live`` are those in use, which may not go.
Where two pages are equal in a policy's eyes the lower page number goes first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvlab.cache.policies.random import _mix


class Twin:
    """Keeps the key and the stamp of every page."""

    def __init__(self, num_usable: int) -> None:
        self.num_usable = num_usable
        self.keys: dict[int, bytes] = {}
        self.stamps: dict[int, int] = {}
        self.seen: dict[str, int] = {}  # what a run must have met to mean anything

    def see(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def inserted(self, pages: Sequence[int], keys: Sequence[bytes], stamp: int) -> None:
        for page, key in zip(pages, keys, strict=True):
            self.keys[page], self.stamps[page] = key, stamp
            self.enter(page)

    def enter(self, page: int) -> None: ...

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        for page in pages:
            self.stamps[page] = stamp

    def became_leaf(self, page: int) -> None: ...

    def pick(self, leaves: list[int], live: set[int]) -> int:
        raise NotImplementedError

    def removed(self, page: int) -> None:
        del self.keys[page], self.stamps[page]

    def settle(self, leaves: list[int]) -> None:
        """A page was removed, and ``leaves`` are left."""


class NaiveLRU(Twin):
    def pick(self, leaves: list[int], live: set[int]) -> int:
        return min((p for p in leaves if p not in live), key=lambda p: (self.stamps[p], p))


class NaiveFIFO(Twin):
    def __init__(self, num_usable: int) -> None:
        super().__init__(num_usable)
        self.queue: list[int] = []

    def enter(self, page: int) -> None:
        self.queue.append(page)

    def pick(self, leaves: list[int], live: set[int]) -> int:
        return next(p for p in self.queue if p in leaves and p not in live)

    def removed(self, page: int) -> None:
        super().removed(page)
        self.queue.remove(page)


class NaiveLFU(Twin):
    def __init__(self, num_usable: int) -> None:
        super().__init__(num_usable)
        self.uses: dict[int, int] = {}

    def enter(self, page: int) -> None:
        self.uses[page] = 1

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        super().touched(pages, stamp)
        for page in pages:
            self.uses[page] += 1

    def pick(self, leaves: list[int], live: set[int]) -> int:
        return min((p for p in leaves if p not in live), key=lambda p: (self.uses[p], self.stamps[p], p))


class NaiveSLRU(Twin):
    def __init__(self, num_usable: int, protected_share: float = 0.8) -> None:
        super().__init__(num_usable)
        self.max_protected = int(protected_share * num_usable)
        self.probation: list[int] = []
        self.protected: list[int] = []

    def enter(self, page: int) -> None:
        self.probation.append(page)

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        super().touched(pages, stamp)
        for page in reversed(pages):
            (self.probation if page in self.probation else self.protected).remove(page)
            self.protected.append(page)
        while len(self.protected) > self.max_protected:
            self.probation.append(self.protected.pop(0))
            self.see("demotions")

    def pick(self, leaves: list[int], live: set[int]) -> int:
        able = [p for p in leaves if p not in live]
        if waiting := [p for p in self.probation if p in able]:
            return waiting[0]
        self.see("protected victims")
        return min(able, key=lambda p: (self.stamps[p], p))

    def removed(self, page: int) -> None:
        super().removed(page)
        (self.probation if page in self.probation else self.protected).remove(page)


class NaiveARC(Twin):
    def __init__(self, num_usable: int) -> None:
        super().__init__(num_usable)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.target = 0

    def enter(self, page: int) -> None:
        key = self.keys[page]
        if key in self.b1:
            self.see("ghosts of T1")
            self.target = min(self.num_usable, self.target + max(1, len(self.b2) // len(self.b1)))
            self.b1.remove(key)
            self.t2.append(page)
        elif key in self.b2:
            self.see("ghosts of T2")
            self.target = max(0, self.target - max(1, len(self.b1) // len(self.b2)))
            self.b2.remove(key)
            self.t2.append(page)
        else:
            self.t1.append(page)

    def inserted(self, pages: Sequence[int], keys: Sequence[bytes], stamp: int) -> None:
        super().inserted(pages, keys, stamp)
        self.trim()

    def trim(self) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > self.num_usable:
            del self.b1[0]
        while len(self.b1) + len(self.b2) > self.num_usable:
            del (self.b2 or self.b1)[0]

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        super().touched(pages, stamp)
        for page in pages:
            if page in self.t1:
                self.t1.remove(page)
                self.t2.append(page)

    def pick(self, leaves: list[int], live: set[int]) -> int:
        first, second = (self.t1, self.t2) if len(self.t1) > self.target else (self.t2, self.t1)
        for pages in (first, second):
            able = [p for p in leaves if p in pages and p not in live]
            if able:
                return min(able, key=lambda p: (self.stamps[p], p))
        raise AssertionError("nothing can go")

    def removed(self, page: int) -> None:
        key = self.keys[page]
        for ghosts in (self.b1, self.b2):
            if key in ghosts:
                ghosts.remove(key)
        if page in self.t1:
            self.t1.remove(page)
            self.b1.append(key)
        else:
            self.t2.remove(page)
            self.b2.append(key)
        self.trim()
        super().removed(page)


class NaiveS3FIFO(Twin):
    def __init__(self, num_usable: int, small_share: float = 0.1) -> None:
        super().__init__(num_usable)
        self.small_pages = max(1, int(small_share * num_usable))
        self.small: list[int] = []
        self.main: list[int] = []
        self.hits: dict[int, int] = {}
        self.ghosts: list[bytes] = []
        self.leaves: Callable[[], list[int]] = list

    def enter(self, page: int) -> None:
        self.hits[page] = 0
        if self.keys[page] in self.ghosts:
            self.see("ghosts")
            self.ghosts.remove(self.keys[page])
            self.main.append(page)
        else:
            self.small.append(page)

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        super().touched(pages, stamp)
        leaves = self.leaves()
        for page in pages:
            self.hits[page] = min(3, self.hits[page] + 1)
            if page in self.small and self.hits[page] > 1 and page not in leaves:
                self.promote(page)

    def promote(self, page: int) -> None:
        self.small.remove(page)
        self.main.append(page)
        self.hits[page] = 0

    def pick(self, leaves: list[int], live: set[int]) -> int:
        passed: set[int] = set()
        while True:
            small = [p for p in self.small if p in leaves and p not in passed]
            main = [p for p in self.main if p in leaves and p not in passed]
            page = ((small or main) if len(self.small) >= self.small_pages else (main or small))[0]
            if page in self.small and self.hits[page] > 1:
                self.see("promotions")
                self.promote(page)
            elif page in self.main and self.hits[page] > 0:
                self.see("second chances")
                self.hits[page] -= 1
                self.main.remove(page)
                self.main.append(page)
            elif page in live:
                passed.add(page)
            else:
                return page

    def removed(self, page: int) -> None:
        key = self.keys[page]
        if page in self.small:
            self.small.remove(page)
            if key in self.ghosts:
                self.ghosts.remove(key)
            self.ghosts.append(key)
            del self.ghosts[: max(0, len(self.ghosts) - (self.num_usable - self.small_pages))]
        else:
            self.main.remove(page)
        super().removed(page)


class NaiveSIEVE(Twin):
    """The hand stands between two places of the queue: ``hand`` pages are behind it."""

    def __init__(self, num_usable: int) -> None:
        super().__init__(num_usable)
        self.queue: list[int] = []
        self.marked: set[int] = set()
        self.hand = 0

    def enter(self, page: int) -> None:
        self.queue.append(page)

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        super().touched(pages, stamp)
        self.marked.update(pages)

    def pick(self, leaves: list[int], live: set[int]) -> int:
        while True:
            if self.hand == len(self.queue):
                self.hand = 0
                self.see("laps")
            page = self.queue[self.hand]
            if page in leaves and page not in live and page not in self.marked:
                return page
            if page in leaves and page in self.marked:
                self.see("second chances")
                self.marked.remove(page)
            self.hand += 1

    def removed(self, page: int) -> None:
        super().removed(page)
        self.hand -= self.queue.index(page) < self.hand
        self.queue.remove(page)
        self.marked.discard(page)


class NaiveRandom(Twin):
    """Shuffles a copy with the policy's own dice."""

    def __init__(self, num_usable: int, seed: int = 0) -> None:
        super().__init__(num_usable)
        self.lots = random.Random(seed)
        self.lot = self.lots.getrandbits(64)
        self.listed: list[int] = []
        self.met_inner: list[int] = []

    def became_leaf(self, page: int) -> None:
        if page not in self.listed:
            self.listed.append(page)

    def settle(self, leaves: list[int]) -> None:
        for page in self.met_inner:
            if page not in leaves:
                self.drop(page)
        self.met_inner = []

    def drop(self, page: int) -> None:
        place, last = self.listed.index(page), self.listed.pop()
        if last != page:
            self.listed[place] = last

    def pick(self, leaves: list[int], live: set[int]) -> int:
        order = list(self.listed)
        for drawn in range(len(order)):
            place = drawn + (_mix(self.lot, drawn) if drawn else self.lot) % (len(order) - drawn)
            order[drawn], order[place] = order[place], order[drawn]
            page = order[drawn]
            if page in leaves and page not in live:
                return page
            if page not in leaves:
                self.see("inner pages")
                self.met_inner.append(page)
        raise AssertionError("nothing can go")

    def removed(self, page: int) -> None:
        super().removed(page)
        self.lot = self.lots.getrandbits(64)
        self.drop(page)


class NaivePriority(NaiveLRU):
    def __init__(self, num_usable: int, clock: Callable[[], float]) -> None:
        super().__init__(num_usable)
        self.clock = clock
        self.asked: dict[int, tuple[int, float]] = {}  # page -> priority, until when

    def retain(self, pages: Sequence[int], priority: int, duration_s: float | None) -> None:
        until = float("inf") if duration_s is None else self.clock() + duration_s
        self.asked.update((page, (priority, until)) for page in pages)

    def priority(self, page: int) -> int:
        priority, until = self.asked.get(page, (50, float("inf")))
        if until <= self.clock():
            self.see("expiries")
            return 50
        return priority

    def pick(self, leaves: list[int], live: set[int]) -> int:
        return min((p for p in leaves if p not in live), key=lambda p: (self.priority(p), self.stamps[p], p))

    def removed(self, page: int) -> None:
        super().removed(page)
        self.asked.pop(page, None)


class NaiveBelady(Twin):
    def __init__(self, num_usable: int, future: Sequence[Sequence[bytes]]) -> None:
        super().__init__(num_usable)
        self.future, self.now = future, 0

    def advance(self) -> None:
        self.now += 1

    def next_use(self, page: int) -> int:
        uses = (n for n in range(self.now, len(self.future)) if self.keys[page] in self.future[n])
        return next(uses, len(self.future))

    def pick(self, leaves: list[int], live: set[int]) -> int:
        return min((p for p in leaves if p not in live), key=lambda p: (-self.next_use(p), self.stamps[p], p))


#: By the policy's name; each is made with the usable pages and what the policy itself is made with.
TWINS: dict[str, Callable[..., Any]] = {
    "arc": NaiveARC,
    "belady": NaiveBelady,
    "fifo": NaiveFIFO,
    "lfu": NaiveLFU,
    "lru": NaiveLRU,
    "priority": NaivePriority,
    "random": NaiveRandom,
    "s3fifo": NaiveS3FIFO,
    "sieve": NaiveSIEVE,
    "slru": NaiveSLRU,
}
