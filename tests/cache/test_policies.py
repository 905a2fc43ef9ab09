"""The seam of eviction policies: what the index asks of one, and that its own rules hold under any."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from itertools import repeat
from typing import Any

import pytest

from kvlab.cache.arena import PageArena
from kvlab.cache.index import PrefixIndex
from kvlab.cache.policies import POLICIES, EvictionPolicy, IndexView, make_policy
from kvlab.cache.policies.arc import ARC
from kvlab.cache.policies.belady import Belady
from kvlab.cache.policies.lru import LRU
from kvlab.cache.policies.priority import Priority
from kvlab.cache.policies.random import Random
from kvlab.cache.policies.s3fifo import S3FIFO
from kvlab.cache.policies.slru import SLRU
from kvlab.errors import InputError, IntegrityError
from kvlab.spec import Retention

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


def names(text: str) -> list[bytes]:
    return [text[: n + 1].encode() for n in range(len(text))]


def store(index: PrefixIndex, text: str) -> list[int]:
    """Serve a request of one page a letter, as an engine does, and cache it; returns its pages."""
    hit = index.lookup(ROOT, names(text))
    index.arena.retain(hit)
    need = len(text) - len(hit)
    index.evict(need - index.arena.num_free)
    fresh = index.arena.acquire(need)
    assert fresh is not None
    index.insert_run(ROOT, names(text)[len(hit) :], fresh, hit[-1] if hit else None)
    index.arena.release(hit + fresh)
    return hit + fresh


def evicted(index: PrefixIndex, n: int) -> str:
    """The last letters of the pages that go."""
    gone: list[str] = []
    index.evict(n, on_evicted=lambda page, root, key: gone.append(key.decode()[-1]))
    return "".join(gone)


def lru(index: PrefixIndex) -> LRU:
    assert isinstance(index.policy, LRU)
    return index.policy


# -- by name


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"belady"}))
def test_every_known_name_makes_a_fresh_policy_of_that_name(name: str) -> None:
    one, two = make_policy(name), make_policy(name)
    assert one is not two
    assert one.name == two.name == name


def test_a_policy_of_ones_own_is_taken_as_it_is() -> None:
    own = Shuffled(0)
    assert make_policy(own) is own


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="no eviction policy is called 'mru'; known: arc, belady, fifo, lfu, lru"):
        PrefixIndex(PageArena(4), "mru")


def test_belady_by_name_is_refused_since_it_must_know_the_future() -> None:
    with pytest.raises(InputError, match="policy belady must know the future"):
        make_policy("belady")


def test_what_is_no_policy_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(InputError, match="7 is no eviction policy: it lacks attach, inserted"):
        make_policy(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [lambda: SLRU(1.5), lambda: S3FIFO(0), lambda: S3FIFO(small_share=1), lambda: Priority(default=101)],
)
def test_a_parameter_that_cannot_be_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InputError, match="give a"):
        make()


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


# -- under every policy


def draw_text(rng: random.Random) -> str:
    return rng.choice(["", "", "ab", "abab"]) + "".join(rng.choice("ab") for _ in range(rng.randrange(1, 6)))


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    """One of each; Belady knows a future that comes to pass in part."""
    rng = random.Random(5)
    return Belady([names(draw_text(rng)) for _ in range(300)]) if request.param == "belady" else make_policy(request.param)


def worked(policy: EvictionPolicy, num_pages: int = 31, seed: int = 5, num_requests: int = 200) -> PrefixIndex:
    """An index that has served requests and evicted."""
    rng = random.Random(seed)
    index = PrefixIndex(PageArena(num_pages), policy)
    for _ in range(num_requests):
        if isinstance(policy, Belady):
            policy.advance()
        store(index, draw_text(rng))
    return index


def test_asking_changes_nothing(policy: EvictionPolicy) -> None:
    index = worked(policy)
    order = list(policy.candidates())
    assert {page for page in index.pages() if index.is_leaf(page)} == set(order)
    for count in range(len(order)):
        asked = policy.candidates()
        assert [next(asked) for _ in range(count)] == order[:count]
        asked.close()
    assert list(policy.candidates()) == order
    gone: list[int] = []
    index.evict(1, on_evicted=lambda page, root, key: gone.append(page))
    assert gone == order[:1]


def test_a_live_page_is_never_evicted_and_its_place_not_lost(policy: EvictionPolicy) -> None:
    index = worked(policy)
    order = list(policy.candidates())
    index.arena.retain(order[:-1])
    live = {a for page in order[:-1] for a in index._tree.ancestors(page)}
    count = index.evictable_count()
    assert 0 < count == len(set(index.pages()) - live)
    assert index.evict(99) == count
    assert set(index.pages()) == live
    index.check()
    index.arena.release(order[:-1])
    assert index.evict(99) == len(live)
    assert (len(index), index.arena.num_free) == (0, 30)


@pytest.mark.parametrize("seed", range(2))
def test_parents_never_dangle_and_evict_frees_what_was_promised(policy: EvictionPolicy, seed: int) -> None:
    rng = random.Random(seed)
    index = worked(policy, seed=seed)
    live: list[list[int]] = []
    for _ in range(500):
        hit = index.lookup(ROOT, names(draw_text(rng)))
        index.arena.retain(hit)
        live.append(hit)
        if len(live) > 4:
            index.arena.release(live.pop(rng.randrange(len(live))))
        text = draw_text(rng)
        if index.arena.num_free + index.evictable_count() >= len(text):
            store(index, text)
        n, promised, before = rng.randrange(4), index.evictable_count(), len(index)
        assert index.evict(n) == before - len(index) == min(n, promised)
        assert {page for pages in live for page in pages} <= set(index.pages())
        index.check()


def container_entries(thing: object, seen: set[int]) -> int:
    """Entries of every list, dict, set and deque reachable from ``thing``."""
    if id(thing) in seen or isinstance(thing, (type, int, bytes, str)) or callable(thing):
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return len(thing) + sum(container_entries(v, seen) for v in thing.values())
    if isinstance(thing, (list, set, deque, tuple)):
        return len(thing) + sum(container_entries(v, seen) for v in thing)
    return container_entries(getattr(thing, "__dict__", {}), seen)


def test_ten_thousand_reads_leave_bounded_state(policy: EvictionPolicy) -> None:
    index = PrefixIndex(PageArena(17), policy)
    store(index, "abc")
    store(index, "abd")
    before = container_entries(vars(policy), set())
    for _ in range(10_000):
        index.lookup(ROOT, names("abc"))
    assert container_entries(vars(policy), set()) <= before + 3 * len(index)
    assert evicted(index, 1) in "cd"
    index.check()


def test_k7_3_no_bookkeeping_outlives_the_pages(policy: EvictionPolicy) -> None:
    index = PrefixIndex(PageArena(17), policy)
    asks = getattr(policy, "retain", None)
    future = container_entries([getattr(policy, "_future", ()), getattr(policy, "_uses", ())], set())

    def serve(number: int) -> None:
        keys = [b"system 1", b"system 2", b"tail %d" % number]
        hit = index.lookup(ROOT, keys)
        index.arena.retain(hit)
        index.evict(3 - len(hit) - index.arena.num_free)
        fresh = index.arena.acquire(3 - len(hit)) or []
        index.insert_run(ROOT, keys[len(hit) :], fresh, hit[-1] if hit else None)
        if asks is not None:
            asks(hit + fresh, number % 90, 0.001 + number % 3)
        index.arena.release(hit + fresh)

    serve(0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(10_000):
            serve(number)
            if number % 1000 == 999:
                assert len(index) <= 16
                assert container_entries(vars(policy), set()) - future <= 16 * 17
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 20
    finally:
        tracemalloc.stop()


def test_clearing_begins_anew(policy: EvictionPolicy) -> None:
    index = worked(policy)
    index.clear()
    assert list(policy.candidates()) == []
    pages = store(index, "abc")
    assert list(policy.candidates()) == pages[-1:]
    assert evicted(index, 9) == "cba"


def test_nobody_hits_more_than_belady() -> None:
    rng = random.Random(3)
    texts = ["".join(rng.choice("aab") for _ in range(rng.randrange(1, 7))) for _ in range(600)]

    def hits(policy: EvictionPolicy) -> int:
        index = PrefixIndex(PageArena(25), policy)
        for text in texts:
            if isinstance(policy, Belady):
                policy.advance()
            store(index, text)
        assert index.counters.evictions > 100
        return index.counters.matched_pages

    best = hits(Belady([names(text) for text in texts]))
    others = {name: hits(make_policy(name)) for name in POLICIES if name != "belady"}
    assert max(others.values()) < best, others


# -- what makes each of them what it is


def test_fifo_does_not_look_at_uses(index: PrefixIndex) -> None:
    index = PrefixIndex(PageArena(20), "fifo")
    for text in ("ab", "c", "d"):
        store(index, text)
    store(index, "ab")
    assert evicted(index, 3) == "bac"


def test_lfu_keeps_what_was_used_often_however_long_ago() -> None:
    index = PrefixIndex(PageArena(20), "lfu")
    for text in ("a", "a", "a", "b", "b", "c", "d", "d"):
        store(index, text)
    assert evicted(index, 4) == "cbda"


def test_slru_keeps_what_was_used_again_from_a_scan_and_no_more_than_its_share() -> None:
    index = PrefixIndex(PageArena(11), SLRU(protected_share=0.2))
    for text in ("a", "b", "c", "a", "b", "c"):  # two may be protected: a went back to probation
        store(index, text)
    for text in "defghij":
        store(index, text)
    assert evicted(index, 10) == "adefghijbc"


def test_s3fifo_lets_a_scan_pass_and_takes_a_ghost_back_to_main() -> None:
    index = PrefixIndex(PageArena(11), S3FIFO(small_share=0.2))
    for text in ("a", "a", "a", "b"):
        store(index, text)
    for text in "cdefghij":
        store(index, text)
    assert evicted(index, 3) == "bcd", "a moved to main"
    store(index, "c")
    assert evicted(index, 7) == "efghiac", "c came back to main behind a, and the small queue keeps its share"


def test_sieve_takes_marks_off_and_goes_on_where_it_was() -> None:
    index = PrefixIndex(PageArena(20), "sieve")
    for text in ("a", "b", "c", "d", "a", "c"):
        store(index, text)
    assert evicted(index, 1) == "b", "a was passed"
    store(index, "e")
    assert evicted(index, 3) == "dea", "c was passed, and the hand went round"


def test_arc_follows_regret() -> None:
    policy = ARC()
    index = PrefixIndex(PageArena(5), policy)
    for text in ("a", "a", "b", "c", "d", "e"):  # b goes to make room for e, and is a ghost of T1
        store(index, text)
    assert policy.target == 0
    store(index, "b")
    assert policy.target == 1, "T1 was too small"
    assert evicted(index, 4) == "dabe", "T1 gives up what is over its target, then T2, by last use"


def test_random_takes_each_leaf_equally_often() -> None:
    gone: Counter[str] = Counter()
    for seed in range(900):
        index = PrefixIndex(PageArena(20), Random(seed))
        for text in ("ab", "c", "d"):
            store(index, text)
        gone[evicted(index, 1)] += 1
    assert set(gone) == set("bcd")
    assert all(240 < times < 360 for times in gone.values()), gone


def test_random_is_a_function_of_its_seed() -> None:
    def order(seed: int) -> str:
        index = PrefixIndex(PageArena(20), Random(seed))
        for text in "abcdefgh":
            store(index, text)
        return evicted(index, 8)

    assert order(1) == order(1) != order(2)


def test_priority_goes_before_recency_until_it_expires() -> None:
    now_s = 0.0
    policy = Priority(clock=lambda: now_s)
    index = PrefixIndex(PageArena(20), policy)
    system, _, _, junk = (store(index, text) for text in ("abc", "d", "e", "f"))
    policy.retain(system, 90, duration_s=60)
    policy.retain(junk, 10, duration_s=None)
    assert evicted(index, 2) == "fd"
    store(index, "g")
    now_s = 61.0
    assert evicted(index, 5) == "cbaeg", "the time is over: the system prompt is as old as it is"


def test_the_latest_retention_decides() -> None:
    now_s = 0.0
    policy = Priority(clock=lambda: now_s)
    index = PrefixIndex(PageArena(20), policy)
    one, other = store(index, "a"), store(index, "b")
    policy.retain(one, 90, duration_s=10)
    policy.retain(one, 80, duration_s=None)
    policy.retain(other, 85, duration_s=5)
    policy.retain(other, 70, duration_s=100)
    now_s = 50.0
    assert evicted(index, 2) == "ba"


def test_retaining_a_page_that_is_not_cached_changes_nothing() -> None:
    policy = Priority(clock=lambda: 0.0)
    index = PrefixIndex(PageArena(20), policy)
    (page,) = store(index, "a")
    index.evict(1)
    policy.retain([page], 0, None)
    store(index, "b")
    assert store(index, "c") != [page]
    assert evicted(index, 2) == "bc"


@pytest.mark.parametrize(
    "fields",
    [{"start": -1}, {"start": 5, "stop": 5}, {"stop": 2.5}, {"priority": 101}, {"priority": True}, {"duration_s": 0}],
)
def test_a_retention_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="retention"):
        Retention(**fields)


def test_belady_evicts_the_farthest_next_use() -> None:
    future = ["a", "b", "c", "d", "b", "d", "a"]
    policy = Belady([names(text) for text in future])
    index = PrefixIndex(PageArena(20), policy)
    for text in future[:4]:
        policy.advance()
        store(index, text)
    assert evicted(index, 4) == "cadb", "c is never used again"


# -- policies that misbehave


class Misbehaving(LRU):
    """Least recently used, but for one verb, and that once."""

    name = "odd"

    def __init__(self, verb: str, act: Callable[..., Any]) -> None:
        super().__init__()
        self.verb, self.act = verb, act
        self.is_on = False

    def __getattribute__(self, name: str) -> Any:
        get = super().__getattribute__
        if name != get("verb") or not get("is_on"):
            return get(name)
        self.is_on = False
        return get("act")


def fail(*args: Any) -> Any:
    raise ZeroDivisionError("a bug")


def propose_and_fail(*args: Any) -> Generator[int, None, None]:
    yield 3
    raise ZeroDivisionError("a bug")


def refuse_to_close(*args: Any) -> Generator[int, None, None]:
    try:
        yield from [3, 4]
    except GeneratorExit:
        yield 1


MISDEEDS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "returns nothing": ("candidates", lambda: None, "policy odd raised AttributeError"),
    "ends early": ("candidates", lambda: (page for page in [3]), "2 pages could go and policy odd proposed 1; it lost some"),
    "proposes live pages": ("candidates", lambda: (page for page in [6, 5, 6]), "2 pages could go and policy odd proposed 0"),
    "proposes a live page without end": ("candidates", lambda: (page for page in repeat(6)), "odd proposed 37 pages in a row"),
    "proposes a stranger": ("candidates", lambda: (page for page in [3, 99]), "odd proposed 99, which is no page of this pool"),
    "proposes a negative page": ("candidates", lambda: (page for page in [-4]), "odd proposed -4, which is no page"),
    "proposes the sink": ("candidates", lambda: (page for page in [0]), "odd proposed 0, which is no page"),
    "proposes no number": ("candidates", lambda: (page for page in ["3"]), "policy odd raised TypeError"),
    "raises when asked": ("candidates", fail, "policy odd raised ZeroDivisionError on being asked for 2 pages: a bug"),
    "raises while asked": ("candidates", propose_and_fail, "policy odd raised ZeroDivisionError"),
    "does not close": ("candidates", refuse_to_close, "policy odd raised"),
    "raises when a page went": ("removed", fail, "policy odd raised ZeroDivisionError"),
    "raises when a leaf appears": ("became_leaf", fail, "policy odd raised ZeroDivisionError"),
}


def state(index: PrefixIndex) -> object:
    tree = index._tree
    filed = {page: (index.key_of(page), index.parent_of(page), index.position_of(page)) for page in index.pages()}
    return filed, list(tree.num_children), list(tree._pins), list(index.arena.num_owners), index.arena.free_pages()


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_misbehaving_policy_is_refused_by_name_and_nothing_changes(misdeed: str) -> None:
    verb, act, message = MISDEEDS[misdeed]
    policy = Misbehaving(verb, act)
    index = PrefixIndex(PageArena(9), policy)
    assert [store(index, text) for text in ("abc", "d", "xy")] == [[1, 2, 3], [4], [5, 6]]
    index.arena.retain([5, 6])
    before, evictions = state(index), index.counters.evictions
    policy.is_on = True
    with pytest.raises(IntegrityError, match=message):
        index.evict(2)
    assert (state(index), index.counters.evictions) == (before, evictions)
    index.check()
    assert (evicted(index, 9), index.arena.num_free) in [("cbad", 6), ("dcba", 6)], "it goes on with what it is told"


def test_a_page_that_followed_an_idle_one_keeps_its_position_through_a_refusal() -> None:
    policy = Misbehaving("candidates", propose_and_fail)
    index = PrefixIndex(PageArena(9), policy)
    pages = store(index, "ab")
    (page,) = index.arena.acquire(1) or []
    index.insert(ROOT, b"abc", page, pages[-1])
    index.arena.release([page])
    assert (page, index.position_of(page)) == (3, 2)
    policy.is_on = True
    with pytest.raises(IntegrityError):
        index.evict(2)
    assert (index.position_of(page), index.evict(9)) == (2, 3)


@pytest.mark.parametrize("verb", ["inserted", "became_leaf"])
def test_an_insert_that_the_policy_fails_on_is_undone(verb: str) -> None:
    policy = Misbehaving(verb, fail)
    index = PrefixIndex(PageArena(9), policy)
    hit = store(index, "ab")
    index.arena.retain(hit)
    fresh = index.arena.acquire(2) or []
    before, inserts = state(index), index.counters.inserts
    for root, keys, parent in ((ROOT, [b"abc", b"abcd"], hit[-1]), (b"new root", [b"x", b"xy"], None)):
        policy.is_on = True
        with pytest.raises(IntegrityError, match="policy odd raised ZeroDivisionError on an insert: a bug; nothing changed"):
            index.insert_run(root, keys, fresh, parent)
    assert (state(index), index.counters.inserts, index.roots()) == (before, inserts, [ROOT])
    index.insert_run(ROOT, [b"abc", b"abcd"], fresh, hit[-1])
    index.check()
    index.arena.release(hit + fresh)
    assert evicted(index, 9) == "dcba"


def test_a_lookup_that_the_policy_fails_on_names_it() -> None:
    policy = Misbehaving("touched", fail)
    index = PrefixIndex(PageArena(9), policy)
    pages = store(index, "ab")
    policy.is_on = True
    with pytest.raises(IntegrityError, match="policy odd raised ZeroDivisionError on a lookup"):
        index.lookup(ROOT, names("ab"))
    assert index.peek(ROOT, names("ab")) == pages
    index.check()


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
