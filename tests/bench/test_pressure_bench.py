"""The bench of pressure: its rows measure what their names say."""

from __future__ import annotations

import pytest

from kvlab.bench import pressure
from kvlab.bench.rows import Row


@pytest.mark.parametrize("order", ["fifo", "backfill"])
def test_the_pass_looks_at_a_full_pool_and_lets_nobody_in(order: str) -> None:
    with pressure.crowded_engine(order, reserved=9, waiting=40) as engine:
        engine.check()
        assert (len(engine._running), len(engine._waiting)) == (9, 40)
        assert engine._gate.outstanding_pages() == engine.kv.usable_pages
        engine._start_waiting()
        assert (len(engine._running), len(engine._waiting)) == (9, 40)
    in_ms, over_scan = pressure.admission_rows(order, reserved=9, waiting=40, rounds=2)
    assert (in_ms.name, in_ms.target, in_ms.ratio) == (f"admission_pass_{order}_ms", 20.0, None)
    assert over_scan.ratio is not None


def test_an_eviction_takes_one_page_and_the_index_stays_full() -> None:
    arena, index = pressure.indexed_leaves(50)
    assert (len(index), index.evictable_count(), arena.num_free) == (50, 50, 0)
    assert pressure._evict_some((arena, index)) > 0
    assert (len(index), index.counters.evictions, arena.num_free) == (50, 5, 0)


def test_memory_is_measured_over_a_full_index() -> None:
    row = pressure.memory_row(3000, usable_pages=100)
    assert isinstance(row, Row)
    assert (row.name, row.target, row.ok) == ("index_memory_growth", 1.0, True)


def test_only_what_can_be_looked_at_gets_a_claim() -> None:
    with pressure.crowded_engine("fifo", reserved=3, waiting=20) as engine:
        assert engine._gate.most_looked_at == 1
    with pressure.crowded_engine("backfill", reserved=3, waiting=20) as engine:
        assert engine._gate.most_looked_at == 129
