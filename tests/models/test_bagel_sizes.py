"""Sizes: as the released rules have them for pictures given, and named when a picture cannot be drawn at the one asked for."""

from __future__ import annotations

import json

import golden_bagel as golden
import numpy as np
import pytest

from kvlab.errors import InputError
from kvlab.models.bagel.config import BagelConfig, ResizeRule
from kvlab.models.bagel.resizing import default_size, require_size, resize, resized_size
from kvlab.models.bagel.sizing import picture_slots

CONFIG = BagelConfig()
TABLE = json.loads(golden.table("resize.json"))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "x".join(map(str, row["wh"])))
def test_sizes_of_the_released_rules(row):
    width, height = row["wh"]
    seen = resized_size(CONFIG.vae_rule, height, width)
    assert list(seen[::-1]) == row["vae_wh"]
    assert list(resized_size(CONFIG.vit_rule, *seen)[::-1]) == row["vit_after_vae_wh"]
    assert list(resized_size(CONFIG.vit_rule, height, width)[::-1]) == row["vit_direct_wh"]
    slots = picture_slots(CONFIG, (height, width))
    assert slots == {"prefill_vae": row["vae_tokens"] + 2, "prefill_vit": row["vit_tokens"] + 2}


def test_all_32_sizes_are_there():
    assert len(TABLE) == 32


@pytest.mark.parametrize(("height", "width"), [(357, 490), (37, 100), (1, 1), (10, 2000)])
def test_k18_1_sides_are_multiples_of_the_patch_within_limits(height, width):
    for rule in (CONFIG.vae_rule, CONFIG.vit_rule):
        sides = resized_size(rule, height, width)
        assert all(side % rule.stride == 0 and 0 < side <= rule.max_side for side in sides)
        scale = max(sides) / max(height, width)
        error = abs(min(sides) - max(rule.stride, min(height, width) * scale))
        assert error < rule.stride  # less than a patch from the right shape


def test_k18_1_patches_are_counted_from_the_sides():
    height, width = resized_size(CONFIG.vit_rule, *resized_size(CONFIG.vae_rule, 357, 490))
    assert picture_slots(CONFIG, (357, 490))["prefill_vit"] == (height // 14) * (width // 14) + 2


@pytest.mark.parametrize(
    ("size", "nearest"),
    [
        ((50, 64), "(48, 64)"),
        ((56, 64), "(64, 64)"),
        ((1, 1), "(16, 16)"),
        ((2000, 1000), "(1024, 1008)"),
        ((0, -3), "(16, 16)"),
    ],
)
def test_k18_1_a_size_that_cannot_be_drawn_names_the_nearest(size, nearest):
    with pytest.raises(InputError) as error:
        require_size(CONFIG, size)
    assert f"nearest size is {nearest}" in str(error.value)
    assert "multiples of 16 from 16 to 1024" in str(error.value)


@pytest.mark.parametrize("size", [64, "64x64", (64,), (64, 64, 3), (64.0, 64), (True, 64)])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(InputError, match=r"give \(height, width\)"):
        require_size(CONFIG, size)


def test_legal_sizes_are_taken_as_they_are():
    assert require_size(CONFIG, [1024, np.int64(576)]) == (1024, 576)
    assert default_size(CONFIG) == (1024, 1024)


def test_a_rule_that_enlarges_more_than_its_longest_side_lets_that_win():
    assert resized_size(ResizeRule(1024, 512, 16), 8, 2000) == (16, 1024)


def test_resizing_is_that_of_the_released_code():
    case = golden.tensors("03_understanding")
    shown = case["image_u8"].numpy()
    assert np.array_equal(resize(shown, (48, 64)), case["resized_u8"].numpy())
    other = golden.tensors("09_packed_two_requests")
    assert np.array_equal(resize(other["image1_original_u8"].numpy(), (64, 32)), other["image1_u8"].numpy())
