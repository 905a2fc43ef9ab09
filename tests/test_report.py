"""The HTML report: complete, self-contained, escaped, bounded."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvlab.lab.results import MissRow, RequestRow, TtftRow
from kvlab.report import write_report
from tests.synthetic_log import Run, prefix, three_sharers

ROWS = [
    RequestRow(
        "first",
        105,
        0,
        0,
        480.0,
        16.2,
        32,
        "length",
        "Pages are <shared>.",
        (MissRow("main", 0, 105, "never_seen", "no page"),),
    ),
    RequestRow(
        "second", 85, 64, 4, 90.0, 16.0, 32, "stop", "", (MissRow("main", 64, 85, "diverged", "token 64 is 17, was 12"),)
    ),
]
TIMES = [TtftRow(512, 0, 512, 1200.0, 1200.0), TtftRow(512, 448, 64, 210.0, 190.0)]
VOID = {"meta", "br", "rect", "path", "circle", "link", "img"}


class Checker(HTMLParser):
    """Collects tags, and notices what is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text.append(data)


def report(tmp_path: Path, **changes) -> str:
    options = {
        "title": "Two questions", "rows": ROWS, "ttft_rows": TIMES, "events": three_sharers(), "model_line": "smollm2, float32",
        "notes": ["A note."],
    } | changes  # fmt: skip
    return write_report(tmp_path / "report.html", **options).read_text(encoding="utf-8")


def parsed(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def test_the_page_is_well_formed_with_one_heading_and_a_language(tmp_path: Path) -> None:
    page = report(tmp_path)
    assert parsed(page).tags.count("h1") == 1
    assert '<html lang="en">' in page


def test_nothing_is_fetched_and_nothing_runs(tmp_path: Path) -> None:
    page = report(tmp_path).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://|<script|<link|<img|<iframe|@import|src=|\son[a-z]+=", page)


def test_it_has_map_tree_times_and_the_reason_of_every_miss(tmp_path: Path) -> None:
    text = " ".join(parsed(report(tmp_path)).text)
    for part in (
        "4 of 63 pages are in use by several requests (3 in all)",
        "4 of 13 indexed pages were used by several requests",
        "448 cached tokens bring the first token 5.7 times sooner",
        "never_seen",
        "token 64 is 17, was 12",
        "At most 17 of 63 pages",
        "A note.",
        "smollm2, float32",
    ):
        assert part in text


def test_requests_with_the_cache_off_are_listed_and_not_explained(tmp_path: Path) -> None:
    off = RequestRow("first, cache off", 105, 0, 0, 480.0, misses=(MissRow("main", 0, 105, "opted_out", "switched off"),))
    with_it, without = (" ".join(parsed(report(tmp_path, uncached=rows)).text) for rows in ([off], []))
    assert "first, cache off" in with_it
    assert "switched off" not in with_it
    assert "64 of 190 prompt tokens came from the cache" in with_it
    assert "first, cache off" not in without


def test_the_model_is_named_once(tmp_path: Path) -> None:
    identity = "0" * 16  # of the synthetic log
    for line in ("a line of its own", f"synthetic {identity}, float32"):
        assert report(tmp_path, model_line=line).count(identity) == 1


def test_k3_5_the_page_size_is_named_as_the_least_reusable_length(tmp_path: Path) -> None:
    text = " ".join(parsed(report(tmp_path)).text)
    assert "The page size, 16 tokens, is the least reusable length" in text


def test_figures_of_maps_times_and_tree_have_a_table_beside_them(tmp_path: Path) -> None:
    figures = re.findall(r"<figure>.*?</figure>", report(tmp_path), flags=re.S)
    assert len(figures) >= 6
    assert sum("<table>" in figure for figure in figures) == len(figures) - 2  # misses and timeline: tables elsewhere


def test_every_figure_has_title_and_description(tmp_path: Path) -> None:
    tags = parsed(report(tmp_path)).tags
    assert tags.count("desc") == tags.count("svg") >= 6


def test_it_follows_a_dark_theme(tmp_path: Path) -> None:
    page = report(tmp_path)
    assert "prefers-color-scheme: dark" in page
    assert '<meta name="color-scheme" content="light dark">' in page
    classes = set(re.findall(r'class="(kv-\w+)"', page))
    assert all(f".{name} " in page for name in classes)


@pytest.mark.parametrize("nasty", ["<script>alert(1)</script>", "a\x00b\x1b\udc80", '"><svg onload=x>'])
def test_text_from_outside_is_text(tmp_path: Path, nasty: str) -> None:
    rows = [RequestRow(nasty, 9, 0, 0, None, None, 0, nasty, nasty, (MissRow(nasty, 0, 9, nasty, nasty),))]
    page = report(tmp_path, rows=rows, title=nasty, model_line=nasty, notes=[nasty])
    assert "script" not in parsed(page).tags
    assert "<svg onload" not in page


def test_an_empty_run_still_gives_a_report(tmp_path: Path) -> None:
    page = write_report(tmp_path / "r.html", title="Nothing", rows=[], events=[]).read_text(encoding="utf-8")
    assert "No request was recorded." in " ".join(parsed(page).text)


def test_a_huge_run_gives_a_bounded_report(tmp_path: Path) -> None:
    run = Run(4096)
    for rid in range(120):
        run.start(rid, prefix(f"q{rid}", 4, prefix("system", 4)), 9, f"question {rid} " * 40)
        if rid >= 8:
            run.finish(rid - 8)
    misses = tuple(MissRow("main", j, j + 1, ("diverged", "evicted")[j % 2], "e" * 500) for j in range(300))
    rows = [RequestRow("n" * 500, 300, 0, 0, 1.0, 1.0, 3, "stop", "text " * 5000, misses)] * 300
    assert len(report(tmp_path, rows=rows, events=run.record)) < 1_500_000


def test_a_folded_log_still_gives_its_maps(tmp_path: Path) -> None:
    text = " ".join(parsed(report(tmp_path, events=three_sharers(max_events=20))).text)
    assert "4 of 63 pages are in use by several requests (2 in all)" in text
    assert "is the least reusable length" in text
