"""Where the spans of a layout lie."""

from __future__ import annotations

import pytest
from kv_driver import UNDERSTANDING, picture, text

from kvlab.cache.layouts import LaidOut

LAID = LaidOut(UNDERSTANDING)


@pytest.mark.parametrize(("slot", "index"), [(0, 0), (1, None), (20, 1), (49, None), (50, 2), (75, None)])
def test_the_span_that_begins_at_a_slot(slot, index):
    assert LAID.index_at(slot) == index


@pytest.mark.parametrize(("slot", "around"), [(0, None), (20, None), (21, (20, 50)), (49, (20, 50)), (50, None), (74, None)])
def test_a_match_may_end_at_either_end_of_a_picture_and_not_inside(slot, around):
    assert LAID.medium_around(slot) == around


@pytest.mark.parametrize(("slots", "position"), [(0, 0), (16, 16), (20, 20), (50, 21), (64, 35), (75, 46)])
def test_a_picture_is_one_position(slots, position):
    assert LAID.positions(slots) == position


@pytest.mark.parametrize(
    ("start", "stop", "has"), [(0, 16, False), (16, 32, True), (32, 48, True), (48, 64, True), (64, 80, False), (50, 64, False)]
)
def test_pages_that_hold_part_of_a_picture(start, stop, has):
    assert LAID.has_medium(start, stop) == has


def test_without_spans_slots_are_positions():
    assert LaidOut(()).positions(7) == 7
    assert not LaidOut(()).ends_with_medium
    assert LaidOut(()).num_slots == 0


def test_what_ends_with_a_picture():
    assert LaidOut([text(3), picture(4)]).ends_with_medium
    assert LaidOut([text(3), picture(4), picture(5)]).media_ends == [7, 12]
