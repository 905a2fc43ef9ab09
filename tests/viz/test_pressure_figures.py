"""Figures of pools under pressure, on real runs of the tracer and on rows made by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from kvlab.errors import InputError
from kvlab.events import PageEvicted
from kvlab.lab.pressure import PressureRun, stall_sandbox
from kvlab.lab.results import PressureRow
from kvlab.run import tracer_engine
from kvlab.viz import (
    as_figure,
    as_svg,
    cures_panel,
    eviction_table,
    evictions_panel,
    occupancy_panel,
    policies_panel,
    stall_curve_panel,
)
from kvlab.viz.marks import Line, Panel, Points
from tests.synthetic_log import three_sharers, under_pressure

SHAPE: dict[str, Any] = {"page_size": 4, "tail": 2, "max_tokens": 6, "prefix_pages": 11, "requests": 12, "pool_pages": 22}
ROW = PressureRow("lru", 96, True, 32, 32, 40, None, 3000, 9000, 12, 0)
STALLED = replace(ROW, name="none", completed=3, stalled_step=7)


@cache
def run(**settings: Any) -> PressureRun:
    return stall_sandbox(tracer_engine, **{"admission": "none", **settings}, **SHAPE)


def lines(panel: Panel) -> list[str]:
    return [mark.label for mark in panel.marks if isinstance(mark, Line)]


def points(panel: Panel) -> list[str]:
    return [mark.label for mark in panel.marks if isinstance(mark, Points)]


def test_a_stall_is_marked_and_is_the_title() -> None:
    panel = occupancy_panel(run().events)
    assert panel.title == f"Stalled in step {run().row.stalled_step}: 22 of 22 pages in use"
    assert "all 12 running requests wait for pages" in panel.subtitle
    assert lines(panel) == ["stall"]


def test_preemptions_are_marked_in_their_steps() -> None:
    panel = occupancy_panel(run(preemption=True).events)
    assert "preemptions" in points(panel)
    assert f"{run(preemption=True).row.preemptions} preemptions" in panel.subtitle
    assert lines(panel) == []


def test_host_pages_are_a_line_only_where_there_are_some() -> None:
    panel = occupancy_panel(run(cpu_offload_pages=64).events)
    (host,) = (mark for mark in panel.marks if isinstance(mark, Line))
    assert host.label == "host"
    assert f"at most {max(y for y in host.ys if y is not None)}" in panel.subtitle
    assert host.ys[-1] == 0, "everybody came back"
    assert max(y for y in host.ys if y is not None) <= panel.y.high


def test_the_table_of_evictions_counts_every_evicted_page() -> None:
    events = run(admission="reserve").events
    table = eviction_table(events)
    assert sum(row[2] for row in table.rows) == len(events.filter(PageEvicted)) > 0
    assert {row[0] for row in table.rows} <= {f"r{n}" for n in range(12)}


def test_evictions_are_drawn_by_the_request_that_needed_the_page() -> None:
    panel = evictions_panel(under_pressure())
    evicted = under_pressure().filter(PageEvicted)
    assert panel.title.startswith(f"{len(evicted)} cached page")
    assert len(panel.marks[0].rects) == len({entry.event.for_rid for entry in evicted})
    assert evictions_panel(three_sharers()).title != panel.title


def test_pages_evicted_by_hand_are_no_requests() -> None:
    with tracer_engine(num_pages=12, page_size=4) as engine:
        engine.generate(list(range(1, 24)), max_tokens=1, name="a")
        engine.kv.evict(3)
        assert evictions_panel(engine.events).title == "3 cached pages were evicted by hand, none for a request"
        assert eviction_table(engine.events).rows == (("nobody, by hand", "a", 3),)
        engine.generate([9] * 40, max_tokens=1, name="b")
        assert evictions_panel(engine.events).title == (
            "1 cached page had to go for 1 request, 1 of them for b; 3 more were evicted by hand"
        )


def test_cures_say_who_completed_and_who_stalled() -> None:
    panel = cures_panel([ROW, STALLED])
    assert panel.title == "1 setting of 2 let every request complete; 1 stalls"
    assert [rect.text for rect in panel.marks[0].rects] == ["32 in 40 steps", "3 in 40 steps", "stalled in step 7"]


def test_the_policy_that_serves_most_comes_first() -> None:
    panel = policies_panel([ROW, replace(ROW, name="arc", cached_tokens=4500)])
    assert panel.title == "arc serves 50% of all prompt tokens from the cache, lru 33%"
    assert [rect.text for rect in panel.marks[0].rects] == ["4500 tokens, 12 evicted", "3000 tokens, 12 evicted"]
    assert policies_panel([ROW]).title == "All policies serve the same 3000 tokens from the cache"


def test_the_curve_tells_stalls_by_shape() -> None:
    rows = [STALLED, replace(ROW, pool_pages=128), replace(ROW, prefix_cache=False)]
    panel = stall_curve_panel(rows)
    assert panel.title == "With the cache on, pools of up to 96 pages stall; with it off none of these does"
    assert [style.name for style in panel.legend] == ["cache on (solid)", "cache off (dashed)"]
    assert lines(panel) == ["", ""]
    assert [mark.symbol for mark in panel.marks if isinstance(mark, Points)] == ["triangle", "square", "square"]
    assert stall_curve_panel([ROW]).title == "No pool of these stalls"


def test_the_curve_speaks_of_the_side_that_stalls_and_of_none_that_was_not_given() -> None:
    off = replace(STALLED, prefix_cache=False)
    assert (
        stall_curve_panel([ROW, off]).title
        == "With the cache off, pools of up to 96 pages stall; with it on none of these does"
    )
    assert stall_curve_panel([STALLED]).title == "With the cache on, pools of up to 96 pages stall"
    assert stall_curve_panel([off]).title == "With the cache off, pools of up to 96 pages stall"
    both = stall_curve_panel([STALLED, replace(off, pool_pages=128)])
    assert both.title == "Pools stall with the cache on (up to 96 pages) and with it off (up to 128)"


def test_a_pool_that_lost_requests_without_a_stall_is_not_said_to_have_completed() -> None:
    lossy = replace(ROW, name="lossy", completed=2)
    panel = cures_panel([ROW, lossy, STALLED])
    assert panel.title == "1 setting of 3 let every request complete; 1 stalls; 1 lost some without a stall"
    assert panel.marks[0].rects[1].text == "2 of 32 in 40 steps"
    assert "squares: every request completed" in stall_curve_panel([ROW, STALLED]).subtitle
    assert "squares: no stall" in stall_curve_panel([lossy]).subtitle


@pytest.mark.parametrize("draw", [cures_panel, policies_panel, stall_curve_panel])
def test_without_rows_nothing_is_drawn(draw: Any) -> None:
    with pytest.raises(InputError, match="no rows to draw"):
        draw([])


def test_every_panel_becomes_svg_and_plotly_and_leaves_a_table() -> None:
    pytest.importorskip("plotly", reason="needs the extra lab")
    panels = [
        *(occupancy_panel(run(**options).events) for options in ({}, {"preemption": True}, {"cpu_offload_pages": 64})),
        evictions_panel(run(admission="reserve").events),
        *(draw([ROW, STALLED]) for draw in (cures_panel, policies_panel, stall_curve_panel)),
    ]
    for panel in panels:
        assert "<title" in as_svg(panel)
        assert as_figure(panel).layout.title.text
        assert panel.table
