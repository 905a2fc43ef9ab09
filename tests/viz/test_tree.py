"""The prefix tree: runs, parents, users."""

from __future__ import annotations

import pytest

from kvlab import events as ev
from kvlab.recorder import Recorder
from kvlab.viz import prefix_tree_panel
from kvlab.viz.marks import Label, Line, Rects
from kvlab.viz.moments import moment
from kvlab.viz.tree import MAX_LEAVES, runs_of, walk_runs
from tests.synthetic_log import Clock, Run, prefix, three_sharers


def shape(runs) -> list:
    return [(run.pages, run.first, shape(run.children)) for run in runs]


def test_single_child_pages_are_one_run_and_branches_part_where_prompts_do() -> None:
    assert shape(runs_of(moment(three_sharers()))) == [
        ([1, 2, 3, 4], 0, [([5, 6], 4, []), ([8], 4, []), ([10, 11, 12], 4, [])]),
        ([14, 15, 16], 0, []),
    ]


def test_users_are_those_who_filed_or_reused_even_after_they_ended() -> None:
    top = runs_of(moment(three_sharers()))[0]
    assert top.users == (1, 2, 3)
    assert [child.users for child in top.children] == [(1,), (2,), (3,)]


def test_a_page_filed_anew_forgets_its_former_users() -> None:
    run = Run(8)
    run.start(1, prefix("a", 4), 3)
    run.finish(1)
    run.start(2, prefix("b", 5), 3)
    users = {r.users for r in walk_runs(runs_of(moment(run.record)))}
    assert users == {(1,), (2,)}


def test_every_indexed_page_is_in_exactly_one_run() -> None:
    now = moment(three_sharers())
    pages = [page for run in walk_runs(runs_of(now)) for page in run.pages]
    assert sorted(pages) == sorted(now.pool.indexed())


@pytest.mark.parametrize(
    ("pages", "name"),
    [([3], "page 3"), ([3, 4, 5], "pages 3-5"), ([3, 5], "2 pages: 3, 5"), ([9, 1, 2, 3, 4], "5 pages: 9, 1, 2, 3, …")],
)
def test_a_run_is_named_by_its_pages(pages: list[int], name: str) -> None:
    recorder = Recorder(clock=Clock())
    recorder(ev.PoolCreated("kv", 12, 16, 0))
    recorder(ev.PagesAcquired(1, "main", pages))
    for position, page in enumerate(pages):
        parent = pages[position - 1] if position else None
        recorder(ev.PageIndexed(1, "main", page, f"k{page}", "root", parent, position))
    assert [run.name for run in runs_of(moment(recorder))] == [name]


def test_the_title_states_the_finding() -> None:
    assert prefix_tree_panel(three_sharers()).title == "4 of 13 indexed pages were used by several requests (3 in all)"
    assert prefix_tree_panel(three_sharers(), step=1).title == "No two requests used the same page of 6 indexed pages"
    assert prefix_tree_panel(three_sharers(), step=0).title == "The prefix cache is empty"


def test_boxes_stand_at_their_tokens_with_letters() -> None:
    boxes = next(m for m in prefix_tree_panel(three_sharers()).marks if isinstance(m, Rects)).rects
    assert [(round(b.x0 / 16), round(b.x1 / 16), b.text) for b in boxes] == [
        (0, 4, "A B C"), (4, 6, "A"), (4, 5, "B"), (4, 7, "C"), (0, 3, "D"),
    ]  # fmt: skip


def narrow_boxes(run_pages: list[int], system_pages: int = 56) -> Recorder:
    """A long common beginning, and after it chains of so many pages, each followed by one page of another user."""
    run = Run(512)
    system = prefix("system", system_pages)
    for rid, pages in enumerate(run_pages, 1):
        own = prefix(f"own {rid}", pages, system)
        run.start(rid, own, 1)
        run.finish(rid)
        run.start(100 + rid, prefix(f"more {rid}", 1, own), 1)
    return run.record


@pytest.mark.parametrize("run_pages", [[1, 1, 1], [2, 1], [1, 3, 2, 1]])
def test_labels_of_a_row_do_not_run_into_each_other_or_out_of_the_picture(run_pages: list[int]) -> None:
    panel = prefix_tree_panel(narrow_boxes(run_pages))
    token_px = (panel.width_px - 48) / (panel.x.high - panel.x.low)
    rows: dict[float, list[Label]] = {}
    for label in panel.marks:
        if isinstance(label, Label):
            rows.setdefault(label.y, []).append(label)
    for labels in rows.values():
        ends = [label.x * token_px + 6.9 * len(label.text) for label in labels]  # as wide as a browser draws them
        starts = [label.x * token_px for label in labels[1:]]
        assert all(end <= start for end, start in zip(ends, [*starts, panel.width_px - 24], strict=True))


def test_boxes_too_narrow_for_their_names_share_one_label() -> None:
    texts = [mark.text for mark in prefix_tree_panel(narrow_boxes([1, 2, 3])).marks if isinstance(mark, Label)]
    assert texts == ["pages 1-56", "pages 57, 59", "pages 61-62, 64", "pages 66-68, 70"]


def test_each_further_branch_is_connected_to_its_parent() -> None:
    line = next(m for m in prefix_tree_panel(three_sharers()).marks if isinstance(m, Line))
    assert line.xs.count(None) == 2  # pages 5-6 continue the row of pages 1-4; 8 and 10-12 hang below


def test_the_table_has_every_run() -> None:
    rows = prefix_tree_panel(three_sharers()).table.to_dicts()
    assert rows[0] == {"pages": "pages 1-4", "from token": 0, "to token": 64, "state": "shared", "used by": "A, B, C"}
    assert len(rows) == 5


def test_a_bushy_tree_is_bounded_and_says_what_it_leaves_out() -> None:
    run = Run(512)
    for rid in range(60):
        run.start(rid, prefix(f"r{rid}", 1, prefix("system", 1)), 3)
    panel = prefix_tree_panel(run.record)
    boxes = next(m for m in panel.marks if isinstance(m, Rects)).rects
    assert len(boxes) == MAX_LEAVES + 1
    assert panel.subtitle.endswith("28 boxes not drawn")


def test_a_very_long_chain_needs_no_deep_stack() -> None:
    recorder = Recorder(clock=Clock())
    recorder(ev.PoolCreated("kv", 6002, 16, 0))
    recorder(ev.PagesAcquired(1, "main", range(1, 6001)))
    for page in range(1, 6001):
        recorder(ev.PageIndexed(1, "main", page, f"k{page}", "root", page - 1 or None, page - 1))
    for page in range(1, 6001, 2):  # users alternate, so that no two pages are one run
        recorder(ev.PagesLeased(2, "main", [page]))
    assert len(list(walk_runs(runs_of(moment(recorder))))) == 6000


def test_roots_are_separate_trees() -> None:
    recorder = Recorder(clock=Clock())
    recorder(ev.PoolCreated("kv", 8, 16, 0))
    recorder(ev.PagesAcquired(1, "main", [1, 2]))
    recorder(ev.PageIndexed(1, "main", 1, "a", "root one", None, 0))
    recorder(ev.PageIndexed(1, "main", 2, "b", "root two", None, 0))
    panel = prefix_tree_panel(recorder)
    assert "2 branches under 2 roots" in panel.subtitle
