"""Pictures side by side: what the PNGs hold, scales, names, and the pixels over a threshold."""

from __future__ import annotations

import io

import numpy as np
import pytest

from kvlab.errors import InputError
from kvlab.lab.pixels import compare_pictures, difference_map, to_draw
from kvlab.viz import as_figure, as_svg, mimebundle, moved_pixels_panel, pictures_panel
from kvlab.viz.display import PLOTLY_MIME
from kvlab.viz.marks import Bitmap, Label, Panel
from kvlab.viz.theme import HEAT, LAST, SIGNED

pillow = pytest.importorskip("PIL.Image")

FIRST = np.random.default_rng(0).integers(60, 180, (8, 12, 3), dtype=np.uint8)
SECOND = FIRST.copy()
SECOND[2, 3, 1] += 40
SECOND[7, 11, 0] -= 4


def bitmaps(panel: Panel) -> list[Bitmap]:
    return [mark for mark in panel.marks if isinstance(mark, Bitmap)]


def pixels(mark: Bitmap) -> np.ndarray:
    return np.asarray(pillow.open(io.BytesIO(mark.png)).convert("RGB"))


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def side_by_side(**options) -> Panel:
    shown = [to_draw(FIRST, "cold"), to_draw(SECOND, "hit"), difference_map(FIRST, SECOND, **options)]
    return pictures_panel(shown, drift=compare_pictures(FIRST, SECOND, "hit against cold"))


def test_a_png_holds_the_picture_bit_for_bit():
    cold, hit, _ = bitmaps(side_by_side())
    assert (pixels(cold) == FIRST).all()
    assert (pixels(hit) == SECOND).all()


def test_equal_pixels_have_the_lowest_colour_and_the_furthest_the_highest():
    drawn = pixels(bitmaps(side_by_side())[2])
    assert tuple(drawn[2, 3]) == rgb(HEAT[-1])
    assert tuple(drawn[7, 11]) == rgb(HEAT[1])
    assert (drawn == rgb(HEAT[0])).all(axis=2).sum() == 8 * 12 - 2


def test_a_signed_map_is_blue_below_and_orange_above_zero():
    drawn = pixels(bitmaps(side_by_side(signed=True))[2])
    middle = len(SIGNED) // 2
    assert tuple(drawn[2, 3]) == rgb(SIGNED[-1])
    assert tuple(drawn[7, 11]) == rgb(SIGNED[middle - 1])
    assert tuple(drawn[0, 0]) == rgb(SIGNED[middle])


def test_the_title_is_the_verdict_and_the_scale_is_said():
    panel = side_by_side()
    assert panel.title == "94 of 96 pixels are equal, the others differ by up to 40 of 255, 1 (1.04%) by more than 32"
    assert "up to 40 of 255" in panel.subtitle
    assert [style.name for style in panel.legend] == ["0", "20", "40"]
    assert panel.table.to_dicts()[0]["equal"] == 94


def test_maps_of_one_row_share_a_scale():
    near = difference_map(FIRST, FIRST + np.uint8(20))
    panel = pictures_panel([difference_map(FIRST, SECOND), near])
    assert tuple(pixels(bitmaps(panel)[1])[7, 7]) == rgb(HEAT[5])  # 20 of 40


def test_every_picture_has_its_name_above_it():
    panel = side_by_side()
    labels = [mark for mark in panel.marks if isinstance(mark, Label)]
    assert [label.text for label in labels] == ["cold", "hit", "difference"]
    assert all(label.y < 0 and label.x == bitmap.x0 for label, bitmap in zip(labels, bitmaps(panel), strict=True))


def test_pixels_are_squares_in_the_figure():
    for count in (1, 3, 6):
        panel = pictures_panel([to_draw(FIRST, str(i)) for i in range(count)])
        across = 712 / (panel.x.high - panel.x.low)
        down = panel.plot_height_px / (panel.y.high - panel.y.low)
        assert across == pytest.approx(down, rel=0.01)


def test_an_equal_pair_is_a_dark_map_and_no_error():
    same = difference_map(FIRST, FIRST)
    panel = pictures_panel([to_draw(FIRST, "cold"), to_draw(FIRST, "hit"), same], drift=compare_pictures(FIRST, FIRST))
    assert panel.title == "All 96 pixels are equal"
    assert (pixels(bitmaps(panel)[2]) == rgb(HEAT[0])).all()


def test_a_picture_drawn_smaller_says_so():
    big = np.zeros((600, 600, 3), np.uint8)
    panel = pictures_panel([to_draw(big, "big"), difference_map(big, big)])
    assert "drawn 3 times smaller" in panel.subtitle


def test_a_figure_with_pictures_carries_each_once():
    bundle = mimebundle(side_by_side())
    assert PLOTLY_MIME not in bundle
    assert bundle["image/svg+xml"].count("<image ") == 3
    assert bundle["image/svg+xml"].count("image-rendering:pixelated") == 3


def test_plotly_gets_the_same_pictures_in_the_same_places():
    panel = side_by_side()
    traces = [trace for trace in as_figure(panel).data if trace.type == "image"]
    assert [trace.source for trace in traces] == [mark.uri for mark in bitmaps(panel)]
    assert [(trace.x0 - 0.5, trace.dx, trace.dy) for trace in traces] == [(mark.x0, 1, 1) for mark in bitmaps(panel)]


def test_pictures_have_words_for_those_who_cannot_see_them():
    svg = as_svg(side_by_side())
    assert "<title>picture: cold</title>" in svg
    assert "<title>map: difference, at most 40 of 255</title>" in svg


@pytest.mark.parametrize(("threshold", "num_marked"), [(0, 2), (3, 2), (4, 1), (39, 1), (40, 0)])
def test_pixels_over_the_threshold_are_marked(threshold: int, num_marked: int):
    drift = compare_pictures(FIRST, SECOND)
    panel = moved_pixels_panel(to_draw(FIRST, "a"), to_draw(SECOND, "b"), difference_map(FIRST, SECOND), drift, threshold)
    drawn = pixels(bitmaps(panel)[2])
    assert (drawn == rgb(LAST)).all(axis=2).sum() == num_marked
    assert panel.title == f"{num_marked / 96:.2%} of 96 pixels differ by more than {threshold} of 255"


def test_none_too_many_or_unequal_pictures_are_refused():
    with pytest.raises(InputError, match="0 pictures to draw"):
        pictures_panel([])
    with pytest.raises(InputError, match="7 pictures to draw"):
        pictures_panel([to_draw(FIRST, "x")] * 7)
    with pytest.raises(InputError, match="give equal ones"):
        pictures_panel([to_draw(FIRST, "x"), to_draw(FIRST[:4], "y")])
    with pytest.raises(InputError, match="a ndarray is to be drawn"):
        pictures_panel([FIRST])
