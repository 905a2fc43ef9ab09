"""An engine with host pages: who makes room, who comes back, and that the text never changes."""

from __future__ import annotations

import pytest

from kvlab.errors import InputError, StallError
from kvlab.events import PagesOffloaded, PagesReloaded

PREFIX = [1 + i % 60 for i in range(20)]  # 5 pages of 4
PROMPTS = [[*PREFIX, *(1 + (i + j) % 60 for j in range(3))] for i in range(8)]


def right(engine, results) -> bool:
    return all(list(r.ids) == engine.model.continuation(list(r.prompt_ids), len(r.ids)) for r in results)


@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_host_pages_cure_the_stall_of_no_admission(tracer, policy):
    engine = tracer(page_size=4, num_pages=17, admission="none", cpu_offload_pages=200, offload_policy=policy)
    results = engine.generate(PROMPTS, max_tokens=24)
    assert {r.finish_reason for r in results} == {"length"}
    assert right(engine, results)
    assert sum(r.offloads for r in results) > 0
    assert engine.kv._pool.host.num_free == 200
    assert engine.kv.counters.offloads == engine.kv.counters.reloads > 0


def test_without_host_pages_the_same_load_stalls(tracer):
    engine = tracer(page_size=4, num_pages=17, admission="none")
    with pytest.raises(StallError, match="cpu_offload_pages"):
        engine.generate(PROMPTS, max_tokens=24)


def test_a_host_pool_too_small_for_any_victim_still_ends_in_a_named_stall(tracer):
    engine = tracer(page_size=4, num_pages=17, admission="none", cpu_offload_pages=2)
    with pytest.raises(StallError):
        engine.generate(PROMPTS, max_tokens=24)
    assert engine.kv.arena.num_free + len(engine.kv.index) == engine.kv.usable_pages
    assert engine.kv._pool.host.num_free == 2


def test_the_log_of_a_run_with_host_pages_replays_to_its_end(tracer):
    engine = tracer(page_size=4, num_pages=17, admission="none", cpu_offload_pages=200)
    engine.generate(PROMPTS, max_tokens=24)
    state = engine.events.replay()
    assert (state.host, state.streams, state.leases) == ({}, {}, {})
    assert set(state.indexed()) == set(engine.kv.index.pages())
    assert len(engine.events.filter(PagesOffloaded)) == len(engine.events.filter(PagesReloaded)) > 0


def parked_engine(tracer, **settings):
    """An engine with a request on the host, and the handles of all."""
    engine = tracer(page_size=4, num_pages=17, admission="none", cpu_offload_pages=200, **settings)
    handles = [engine.submit(prompt, max_tokens=24) for prompt in PROMPTS]
    for _ in range(200):
        engine.step()
        if engine._offloads.parked:
            return engine, handles
    raise AssertionError("nobody was parked")


def test_sampled_rows_of_a_parked_request_go_on_where_they_were(tracer):
    sampled = {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.2, "max_tokens": 24}
    calm = tracer(page_size=4, num_pages=400).generate(PROMPTS, **sampled)
    tight = tracer(page_size=4, num_pages=17, admission="none", cpu_offload_pages=200)
    results = tight.generate(PROMPTS, **sampled)
    assert sum(r.offloads for r in results) > 0
    assert [r.ids for r in results] == [r.ids for r in calm]


def test_a_parked_request_can_be_cancelled(tracer):
    engine, handles = parked_engine(tracer)
    run = engine._offloads.parked[0]
    used = 200 - engine.kv._pool.host.num_free
    next(h for h in handles if h.rid == run.rid).cancel()
    assert run.result.finish_reason == "cancelled"
    assert 200 - engine.kv._pool.host.num_free < used
    others = [h.result() for h in handles if h.rid != run.rid]
    assert right(engine, others)


def test_a_parked_request_can_miss_its_deadline(tracer):
    engine = tracer(page_size=4, num_pages=17, admission="none", cpu_offload_pages=200)
    results = [engine.submit(p, max_tokens=24, deadline_steps=30) for p in PROMPTS]
    while not all(h.done for h in results):
        engine.step()
    assert "deadline" in {h.outcome.finish_reason for h in results}
    assert engine.kv._pool.host.num_free == 200
    engine.check()


def test_nobody_starts_while_somebody_is_parked(tracer):
    engine, handles = parked_engine(tracer)
    late = engine.submit([9] * 4, max_tokens=2)
    while engine._offloads.parked:
        engine.step()
        assert not engine._offloads.parked or not late._run.generated
    assert right(engine, [late.result(), *(h.result() for h in handles)])


@pytest.mark.parametrize("admission", ["reserve", "peak"])
def test_with_a_gate_nobody_needs_to_make_room(tracer, admission):
    engine = tracer(page_size=4, num_pages=17, admission=admission, cpu_offload_pages=200)
    results = engine.generate(PROMPTS, max_tokens=24)
    assert right(engine, results)
    assert sum(r.offloads for r in results) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_offload_pages": -1}, "cpu_offload_pages is -1"),
        ({"cpu_offload_pages": True}, "cpu_offload_pages is True"),
        ({"offload_policy": "coldest"}, "offload_policy is 'coldest'; it must be one of lru, priority"),
    ],
)
def test_illegal_host_settings_are_refused(tracer, settings, message):
    with pytest.raises(InputError, match=message):
        tracer(**settings)
