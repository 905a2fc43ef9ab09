"""Every eviction policy against its naive twin: the same victim at every eviction, whatever is live meanwhile."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any

import pytest
from naive_policies import TWINS

from kvlab.cache.arena import PageArena
from kvlab.cache.index import PrefixIndex
from kvlab.cache.policies import POLICIES, IndexView
from kvlab.cache.policies.arc import ARC
from kvlab.cache.policies.belady import Belady
from kvlab.cache.policies.fifo import FIFO
from kvlab.cache.policies.lfu import LFU
from kvlab.cache.policies.lru import LRU
from kvlab.cache.policies.priority import Priority
from kvlab.cache.policies.random import Random
from kvlab.cache.policies.s3fifo import S3FIFO
from kvlab.cache.policies.sieve import SIEVE
from kvlab.cache.policies.slru import SLRU

ROOTS = [b"root", b"root", b"other root"]
NUM_PAGES = 41


def names(text: str) -> list[bytes]:
    return [text[: n + 1].encode() for n in range(len(text))]


class Told:
    """Passes on what a policy is told, to it and to its twin."""

    def __init__(self, policy: Any, twin: Any) -> None:
        self.policy, self.twin, self.name = policy, twin, policy.name
        self.is_evicting = False

    def attach(self, index: IndexView) -> None:
        self.keys = index.keys
        self.policy.attach(index)

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        self.policy.inserted(pages, stamp)
        self.twin.inserted(pages, [self.keys[page] for page in pages], stamp)

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        self.policy.touched(pages, stamp)
        self.twin.touched(pages, stamp)

    def became_leaf(self, page: int) -> None:
        self.policy.became_leaf(page)
        if not self.is_evicting:
            self.twin.became_leaf(page)

    def removed(self, page: int) -> None:
        self.policy.removed(page)

    def candidates(self) -> Generator[int, None, None]:
        return self.policy.candidates()


class Trace:
    """Random streams over a small pool: they share, lose races, decode, let go of their first pages and end."""

    def __init__(self, name: str, seed: int, **parameters: Any) -> None:
        self.rng = random.Random(f"{name} {seed}")
        self.now_s = 0.0
        self.prompts = [self.draw_prompt() for _ in range(8000)]
        self.num_started = 0
        policy, twin = self.make(name, seed, parameters)
        self.told = Told(policy, twin)
        self.policy, self.twin = policy, twin
        self.arena = PageArena(NUM_PAGES)
        self.index = PrefixIndex(self.arena, self.told)
        twin.leaves = self.leaves
        self.streams: list[tuple[bytes, str, list[int]]] = []

    def make(self, name: str, seed: int, parameters: dict[str, Any]) -> tuple[Any, Any]:
        if name == "belady":
            parameters = {"future": [names(text) for _, text in self.prompts]}
        if name == "priority":
            parameters = {"clock": lambda: self.now_s}
        if name == "random":
            parameters = {"seed": seed}
        self.parameters = parameters
        policies = {p.name: p for p in (ARC, Belady, FIFO, LFU, LRU, Priority, Random, S3FIFO, SIEVE, SLRU)}
        return policies[name](**parameters), TWINS[name](NUM_PAGES - 1, **parameters)

    def draw_prompt(self) -> tuple[bytes, str]:
        trunk = "ab" * self.rng.choice([0, 0, 1, 2, 3]) if self.rng.random() < 0.5 else ""
        return self.rng.choice(ROOTS), trunk + "".join(self.rng.choice("ab") for _ in range(self.rng.randrange(7)))

    def step(self) -> None:
        ways = {
            self.start: 40,
            self.finish: 25,
            self.decode: 10,
            self.let_go: 6,
            self.look: 14,
            self.make_room: 6,
            self.reset: 0.05,
        }
        self.rng.choices(list(ways), list(ways.values()))[0]()
        self.now_s += self.rng.random()

    # -- what happens

    def start(self) -> None:
        root, text = self.prompts[self.num_started % len(self.prompts)]
        self.num_started += 1
        if isinstance(self.policy, Belady):
            self.policy.advance()
            self.twin.advance()
        keys = names(text)
        hit = self.index.lookup(root, keys) if self.rng.random() < 0.85 else []
        self.arena.retain(hit)
        fresh = self.acquire(len(keys) - len(hit))
        if fresh is None:
            self.arena.release(hit)
            return
        winners = self.index.insert_run(root, keys[len(hit) :], fresh, hit[-1] if hit else None)
        self.streams.append((root, text, hit + fresh))
        if self.rng.random() < 0.2:
            self.retain(hit + winners)

    def retain(self, pages: list[int]) -> None:
        if isinstance(self.policy, Priority):
            priority, duration_s = self.rng.choice([0, 10, 50, 80, 100]), self.rng.choice([None, 1, 5, 40])
            self.policy.retain(pages, priority, duration_s)
            self.twin.retain(pages, priority, duration_s)

    def decode(self) -> None:
        """A stream files one more page behind its last, without a lookup."""
        whole = [n for n, (_, text, pages) in enumerate(self.streams) if text and len(pages) == len(text)]
        if not whole:
            return
        number = self.rng.choice(whole)
        root, text, pages = self.streams[number]
        fresh = self.acquire(1)
        if fresh is None:
            return
        parent = self.index.page_for(root, text.encode())
        if parent is None:  # another stream had filed the key, and its page is gone
            self.arena.release(fresh)
            return
        text += self.rng.choice("abc")
        self.index.insert_run(root, [text.encode()], fresh, parent)
        self.streams[number] = root, text, pages + fresh

    def finish(self) -> None:
        if self.streams:
            self.arena.release(self.streams.pop(self.rng.randrange(len(self.streams)))[2])

    def let_go(self) -> None:
        if self.streams:
            pages = self.rng.choice(self.streams)[2]
            count = self.rng.randrange(len(pages) + 1)
            self.arena.release(pages[:count])
            del pages[:count]

    def look(self) -> None:
        root, text = self.draw_prompt()
        self.index.lookup(root, names(text))

    def make_room(self) -> None:
        self.evict(self.rng.randrange(6))

    def reset(self) -> None:
        self.index.clear()
        now, seen = getattr(self.twin, "now", 0), self.twin.seen
        self.twin.__init__(NUM_PAGES - 1, **self.parameters)
        self.twin.leaves, self.twin.now, self.twin.seen = self.leaves, now, seen

    def acquire(self, n: int) -> list[int] | None:
        self.evict(n - self.arena.num_free)
        return self.arena.acquire(n)

    # -- and who goes

    def leaves(self) -> list[int]:
        return leaves_of({page: self.index.parent_of(page) for page in self.index.pages()})

    def evict(self, n: int) -> None:
        n = min(n, self.index.evictable_count())
        expected = self.expect(n) if n > 0 else []
        self.told.is_evicting, victims = True, []
        self.index.evict(n, on_evicted=lambda page, root, key: victims.append(page))
        self.told.is_evicting = False
        assert victims == expected

    def expect(self, n: int) -> list[int]:
        """Victims by the twin, one at a time."""
        parents = {page: self.index.parent_of(page) for page in self.index.pages()}
        live = {page for page in parents if self.arena.owners(page) > 1}
        victims = []
        for _ in range(n):
            victim = self.twin.pick(leaves_of(parents), live)
            parent = parents.pop(victim)
            self.twin.removed(victim)
            if parent in leaves_of(parents):
                self.twin.became_leaf(parent)
            self.twin.settle(leaves_of(parents))
            victims.append(victim)
        return victims


def leaves_of(parents: dict[int, int | None]) -> list[int]:
    return sorted(parents.keys() - set(parents.values()))


#: Policies with parameters that make a small pool meet what a large one does, and what a run must have met to mean anything.
CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    **{name: (name, {}, set()) for name in sorted(POLICIES)},
    "arc": ("arc", {}, {"ghosts of T1", "ghosts of T2"}),
    "priority": ("priority", {}, {"expiries"}),
    "random": ("random", {}, {"inner pages"}),
    "s3fifo": ("s3fifo", {}, {"ghosts", "second chances"}),
    "s3fifo small 0.5": ("s3fifo", {"small_share": 0.5}, {"ghosts", "promotions", "second chances"}),
    "sieve": ("sieve", {}, {"laps", "second chances"}),
    "slru": ("slru", {}, {"protected victims"}),
    "slru protected 0.3": ("slru", {"protected_share": 0.3}, {"demotions", "protected victims"}),
    "slru protected 0": ("slru", {"protected_share": 0}, {"demotions"}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_victims_equal_those_of_the_naive_twin(case: str, seed: int) -> None:
    name, parameters, to_meet = CASES[case]
    trace = Trace(name, seed, **parameters)
    for number in range(3000):
        trace.step()
        if number % 10 == 0:
            trace.index.check()
    counters = trace.index.counters
    assert min(counters.evictions, counters.matched_pages, counters.skipped_live, counters.race_losses) > 100, "a vacuous run"
    assert all(trace.twin.seen.get(what, 0) > 5 for what in to_meet), f"a vacuous run: {trace.twin.seen}"
