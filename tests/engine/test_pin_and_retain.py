"""Pins and retention as a client asks for them."""

from __future__ import annotations

import pytest

from kvlab.cache.policies.priority import Priority
from kvlab.errors import InputError, StallError
from kvlab.spec import RequestConfig, Retention

SYSTEM = [1 + i % 60 for i in range(48)]  # three pages of 16


def churn(engine, first: int, count: int, pages: int = 4) -> None:
    """Requests that share nothing and together fill the pool several times."""
    for number in range(first, first + count):
        engine.generate([1 + (number * 7 + i * 11) % 61 for i in range(16 * pages)] + [number % 60 + 1] * 3, max_tokens=2)


def test_a_pinned_prompt_is_computed_once_and_hit_after_any_churn(tracer) -> None:
    engine = tracer(page_size=16, num_pages=17)
    assert engine.pin(SYSTEM, name="system") == 3
    churn(engine, 1, 12)
    result = engine.generate([*SYSTEM, 5, 6], max_tokens=4)
    assert (result.cached_tokens, result.finish_reason) == (48, "length")
    assert list(result.ids) == engine.model.continuation([*SYSTEM, 5, 6], 4)
    assert engine.unpin("system") == 3
    churn(engine, 50, 12)
    assert engine.generate([*SYSTEM, 5, 6], max_tokens=4).cached_tokens == 0


def test_pinning_what_is_cached_computes_only_the_last_page(tracer) -> None:
    engine = tracer(page_size=16, num_pages=17)
    engine.generate([*SYSTEM, 1], max_tokens=1)
    computed = engine.kv.counters.committed_tokens
    assert engine.pin(SYSTEM, name="system") == 3
    assert engine.kv.counters.committed_tokens - computed == 16


@pytest.mark.parametrize("profile", ["kvlab", "published"])
def test_a_request_that_pins_leave_no_room_for_ends_with_both_numbers(tracer, profile) -> None:
    engine = tracer(page_size=16, num_pages=9, max_pinned_pages=6, profile=profile, admission="reserve")
    engine.pin([*SYSTEM, *SYSTEM], name="system")
    with pytest.raises(InputError, match="needs up to 4 pages; nothing else runs, 6 pages are pinned, and only 2 can be had"):
        engine.generate([9] * 50, max_tokens=8)
    assert engine.generate([*SYSTEM, *SYSTEM, 1], max_tokens=8).cached_tokens == 96, "one that shares them fits"
    assert engine.generate([9] * 20, max_tokens=8).finish_reason == "length"


def test_a_callback_cannot_pin_and_leaves_nothing_behind(tracer) -> None:
    engine = tracer(page_size=16)
    handle = engine.submit(SYSTEM, max_tokens=3, on_token=lambda chunk: engine.pin([5] * 20, name="mine"))
    with pytest.raises(InputError, match="on_token cannot pin the engine that is calling it"):
        handle.result()
    assert engine._waiting == engine._running == []
    assert engine.pin([5] * 20, name="mine") == 1


def test_room_promised_to_requests_under_way_cannot_be_pinned(tracer) -> None:
    engine = tracer(page_size=16, num_pages=9)
    engine.generate([*SYSTEM, 1], max_tokens=1)
    handle = engine.submit([9] * 40, max_tokens=70)  # seven of the eight pages
    engine.step()
    config = engine.preprocess.prepare(SYSTEM).configs["kv"]
    with pytest.raises(InputError, match="3 pages cannot be pinned as 'system' now: requests under way"):
        engine.kv.pins.pin("system", RequestConfig(config, salt=""))
    engine.check()
    assert handle.result().finish_reason == "length"


def test_a_pin_above_the_limit_is_refused_and_nothing_is_pinned(tracer) -> None:
    engine = tracer(page_size=16, num_pages=17, max_pinned_pages=2)
    with pytest.raises(InputError, match="would make 3 pinned pages and at most 2 may be"):
        engine.pin(SYSTEM, name="system")
    assert len(engine.kv.pins) == 0


def test_salts_pin_apart(tracer) -> None:
    engine = tracer(page_size=16, num_pages=17)
    engine.pin(SYSTEM, name="a", salt="tenant")
    churn(engine, 1, 12)
    assert engine.generate([*SYSTEM, 5], max_tokens=1).cached_tokens == 0
    assert engine.generate([*SYSTEM, 5], max_tokens=1, salt="tenant").cached_tokens == 48


def test_a_retained_system_prompt_outlives_churn_until_its_time_is_over(tracer) -> None:
    now_s = 0.0
    engine = tracer(page_size=16, num_pages=17, policy=Priority(clock=lambda: now_s))
    wish = Retention(0, len(SYSTEM), priority=90, duration_s=60)
    engine.generate([*SYSTEM, 5], max_tokens=2, retention=wish)
    churn(engine, 1, 12)
    assert engine.generate([*SYSTEM, 6], max_tokens=2).cached_tokens == 48
    now_s = 61.0
    churn(engine, 50, 12)
    assert engine.generate([*SYSTEM, 7], max_tokens=2).cached_tokens == 0


def test_asking_lru_to_retain_is_refused_and_the_engine_goes_on(tracer) -> None:
    engine = tracer(page_size=16, num_pages=17)
    with pytest.raises(InputError, match="only policy 'priority' can"):
        engine.generate(SYSTEM, max_tokens=2, retention=[Retention()])
    with pytest.raises(InputError, match="an entry of retention is 5"):
        engine.generate(SYSTEM, max_tokens=2, retention=[5])
    assert engine.generate(SYSTEM, max_tokens=2).finish_reason == "length"


@pytest.mark.parametrize("policy", ["arc", "fifo", "lfu", "priority", "random", "s3fifo", "sieve", "slru"])
def test_answers_are_the_same_under_every_policy(tracer, policy) -> None:
    engine = tracer(page_size=4, num_pages=25, policy=policy)
    trunk = [1 + i % 50 for i in range(24)]
    prompts = [[*trunk[: 4 * (n % 7)], *[1 + (n + i) % 9 for i in range(5)]] for n in range(40)]
    results = engine.generate(prompts, max_tokens=6)
    assert all(list(r.ids) == engine.model.continuation(list(r.prompt_ids), 6) for r in results)
    assert engine.kv.index.counters.evictions > 10
    assert engine.kv.index.counters.matched_pages > 10


def test_a_stall_says_how_many_pages_are_pinned(tracer) -> None:
    engine = tracer(page_size=16, num_pages=9, admission="none")
    engine.pin(SYSTEM, name="system")
    with pytest.raises(StallError, match=r"8 of 8 usable pages are in use, 3 of them pinned .*; unpin something, give"):
        engine.generate([[n + 1] * 20 for n in range(3)], max_tokens=60)
    engine.unpin("system")
    with pytest.raises(StallError, match=r"usable pages are in use \(page size 16\)"):
        engine.generate([[n + 1] * 50 for n in range(3)], max_tokens=60)


@pytest.mark.parametrize(
    ("wrong", "message"), [({"name": ""}, "name of a pin is ''"), ({"name": "a", "fields": 3}, "fields is 3")]
)
def test_what_cannot_be_pinned_is_refused_before_anything_is_computed(tracer, wrong, message) -> None:
    engine = tracer(page_size=16)
    with pytest.raises(InputError, match=message):
        engine.pin(SYSTEM, **wrong)
    assert engine.kv.counters.committed_tokens == 0
