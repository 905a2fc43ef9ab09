"""Waveforms and spectrograms: lanes on one scale, levels in their places, sizes that a notebook can hold."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

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
    assert panel.title == "Peaks, of full scale: cold 0.5, hit − cold 0.05"
    assert [text for _, text in panel.y.ticks] == ["cold", "hit − cold"]
    assert panel.table.to_dicts()[1] == {"signal": "hit − cold", "seconds": 2.0, "peak": 0.05, "rms": 0.01}


def test_a_soft_lane_is_drawn_larger_under_its_own_numbers():
    panel = waveforms_panel([LOUD, replace(SOFT, drawn_gain=10.0)])
    assert panel.marks[2].ys == (1.48, 1.0, 1.0, 0.52)
    assert panel.y.ticks[1] == (1, "hit − cold, drawn ×10")
    assert (panel.marks[3].text, panel.table.rows[1][2]) == ("rms 0.01", 0.05)


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


def test_an_svg_has_one_path_a_level_and_equal_neighbours_as_one_stroke():
    svg = as_svg(spectrograms_panel([picture("cold")]))
    cells = svg[svg.index("crispEdges") :]
    paths = dict(reversed(pair) for pair in re.findall(r'<path d="([^"]+)" stroke="([^"]+)"/>', cells))
    assert {colour: d.count("M") for colour, d in paths.items()} == {HEAT[0]: 2, HEAT[level_of(-50)]: 1, HEAT[9]: 1}


def test_a_spectrogram_fits_into_a_notebook():
    noisy = tuple(tuple(-90 + (7 * row + 13 * column) % 80 for column in range(60)) for row in range(24))
    bundle = mimebundle(spectrograms_panel([picture("cold", noisy), picture("hit", noisy)]))
    assert len(json.dumps(bundle)) < 40_000  # of the worst kind: no two neighbours alike


def test_the_plotly_grid_lies_where_the_svg_has_it():
    trace = mimebundle(spectrograms_panel([picture("cold")]))["application/vnd.plotly.v1+json"]["data"][0]
    assert (trace["type"], trace["x0"], trace["dx"], trace["y0"], trace["dy"]) == ("heatmap", 0.5, 1.0, 0.25, 0.5)
    assert (trace["z"]["dtype"], trace["z"]["shape"], trace["zmin"], trace["zmax"]) == ("i1", "2, 3", 0, 9)
    assert list(base64.b64decode(trace["z"]["bdata"])) == [0, 0, 0, level_of(-50), 9, 0]


def test_long_lines_are_packed_and_plotly_reads_them_back():
    np, plotly = pytest.importorskip("numpy"), pytest.importorskip("plotly", reason="needs the extra lab")
    wave = Wave("long", 60.0, tuple(-i / 100 for i in range(60)), tuple(i / 100 for i in range(60)), 0.1)
    line = waveforms_panel([wave]).marks[0]
    trace = mimebundle(waveforms_panel([wave]))["application/vnd.plotly.v1+json"]["data"][0]
    packed = plotly.graph_objects.Scatter(x=trace["x"], y=trace["y"])
    for axis in ("x", "y"):
        raw = base64.b64decode(packed[axis]["bdata"])
        assert np.frombuffer(raw, "<f4") == pytest.approx(np.asarray(getattr(line, f"{axis}s"), np.float32))


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


@pytest.mark.parametrize("levels", [(), ((), ())])
def test_a_spectrogram_without_levels_is_refused(levels):
    with pytest.raises(InputError, match="the spectrogram 'cold' has no levels; make it of at least one band and one column"):
        spectrograms_panel([Spectrogram("cold", 0.0, 8000.0, levels)])
