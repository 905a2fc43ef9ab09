"""Codes beside codes, drift beside its noise floor, and the map of what prompts share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlab.errors import InputError
from kvlab.lab.results import DriftRow, SharedPrompt
from kvlab.viz import as_svg, sharing_map_panel, speech_drift_panel, token_grid_panel
from kvlab.viz.marks import Label
from kvlab.viz.speech import EQUAL_FRAMES, OTHER, OTHER_FRAMES, SAME
from kvlab.viz.theme import COMPUTED, SERVED

FRAMES = [tuple(range(i, i + 7)) for i in range(20)]
PARTED = [*FRAMES[:9], (9, 10, 99, 12, 13, 14, 15), *FRAMES[10:]]
EQUAL = DriftRow("float32", 26, 24, 14, None, 1.7e-6, 0.0, 0.0, 0.03, 0.004)
DRIFTED = DriftRow("bfloat16", 26, 24, 15, 6, 0.02, 0.5, 0.11, 0.02, 0.003)


# -- codes -------------------------------------------------------------------------------------------------------------


def test_the_first_frame_that_differs_is_named_with_slot_and_codes():
    panel = token_grid_panel(FRAMES, PARTED)
    assert panel.title == (
        "Frame 9 is the first that differs, in slot 2: code 11 in cold, 99 in hit; 19 of 20 frames are equal"
    )
    assert panel.table.to_dicts() == [{"frame": 9, "first": "9 10 11 12 13 14 15", "second": "9 10 99 12 13 14 15"}]


def test_the_grid_shows_the_frames_around_it():
    rects = token_grid_panel(FRAMES, PARTED, columns=12).marks[0].rects
    assert [round((r.x0 + r.x1) / 2) for r in rects[::7]] == list(range(5, 17))
    assert [(r.text, r.style) for r in rects[4 * 7 : 4 * 7 + 3]] == [("9", SAME), ("10", SAME), ("11→99", OTHER)]


def test_equal_utterances_are_shown_from_the_front():
    panel = token_grid_panel(FRAMES, FRAMES, ("one", "two"))
    assert panel.title == "one and two: all 20 frames have the same codes"
    assert {r.style for r in panel.marks[0].rects} == {SAME}
    assert panel.x.ticks[0] == (0, "0")


def test_an_utterance_that_ends_earlier_differs_where_it_ends():
    panel = token_grid_panel(FRAMES, FRAMES[:5])
    assert panel.title == "hit ends at frame 5; the 5 frames before have the same codes"
    assert panel.marks[0].rects[-1].text.endswith("→–")


def test_one_frame_is_drawn_and_none_is_refused():
    assert len(token_grid_panel(FRAMES[:1], FRAMES[:1]).marks[0].rects) == 7
    with pytest.raises(InputError, match="no frames to draw"):
        token_grid_panel([], [])


# -- drift -------------------------------------------------------------------------------------------------------------


def test_bars_are_equal_frames_and_then_the_others():
    rects = speech_drift_panel([EQUAL, DRIFTED]).marks[0].rects
    assert [(r.x0, r.x1, r.style) for r in rects] == [(0, 14, EQUAL_FRAMES), (0, 6, EQUAL_FRAMES), (6, 15, OTHER_FRAMES)]


def test_the_noise_floor_stands_beside_every_drift():
    panel = speech_drift_panel([EQUAL, DRIFTED])
    assert [mark.text for mark in panel.marks if isinstance(mark, Label)] == [
        "samples equal (noise 0.004)",
        "rms 0.11 (noise 0.003)",
    ]
    columns = panel.table.columns
    for name in ("most", "rms"):
        assert columns.index(f"noise, {name}") == columns.index(f"sample drift, {name}") + 1


def test_the_title_names_the_earliest_that_parts():
    later = replace(DRIFTED, name="later", first_frame=8)
    assert speech_drift_panel([later, DRIFTED, EQUAL]).title == "2 of 3 pairs part; the earliest at frame 6 (bfloat16)"
    assert speech_drift_panel([EQUAL]).title == "1 pair of utterances: equal in every frame"
    assert speech_drift_panel([EQUAL], "A finding").title == "A finding"


def test_a_pair_that_parts_at_once_has_no_green():
    rects = speech_drift_panel([replace(DRIFTED, first_frame=0)]).marks[0].rects
    assert [r.style for r in rects] == [OTHER_FRAMES]


def test_utterances_of_no_whole_frame_are_drawn():
    panel = speech_drift_panel([replace(EQUAL, num_frames=0)] * 2)
    assert panel.title == "2 pairs of utterances without a whole frame: nothing to compare"
    assert "samples equal" in as_svg(panel)


def test_no_rows_are_refused():
    with pytest.raises(InputError, match="at least one DriftRow"):
        speech_drift_panel([])
    with pytest.raises(InputError, match="at least one SharedPrompt"):
        sharing_map_panel([])


# -- sharing -----------------------------------------------------------------------------------------------------------

ASKED = [
    SharedPrompt("tara", "one red star", 16, 0, 4),
    SharedPrompt("tara", "one red circle", 16, 8, 4),
    SharedPrompt("leo", "one red star", 16, 0, 4),
    SharedPrompt("leo", "one red circle", 16, 8, 4),
]


def test_every_cell_is_split_where_the_cache_ends():
    rects = sharing_map_panel(ASKED).marks[0].rects
    assert [(round(r.x0, 2), round(r.x1, 2), r.style, r.text) for r in rects[:3]] == [
        (-0.46, 0.46, COMPUTED, "16 of 16"),
        (0.54, 1.0, SERVED, "8"),
        (1.0, 1.46, COMPUTED, "8"),
    ]
    assert {(r.y0, r.y1) for r in rects[3:]} == {(0.6, 1.4)}


def test_the_map_tells_what_a_new_voice_finds():
    assert sharing_map_panel(ASKED).title == "16 of 64 prompt tokens came from the cache; a new voice finds nothing"
    crossed = [*ASKED[:2], replace(ASKED[2], cached_tokens=4), ASKED[3]]
    assert sharing_map_panel(crossed).title.endswith("20 of 64 prompt tokens came from the cache; new voices find 4 tokens")
    assert sharing_map_panel(ASKED[:2]).title == "8 of 32 prompt tokens came from the cache"


def test_prompts_of_no_token_are_drawn():
    panel = sharing_map_panel([SharedPrompt("tara", "", 0, 0, 4)])
    assert panel.title == "0 of 0 prompt tokens came from the cache"
    assert [(r.text, r.style) for r in panel.marks[0].rects] == [("0 of 0", COMPUTED)]
