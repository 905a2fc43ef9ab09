"""Waveforms and spectrograms: lanes on one scale, levels in their places, sizes that a notebook can hold."""

from __future__ import annotations

import json
import re

import pytest

from kvlab.errors import InputError
from kvlab.lab.results import Spectrogram, Wave
from kvlab.viz import as_svg, mimebundle, spectrograms_panel, waveforms_panel
from kvlab.viz.audio import difference_db, level_of
from kvlab.viz.marks import Heat, Label, Line
from kvlab.viz.theme import HEAT

LOUD = Wave("cold", 2.0, (-0.5, -0.25), (0.25, 0.5), 0.2)
SOFT = Wave("hit − cold", 2.0, (-0.05, 0.0), (0.0, 0.05), 0.01)
SILENT = Wave("nothing", 2.0, (0.0, 0.0), (0.0, 0.0), 0.0)
QUIET_ROWS = ((-90, -90, -90), (-50, -10, -90))


def heats(panel):
    return [mark for mark in panel.marks if isinstance(mark, Heat)]


def test_lanes_lie_below_each_other_on_one_scale():
    first, _, second, _ = waveforms_panel([LOUD, SOFT]).marks
    assert first.ys == (0.48, -0.24, 0.24, -0.48)  # downwards: the axis is flipped
    assert second.ys == (1.048, 1.0, 1.0, 0.952)
    assert first.xs == (0.5, 0.5, 1.5, 1.5)


def test_every_lane_says_its_rms_and_the_title_its_peak():
    panel = waveforms_panel([LOUD, SOFT])
    assert [mark.text for mark in panel.marks if isinstance(mark, Label)] == ["rms 0.2", "rms 0.01"]
    assert panel.title == "cold peaks at 0.5 of full scale; hit − cold peaks at 0.05 of full scale"
    assert [text for _, text in panel.y.ticks] == ["cold", "hit − cold"]
    assert panel.table.to_dicts()[1] == {"signal": "hit − cold", "seconds": 2.0, "peak": 0.05, "rms": 0.01}


def test_a_silent_signal_is_a_line_of_two_points():
    (line,) = [mark for mark in waveforms_panel([SILENT]).marks if isinstance(mark, Line)]
    assert (line.xs, line.ys) == ((0.0, 2.0), (0.0, 0.0))


def test_a_signal_of_no_samples_is_drawn():
    assert "<svg" in as_svg(waveforms_panel([Wave("none", 0.0, (), (), 0.0)]))


def test_a_finding_takes_the_place_of_the_title():
    assert waveforms_panel([LOUD], "Equal").title == spectrograms_panel([picture("a")], "Equal").title == "Equal"


def picture(name, rows=QUIET_ROWS, **changes):
    return Spectrogram(**{"name": name, "duration_s": 3.0, "max_hz": 8000.0, "levels_db": rows} | changes)


def test_levels_stand_in_their_bands_the_first_picture_on_top():
    top, bottom = heats(spectrograms_panel([picture("cold"), picture("hit")]))
    assert (bottom.y0, bottom.y1, top.y0, top.y1) == (0, 1, 1.2, 2.2)
    assert top.levels == ((0, 0, 0), (level_of(-50), 9, 0))
    assert (top.x0, top.x1) == (0, 3.0)


def test_an_svg_has_one_path_a_level_and_equal_neighbours_as_one_piece():
    svg = as_svg(spectrograms_panel([picture("cold")]))
    cells = svg[svg.index("crispEdges") :]
    paths = dict(reversed(pair) for pair in re.findall(r'<path d="([^"]+)" fill="([^"]+)"/>', cells))
    assert {colour: d.count("M") for colour, d in paths.items()} == {HEAT[0]: 2, HEAT[level_of(-50)]: 1, HEAT[9]: 1}


def test_a_spectrogram_fits_into_a_notebook():
    noisy = tuple(tuple(-90 + (7 * row + 13 * column) % 80 for column in range(80)) for row in range(32))
    bundle = mimebundle(spectrograms_panel([picture("cold", noisy), picture("hit", noisy)]))
    assert len(json.dumps(bundle)) < 300_000  # of the worst kind: no two neighbours alike


def test_the_plotly_grid_lies_where_the_svg_has_it():
    trace = mimebundle(spectrograms_panel([picture("cold")]))["application/vnd.plotly.v1+json"]["data"][0]
    assert (trace["type"], trace["x0"], trace["dx"], trace["y0"], trace["dy"]) == ("heatmap", 0.5, 1.0, 0.25, 0.5)
    assert (trace["z"][1], trace["zmin"], trace["zmax"]) == ([level_of(-50), 9, 0], 0, 9)


def test_the_title_says_how_far_pictures_differ():
    other = picture("bfloat16", ((-90, -80, -90), (-50, -10, -90)))
    assert spectrograms_panel([picture("cold"), picture("hit"), other]).title == (
        "hit equals cold; bfloat16 differs by up to 10 dB"
    )
    assert difference_db(picture("a"), other) == 10


def test_nothing_and_unlike_bands_are_refused():
    for draw in (waveforms_panel, spectrograms_panel):
        with pytest.raises(InputError, match="give at least one"):
            draw([])
    with pytest.raises(InputError, match="different bands"):
        spectrograms_panel([picture("a"), picture("b", max_hz=4000.0)])
