"""Result rows and tables: what they compute, and that they show themselves whatever they hold."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError, fields

import pytest

from kvlab.errors import InputError, MissingExtraError
from kvlab.lab.results import LadderRow, MissRow, PageSizeRow, RequestRow, Spectrogram, Table, TtftRow, Wave, table_of
from kvlab.spec import Miss

LADDER = [
    LadderRow(n, 16, send, 0 if send == 1 else (n - 1) // 16 * 16) for n in (15, 16, 17, 32, 33, 48) for send in (1, 2, 3)
]


def test_k13_4_each_row_of_the_ladder_has_tokens_matched_pages_and_the_recomputed_rest() -> None:
    again = [(r.cached_tokens, r.pages_matched, r.recomputed_tokens) for r in LADDER if r.send == 2]
    assert again == [(0, 0, 15), (0, 0, 16), (16, 1, 1), (16, 1, 16), (32, 2, 1), (32, 2, 16)]


def test_the_first_sending_is_expected_to_find_nothing_and_the_next_all_pages_before_the_last_token() -> None:
    assert all(row.expected_tokens == row.cached_tokens for row in LADDER)


def test_rows_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        LADDER[0].cached_tokens = 3  # type: ignore[misc]


def test_a_miss_row_is_the_miss_that_the_cache_reports() -> None:
    assert MissRow is Miss


@pytest.mark.parametrize("row_type", [LadderRow, TtftRow, PageSizeRow])
def test_a_table_of_rows_has_a_column_a_field(row_type: type) -> None:
    row = row_type(**{f.name: 2 for f in fields(row_type)})
    assert table_of([row]).to_dicts() == [{f.name: 2 for f in fields(row_type)}]


def test_a_request_row_is_taken_from_a_result() -> None:
    class Result:
        name, rid, prompt_tokens, cached_tokens, pages_matched = "", 7, 40, 32, 2
        ttft_ms, tokens_per_s, ids, finish_reason, text = 12.5, None, (1, 2, 3), "stop", "hello"
        misses = (Miss("main", 32, 40, "last_page_cap"),)

    row = RequestRow.of(Result())
    assert (row.name, row.generated_tokens, row.misses[0].cause) == ("request 7", 3, "last_page_cap")


@pytest.mark.parametrize(
    "table",
    [
        Table((), []),
        Table(("a",), []),
        Table(("a", "b"), [(None, "<b>&"), (1.23456, True)], title="t"),
        Table([f"column {i}" for i in range(300)], [["x" * 5000] * 300] * 500, title="y" * 9000),
        Table(("line\nbreak",), [("two\nlines\udc80",)], title="\n"),
    ],
    ids=["empty", "no rows", "normal", "huge", "odd text"],
)
def test_table_reprs_are_total_and_bounded(table: Table) -> None:
    assert "\n" not in repr(table)
    assert len(repr(table)) < 250
    assert table._repr_html_().startswith("<table>")
    assert table._repr_html_().count("<tr>") <= 103
    assert len(table._repr_html_()) < 800_000


def test_a_table_shows_markup_as_text() -> None:
    shown = Table(("<i>",), [("<script>alert(1)</script>",)], title="<u>")._repr_html_()
    assert "<script>" not in shown
    assert "<i>" not in shown
    assert "<u>" not in shown


def test_a_long_table_says_how_many_rows_it_hides() -> None:
    assert "and 150 more rows" in Table(("n",), [(i,) for i in range(250)])._repr_html_()


def test_a_wide_table_says_how_many_columns_it_hides() -> None:
    assert "and 6 more columns" in Table([f"c{i}" for i in range(30)], [range(30)])._repr_html_()


def test_a_table_keeps_its_own_rows() -> None:
    rows = [[1], [2]]
    table = Table(("n",), rows)
    rows.clear()
    assert len(table) == 2


def test_a_ragged_table_is_refused_with_the_row() -> None:
    with pytest.raises(InputError, match="row 1 has 1 values for 2 columns"):
        Table(("a", "b"), [(1, 2), (3,)])


def test_to_pandas_has_the_same_columns_and_values() -> None:
    pytest.importorskip("pandas")
    frame = Table(("a", "b"), [(1, "x"), (2, "y")]).to_pandas()
    assert frame.to_dict("list") == {"a": [1, 2], "b": ["x", "y"]}


def test_to_pandas_names_the_extra_where_pandas_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[lab\]"):
        Table(("a",), [(1,)]).to_pandas()


@pytest.mark.parametrize(
    "row",
    [RequestRow("", 0, 0, 0), RequestRow("q", 40, 32, 2, 1.0, 2.0, 3, "stop", "hi"), RequestRow("n" * 9000, 10**9, 10**8, 5)],
    ids=["empty", "normal", "huge"],
)
def test_request_row_reprs_are_total_and_bounded(row: RequestRow) -> None:
    assert len(repr(row)) < 160
    bundle = row._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.plotly.v1+json", "image/svg+xml", "text/plain"}
    assert bundle["text/plain"] == repr(row)


def test_numbers_stand_right_and_words_left_whatever_the_page_does() -> None:
    shown = Table(("n", "cause", "ms"), [(1, "evicted", 2.5), (2, "diverged", None)])._repr_html_()
    head = [cell.partition('style="text-align:')[2].partition('"')[0] for cell in shown.split("<th")[2:]]
    assert head == ["right", "left", "right"]
    assert '<td style="text-align:left">evicted</td>' in shown


def test_signals_are_one_bounded_line() -> None:
    wave = Wave("long " * 100, 60.0, (-0.5,) * 10_000, (0.25,) * 10_000, 0.1)
    assert repr(wave).endswith("…: 60.00 s, peak 0.5, rms 0.1)")
    assert len(repr(wave)) < 100
    picture = Spectrogram("cold", 1.5, 8000.0, ((-90,) * 1000,) * 24)
    assert repr(picture) == "Spectrogram(cold: 1.50 s, 24 bands up to 8000 Hz)"
    assert repr(Wave("", 0.0, (), (), 0.0)) == "Wave(: 0.00 s, peak 0, rms 0)"
