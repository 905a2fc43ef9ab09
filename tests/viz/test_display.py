"""Plotly JSON, figures and mimebundles."""

from __future__ import annotations

import copy
import json
import pickle
import sys

import pytest

from kvlab.errors import MissingExtraError
from kvlab.lab.results import RequestRow, Table
from kvlab.viz import as_figure, mimebundle, misses_panel, page_map_panel, page_timeline_panel, prefix_tree_panel
from kvlab.viz.display import PLOTLY_MIME, _figure_class, bundle_of, plotly_json, request_bundle
from tests.synthetic_log import Run, three_sharers

BUNDLE = {PLOTLY_MIME, "image/svg+xml", "text/plain"}


@pytest.mark.parametrize("draw", [page_map_panel, page_timeline_panel, prefix_tree_panel])
def test_plotly_takes_the_json_as_it_is(draw) -> None:
    go = pytest.importorskip("plotly.graph_objects")
    panel = draw(three_sharers())
    figure = go.Figure(plotly_json(panel))
    assert panel.title in figure.layout.title.text


def test_a_bundle_has_plotly_svg_and_one_sentence() -> None:
    bundle = mimebundle(page_map_panel(three_sharers()))
    assert set(bundle) == BUNDLE
    assert "\n" not in bundle["text/plain"]
    assert bundle["text/plain"].startswith("4 of 63 pages are in use by several requests")


def test_a_bundle_is_json_and_needs_no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    json.dumps(mimebundle(page_map_panel(three_sharers())), allow_nan=False)


def test_plotly_json_and_svg_show_the_same_letters() -> None:
    bundle = mimebundle(page_map_panel(three_sharers()))
    letters = {text for text in bundle[PLOTLY_MIME]["data"][0]["text"] if text}
    assert letters == {"sink", "BCc", "Bc", "B", "Cc", "C", "c"}
    assert all(f">{text}</text>" in bundle["image/svg+xml"] for text in letters)


def test_the_own_template_is_small() -> None:
    assert len(json.dumps(plotly_json(page_map_panel(three_sharers()))["layout"]["template"])) < 1500


def test_what_all_marks_have_in_common_is_said_once() -> None:
    (cells, *_) = plotly_json(page_map_panel(three_sharers()))["data"]
    assert cells["width"] == pytest.approx(0.9)
    assert len(cells["x"]) == len(cells["marker"]["color"]) == 64


def test_a_large_figure_stays_small_enough_for_a_notebook() -> None:
    panel = page_map_panel(Run(1024).record)
    assert len(json.dumps(plotly_json(panel))) < 150_000


def test_a_figure_shows_itself_with_an_svg() -> None:
    pytest.importorskip("plotly")
    figure = as_figure(page_map_panel(three_sharers()))
    assert set(figure._repr_mimebundle_()) == BUNDLE
    assert repr(figure) == "Figure('4 of 63 pages are in use by several requests (2 in all)')"


def test_jupyter_shows_the_bundle_and_nothing_else() -> None:
    """The front end asks several methods in turn; plotly's own come first and would leave the SVG out."""
    pytest.importorskip("plotly")
    formatters = pytest.importorskip("IPython.core.formatters")
    figure = as_figure(page_map_panel(three_sharers()))
    data, _ = formatters.DisplayFormatter().format(figure)
    assert data == figure._repr_mimebundle_()


def test_jupyter_shows_a_figure_changed_by_hand() -> None:
    pytest.importorskip("plotly")
    formatters = pytest.importorskip("IPython.core.formatters")
    figure = as_figure(page_map_panel(three_sharers()))
    figure.update_layout(title_text="mine")
    data, _ = formatters.DisplayFormatter().format(figure)
    assert "mine" in json.dumps(data)


def test_a_figure_changed_by_hand_does_not_show_the_old_svg() -> None:
    pytest.importorskip("plotly")
    figure = as_figure(page_map_panel(three_sharers()))
    figure.update_layout(title_text="mine")
    assert "image/svg+xml" not in figure._repr_mimebundle_()


def test_a_figure_can_be_copied_and_pickled() -> None:
    pytest.importorskip("plotly")
    figure = as_figure(page_map_panel(three_sharers()))
    for twin in (copy.deepcopy(figure), pickle.loads(pickle.dumps(figure))):
        assert twin.to_dict() == figure.to_dict()


def test_without_plotly_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    _figure_class.cache_clear()
    with pytest.raises(MissingExtraError, match=r'pip install .*\[lab\]"'):
        as_figure(page_map_panel(three_sharers()))


def test_a_result_shows_its_prompt_and_prints_as_itself() -> None:
    row = RequestRow("q", 40, 32, 2)
    bundle = request_bundle(row)
    assert bundle["text/plain"] == repr(row)
    assert "32 of 40 prompt tokens came from the cache" in bundle["image/svg+xml"]


def test_anything_that_shows_itself_has_a_bundle() -> None:
    assert set(bundle_of(page_map_panel(three_sharers()))) == BUNDLE
    assert set(bundle_of(Table(("a",), [(1,)]))) == {"text/html", "text/plain"}
    assert bundle_of(3.5) == {"text/plain": "3.5"}
    assert set(bundle_of(RequestRow("q", 40, 32, 2))) == BUNDLE


def test_markup_in_a_name_is_text_in_plotly_too() -> None:
    data = plotly_json(misses_panel([RequestRow("<b>x</b>", 40, 32, 2)]))
    assert data["layout"]["yaxis"]["ticktext"] == ["&lt;b&gt;x&lt;/b&gt;"]


def test_a_name_with_lone_surrogates_makes_a_bundle_that_utf8_can_hold() -> None:
    json.dumps(mimebundle(misses_panel([RequestRow("a\udc80b", 40, 32, 2)])), ensure_ascii=False).encode("utf-8")
