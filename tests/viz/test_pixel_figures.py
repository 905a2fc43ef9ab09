"""Shares over thresholds, drift against noise and matched tokens, and sweeps of seeds."""

from __future__ import annotations

import pytest

from kvlab.errors import InputError
from kvlab.lab.picture_results import NoiseRow, PixelDrift, PixelRow, SweepRow
from kvlab.viz import (
    drift_by_match_panel,
    guided_sweep_panel,
    noise_curve_panel,
    noise_table,
    pixel_shares_panel,
    pixel_table,
    sweep_table,
)
from kvlab.viz.marks import Line, Points, Rects
from kvlab.viz.pixels import share_axis, share_place
from kvlab.viz.theme import COMPUTED, SERVED

SIZE = 1000  # pixels


def drift(name: str = "", **moved: int) -> PixelDrift:
    """``by_3=20``: 20 pixels are 3 of 255 off."""
    counts = [0] * 256
    for by, pixels in moved.items():
        counts[int(by.removeprefix("by_"))] = pixels
    counts[0] = SIZE - sum(counts)
    return PixelDrift(10, 100, tuple(counts), 0.1, 40.0, name)


NEAR, FAR, EQUAL = drift("float32", by_1=30), drift("wrong walk", by_40=500, by_90=100), drift("same")


def row(cached: int, found: PixelDrift, dtype: str = "float32") -> PixelRow:
    return PixelRow(f"{cached} cached", dtype, 24, True, 40, cached, 2 * cached, found, EQUAL)


# -- the axis of shares ------------------------------------------------------------------------------------------------


def test_none_stands_below_a_single_pixel():
    axis = share_axis([NEAR])
    assert [text for _, text in axis.ticks] == ["none", "0.1 %", "1 %", "10 %", "100 %"]
    assert share_place(0.0, SIZE) < 0 <= share_place(1 / SIZE, SIZE)
    assert share_place(1.0, SIZE) == axis.ticks[-1][0]


# -- shares over a threshold -------------------------------------------------------------------------------------------


def test_the_curve_of_a_pair_ends_where_nothing_is_left():
    panel = pixel_shares_panel([NEAR, FAR, EQUAL], threshold=32)
    near, far, equal = (mark for mark in panel.marks[1:] if isinstance(mark, Line))
    assert (near.ys[0], near.ys[1]) == (share_place(0.03, SIZE), share_place(0, SIZE))
    assert (far.ys[39], far.ys[40]) == (share_place(0.6, SIZE), share_place(0.1, SIZE))
    assert set(equal.ys) == {share_place(0, SIZE)}


def test_the_threshold_is_marked_and_its_shares_are_the_title():
    panel = pixel_shares_panel([NEAR, FAR, EQUAL], threshold=32)
    assert panel.title == "Pixels over 32 of 255: none (float32), 60.00% (wrong walk), none (same)"
    assert panel.marks[0].xs == (32, 32)
    assert panel.table.to_dicts()[1]["over 64"] == "10.00%"


def test_a_title_without_room_for_all_shares_names_the_largest():
    panel = pixel_shares_panel([NEAR, EQUAL, EQUAL, FAR], threshold=0)
    assert panel.title == "Pixels over 0 of 255: 3.00% (float32), none (same), 60.00% (wrong walk), and 1 more"


# -- noise -------------------------------------------------------------------------------------------------------------


NOISE = [NoiseRow(-10, 24, EQUAL), NoiseRow(-7, 24, NEAR), NoiseRow(-3, 24, FAR)]


def test_the_figure_says_that_noise_was_injected():
    panel = noise_curve_panel(NOISE)
    assert panel.subtitle.startswith("Injected: ")
    assert "injected" in panel.x.title
    assert noise_table(NOISE).columns[0] == "injected noise"


def test_the_title_names_the_least_noise_that_reaches_one_percent():
    assert noise_curve_panel(NOISE).title == "1 % of pixels over 32 is reached with injected noise of 2^-3"
    assert noise_curve_panel(NOISE[:2]).title == (
        "Even injected noise of 2^-7 moves few pixels: none over 32, at most 1 of 255"
    )


def test_rows_are_drawn_in_the_order_of_their_noise():
    lines = [mark for mark in noise_curve_panel(NOISE[::-1], (0,)).marks if isinstance(mark, Line)]
    assert lines[0].xs == (-10, -7, -3)
    assert lines[0].ys == tuple(share_place(share, SIZE) for share in (0.0, 0.03, 0.6))


# -- cold against hit --------------------------------------------------------------------------------------------------


def test_each_format_has_its_points_with_the_largest_difference_above():
    panel = drift_by_match_panel([row(8, NEAR), row(4, EQUAL), row(8, FAR, "bfloat16")])
    single, half = (mark for mark in panel.marks if isinstance(mark, Points))
    assert (single.xs, single.texts) == ((4, 8), ("0", "1"))
    assert (half.xs, half.texts) == ((8,), ("90",))
    assert single.symbol != half.symbol
    assert panel.title == "A hit moves pixels by at most 90 of 255 (8 slots cached, bfloat16)"


def test_pictures_that_are_all_equal_are_said_to_be():
    assert drift_by_match_panel([row(8, EQUAL), row(4, EQUAL)]).title == (
        "2 pictures after a hit: each equals its cold one in every pixel"
    )


def test_the_table_puts_equality_before_distances_and_tells_whether_cold_repeats_itself():
    found = pixel_table([row(8, NEAR)]).to_dicts()[0]
    assert list(found).index("equal pixels") < list(found).index("largest of 255") < list(found).index("over 0")
    assert (found["cached of main"], found["over 0"], found["over 1"], found["cold again"]) == (
        "8 of 40", "3.00%", "none", "equal",
    )  # fmt: skip


# -- sweeps ------------------------------------------------------------------------------------------------------------


SWEEP = [SweepRow(seed, reuse, 60, 12 if reuse and seed else 60, 20.0, 200.0) for reuse in (False, True) for seed in range(3)]


def test_served_and_computed_slots_add_up_to_the_prompt():
    panel = guided_sweep_panel(SWEEP)
    rects = panel.marks[0].rects
    assert isinstance(panel.marks[0], Rects)
    assert [(r.x1 - r.x0, r.style) for r in rects[-2:]] == [(48, SERVED), (12, COMPUTED)]
    assert panel.title == "Reuse in guided prefill: 180 slots computed without it, 84 with it"


def test_a_sweep_has_two_sides():
    with pytest.raises(InputError, match="with reuse and without"):
        guided_sweep_panel(SWEEP[:3])


def test_the_share_of_prefill_is_that_of_the_whole_request():
    assert sweep_table(SWEEP).to_dicts()[0]["prefill's share"] == "10.0%"
