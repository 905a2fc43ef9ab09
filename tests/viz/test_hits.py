"""Figures of what the cache served."""

from __future__ import annotations

import pytest

from kvlab.errors import InputError
from kvlab.lab.results import LadderRow, MissRow, PageSizeRow, RequestRow, TtftRow
from kvlab.spec import MISS_CAUSES
from kvlab.viz import hit_ladder_panel, ladder_table, miss_table, misses_panel, page_size_panel, request_table, ttft_panel
from kvlab.viz.hits import MAX_BARS, MAX_RANGES
from kvlab.viz.marks import Line, Points
from kvlab.viz.theme import LAST_PAGE, SERVED, cause_style

LADDER = [
    LadderRow(n, 16, send, 0 if send == 1 else (n - 1) // 16 * 16) for n in (15, 16, 17, 32, 33, 48) for send in (1, 2, 3)
]
TIMES = [TtftRow(512, cached, 512 - cached, 1200 - 2 * cached, 1100 - 2 * cached) for cached in (496, 0, 256)]
REQUEST = RequestRow(
    "second", 105, 64, 4,
    misses=(MissRow("main", 64, 96, "diverged", "token 64"), MissRow("main", 96, 105, "last_page_cap", "whole pages only")),
)  # fmt: skip


def test_k13_4_the_ladder_shows_tokens_matched_pages_and_the_recomputed_last_page() -> None:
    rects = hit_ladder_panel(LADDER).marks[0].rects
    second_of_48 = [r for r in rects if round((r.y0 + r.y1) / 2) == 16]
    assert [(r.x0, r.x1, r.style, r.text) for r in second_of_48] == [(0, 32, SERVED, "32 (2 pages)"), (32, 48, LAST_PAGE, "16")]
    assert ladder_table(LADDER).to_dicts()[16] == {
        "prompt tokens": 48, "page size": 16, "sending": 2, "cached tokens": 32, "pages matched": 2, "computed tokens": 16,
        "of these in the last page": 16,
    }  # fmt: skip


def test_the_ladder_title_tells_whether_the_rule_held() -> None:
    assert hit_ladder_panel(LADDER).title.startswith("A repeated prompt is served all whole pages before its last token")
    broken = [*LADDER[:-1], LadderRow(48, 16, 3, 48)]
    assert hit_ladder_panel(broken).title.startswith("1 of 12 repeated prompts were not served exactly")


def test_k3_5_the_ladder_names_the_page_size_as_the_least_reusable_length() -> None:
    assert "Page size 16 tokens: a prefix shorter than a page cannot be reused" in hit_ladder_panel(LADDER).subtitle


def test_ttft_has_the_measured_points_the_ideal_line_and_both_units() -> None:
    panel = ttft_panel(TIMES)
    line = next(m for m in panel.marks if isinstance(m, Line))
    points = next(m for m in panel.marks if isinstance(m, Points))
    assert (line.xs, line.ys, line.dash) == ((0, 256, 496), (1100, 588, 108), "dash")
    assert (points.xs, points.ys) == ((0, 256, 496), (1200, 688, 208))
    assert (panel.x.title, panel.y.title) == ("cached tokens", "time to first token, ms")


def test_the_ttft_title_has_ratio_and_both_times() -> None:
    assert ttft_panel(TIMES).title == (
        "496 cached tokens bring the first token 5.8 times sooner: 208 ms instead of 1200 ms with 0 cached"
    )


def test_the_ttft_title_does_not_call_slower_sooner() -> None:
    rows = [TtftRow(64, 0, 64, 100.0, 100.0), TtftRow(64, 32, 32, 150.0, 60.0)]
    assert "in 1.5 times the time" in ttft_panel(rows).title


def test_k3_5_page_sizes_show_what_whole_pages_can_reuse() -> None:
    rows = [PageSizeRow(128, shared, cached) for shared, cached in ((127, 0), (128, 128), (255, 128), (256, 256))]
    panel = page_size_panel(rows)
    assert panel.subtitle.startswith("The page size is the least reusable length")
    assert [row["cached tokens"] for row in panel.table.to_dicts()] == [0, 128, 128, 256]
    assert panel.title == "128-token pages reuse 512 of 766 shared tokens"


def test_the_page_size_title_compares_the_best_with_the_worst() -> None:
    panel = page_size_panel([PageSizeRow(16, 255, 240), PageSizeRow(64, 255, 192), PageSizeRow(128, 255, 128)])
    assert panel.title == "16-token pages reuse 240 of 255 shared tokens, 128-token pages only 128 of 255"


def test_each_prompt_is_covered_by_what_was_served_and_why_the_rest_was_computed() -> None:
    rects = misses_panel([REQUEST]).marks[0].rects
    assert [(r.x0, r.x1) for r in rects] == [(0, 64), (64, 96), (96, 105)]
    assert [r.text for r in rects] == ["64 served", "32 diverged", "9 last page, recomputed"]


def test_every_miss_stands_in_the_table_with_its_evidence() -> None:
    assert miss_table([REQUEST]).to_dicts()[0] == {
        "request": "second", "label": "main", "start": 64, "stop": 96, "tokens": 32, "cause": "diverged",
        "evidence": "token 64",
    }  # fmt: skip


def test_misses_of_another_label_are_in_the_table_but_not_on_the_prompts_bar() -> None:
    row = RequestRow("r", 40, 0, 0, misses=(MissRow("cfg_text", 0, 8, "no_keys"), MissRow("main", 0, 40, "never_seen")))
    assert len(misses_panel([row]).marks[0].rects) == 1
    assert len(miss_table([row])) == 2


def test_the_misses_title_names_the_commonest_cause() -> None:
    expected = "64 of 105 prompt tokens came from the cache; commonest reason for the rest: diverged (32 tokens)"
    assert misses_panel([REQUEST]).title == expected


def test_every_cause_has_a_look_and_a_name_of_its_own() -> None:
    names = [cause_style(cause).name for cause in MISS_CAUSES]
    assert len(set(names)) == len(MISS_CAUSES)


@pytest.mark.parametrize("draw", [hit_ladder_panel, ttft_panel, page_size_panel, misses_panel])
def test_no_rows_are_refused(draw) -> None:
    with pytest.raises(InputError, match="no rows to draw"):
        draw([])


def test_many_requests_and_ranges_give_a_bounded_figure_that_says_so() -> None:
    causes = ("diverged", "evicted")
    misses = tuple(MissRow("main", i, i + 1, causes[i % 2]) for i in range(400))
    panel = misses_panel([RequestRow("r", 400, 0, 0, misses=misses)] * 100)
    assert len(panel.marks[0].rects) <= MAX_BARS * (MAX_RANGES + 1)
    assert "60 requests not drawn" in panel.subtitle
    assert "ranges not drawn" in panel.subtitle


def test_neighbouring_ranges_of_one_cause_are_one_bar() -> None:
    row = RequestRow("r", 4, 0, 0, misses=tuple(MissRow("main", i, i + 1, "never_seen") for i in range(4)))
    assert [(r.x0, r.x1) for r in misses_panel([row]).marks[0].rects] == [(0, 4)]


def test_a_finding_of_ones_own_takes_the_title() -> None:
    panel = misses_panel([RequestRow("q", 40, 32, 2)], "Turn two is served from the cache")
    assert panel.title == "Turn two is served from the cache"


@pytest.mark.parametrize(
    ("generated", "header"),
    [((), "first token, ms"), ((3,), "first token, ms"), ((0,), "first step, ms"), ((0, 3), "first token or step, ms")],
)
def test_the_wait_of_a_picture_ends_with_its_first_step(generated: tuple[int, ...], header: str) -> None:
    rows = [RequestRow("r", 40, 32, 2, ttft_ms=5.0, generated_tokens=count) for count in generated]
    assert request_table(rows).columns[4] == header
