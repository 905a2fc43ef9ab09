"""The page map and the pool over time, on a run made by hand."""

from __future__ import annotations

import pytest

from kvlab.errors import InputError
from kvlab.events import PagesAcquired, PoolCreated
from kvlab.recorder import Recorder
from kvlab.viz import page_map, page_map_panel, page_table, page_timeline_panel
from kvlab.viz.marks import Panel, Rects
from kvlab.viz.moments import moment, steps_of
from kvlab.viz.theme import EVICTED, STATES
from tests.synthetic_log import Clock, Run, prefix, three_sharers, under_pressure


def texts(panel: Panel) -> list[str]:
    return [rect.text for rect in panel.marks[0].rects]


def pool(num_pages: int) -> Recorder:
    recorder = Recorder(clock=Clock())
    recorder(PoolCreated("kv", num_pages, 16, 0))
    return recorder


def test_the_title_states_the_finding() -> None:
    assert page_map_panel(three_sharers()).title == "4 of 63 pages are in use by several requests (2 in all)"
    assert page_map_panel(three_sharers(), step=10).title == "4 of 63 pages are in use by several requests (3 in all)"
    assert page_map_panel(under_pressure()).title == "8 of 13 pages in use by 1 request, none by two at once"
    assert page_map_panel(pool(64)).title == "All 63 pages are free"


def test_every_cell_has_the_letters_of_its_owners() -> None:
    shown = texts(page_map_panel(three_sharers(), step=10))
    assert shown[:18] == ["sink", *["ABCc"] * 4, "Ac", "Ac", "A", "Bc", "B", "Cc", "Cc", "Cc", "C", "Dc", "Dc", "Dc", "D"]
    assert set(shown[18:]) == {""}
    assert len(shown) == 64


def test_cell_colours_are_the_states_that_replay_gives() -> None:
    for step in steps_of(three_sharers()):
        now = moment(three_sharers(), step=step).pool
        rects = page_map_panel(three_sharers(), step=step).marks[0].rects
        states = [now.pages[p].state if p in now.pages else "free" for p in range(1, 64)]
        assert [rect.style.fill for rect in rects[1:]] == [STATES[s].fill for s in states]


def test_no_cell_in_use_is_told_by_colour_alone() -> None:
    for rect in page_map_panel(three_sharers()).marks[0].rects:
        assert rect.text or rect.style.name == "free"


def test_more_than_three_owners_are_counted() -> None:
    run = Run(32)
    for rid in range(5):
        run.start(rid, prefix("system", 2), 3)
    assert texts(page_map_panel(run.record))[1] == "5×c"


def test_owners_stand_in_a_table_too() -> None:
    rows = page_table(three_sharers(), step=10).to_dicts()
    assert rows[0] == {"pages": "1-4", "number": 4, "state": "shared", "requests": "A B C", "in the index": "yes"}
    assert sum(row["number"] for row in rows) == 17
    assert "A: request 1 (first question)" in page_table(three_sharers(), step=10).title


def test_the_panel_carries_the_same_table() -> None:
    assert page_map_panel(three_sharers(), step=10).table == page_table(three_sharers(), step=10)


def test_hover_names_page_state_owner_and_key() -> None:
    note = page_map_panel(three_sharers(), step=10).marks[0].rects[5].note
    assert note == "page 5: shared, owned by A: request 1 (first question); c: the index, as page 4 of its chain, key first0"


def test_letters_stay_the_same_from_step_to_step() -> None:
    late = three_sharers()
    for step in (1, 7, 14):
        assert moment(late, step=step).letters == {1: "A", 2: "B", 3: "C", "other": "D"}


def test_an_evicted_page_is_marked_in_its_step_only() -> None:
    step = next(e.step for e in under_pressure() if e.event.kind == "PageEvicted")
    marked = [r for r in page_map_panel(under_pressure(), step=step).marks[0].rects if r.style.outline == EVICTED]
    assert len(marked) == 5
    assert all("evicted in this step" in rect.note for rect in marked)
    after = page_map_panel(under_pressure(), step=step + 1).marks[0].rects
    assert not [r for r in after if r.style.outline == EVICTED]


def test_until_seq_and_a_list_of_entries_give_the_same_map() -> None:
    recorder = three_sharers()
    whole = page_map_panel(recorder, until_seq=40)
    assert page_map_panel(list(recorder), until_seq=40) == whole
    assert page_map_panel(list(recorder)[:41]).marks == whole.marks


def test_a_folded_recorder_draws_what_the_whole_one_draws() -> None:
    whole, folded = page_map_panel(three_sharers()), page_map_panel(three_sharers(max_events=20))
    assert [r.style for r in folded.marks[0].rects] == [r.style for r in whole.marks[0].rects]


def test_a_list_that_begins_in_the_middle_is_refused() -> None:
    with pytest.raises(InputError, match="begin at event 5; give the Recorder"):
        page_map_panel(list(three_sharers())[5:])


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"step": 99}, "step 99 is not in the log; it has steps 0 to 14"),
        ({"until_seq": 999}, "event 999 is not in the log; it has events 0 to 79"),
        ({"step": 1, "until_seq": 1}, "name two moments; give one"),
    ],
)
def test_a_moment_that_is_not_there_is_refused_with_the_range(choice: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        page_map_panel(three_sharers(), **choice)


def test_drawing_changes_nothing_in_the_log() -> None:
    recorder = three_sharers()
    before = list(recorder), recorder.replay()
    page_map_panel(recorder)
    page_timeline_panel(recorder)
    assert (list(recorder), recorder.replay()) == before


@pytest.mark.parametrize(("num_pages", "cells"), [(2, 2), (256, 256), (1024, 1024), (1025, 513), (100_000, 1021)])
def test_a_pool_of_any_size_gives_a_bounded_grid(num_pages: int, cells: int) -> None:
    panel = page_map_panel(pool(num_pages))
    assert len(panel.marks[0].rects) == cells


def test_a_cell_of_several_pages_takes_the_first_of_shared_live_cached() -> None:
    recorder = pool(2048)
    recorder(PagesAcquired(1, "main", [5]))
    rect = page_map_panel(recorder).marks[0].rects[2]
    assert (rect.text, rect.style.fill, rect.note) == ("l1", STATES["live"].fill, "pages 4-5: live, free")


def test_an_empty_log_still_draws() -> None:
    assert page_map_panel([]).title == "The log has no page pool yet"


def test_the_timeline_stacks_to_the_pool_at_every_step() -> None:
    recorder = three_sharers()
    rects = page_timeline_panel(recorder).marks[0].rects
    for step in steps_of(recorder):
        column = [r for r in rects if r.x0 <= step < r.x1]
        assert sum(r.y1 - r.y0 for r in column) == 63
        heights = {r.style.name.split(":")[0]: r.y1 - r.y0 for r in column}
        assert heights == {s: n for s, n in moment(recorder, step=step).pool.counts().items() if n}


def test_the_timeline_title_and_table_have_the_numbers() -> None:
    panel = page_timeline_panel(under_pressure())
    assert panel.title == "At most 8 of 13 pages were in use at once (step 9); 5 cached at the end"
    assert panel.subtitle == "5 pages evicted"
    assert panel.table.to_dicts()[-1] == {"step": 11, "live": 1, "shared": 7, "cached": 5, "free": 0, "evicted": 0}
    assert sum(row["evicted"] for row in panel.table.to_dicts()) == 5


def test_a_long_run_gives_a_bounded_timeline() -> None:
    run = Run(64)
    for rid in range(40):
        run.start(rid, prefix(f"r{rid}", 2), 3, decode=30)
        run.finish(rid)
    assert len(page_timeline_panel(run.record).marks[0].rects) <= 4 * 161


def test_a_timeline_without_a_pool_is_refused() -> None:
    with pytest.raises(InputError, match="no page pool"):
        page_timeline_panel([])


def test_page_map_is_a_plotly_figure_of_the_panel() -> None:
    go = pytest.importorskip("plotly.graph_objects")
    figure = page_map(three_sharers())
    assert isinstance(figure, go.Figure)
    assert list(figure.data[0].text) == texts(page_map_panel(three_sharers()))


def test_marks_of_the_map_are_one_trace_whatever_the_step() -> None:
    assert all(isinstance(page_map_panel(three_sharers(), step=s).marks[0], Rects) for s in (0, 7, 14))
