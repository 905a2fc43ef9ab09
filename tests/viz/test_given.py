"""What is no log, no row and no panel is refused by every figure with what to give instead."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab import viz
from kvlab.errors import InputError

OF_EVENTS = [
    "page_map_panel", "page_timeline_panel", "prefix_tree_panel", "occupancy_panel", "evictions_panel", "page_table",
    "eviction_table", "page_map", "page_timeline", "prefix_tree", "occupancy", "evictions", "step_player",
]  # fmt: skip
OF_ROWS = {
    "hit_ladder_panel": "LadderRow", "ttft_panel": "TtftRow", "page_size_panel": "PageSizeRow", "misses_panel": "RequestRow",
    "waveforms_panel": "Wave", "spectrograms_panel": "Spectrogram", "speech_drift_panel": "DriftRow",
    "sharing_map_panel": "SharedPrompt", "cures_panel": "PressureRow", "policies_panel": "PressureRow",
    "stall_curve_panel": "PressureRow", "hit_ladder": "LadderRow", "ttft_vs_cached": "TtftRow", "misses": "RequestRow",
    "page_size_study": "PageSizeRow", "waveforms": "Wave", "spectrograms": "Spectrogram", "speech_drift": "DriftRow",
    "sharing_map": "SharedPrompt", "cures": "PressureRow", "policies": "PressureRow", "stall_curve": "PressureRow",
    "ladder_table": "LadderRow", "ttft_table": "TtftRow", "page_size_table": "PageSizeRow", "miss_table": "RequestRow",
    "request_table": "RequestRow", "speech_drift_table": "DriftRow", "pressure_table": "PressureRow",
    "pixel_shares_panel": "PixelDrift", "noise_curve_panel": "NoiseRow", "drift_by_match_panel": "PixelRow",
    "guided_sweep_panel": "SweepRow", "pixel_shares": "PixelDrift", "noise_curve": "NoiseRow", "drift_by_match": "PixelRow",
    "guided_sweep": "SweepRow", "drift_table": "PixelDrift", "pixel_table": "PixelRow", "noise_table": "NoiseRow",
    "sweep_table": "SweepRow",
}  # fmt: skip
OF_PANELS = ["as_figure", "as_svg", "mimebundle"]
OTHERS = {
    "pictures",
    "pictures_panel",
    "moved_pixels",
    "moved_pixels_panel",
    "token_grid",
    "token_grid_panel",
    "audio_player",
    "explore",
}


def test_every_entry_of_the_room_is_tried_here() -> None:
    assert {*OF_EVENTS, *OF_ROWS, *OF_PANELS, *OTHERS} == set(viz.__all__)


@pytest.mark.parametrize("name", OF_EVENTS)
def test_an_engine_in_the_place_of_its_events_is_told_so(tracer, name: str) -> None:
    with pytest.raises(InputError, match=r"an Engine was given; give engine\.events"):
        getattr(viz, name)(tracer())


@pytest.mark.parametrize("name", OF_EVENTS)
@pytest.mark.parametrize("wrong", [None, 3, "log.jsonl", [1, 2]])
def test_what_is_no_log_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(InputError, match=r"give engine\.events"):
        getattr(viz, name)(wrong)


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("wrong", [None, 3, "rows", [None]])
def test_what_are_no_rows_is_refused_with_their_kind(name: str, wrong: Any) -> None:
    with pytest.raises(InputError, match=f"list of {OF_ROWS[name]}"):
        getattr(viz, name)(wrong)


def test_results_in_the_place_of_rows_are_told_how_to_become_some(tracer) -> None:
    result = tracer().generate([1, 2, 3], max_tokens=1)
    with pytest.raises(InputError, match=r"row 0 is a GenerationResult.*RequestRow\.of"):
        viz.misses_panel([result])


@pytest.mark.parametrize("name", OF_PANELS)
def test_what_is_no_panel_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="a panel is needed, and a list was given"):
        getattr(viz, name)([])


@pytest.mark.parametrize("choice", [{"step": "x"}, {"step": True}, {"until_seq": 1.5}])
def test_a_moment_that_is_no_number_is_refused(tracer, choice: dict[str, Any]) -> None:
    engine = tracer()
    engine.generate([1, 2, 3], max_tokens=1)
    with pytest.raises(InputError, match=f"{next(iter(choice))} is"):
        viz.page_map_panel(engine.events, **choice)


@pytest.mark.parametrize("frames", [None, 3, [1], [[1, 2]]])
def test_frames_of_another_shape_are_refused(frames: Any) -> None:
    with pytest.raises(InputError, match="frames of hit are no list of 7 codes"):
        viz.token_grid_panel([[1] * 7], frames)


def test_a_grid_of_no_columns_a_sound_that_is_none_and_a_drawing_without_a_function_are_refused() -> None:
    with pytest.raises(InputError, match="columns is 0"):
        viz.token_grid_panel([[1] * 7], [[1] * 7], columns=0)
    with pytest.raises(InputError, match="a list is no utterance"):
        viz.audio_player([0, 1])
    with pytest.raises(InputError, match="3 is none"):
        viz.explore(3)  # type: ignore[arg-type]
