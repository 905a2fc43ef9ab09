"""An engine whose evicted pages go to the host: the same text, and hits that a small pool could not keep."""

from __future__ import annotations

import pytest

SYSTEMS = [[i] * 17 for i in range(1, 7)]  # 6 prefixes of 4 whole pages


@pytest.mark.parametrize("admission", ["reserve", "peak", "none"])
def test_turns_over_more_prefixes_than_the_pool_holds(tracer, admission):
    engine = tracer(page_size=4, num_pages=13, host_tier_pages=40, admission=admission)
    for turn in range(3):
        results = [engine.generate([*system, 7 + turn], max_tokens=5) for system in SYSTEMS]
        assert [list(r.ids) for r in results] == [engine.model.continuation(list(r.prompt_ids), 5) for r in results]
        assert {r.cached_tokens for r in results} == {16 if turn else 0}
    assert engine.kv.counters.host_hits > 0
    engine.check()


@pytest.mark.parametrize("admission", ["reserve", "peak"])
def test_side_by_side_under_a_gate(tracer, admission):
    engine = tracer(page_size=4, num_pages=20, host_tier_pages=40, admission=admission)
    prompts = [[*SYSTEMS[i % 6], 7 + i] for i in range(24)]
    results = engine.generate(prompts, max_tokens=9)
    assert [list(r.ids) for r in results] == [engine.model.continuation(list(r.prompt_ids), 9) for r in results]
    state = engine.events.replay()
    assert state.host_cached.keys() == set(engine.kv._pool.tier._pages.values())
    assert set(state.indexed()) == set(engine.kv.index.pages())
