"""The static SVG: well formed, described, self-contained, the same each time."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from kvlab.lab.results import DriftRow, LadderRow, PageSizeRow, RequestRow, SharedPrompt, Spectrogram, TtftRow, Wave
from kvlab.viz import (
    as_svg,
    hit_ladder_panel,
    misses_panel,
    page_map_panel,
    page_size_panel,
    page_timeline_panel,
    prefix_tree_panel,
    sharing_map_panel,
    spectrograms_panel,
    speech_drift_panel,
    token_grid_panel,
    ttft_panel,
    waveforms_panel,
)
from kvlab.viz.marks import Axis, Label, Panel, Rect, Rects
from kvlab.viz.theme import CAUSES, INK, PAPER, SINK, STATES, luminance
from tests.synthetic_log import three_sharers, under_pressure

SVG = "{http://www.w3.org/2000/svg}"


def every_panel() -> list[Panel]:
    return [
        page_map_panel(three_sharers()),
        page_map_panel([]),
        page_timeline_panel(under_pressure()),
        prefix_tree_panel(three_sharers()),
        prefix_tree_panel([]),
        hit_ladder_panel([LadderRow(48, 16, 2, 32)]),
        ttft_panel([TtftRow(512, 256, 256, 100.0, 90.0)]),
        page_size_panel([PageSizeRow(16, 255, 240)]),
        misses_panel([RequestRow("<&\"'", 40, 32, 2)]),
        waveforms_panel([Wave("<&", 1.0, (-0.5, 0.0), (0.5, 0.1), 0.1)]),
        spectrograms_panel([Spectrogram("<&", 1.0, 8000.0, ((-90, -20), (-30, -30)))]),
        token_grid_panel([range(7)], [range(1, 8)]),
        speech_drift_panel([DriftRow("<&", 26, 24, 14, 3, 0.0, 0.1, 0.1, 0.01, 0.01)]),
        sharing_map_panel([SharedPrompt("<&", "one", 16, 8, 4)]),
    ]


@pytest.mark.parametrize("panel", every_panel(), ids=lambda panel: panel.title[:30])
class TestEveryFigure:
    def test_is_well_formed_and_described(self, panel: Panel) -> None:
        root = ET.fromstring(as_svg(panel))
        title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
        assert title.text == panel.title
        assert desc.text == panel.sentence
        assert root.get("role") == "img"
        assert root.get("aria-labelledby").split() == [title.get("id"), desc.get("id")]

    def test_is_drawn_the_same_each_time(self, panel: Panel) -> None:
        assert as_svg(panel) == as_svg(panel)

    def test_fetches_nothing_and_runs_nothing(self, panel: Panel) -> None:
        svg = as_svg(panel).replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|<script|<image|@import|\son\w+=", svg)

    def test_every_hatch_is_defined(self, panel: Panel) -> None:
        svg = as_svg(panel)
        assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= set(re.findall(r'<pattern id="([^"]+)"', svg))

    def test_nothing_lies_outside_the_picture(self, panel: Panel) -> None:
        root = ET.fromstring(as_svg(panel))
        _, _, width, height = (float(v) for v in root.get("viewBox").split())
        for rect in root.iter(f"{SVG}rect"):
            if rect.get("x") is not None:
                assert float(rect.get("x")) >= -0.5
                assert float(rect.get("x")) + float(rect.get("width")) <= width + 0.5
                assert float(rect.get("y")) + float(rect.get("height")) <= height + 0.5
        for text in root.iter(f"{SVG}text"):
            assert 0 <= float(text.get("y", 0)) <= height


def test_an_axis_of_no_extent_is_drawn() -> None:
    nowhere = Axis("", 0, 0, ((0, "here"),), True)
    drawn = as_svg(Panel("nowhere", nowhere, nowhere, (Label(0, 0, "text"),)))
    assert "here" in drawn
    assert "nan" not in drawn


def test_a_map_is_small() -> None:
    assert len(as_svg(page_map_panel(three_sharers()))) < 20_000


def test_two_figures_of_one_page_share_no_id() -> None:
    ids = [
        set(re.findall(r'id="([^"]+)"', as_svg(p)))
        for p in (page_map_panel(three_sharers()), page_timeline_panel(three_sharers()))
    ]
    assert not ids[0] & ids[1]


def test_text_that_is_markup_or_no_character_does_no_harm() -> None:
    nasty = "<script>&\"'\x00\x1b\udc80 end"
    panel = Panel(
        nasty,
        Axis(nasty, 0, 1),
        Axis(nasty, 0, 1),
        (Rects((Rect(0, 1, 0, 1, STATES["live"], nasty, nasty),)), Label(0, 0, nasty)),
    )
    root = ET.fromstring(as_svg(panel))
    assert "script" not in {element.tag.removeprefix(SVG) for element in root.iter()}


def test_cell_text_that_would_be_too_small_is_left_out() -> None:
    panel = Panel("t", Axis("", 0, 1000), Axis("", 0, 1), (Rects((Rect(0, 1, 0, 1, STATES["live"], "LETTERS"),)),))
    assert "LETTERS" not in as_svg(panel)


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("style", [*STATES.values(), *CAUSES.values(), SINK], ids=lambda style: style.name)
def test_letters_read_on_every_fill(style) -> None:
    assert contrast(style.ink, style.fill) >= 4.5


def test_words_read_on_the_own_paper() -> None:
    assert contrast(INK, PAPER) >= 7


def test_states_and_causes_differ_without_colour() -> None:
    assert len({s.hatch for s in STATES.values()}) >= 3
    assert len({s.name for s in CAUSES.values()}) == len(CAUSES)
