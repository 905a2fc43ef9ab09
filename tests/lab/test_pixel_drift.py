"""Drift of pictures: equal pixels first, then the largest difference, then shares over thresholds; and what is drawn of it."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvlab.errors import InputError
from kvlab.lab.picture_results import MAX_THRESHOLD, Picture
from kvlab.lab.pixels import as_pixels, compare_pictures, difference_map, differences, share_curve, to_draw


def noise(height: int = 5, width: int = 7, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def moved(picture: np.ndarray, *changes: tuple[int, int, int, int]) -> np.ndarray:
    """A copy with (row, column, channel, by) changes."""
    other = picture.astype(np.int16)
    for row, column, channel, by in changes:
        other[row, column, channel] += by
    return other.astype(np.uint8)


GREY = np.full((4, 6, 3), 100, np.uint8)


def test_equal_pictures_are_equal_in_every_pixel():
    found = compare_pictures(noise(), noise())
    assert (found.equal_pixels, found.max_abs, found.psnr_db, found.is_equal) == (35, 0, None, True)
    assert found.verdict == "all 35 pixels are equal"


def test_one_channel_makes_a_pixel_differ_and_two_channels_count_once():
    found = compare_pictures(GREY, moved(GREY, (0, 0, 0, 3), (0, 0, 2, -9), (3, 5, 1, 1)))
    assert (found.equal_pixels, found.moved[9], found.moved[1], found.moved[3]) == (22, 1, 1, 0)
    assert found.max_abs == 9


def test_a_difference_below_zero_does_not_wrap_around():
    assert compare_pictures(np.zeros((1, 1, 3), np.uint8), np.full((1, 1, 3), 255, np.uint8)).max_abs == 255
    assert differences(np.full((1, 1, 3), 255, np.uint8), np.zeros((1, 1, 3), np.uint8)).min() == -255


@pytest.mark.parametrize("threshold", [0, 1, 7, 32, 64, 254, 255])
def test_the_share_over_a_threshold_is_that_of_a_count_over_channels(threshold: int):
    one, other = noise(9, 11, 1), noise(9, 11, 2)
    over = (np.abs(one.astype(int) - other.astype(int)) > threshold).any(axis=2)
    assert compare_pictures(one, other).share_over(threshold) == over.mean()


@pytest.mark.parametrize("threshold", [-1, 256, 1.0, True, None])
def test_a_threshold_that_is_none_is_refused(threshold):
    with pytest.raises(InputError, match="from 0 to 255"):
        compare_pictures(GREY, GREY).share_over(threshold)


def test_the_curve_falls_from_zero_to_64():
    curve = share_curve(compare_pictures(noise(seed=1), noise(seed=2)))
    assert [t for t, _ in curve] == list(range(MAX_THRESHOLD + 1))
    assert all(a >= b for (_, a), (_, b) in pairwise(curve))


def test_the_verdict_says_how_many_are_equal_first_and_names_what_is_far():
    found = compare_pictures(GREY, moved(GREY, (0, 0, 0, 40), (1, 1, 1, 2)))
    assert found.verdict == "22 of 24 pixels are equal, the others differ by up to 40 of 255, 1 (4.17%) by more than 32"
    near = compare_pictures(GREY, moved(GREY, (1, 1, 1, 2)))
    assert near.verdict.endswith("by up to 2 of 255, none by more than 32")


def test_psnr_and_mean_are_those_of_all_channels():
    found = compare_pictures(GREY, moved(GREY, (0, 0, 0, 12)))
    assert found.mean_abs == pytest.approx(12 / 72)
    assert found.psnr_db == pytest.approx(10 * np.log10(255**2 / (144 / 72)))


def test_a_result_a_tensor_an_array_and_an_image_are_one_picture():
    pillow = pytest.importorskip("PIL.Image")
    picture = noise()
    for same in (torch.from_numpy(picture), pillow.fromarray(picture), SimpleNamespace(pixels=torch.from_numpy(picture))):
        assert compare_pictures(picture, same).is_equal


@pytest.mark.parametrize(
    "wrong", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8), 3]
)
def test_what_is_no_picture_of_bytes_is_refused(wrong):
    with pytest.raises(InputError, match=r"give bytes \[height, width, 3\]"):
        as_pixels(wrong)


def test_a_result_without_a_picture_says_how_to_ask_for_one():
    with pytest.raises(InputError, match=r"kvlab\.draw"):
        as_pixels(SimpleNamespace(pixels=None))


def test_pictures_of_two_sizes_are_not_compared():
    with pytest.raises(InputError, match="4 x 6 and 5 x 7 pixels"):
        compare_pictures(GREY, noise())


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_a_small_picture_is_drawn_as_it_is():
    shown = to_draw(noise(), "noise")
    assert (shown.height, shown.width, shown.shrunk, shown.rgb) == (5, 7, 1, noise().tobytes())


def test_a_large_picture_is_drawn_as_means_and_its_edges_stay():
    picture = np.zeros((5, 7, 3), np.uint8)
    picture[:, 6] = 200
    shown = to_draw(picture, "wide", max_side_px=4)
    rows = np.frombuffer(shown.rgb, np.uint8).reshape(shown.height, shown.width, 3)
    assert (shown.height, shown.width, shown.shrunk) == (3, 4, 2)
    assert rows[:, :, 0].tolist() == [[0, 0, 0, 200]] * 3


def test_a_map_has_the_channel_furthest_off_with_or_without_its_sign():
    other = moved(GREY, (0, 0, 0, 3), (0, 0, 2, -9), (3, 5, 1, 1))
    magnitudes, signed = difference_map(GREY, other), difference_map(GREY, other, signed=True)
    assert (magnitudes.values[0][0], magnitudes.values[3][5], magnitudes.max_abs) == (9, 1, 9)
    assert (signed.values[0][0], signed.values[3][5], signed.max_abs) == (-9, 1, 9)
    assert sum(value != 0 for row in signed.values for value in row) == 2


def test_one_pixel_of_a_large_picture_is_not_lost_in_its_map():
    big = np.full((1000, 700, 3), 9, np.uint8)
    apart = difference_map(big, moved(big, (999, 699, 0, -5)), signed=True, max_side_px=100)
    assert (apart.cell_px, len(apart.values), len(apart.values[0])) == (10, 100, 70)
    assert apart.values[99][69] == -5
    assert sum(value != 0 for row in apart.values for value in row) == 1


def test_a_picture_and_its_map_are_shrunk_alike():
    big = np.full((700, 1000, 3), 9, np.uint8)
    shown, apart = to_draw(big, "big", max_side_px=64), difference_map(big, big, max_side_px=64)
    assert (shown.height, shown.width) == (len(apart.values), len(apart.values[0]))
    with pytest.raises(InputError, match="max_side_px is 0"):
        to_draw(big, "big", max_side_px=0)


def test_reprs_are_one_bounded_line():
    big = np.zeros((300, 300, 3), np.uint8)
    texts = [repr(x) for x in (to_draw(big, "big"), difference_map(big, big), compare_pictures(big, big))]
    assert all(len(text) < 120 and "\n" not in text for text in texts)


def test_a_picture_needs_three_bytes_a_pixel():
    with pytest.raises(InputError, match="has 5 bytes; give 3 a pixel"):
        Picture("odd", 1, 2, bytes(5))
