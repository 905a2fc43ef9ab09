"""The studies of pools that are too small, on the tracer: what stalls, what cures it, what policies serve."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.errors import InputError
from kvlab.events import Stalled
from kvlab.lab.pressure import (
    PLAIN_POLICIES,
    policy_study,
    regulars_and_passers,
    stall_cures,
    stall_sandbox,
    stall_threshold,
)
from kvlab.run import tracer_engine

#: The published case in pages of four tokens: the same numbers of pages at a sixteenth of the work.
SMALL: dict[str, Any] = {"page_size": 4, "tail": 2, "max_tokens": 6, "prefix_pages": 11, "requests": 12}


def test_b11_the_sandbox_is_the_published_stall() -> None:
    run = stall_sandbox(tracer_engine, admission="none")
    assert run.row.completed == 0
    assert run.row.stalled_step is not None
    assert run.row.stalled_step <= 50
    assert [entry.event.usable_pages for entry in run.events.filter(Stalled)] == [96]
    assert "0 of 32 completed on 96 pages, stalled" in repr(run)


def test_b11_gate_limit_preemption_and_host_pages_each_cure_the_stall() -> None:
    cures: dict[str, dict[str, Any]] = {
        "nothing": {"admission": "none"},
        "reserve": {"admission": "reserve"},
        "peak": {"admission": "peak"},
        "limit": {"admission": "none", "max_concurrent_requests": 4},
        "preemption": {"admission": "none", "preemption": True},
        "host": {"admission": "none", "cpu_offload_pages": 64},
    }
    rows = stall_cures(tracer_engine, cures, pool_pages=22, **SMALL)
    assert {row.name: row.completed for row in rows} == {name: 0 if name == "nothing" else 12 for name in cures}
    assert {row.name: bool(row.preemptions) for row in rows} == {name: name == "preemption" for name in cures}
    assert {row.name: bool(row.host_moves) for row in rows} == {name: name == "host" for name in cures}


def test_with_the_cache_off_the_same_pool_stalls_later() -> None:
    on, off = (stall_sandbox(tracer_engine, admission="none", prefix_cache=cached).row for cached in (True, False))
    assert on.stalled_step is not None
    assert off.stalled_step is not None
    assert on.stalled_step < off.stalled_step
    assert on.completed < off.completed


def test_a_pool_sized_by_the_rule_never_stalls() -> None:
    enough = 11 + 12 * 2  # the shared prefix once, and what each of twelve requests adds
    rows = stall_threshold(tracer_engine, [18, enough], first_alone=True, **SMALL)
    assert [(row.name, row.pool_pages) for row in rows[:2]] == [("cache on", 18), ("cache on", enough)]
    assert [row.is_stalled for row in rows[:2]] == [True, False]
    assert {row.prefix_cache for row in rows[2:]} == {False}


def test_every_policy_plays_the_same_requests() -> None:
    items = regulars_and_passers(40)
    rows = policy_study(tracer_engine, items, num_pages=31)
    assert tuple(row.name for row in rows) == PLAIN_POLICIES
    assert {(row.requests, row.completed) for row in rows} == {(40, 40)}
    assert len({row.prompt_tokens for row in rows}) == 1
    assert all(row.evicted_pages for row in rows)
    assert len({row.cached_tokens for row in rows}) > 1


def test_a_study_is_the_same_every_time() -> None:
    assert policy_study(tracer_engine, regulars_and_passers(20), ["random"], num_pages=31) == policy_study(
        tracer_engine, regulars_and_passers(20), ["random"], num_pages=31
    )


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="no eviction policy is called 'best'"):
        policy_study(tracer_engine, regulars_and_passers(2), ["best"], num_pages=31)
