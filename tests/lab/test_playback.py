"""The player: order of arrivals and follow-ups, what it counts, and what it leaves behind."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvlab.errors import InputError
from kvlab.events import PageEvicted, RequestStarted
from kvlab.lab.playback import Player, failing_forwards
from kvlab.lab.result_file import ResultFile
from kvlab.lab.workloads import WORKLOADS, WorkItem, WorkloadShape, make_workload

SMALL = WorkloadShape(requests=12, prefix_pages=4, page_size=4, tail=3, max_tokens=5)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_built_in_workload_completes(tracer: Any, name: str) -> None:
    engine = tracer(page_size=4, num_pages=33)
    report = Player(engine).play(make_workload(name, SMALL))
    assert (report.completed, report.failed, report.cancelled, report.not_run) == (12, 0, 0, 0)
    assert (report.stall, report.leaked_pages) == (None, 0)
    assert report.cached_tokens > 0 or name == "churn"


def test_chains_run_side_by_side(tracer: Any) -> None:
    engine = tracer(page_size=4, num_pages=200)
    shape = WorkloadShape(requests=12, prefix_pages=4, page_size=4, tail=3, max_tokens=40)
    report = Player(engine).play(make_workload("edit-chains", shape))
    assert report.completed == 12
    assert report.steps < 2 * 3 * 40, "three chains of three turns in a row take 120 steps each"


def test_a_follow_up_goes_on_from_what_it_follows(tracer: Any) -> None:
    engine = tracer(page_size=4)
    items = [WorkItem("a", 0, (1, 2, 3), 4), WorkItem("b", 0, (9,), 2, follows="a"), WorkItem("c", 0, (5, 6), 3)]
    seen: dict[str, Any] = {}
    Player(engine, verify=lambda result: bool(seen.update({result.request.options.name: result})) or True).play(items)
    assert seen["b"].prompt_ids == (*seen["a"].prompt_ids, *seen["a"].ids, 9)
    started = [entry.event.rid for entry in engine.events.filter(RequestStarted)]
    assert started == [1, 2, 3], "c does not wait for a"
    assert seen["c"].rid == 2


def test_what_follows_a_failed_request_is_not_run(tracer: Any) -> None:
    engine = tracer(page_size=4)
    items = [WorkItem("a", 0, (1,), 1), WorkItem("b", 0, (2,), 1, follows="a"), WorkItem("c", 0, (3,), 1, follows="b")]
    with failing_forwards(engine.model, 0.999):
        report = Player(engine).play(items)
    assert (report.failed, report.not_run, report.completed) == (1, 2, 0)


def test_requests_are_cancelled_when_the_workload_says_so(tracer: Any) -> None:
    report = Player(tracer(page_size=4)).play([WorkItem("a", 0, (1,), 50, cancel_after=3), WorkItem("b", 0, (2,), 5)])
    assert (report.cancelled, report.completed) == (1, 1)


def test_evictions_are_counted_also_when_their_events_fell_out_of_memory(tracer: Any) -> None:
    engine = tracer(page_size=4, num_pages=14)
    engine.events._max_events = 400
    report = Player(engine).play(make_workload("churn", WorkloadShape(requests=60, page_size=4, tail=3, max_tokens=5)))
    assert report.evictions == {"allocation": engine.kv.index.counters.evictions}
    assert len(engine.events.filter(PageEvicted)) < report.evictions["allocation"]


def test_a_stall_is_told_with_its_facts_and_what_was_not_run(tracer: Any) -> None:
    engine = tracer(page_size=4, num_pages=9, admission="none")
    items = [WorkItem(f"r{n}", 0, tuple(range(1, 9)), 20) for n in range(3)]
    report = Player(engine).play([*items, WorkItem("late", 500, (1,), 1), WorkItem("next", 501, (1,), 1, follows="r0")])
    assert report.stall is not None
    assert report.stall["usable_pages"] == 8
    assert "wait for pages" in report.stall["message"]
    assert (report.failed, report.not_run, report.leaked_pages) == (3, 2, 0)


@pytest.mark.parametrize("workload", ["shared-prefix", "chats"])
def test_what_was_queued_at_a_stall_is_counted_among_what_was_not_run(tracer: Any, workload: str) -> None:
    engine = tracer(page_size=4, num_pages=12, admission="none", max_concurrent_requests=3)
    shape = WorkloadShape(requests=8, prefix_pages=4, page_size=4, tail=3, max_tokens=20)
    report = Player(engine).play(make_workload(workload, shape))
    assert report.stall is not None
    assert report.completed + report.failed + report.cancelled + report.not_run == 8
    assert report.not_run >= 5, "three run at a time"


def test_a_request_that_cannot_be_served_is_named(tracer: Any) -> None:
    with pytest.raises(InputError, match="request r0 of the workload: .*64"):
        Player(tracer()).play([WorkItem("r0", 0, (64,), 1)])


# -- results -----------------------------------------------------------------------------------------------------------


def interrupted(after: int, items: list[WorkItem]) -> Any:
    yield from islice(items, after)
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_interrupted_run_goes_on_to_the_same_results(tracer: Any, tmp_path: Path, name: str) -> None:
    items = list(make_workload(name, SMALL))
    rows = []
    for path, parts in ((tmp_path / "whole", [items]), (tmp_path / "parts", [interrupted(7, items), items])):
        for part in parts:
            with ResultFile(path, {}) as results:
                player = Player(tracer(page_size=4, num_pages=33), results=results)
                if part is items:
                    player.play(part)
                else:
                    with pytest.raises(KeyboardInterrupt):
                        player.play(part)
        with ResultFile(path, {}) as results:
            rows.append({row["id"]: row["ids"] for row in results.rows})
    assert rows[0] == rows[1]
    assert len(rows[0]) == 12


def test_what_a_stall_ended_is_tried_again(tracer: Any, tmp_path: Path) -> None:
    items = [WorkItem(f"r{n}", 0, tuple(range(1, 9)), 20) for n in range(3)]
    for pages, completed in ((9, 0), (40, 3)):
        with ResultFile(tmp_path / "results", {}) as results:
            report = Player(tracer(page_size=4, num_pages=pages, admission="none"), results=results).play(items)
            assert (report.completed, report.resumed_from_file) == (completed, 0)
