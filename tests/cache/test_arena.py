"""The arena: who owns a page, when it is free, and what it says when somebody miscounts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cache.arena import SINK, PageArena
from kvlab.errors import InputError, IntegrityError


class Heard:
    """A listener that writes down what it was told."""

    def __init__(self, num_owned: int = 0) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.num_owned = num_owned

    def shared(self, pages: Sequence[int]) -> None:
        self.calls.append(("shared", list(pages)))

    def unshared(self, pages: Sequence[int]) -> None:
        self.calls.append(("unshared", list(pages)))

    def __len__(self) -> int:
        return self.num_owned


def test_the_sink_is_taken_at_construction() -> None:
    arena = PageArena(4)
    assert (arena.owners(SINK), arena.num_free, arena.free_pages()) == (1, 3, [1, 2, 3])


@pytest.mark.parametrize("num_pages", [1, 0, -3, 2.0, "8", True])
def test_a_pool_without_a_usable_page_is_refused(num_pages: object) -> None:
    with pytest.raises(InputError, match="at least 2 pages"):
        PageArena(num_pages)  # type: ignore[arg-type]


def test_acquire_is_all_or_nothing() -> None:
    arena = PageArena(4)
    assert arena.acquire(4) is None
    assert arena.num_free == 3
    assert arena.acquire(0) == []
    assert arena.acquire(3) == [1, 2, 3]


def test_acquiring_a_negative_number_is_refused() -> None:
    with pytest.raises(InputError, match="-1 pages"):
        PageArena(4).acquire(-1)


def test_pages_are_handed_out_in_the_order_they_were_freed() -> None:
    arena = PageArena(5)
    arena.acquire(4)
    arena.release([3])
    arena.release([1, 4])
    assert arena.acquire(3) == [3, 1, 4]


def test_a_page_returns_when_its_last_owner_lets_go() -> None:
    arena = PageArena(3)
    (page,) = arena.acquire(1) or []
    arena.retain([page])
    arena.release([page])
    assert (arena.owners(page), arena.num_free) == (1, 1)
    arena.release([page])
    assert (arena.owners(page), arena.num_free) == (0, 2)


def test_a_list_may_name_a_page_several_times() -> None:
    arena = PageArena(3)
    arena.acquire(2)
    arena.retain([1, 1, 2])
    assert arena.owners(1) == 3
    arena.release([1, 2, 1, 1])
    assert (arena.owners(1), arena.owners(2), arena.free_pages()) == (0, 1, [1])


def test_a_seal_lasts_until_the_page_is_free() -> None:
    arena = PageArena(4)
    arena.acquire(2)
    arena.seal([1])
    arena.retain([1])
    arena.release([1])
    assert arena.is_sealed(1)
    assert arena.any_sealed([2, 1])
    assert not arena.any_sealed([2])
    arena.release([1])
    assert not arena.is_sealed(1)


def test_releasing_a_page_too_often_names_it_and_changes_nothing() -> None:
    arena = PageArena(5)
    arena.acquire(3)
    arena.retain([2])
    before = list(arena.num_owners), arena.free_pages(), arena.owner_changes
    with pytest.raises(IntegrityError, match="page 4 is released 1 times and has 0 owners"):
        arena.release([1, 4, 2])
    with pytest.raises(IntegrityError, match="page 2 is released 3 times and has 2 owners"):
        arena.release([2, 2, 1, 2])
    assert (list(arena.num_owners), arena.free_pages(), arena.owner_changes) == before


def test_a_free_page_can_be_neither_retained_nor_sealed() -> None:
    arena = PageArena(5)
    arena.acquire(2)
    for change in (arena.retain, arena.seal):
        with pytest.raises(IntegrityError, match=r"pages \[3\] cannot be"):
            change([1, 3, 2])
    assert arena.num_owners == [1, 1, 1, 0, 0]
    assert not arena.is_sealed(1)


@pytest.mark.parametrize("page", [-1, 4, 99])
def test_a_page_of_no_pool_is_named(page: int) -> None:
    arena = PageArena(4)
    arena.acquire(3)
    for change in (arena.retain, arena.release, arena.seal, lambda pages: arena.owners(pages[-1])):
        with pytest.raises(IntegrityError, match=rf"pages \[{page}\] are not of this pool of 4"):
            change([1, page])
    assert arena.num_owners == [1, 1, 1, 1]


def test_owner_changes_counts_retain_and_release_and_not_acquire() -> None:
    arena = PageArena(4)
    pages = arena.acquire(2) or []
    assert arena.owner_changes == 0
    arena.retain(pages)
    arena.release(pages)
    assert arena.owner_changes == 2


def test_the_listener_hears_once_a_call_of_pages_between_one_and_two_owners() -> None:
    arena, heard = PageArena(6), Heard()
    arena.attach(heard)
    pages = arena.acquire(3) or []
    arena.retain(pages)
    arena.retain([1])
    arena.release([1, 2])
    arena.release([1, 2])
    assert heard.calls == [("shared", [1, 2, 3]), ("unshared", [2]), ("unshared", [1])]


def test_the_listener_is_not_told_of_pages_it_adopts() -> None:
    arena, heard = PageArena(4), Heard()
    arena.attach(heard)
    pages = arena.acquire(2) or []
    arena.adopt(pages)
    assert heard.calls == []
    assert ([arena.owners(page) for page in pages], arena.any_sealed(pages[:1]), arena.owner_changes) == ([2, 2], True, 1)


def test_released_pages_are_free_when_the_listener_hears() -> None:
    arena = PageArena(4)
    seen: list[tuple[int, int]] = []

    class Looks(Heard):
        def unshared(self, pages: Sequence[int]) -> None:
            seen.append((arena.num_free, arena.owner_changes))

    arena.attach(Looks())
    arena.acquire(2)
    arena.retain([1])
    arena.release([1, 2])
    assert seen == [(2, 2)]


def test_a_listener_that_owns_pages_cannot_be_replaced() -> None:
    arena, first = PageArena(4), Heard(num_owned=2)
    arena.attach(first)
    with pytest.raises(IntegrityError, match="still owns 2 pages"):
        arena.attach(Heard())
    first.num_owned = 0
    arena.attach(Heard())


@given(st.lists(st.tuples(st.sampled_from("arsx"), st.integers(0, 7)), max_size=60))
def test_every_page_is_free_or_owned(steps: list[tuple[str, int]]) -> None:
    arena, held = PageArena(8), [SINK]
    for verb, number in steps:
        page = held[number % len(held)]
        if verb == "a":
            held += arena.acquire(number) or []
        elif verb == "r":
            arena.retain([page])
            held.append(page)
        elif verb == "s":
            arena.seal([page])
        elif len(held) > 1 and page != SINK:
            arena.release([page])
            held.remove(page)
        assert [arena.owners(p) for p in range(8)] == [held.count(p) for p in range(8)]
        assert sorted(arena.free_pages()) == [p for p in range(8) if p not in held]
        assert not any(arena.is_sealed(p) for p in arena.free_pages())
