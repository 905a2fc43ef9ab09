"""The prefix index: what it answers, which pages it lets go, what it counts, and what it refuses."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvlab.cache.arena import SINK, PageArena
from kvlab.cache.index import PrefixIndex
from kvlab.cache.keys import chain_ids
from kvlab.cache.policies.lru import LRU
from kvlab.errors import InputError, IntegrityError

ROOT, OTHER = b"root", b"other root"


def names(text: str) -> list[bytes]:
    """Keys of a chain, one a letter; a key names everything before it, as real ones do."""
    return [text[: n + 1].encode() for n in range(len(text))]


@pytest.fixture
def arena() -> PageArena:
    return PageArena(9)


@pytest.fixture
def index(arena: PageArena) -> Iterator[PrefixIndex]:
    index = PrefixIndex(arena)
    yield index
    index.check()


def store(index: PrefixIndex, text: str, root: bytes = ROOT, *, live: bool = False) -> list[int]:
    """Cache a chain that follows what is cached of it, as an engine does; returns all its pages."""
    keys = names(text)
    shared = index.lookup(root, keys)
    index.arena.retain(shared)
    fresh = index.arena.acquire(len(keys) - len(shared))
    assert fresh is not None
    pages = shared + fresh
    index.insert_run(root, keys[len(shared) :], fresh, shared[-1] if shared else None)
    if not live:
        index.arena.release(pages)
    return pages


def evicted(index: PrefixIndex, n: int) -> list[int]:
    """Pages that ``evict(n)`` let go, in order."""
    gone: list[int] = []
    index.evict(n, on_evicted=lambda page, root, key: gone.append(page))
    return gone


# -- looking up


def test_a_lookup_ends_at_the_first_key_that_is_not_there(index: PrefixIndex) -> None:
    pages = store(index, "abc")
    assert index.lookup(ROOT, names("abcd")) == pages
    assert index.lookup(ROOT, names("abx")) == pages[:2]
    assert index.lookup(ROOT, [b"x", *names("abc")]) == []


def test_each_root_is_a_space_of_its_own(index: PrefixIndex) -> None:
    here, there = store(index, "ab"), store(index, "ab", OTHER)
    assert index.lookup(ROOT, names("ab")) == here
    assert index.lookup(OTHER, names("ab")) == there
    assert index.lookup(b"third", names("ab")) == []


def test_a_matching_lookup_ticks_once_and_stamps_the_whole_run(index: PrefixIndex) -> None:
    pages = store(index, "abc")
    clock = index.clock
    index.lookup(ROOT, names("abc"))
    assert index.clock == clock + 1
    assert {index.stamps[page] for page in pages} == {index.clock}


def test_peek_and_page_for_touch_nothing(index: PrefixIndex) -> None:
    pages = store(index, "abc")
    state = index.clock, list(index.stamps), index.counters.lookups
    assert index.peek(ROOT, names("abx")) == pages[:2]
    assert index.page_for(ROOT, b"abc") == pages[2]
    assert index.page_for(ROOT, b"x") is None
    assert index.page_for(OTHER, b"abc") is None
    assert (index.clock, list(index.stamps), index.counters.lookups) == state


def test_k7_5_less_than_a_page_matches_and_stores_nothing(index: PrefixIndex) -> None:
    store(index, "ab")
    state = index.clock, list(index.stamps), len(index)
    for ids in ([], [1], [1, 2, 3]):
        whole = chain_ids(ids, 4)[: len(ids) // 4]
        assert index.lookup(ROOT, whole) == []
        assert index.insert_run(ROOT, whole, [], None) == []
        assert index.insert_run(b"new root", whole, [], None) == []
    assert (index.clock, list(index.stamps), len(index), index.roots()) == (*state, [ROOT])


# -- storing


def test_an_inserted_page_is_sealed_and_owned(index: PrefixIndex, arena: PageArena) -> None:
    (page,) = arena.acquire(1) or []
    assert index.insert(ROOT, b"a", page, None)
    assert (arena.owners(page), arena.is_sealed(page)) == (2, True)
    arena.release([page])
    assert (arena.owners(page), arena.is_sealed(page), arena.num_free) == (1, True, 7)


def test_the_first_writer_of_a_key_wins_and_nothing_changes(index: PrefixIndex, arena: PageArena) -> None:
    (first, second) = arena.acquire(2) or []
    index.insert(ROOT, b"a", first, None)
    state = index.clock, list(index.stamps), len(index), list(arena.num_owners), arena.owner_changes
    assert not index.insert(ROOT, b"a", second, None)
    assert not index.insert(ROOT, b"a", first, None)
    assert (index.clock, list(index.stamps), len(index), list(arena.num_owners), arena.owner_changes) == state
    assert not arena.is_sealed(second)
    assert index.counters.race_losses == 1


def test_a_run_goes_on_behind_the_winner_of_a_lost_race(index: PrefixIndex, arena: PageArena) -> None:
    theirs = store(index, "ab", live=True)
    mine = arena.acquire(4) or []
    assert index.insert_run(ROOT, names("abcd"), mine, None) == [*theirs, *mine[2:]]
    assert [index.parent_of(page) for page in mine[2:]] == [theirs[1], mine[2]]
    assert [arena.owners(page) for page in mine] == [1, 1, 2, 2]
    assert index.counters.race_losses == 2


def test_a_run_is_a_repeated_insert() -> None:
    def build(insert: Callable[[PrefixIndex, list[bytes], list[int]], Any]) -> tuple[Any, ...]:
        arena = PageArena(20)
        index = PrefixIndex(arena)
        for text in ("abc", "abcde", "abx", "abcdef", "q"):
            insert(index, names(text), arena.acquire(len(text)) or [])
            index.check()
        links = {p: (index.key_of(p), index.parent_of(p), index.position_of(p)) for p in index.pages()}
        arena.release([p for p in range(1, 20) if arena.owners(p) for _ in range(arena.owners(p) - (p in links))])
        return links, evicted(index, 20)

    def one_by_one(index: PrefixIndex, keys: list[bytes], pages: list[int]) -> None:
        parent = None
        for key, page in zip(keys, pages, strict=True):
            index.insert(ROOT, key, page, parent)
            parent = index.page_for(ROOT, key)

    assert build(lambda index, keys, pages: index.insert_run(ROOT, keys, pages, None)) == build(one_by_one)


def test_b9_a_page_under_a_second_key_is_refused(index: PrefixIndex, arena: PageArena) -> None:
    (page,) = arena.acquire(1) or []
    old, new = b"\xaa" * 32, b"\xbb" * 32
    index.insert(ROOT, old, page, None)
    with pytest.raises(IntegrityError, match=f"page {page} is indexed under key {'aa' * 8} and was offered under {'bb' * 8}"):
        index.insert(ROOT, new, page, None)
    with pytest.raises(IntegrityError, match="a page has one key"):
        index.insert(OTHER, old, page, None)
    assert (index.page_for(ROOT, old), index.page_for(ROOT, new), index.roots()) == (page, None, [ROOT])


def test_a_run_that_names_a_page_twice_keeps_what_came_before(index: PrefixIndex, arena: PageArena) -> None:
    one, two = arena.acquire(2) or []
    with pytest.raises(IntegrityError, match=f"page {one} is indexed under key"):
        index.insert_run(ROOT, names("abc"), [one, two, one], None)
    assert index.peek(ROOT, names("abc")) == [one, two]
    index.check()


def test_an_unindexed_parent_is_refused(index: PrefixIndex, arena: PageArena) -> None:
    pages = arena.acquire(2) or []
    for parent in (pages[0], SINK, -1, 99):
        with pytest.raises(IntegrityError, match=f"parent page {parent} is not indexed"):
            index.insert(ROOT, b"a", pages[1], parent)
    assert not len(index)


@pytest.mark.parametrize("page", [SINK, 3, -1, 9])
def test_the_sink_a_free_page_and_no_page_are_refused(index: PrefixIndex, arena: PageArena, page: int) -> None:
    arena.acquire(2)
    with pytest.raises(IntegrityError):
        index.insert_run(ROOT, names("ab"), [1, page], None)
    assert (len(index), index.roots(), arena.owners(1)) == (0, [], 1)


def test_a_run_needs_one_key_a_page(index: PrefixIndex, arena: PageArena) -> None:
    with pytest.raises(InputError, match="2 keys for 1 pages"):
        index.insert_run(ROOT, names("ab"), arena.acquire(1) or [], None)


def test_positions_count_pages_from_the_chain_start(index: PrefixIndex) -> None:
    pages = store(index, "abc")
    assert [index.position_of(page) for page in pages] == [0, 1, 2]
    assert [index.parent_of(page) for page in pages] == [None, *pages[:2]]
    assert (index.position_of(8), index.parent_of(8), index.key_of(8), index.root_of(8)) == (None, None, None, None)


# -- letting go


def test_k6_8_an_old_key_does_not_survive_recycling() -> None:
    arena = PageArena(5)
    index = PrefixIndex(arena)
    store(index, "a")
    arena.acquire(3)
    assert arena.acquire(1) is None
    assert index.evict(1) == 1
    (page,) = store(index, "b")
    assert index.lookup(ROOT, names("a")) == []
    assert index.lookup(ROOT, names("b")) == [page]
    assert index.key_of(page) == b"b"
    index.check()
    index.evict(1)
    assert (index.key_of(page), index.root_of(page), index.stamps[page]) == (None, None, 0)


def test_k7_1_the_deepest_page_goes_first() -> None:
    for _ in range(200):
        arena = PageArena(4)
        index = PrefixIndex(arena)
        pages = store(index, "abc")
        assert arena.acquire(1) is None
        assert evicted(index, 1) == [pages[2]]
        assert index.lookup(ROOT, names("abc")) == pages[:2]


def test_a_chain_goes_bottom_up_in_one_call(index: PrefixIndex) -> None:
    pages = store(index, "abcd")
    assert evicted(index, 8) == pages[::-1]
    assert (len(index), index.roots(), index.arena.num_free) == (0, [], 8)


def test_tails_go_before_trunks(index: PrefixIndex) -> None:
    one, two = store(index, "abx"), store(index, "aby")
    assert evicted(index, 4) == [one[2], two[2], two[1], two[0]]


def test_the_least_recently_used_leaf_goes_first(index: PrefixIndex) -> None:
    one, two = store(index, "ax"), store(index, "by")
    index.lookup(ROOT, names("ax"))
    assert evicted(index, 4) == [two[1], two[0], one[1], one[0]]


def test_an_evicted_page_is_free_at_once_and_named(index: PrefixIndex, arena: PageArena) -> None:
    pages = store(index, "ab", OTHER)
    gone: list[tuple[int, bytes, bytes, int]] = []
    index.evict(1, on_evicted=lambda page, root, key: gone.append((page, root, key, arena.owners(page))))
    assert gone == [(pages[1], OTHER, b"ab", 0)]
    assert arena.num_free == 7


def test_a_live_page_is_never_evicted_and_not_forgotten(index: PrefixIndex, arena: PageArena) -> None:
    live, idle = store(index, "ab", live=True), store(index, "cd")
    assert evicted(index, 8) == idle[::-1]
    skipped = index.counters.skipped_live
    assert (evicted(index, 8), index.counters.skipped_live) == ([], skipped), "nothing is looked for where nothing can go"
    arena.release(live)
    assert evicted(index, 8) == live[::-1]


def test_a_live_leaf_passed_over_goes_in_its_turn_later(index: PrefixIndex, arena: PageArena) -> None:
    live, idle = store(index, "a", live=True), store(index, "b")
    assert evicted(index, 1) == idle
    assert index.counters.skipped_live == 1
    younger = store(index, "c")
    arena.release(live)
    assert evicted(index, 2) == live + younger


def test_k6_1_the_matched_page_itself_is_held(index: PrefixIndex, arena: PageArena) -> None:
    store(index, "abc")
    hit = index.lookup(ROOT, names("abc"))
    arena.retain(hit)
    assert (index.evictable_count(), index.evict(3)) == (0, 0)
    arena.release(hit)


def test_a_live_page_keeps_all_before_it(index: PrefixIndex, arena: PageArena) -> None:
    pages = store(index, "abcd")
    arena.retain(pages[2:3])
    assert index.evictable_count() == 1
    assert evicted(index, 8) == [pages[3]]
    arena.release(pages[2:3])
    assert index.evictable_count() == 3


def test_evicting_none_or_fewer_does_nothing(index: PrefixIndex) -> None:
    store(index, "ab")
    assert (index.evict(0), index.evict(-3), len(index)) == (0, 0, 2)


def test_an_error_in_the_callback_leaves_the_index_whole(index: PrefixIndex, arena: PageArena) -> None:
    store(index, "abc")

    def fail(page: int, root: bytes, key: bytes) -> None:
        raise RuntimeError("no room for the event")

    with pytest.raises(RuntimeError):
        index.evict(2, on_evicted=fail)
    assert (len(index), arena.num_free, index.counters.evictions) == (1, 7, 2)
    index.check()


def test_excluding_counts_as_if_the_hit_were_held(index: PrefixIndex, arena: PageArena) -> None:
    pages, _ = store(index, "abcd"), store(index, "xy")
    for hit in (pages[:2], pages[1:2], pages, [], [8, SINK], [pages[0], pages[0]]):
        excluding = index.evictable_count(excluding=hit)
        indexed = [page for page in hit if page in set(index.pages())]
        arena.retain(indexed)
        assert excluding == index.evictable_count()
        arena.release(indexed)
    assert index.evictable_count() == 6


def test_b35_a_page_behind_an_idle_parent_does_not_pin_it(index: PrefixIndex, arena: PageArena) -> None:
    a, b = store(index, "ab")
    (page,) = arena.acquire(1) or []
    assert index.insert(ROOT, b"abc", page, b)
    assert index.evictable_count() == 2
    assert (index.parent_of(page), index.position_of(page)) == (None, 2)
    assert evicted(index, 8) == [b, a]
    assert (index.parent_of(page), index.position_of(page)) == (None, 2), "nothing points at a page that is gone"
    arena.release([page])
    assert evicted(index, 8) == [page]


def test_a_page_behind_a_live_parent_pins_it(index: PrefixIndex, arena: PageArena) -> None:
    pages = store(index, "abc", live=True)
    arena.release(pages[:2])
    assert [index.parent_of(page) for page in pages] == [None, *pages[:2]]
    assert index.evictable_count() == 0
    arena.release(pages[2:])
    assert index.evictable_count() == 3


def test_a_page_two_streams_own_already_is_pinned_from_the_start(index: PrefixIndex, arena: PageArena) -> None:
    (page,) = arena.acquire(1) or []
    arena.retain([page])
    index.insert(ROOT, b"a", page, None)
    assert index.evictable_count() == 0
    arena.release([page, page])
    assert index.evictable_count() == 1


def test_clear_lets_go_of_everything_and_streams_keep_theirs(index: PrefixIndex, arena: PageArena) -> None:
    live, idle = store(index, "ab", live=True), store(index, "cd", OTHER)
    assert sorted(index.clear()) == sorted(live + idle)
    assert (len(index), index.roots(), index.evictable_count(), index.clear()) == (0, [], 0, [])
    assert [arena.owners(page) for page in live + idle] == [1, 1, 0, 0]
    arena.release(live)
    again = store(index, "ab")
    assert evicted(index, 2) == again[::-1]


def test_an_index_can_replace_a_cleared_one_and_no_other(arena: PageArena) -> None:
    first = PrefixIndex(arena)
    store(first, "a")
    with pytest.raises(IntegrityError, match="still owns 1 pages"):
        PrefixIndex(arena)
    first.clear()
    store(PrefixIndex(arena), "a")


def test_counters_tell_what_happened(index: PrefixIndex) -> None:
    store(index, "abc")
    store(index, "abd")
    index.evict(1)
    counters = index.counters
    assert (counters.lookups, counters.matched_pages, counters.inserts, counters.evictions) == (2, 2, 4, 1)


def test_the_repr_is_one_line(index: PrefixIndex) -> None:
    store(index, "abc")
    assert repr(index) == "PrefixIndex(3 pages, 3 evictable, 1 roots, lru)"


# -- memory


def heap_of(index: PrefixIndex) -> list[int]:
    assert isinstance(index.policy, LRU)
    return index.policy._heap


def test_b4_ten_thousand_reads_of_a_leaf_leave_one_entry(index: PrefixIndex) -> None:
    pages = store(index, "ab")
    for _ in range(10_000):
        index.lookup(ROOT, names("ab"))
    assert len(heap_of(index)) == 1
    assert evicted(index, 1) == [pages[1]]


def container_entries(thing: object, seen: set[int]) -> int:
    """Entries of every list, dict, set and deque reachable from ``thing``, the arena's own left out."""
    if id(thing) in seen or isinstance(thing, (PageArena, type, int, bytes, str)) or callable(thing):
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return len(thing) + sum(container_entries(v, seen) for v in thing.values())
    if isinstance(thing, (list, set, deque, tuple)):
        return len(thing) + sum(container_entries(v, seen) for v in thing)
    return container_entries(getattr(thing, "__dict__", {}), seen)


def test_k7_3_no_bookkeeping_outlives_the_pages() -> None:
    arena = PageArena(17)
    index = PrefixIndex(arena)
    system = [b"system 1", b"system 2"]

    def serve(number: int) -> None:
        root = b"root %d" % (number % 7)
        keys = [*system, b"tail %d" % number]
        hit = index.lookup(root, keys)
        arena.retain(hit)
        need = len(keys) - len(hit)
        index.evict(need - arena.num_free)
        fresh = arena.acquire(need)
        assert fresh is not None
        index.insert_run(root, keys[len(hit) :], fresh, hit[-1] if hit else None)
        arena.release(hit + fresh)

    serve(0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(10_000):
            serve(number)
            if number % 1000 == 999:
                assert len(index) <= 16
                assert container_entries(index, set()) <= 16 * 16
                assert len(heap_of(index)) <= len(index)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 20
    finally:
        tracemalloc.stop()


def test_memory_after_20_000_inserts_is_that_after_2_000() -> None:
    arena = PageArena(1001)
    index = PrefixIndex(arena)

    def insert(first: int, last: int) -> None:
        for start in range(first, last, 10):
            keys = [b"%032d" % n for n in range(start, start + 10)]
            index.evict(10 - arena.num_free)
            pages = arena.acquire(10) or []
            index.insert_run(ROOT, keys, pages, None)
            arena.release(pages)

    tracemalloc.start()
    try:
        insert(0, 2000)
        gc.collect()
        after_2000 = tracemalloc.get_traced_memory()[0]
        insert(2000, 20_000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - after_2000 < 1 << 20
    finally:
        tracemalloc.stop()
    assert len(index) == 1000


# -- the check finds what is broken


def test_check_finds_each_broken_rule() -> None:
    def key_twice(index: PrefixIndex) -> None:
        index._maps[ROOT][b"second"] = 1

    def wrong_root(index: PrefixIndex) -> None:
        index._roots[2] = OTHER

    def key_left_behind(index: PrefixIndex) -> None:
        index.keys[7] = b"stale"

    def empty_root(index: PrefixIndex) -> None:
        index._maps[OTHER] = {}

    def not_owned(index: PrefixIndex) -> None:
        index.arena.release([3])

    def not_in_tree(index: PrefixIndex) -> None:
        index._tree.num_children[3] = -1

    def lost_parent(index: PrefixIndex) -> None:
        index._tree.parents[2] = 8

    def child_count(index: PrefixIndex) -> None:
        index._tree.num_children[1] += 1

    def pin_count(index: PrefixIndex) -> None:
        index._tree._pins[3] += 1

    def evictable(index: PrefixIndex) -> None:
        index._tree._num_pinned += 1

    def lost_entry(index: PrefixIndex) -> None:
        heap_of(index).clear()

    messages = {
        key_twice: "page has one key",
        wrong_root: "page has one key",
        key_left_behind: "4 pages record a key and the maps name 3",
        empty_root: "root without pages",
        not_owned: r"pages \[3\] are not sealed or not owned",
        not_in_tree: r"pages \[3\] are in the index's map or in its tree",
        lost_parent: r"pages \[2\] have a parent that is not indexed",
        child_count: r"pages \[1\] do not have as many children",
        pin_count: r"pages \[3\] do not have as many pins",
        evictable: "2 pages are counted as evictable; a recount finds 3",
        lost_entry: r"policy lru does not propose leaves \[3\]",
    }
    for damage, message in messages.items():
        index = PrefixIndex(PageArena(9))
        assert store(index, "abc") == [1, 2, 3]
        index.check()
        damage(index)
        with pytest.raises(IntegrityError, match=message):
            index.check()


def test_a_policy_that_loses_pages_is_found_out(arena: PageArena) -> None:
    class Forgetful(LRU):
        name = "forgetful"

        def became_leaf(self, page: int) -> None:
            if page != 1:
                super().became_leaf(page)

    index = PrefixIndex(arena, Forgetful())
    store(index, "ab")
    with pytest.raises(IntegrityError, match="2 pages could go and policy forgetful proposed 1"):
        index.evict(2)
    assert (len(index), arena.num_free) == (2, 6)


# -- against a naive model


class NaiveIndex:
    """The same answers from one dict and full recounts. ``held`` counts the owners besides the index."""

    def __init__(self, held: Counter[int]) -> None:
        self.held = held
        self.page_of: dict[tuple[bytes, bytes], int] = {}
        self.parent: dict[int, int | None] = {}
        self.position: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self.clock = 0

    def match(self, root: bytes, keys: list[bytes], *, touch: bool) -> list[int]:
        pages = []
        for key in keys:
            if (root, key) not in self.page_of:
                break
            pages.append(self.page_of[root, key])
        if touch and pages:
            self.clock += 1
            self.last_use.update(dict.fromkeys(pages, self.clock))
        return pages

    def insert_run(self, root: bytes, keys: list[bytes], pages: list[int], parent: int | None) -> list[int]:
        winners: list[int] = []
        for key, page in zip(keys, pages, strict=True):
            if (root, key) not in self.page_of:
                self.clock += 1
                self.page_of[root, key] = page
                self.parent[page] = parent if parent is not None and self.held[parent] else None
                self.position[page] = 0 if parent is None else self.position[parent] + 1
                self.last_use[page] = self.clock
            parent = self.page_of[root, key]
            winners.append(parent)
        return winners

    def pinned(self) -> set[int]:
        pinned: set[int] = set()
        for page in self.parent:
            climb: int | None = page
            while self.held[page] and climb is not None:
                pinned.add(climb)
                climb = self.parent[climb]
        return pinned

    def evict(self, n: int) -> list[int]:
        victims: list[int] = []
        while len(victims) < n:
            parents = set(self.parent.values())
            leaves = [page for page in self.parent if page not in parents and not self.held[page]]
            if not leaves:
                break
            victim = min(leaves, key=lambda page: (self.last_use[page], page))
            del self.parent[victim], self.last_use[victim]
            self.page_of = {name: page for name, page in self.page_of.items() if page != victim}
            victims.append(victim)
        return victims


class Twins:
    """An index and its naive model under the same random streams."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.arena = PageArena(41)
        self.index = PrefixIndex(self.arena)
        self.held: Counter[int] = Counter()
        self.naive = NaiveIndex(self.held)
        self.streams: list[list[int]] = []

    def prompt(self) -> tuple[bytes, list[bytes]]:
        text = "".join(self.rng.choice("ab") for _ in range(self.rng.randrange(9)))
        return self.rng.choice([ROOT, OTHER]), names(text)

    def step(self) -> None:
        weights = {self.start: 40, self.finish: 25, self.let_go: 10, self.look: 20, self.make_room: 4.9, self.reset: 0.1}
        self.rng.choices(list(weights), list(weights.values()))[0]()

    def start(self) -> None:
        """A stream that looks its prompt up, or (as after a simultaneous start) one that computes all of it."""
        root, keys = self.prompt()
        hit = self.index.lookup(root, keys) if self.rng.random() < 0.8 else []
        if hit:
            assert hit == self.naive.match(root, keys, touch=True)
        self.hold(hit)
        need = len(keys) - len(hit)
        self.evict(need - self.arena.num_free)
        fresh = self.arena.acquire(need)
        if fresh is None:
            self.release(hit)
            return
        self.held.update(fresh)
        parent = hit[-1] if hit else None
        rest = keys[len(hit) :]
        assert self.index.insert_run(root, rest, fresh, parent) == self.naive.insert_run(root, rest, fresh, parent)
        self.streams.append(hit + fresh)

    def finish(self) -> None:
        if self.streams:
            self.release(self.streams.pop(self.rng.randrange(len(self.streams))))

    def let_go(self) -> None:
        """A stream lets go of its first pages and keeps the others."""
        if self.streams:
            stream = self.rng.choice(self.streams)
            count = self.rng.randrange(len(stream) + 1)
            self.release(stream[:count])
            del stream[:count]

    def look(self) -> None:
        root, keys = self.prompt()
        touch = self.rng.random() < 0.7
        answer = self.index.lookup(root, keys) if touch else self.index.peek(root, keys)
        assert answer == self.naive.match(root, keys, touch=touch)

    def make_room(self) -> None:
        self.evict(self.rng.randrange(6))

    def reset(self) -> None:
        assert sorted(self.index.clear()) == sorted(self.naive.parent)
        self.naive = NaiveIndex(self.held)

    def evict(self, n: int) -> None:
        assert evicted(self.index, n) == self.naive.evict(n)

    def hold(self, pages: list[int]) -> None:
        self.arena.retain(pages)
        self.held.update(pages)

    def release(self, pages: list[int]) -> None:
        self.arena.release(pages)
        self.held.subtract(pages)

    def compare(self) -> None:
        pinned = self.naive.pinned()
        assert set(self.index.pages()) == set(self.naive.parent)
        assert self.index.evictable_count() == len(self.naive.parent) - len(pinned)
        assert len(heap_of(self.index)) <= len(self.index)
        for page, parent in self.naive.parent.items():
            assert self.index.parent_of(page) == parent
            assert self.index.position_of(page) == self.naive.position[page]
            assert self.arena.owners(page) == self.held[page] + 1


@pytest.mark.parametrize("seed", range(8))
def test_the_index_equals_a_naive_one_over_4000_random_operations(seed: int) -> None:
    twins = Twins(seed)
    for number in range(4000):
        twins.step()
        twins.compare()
        if number % 20 == 0:
            twins.index.check()
    counters = twins.index.counters
    assert min(counters.evictions, counters.matched_pages, counters.race_losses, counters.skipped_live) > 50, "a vacuous run"
