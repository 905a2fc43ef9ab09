"""The seam of eviction policies: what the index asks of one, and that its own rules hold under any."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence

import pytest

from kvlab.cache.arena import PageArena
from kvlab.cache.index import PrefixIndex
from kvlab.cache.policies import POLICIES, IndexView, make_policy
from kvlab.cache.policies.lru import LRU
from kvlab.errors import InputError

ROOT = b"root"


class Shuffled:
    """Proposes every page ever inserted, in random order: no policy obeys fewer rules."""

    name = "shuffled"

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def attach(self, index: IndexView) -> None:
        self.index, self.known = index, set[int]()

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        self.known.update(pages)
        self.calls.append(("inserted", tuple(pages)))

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        self.calls.append(("touched", tuple(pages)))

    def became_leaf(self, page: int) -> None:
        self.calls.append(("became_leaf", (page,)))

    def removed(self, page: int) -> None:
        assert self.index.key_of(page) is not None, "a ghost can still be named"
        self.calls.append(("removed", (page,)))

    def candidates(self) -> Generator[int, None, None]:
        num_calls = -1
        while num_calls != len(self.calls):  # a page proposed too early may be a leaf by now
            num_calls = len(self.calls)
            order = sorted(self.known)
            self.rng.shuffle(order)
            yield from order


def cache_chain(index: PrefixIndex, text: str) -> list[int]:
    """Cache a chain of one page a letter that nobody uses."""
    keys = [text[: n + 1].encode() for n in range(len(text))]
    pages = index.arena.acquire(len(keys)) or []
    winners = index.insert_run(ROOT, keys, pages, None)
    index.arena.release(pages)
    return winners


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(PageArena(20))


def lru(index: PrefixIndex) -> LRU:
    assert isinstance(index.policy, LRU)
    return index.policy


# -- by name


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_known_name_makes_a_fresh_policy_of_that_name(name: str) -> None:
    one, two = make_policy(name), make_policy(name)
    assert one is not two
    assert one.name == two.name == name


def test_a_policy_of_ones_own_is_taken_as_it_is() -> None:
    own = Shuffled(0)
    assert make_policy(own) is own


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="no eviction policy is called 'random'; known: .*lru"):
        PrefixIndex(PageArena(4), "random")


# -- the seam


def test_the_policy_hears_what_happens_in_order() -> None:
    policy = Shuffled(0)
    index = PrefixIndex(PageArena(9), policy)
    pages = cache_chain(index, "ab")
    index.lookup(ROOT, [b"a", b"x"])
    index.peek(ROOT, [b"a"])
    index.evict(2)
    assert policy.calls == [
        ("inserted", tuple(pages)),
        ("became_leaf", (pages[1],)),
        ("touched", (pages[0],)),
        ("removed", (pages[1],)),
        ("became_leaf", (pages[0],)),
        ("removed", (pages[0],)),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_rules_of_the_index_hold_under_any_order(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(PageArena(30), Shuffled(seed))
    live: list[list[int]] = []
    for _ in range(400):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 7)))
        index.evict(len(text) - index.arena.num_free)
        if index.arena.num_free >= len(text):
            cache_chain(index, text)
        hit = index.lookup(ROOT, [text[: n + 1].encode() for n in range(len(text))])
        index.arena.retain(hit)
        live.append(hit)
        if len(live) > 3:
            index.arena.release(live.pop(0))
        before, n = len(index), rng.randrange(4)
        assert index.evict(n) == before - len(index) == min(n, before - len(index) + index.evictable_count())
        assert {page for pages in live for page in pages} <= set(index.pages())
        index.check()


def test_evicting_to_the_end_frees_every_page_under_any_order() -> None:
    index = PrefixIndex(PageArena(30), Shuffled(1))
    for text in ("abcd", "abxy", "q", "abcz"):
        cache_chain(index, text)
    assert index.evict(99) == 8
    assert (len(index), index.arena.num_free) == (0, 29)


def test_a_policy_object_can_serve_a_second_index() -> None:
    policy = LRU()
    cache_chain(PrefixIndex(PageArena(9), policy), "abc")
    index = PrefixIndex(PageArena(9), policy)
    pages = cache_chain(index, "xy")
    index.check()
    assert (index.evict(9), len(policy), pages) == (2, 0, [1, 2])


# -- LRU


def test_passing_over_a_candidate_changes_nothing(index: PrefixIndex) -> None:
    for text in ("abc", "xyz", "q"):
        cache_chain(index, text)
    index.lookup(ROOT, [b"a", b"ab", b"abc"])
    orders = [list(index.policy.candidates()) for _ in range(3)]
    assert orders == [[6, 7, 3]] * 3
    partly = index.policy.candidates()
    assert next(partly) == 6
    partly.close()
    assert list(index.policy.candidates()) == [6, 7, 3]


def test_lru_keeps_at_most_one_entry_a_page() -> None:
    rng = random.Random(11)
    index = PrefixIndex(PageArena(41))
    for _ in range(3000):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 6)))
        index.evict(len(text) - index.arena.num_free)
        cache_chain(index, text)
        index.lookup(ROOT, [text[: n + 1].encode() for n in range(len(text))])
        index.evict(rng.randrange(3))
        assert len(lru(index)) <= len(index)
        pages = [entry & 0xFFFFFFFF for entry in lru(index)._heap]
        assert len(pages) == len(set(pages))


def test_lru_orders_leaves_by_their_last_use(index: PrefixIndex) -> None:
    first, second, third = (cache_chain(index, text)[0] for text in "abc")
    index.lookup(ROOT, [b"a"])
    index.lookup(ROOT, [b"b"])
    assert list(index.policy.candidates()) == [third, first, second]
