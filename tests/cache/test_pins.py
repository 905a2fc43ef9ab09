"""Pinned prefixes and retained ranges: what stays cached though room is needed, for how long, and what is refused."""

from __future__ import annotations

import logging

import pytest
from kv_driver import TEXT, Driver, keyed

from kvlab.cache.kv import KVResource
from kvlab.cache.policies.priority import Priority
from kvlab.errors import InputError, IntegrityError
from kvlab.events import PagesPinned, PagesUnpinned
from kvlab.pool_state import PoolState
from kvlab.recorder import Recorder
from kvlab.spec import KVLayout, RequestConfig, Retention

ROOT = b"r" * 32
PAGE = 4
SYSTEM = list(range(10, 22))  # three pages


def make(num_pages: int = 13, **options) -> Driver:
    kv = KVResource(KVLayout(1, 1, 8, PAGE), num_pages, check_invariants=True, **options)
    kv.enable_prefix_cache(ROOT, TEXT)
    return Driver(kv, PAGE)


def prompt(ids: list[int], salt: str = "") -> RequestConfig:
    return RequestConfig({"main": keyed(ids, PAGE)}, salt=salt)


def cached(driver: Driver, ids: list[int]) -> int:
    """Whole pages of ``ids`` that are cached."""
    index = driver.kv.index
    key = stream_root_of(driver)
    return len(index.peek(key, keyed(ids, PAGE).keys[: len(ids) // PAGE]))


def stream_root_of(driver: Driver) -> bytes:
    (root,) = driver.kv.index.roots() or [b""]
    return root


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(clock=lambda: 0.0)


# -- pins


def test_pinned_pages_outlive_their_request_and_every_eviction() -> None:
    driver = make()
    driver.serve(1, [*SYSTEM, 1])
    driver.serve(2, [5, 6, 7, 8, 9])
    assert driver.kv.pins.pin("system", prompt([*SYSTEM, 1])) == 3
    index = driver.kv.index
    assert (len(index), index.evictable_count(), len(driver.kv.pins)) == (4, 1, 3)
    assert driver.kv.evict(99) == 1
    assert cached(driver, SYSTEM) == 3
    driver.kv.check()


def test_unpinned_pages_go_when_room_is_needed() -> None:
    driver = make()
    driver.serve(1, SYSTEM)
    driver.kv.pins.pin("system", prompt(SYSTEM))
    assert driver.kv.pins.unpin("system") == 3
    assert (len(driver.kv.pins), driver.kv.evict(99)) == (0, 3)
    assert driver.kv.arena.num_free == 12


def test_a_request_hits_pinned_pages_like_any_other() -> None:
    driver = make()
    driver.serve(1, SYSTEM)
    driver.kv.pins.pin("system", prompt(SYSTEM))
    assert driver.serve(2, [*SYSTEM, 1, 2]) == 12


def test_supply_leaves_pinned_pages_out() -> None:
    driver = make()
    driver.serve(1, SYSTEM)
    assert driver.kv.supply_pages() == 12
    mark = driver.kv.supply_mark()
    driver.kv.pins.pin("system", prompt(SYSTEM))
    assert driver.kv.supply_pages() == 9
    assert driver.kv.supply_mark() != mark


def test_pins_that_share_pages_count_them_once() -> None:
    driver = make(max_pinned_pages=4)
    driver.serve(1, [*SYSTEM, 1, 2, 3, 4])
    assert driver.kv.pins.pin("system", prompt(SYSTEM)) == 3
    assert driver.kv.pins.pin("longer", prompt([*SYSTEM, 1, 2, 3, 4])) == 4
    assert len(driver.kv.pins) == 4
    driver.kv.pins.unpin("longer")
    assert (len(driver.kv.pins), driver.kv.evict(99)) == (3, 1)
    assert driver.kv.pins.by_name() == {"system": (1, 2, 3)}


def test_salts_are_pinned_apart() -> None:
    driver = make()
    driver.serve(1, SYSTEM, salt="a")
    with pytest.raises(InputError, match="0 of the prompt's 3 whole pages are cached"):
        driver.kv.pins.pin("system", prompt(SYSTEM))
    assert driver.kv.pins.pin("system", prompt(SYSTEM, salt="a")) == 3


@pytest.mark.parametrize(
    ("options", "ids", "name", "message"),
    [
        ({}, SYSTEM, "taken", "'taken' is pinned already \\(1 pages\\)"),
        ({}, [*SYSTEM, 1, 2, 3, 4], "more", "3 of the prompt's 4 whole pages are cached"),
        ({}, [1, 2, 3], "short", "0 of the prompt's 0 whole pages are cached"),
        ({}, SYSTEM, 3, "name of a pin is 3; give a str"),
        ({}, SYSTEM, "", "at least one character"),
        ({"max_pinned_pages": 3}, SYSTEM, "wide", "would make 4 pinned pages and at most 3 may be"),
    ],
)
def test_a_pin_that_cannot_be_is_refused_and_nothing_changes(options, ids, name, message) -> None:
    driver = make(**options)
    driver.serve(1, SYSTEM)
    driver.serve(2, [5, 6, 7, 8])
    driver.kv.pins.pin("taken", prompt([5, 6, 7, 8]))
    before = driver.kv.pins.by_name(), list(driver.kv.arena.num_owners), driver.kv.index.clock
    with pytest.raises(InputError, match=message):
        driver.kv.pins.pin(name, prompt(ids))
    assert (driver.kv.pins.by_name(), list(driver.kv.arena.num_owners), driver.kv.index.clock) == before


def test_half_of_the_pool_may_be_pinned_unless_told_otherwise() -> None:
    assert (make().kv.pins.max_pages, make(max_pinned_pages=0).kv.pins.max_pages) == (6, 0)
    for limit in (-1, 13, 2.5, True):
        with pytest.raises(InputError, match="the pool has 12 usable pages, give 0 to 12"):
            make(max_pinned_pages=limit)


def test_unpinning_an_unknown_name_names_those_there_are() -> None:
    driver = make()
    with pytest.raises(InputError, match="nothing is pinned as 'x'; pinned are: none"):
        driver.kv.pins.unpin("x")
    driver.serve(1, SYSTEM)
    driver.kv.pins.pin("system", prompt(SYSTEM))
    for name in ("x", 3, ["system"], ""):
        with pytest.raises(InputError, match="pinned are: system"):
            driver.kv.pins.unpin(name)


def test_without_an_index_there_is_nothing_to_pin() -> None:
    driver = make(prefix_cache=False)
    driver.serve(1, SYSTEM)
    with pytest.raises(InputError, match="are cached"):
        driver.kv.pins.pin("system", prompt(SYSTEM))


def test_a_reset_drops_every_pin_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    driver = make()
    driver.serve(1, SYSTEM)
    driver.kv.pins.pin("system", prompt(SYSTEM))
    with caplog.at_level(logging.INFO, logger="kvlab.cache"):
        assert driver.kv.reset_prefix_cache("asked")
    assert "3 pinned pages are let go of (asked): system" in caplog.text
    assert (len(driver.kv.pins), driver.kv.pins.by_name(), driver.kv.arena.num_free) == (0, {}, 12)
    driver.serve(2, SYSTEM)
    assert driver.kv.pins.pin("system", prompt(SYSTEM)) == 3, "the name is free again"
    driver.kv.cleanup()
    assert driver.kv.arena.num_free == 12


def test_pins_replay_exactly(recorder: Recorder, tmp_path) -> None:
    driver = make(record=recorder)
    driver.serve(1, SYSTEM)
    driver.serve(2, [5, 6, 7, 8])
    driver.kv.pins.pin("system", prompt(SYSTEM))
    driver.kv.pins.pin("other", prompt([5, 6, 7, 8]))
    driver.kv.pins.unpin("other")
    assert [entry.event for entry in recorder.filter(PagesPinned, PagesUnpinned)] == [
        PagesPinned("system", (1, 2, 3)),
        PagesPinned("other", (4,)),
        PagesUnpinned("other", (4,), "asked"),
    ]
    state = recorder.replay()
    assert state.pins == {"system": [1, 2, 3]}
    assert [state.page(page).pins for page in (1, 4)] == [["system"], []]
    assert state.counts() == {"live": 0, "shared": 0, "cached": 4, "free": 8}, "a pinned page nobody uses is a cached one"
    assert PoolState.from_json(state.to_json()) == state
    recorder.to_jsonl(tmp_path / "log.jsonl")
    assert Recorder.from_jsonl(tmp_path / "log.jsonl").replay() == state


def test_a_log_that_unpins_other_pages_is_refused() -> None:
    state = PoolState()
    state.apply(PagesPinned("system", [1, 2]))
    with pytest.raises(IntegrityError, match="the log unpins pages"):
        state.apply(PagesUnpinned("system", [1], "asked"))


def test_the_check_finds_a_pin_whose_page_is_not_cached() -> None:
    driver = make()
    driver.serve(1, SYSTEM)
    driver.kv.pins.pin("system", prompt(SYSTEM))
    driver.kv.index.clear()
    with pytest.raises(IntegrityError, match=r"I6: pages \[1, 2, 3\] are pinned and not cached"):
        driver.kv.check()


# -- retention


def test_a_retained_system_prompt_stays_until_its_time_is_over() -> None:
    now_s = 0.0
    driver = make(policy=Priority(clock=lambda: now_s))
    driver.serve(1, [*SYSTEM, 1], retention=(Retention(0, 12, 90, duration_s=60),))
    driver.serve(2, [5, 6, 7, 8, 9])
    assert (driver.kv.evict(1), cached(driver, SYSTEM)) == (1, 3)
    driver.serve(3, [5, 6, 7, 8, 9])
    now_s = 61.0
    assert (driver.kv.evict(1), cached(driver, SYSTEM)) == (1, 2)


def test_a_range_covers_the_pages_it_lies_on_generated_ones_too() -> None:
    driver = make(policy="priority")
    retention = (Retention(0, 5, 10), Retention(8, None, 90))
    driver.serve(1, SYSTEM, tokens=[1, 2, 3, 4, 5], retention=retention)  # four pages
    driver.serve(2, [5, 6, 7, 8, 9])
    assert driver.kv.index.policy._priorities[1:6] == [10, 10, 90, 90, 50]


def test_a_hit_retains_the_lent_pages_anew_and_one_without_a_wish_changes_nothing() -> None:
    now_s = 0.0
    driver = make(policy=Priority(clock=lambda: now_s))
    wish = (Retention(0, None, 80, duration_s=10),)
    driver.serve(1, [*SYSTEM, 1], retention=wish)
    now_s = 8.0
    assert driver.serve(2, [*SYSTEM, 2], retention=wish) == 12
    now_s = 16.0
    driver.serve(3, [*SYSTEM, 3])
    driver.serve(4, [5, 6, 7, 8, 9])
    assert (driver.kv.evict(1), cached(driver, SYSTEM)) == (1, 3), "still at 80"


def test_who_loses_the_race_for_a_key_retains_the_page_that_won() -> None:
    driver = make(policy="priority")
    driver.ingest(1, [*SYSTEM, 1])
    driver.ingest(2, [*SYSTEM, 2], retention=(Retention(priority=70),))
    driver.prefill(1, 2)
    assert driver.kv.index.policy._priorities[1:4] == [70, 70, 70]


def test_a_policy_that_cannot_retain_refuses_and_keeps_nothing() -> None:
    driver = make()
    with pytest.raises(InputError, match="request 1 asks to retain pages, which only policy 'priority' can"):
        driver.ingest(1, SYSTEM, retention=(Retention(),))
    assert driver.kv.streams_of(1) == {}
    with pytest.raises(InputError, match="policy lru cannot retain pages"):
        driver.kv.index.retain([], 1, None)
