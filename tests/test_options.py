"""Numbers and switches among options, numpy's too."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kvlab.engine.request import read_options
from kvlab.errors import InputError
from kvlab.options import is_number, is_whole, plain, require_switch, whole
from kvlab.spec import Retention, RetentionPolicy


@pytest.mark.parametrize("value", [np.int64(2), np.uint8(2), np.float32(0.5)])
def test_numpys_numbers_become_pythons_own(value: Any) -> None:
    assert is_number(value)
    assert type(plain(value)) in (int, float)
    assert plain(value) == value


@pytest.mark.parametrize("value", [True, np.True_, "2", None, np.nan, np.float32("inf"), np.array([2]), 1j])
def test_what_is_no_number_is_none(value: Any) -> None:
    assert not is_number(value)
    assert not is_whole(value)
    assert plain(value) is value


@pytest.mark.parametrize("value", [1, 2.0, True, np.bool_(True), "2", None])
def test_a_count_that_is_none_is_refused_with_its_bound(value: Any) -> None:
    with pytest.raises(InputError, match=r"num_pages is .*whole number of at least 2 \(a reason\)"):
        whole("num_pages", value, 2, "a reason")


@pytest.mark.parametrize(("value", "or_none"), [("x", False), (1, False), (None, False), ("x", True), (0, True)])
def test_a_switch_is_true_or_false_and_nothing_else(value: Any, or_none: bool) -> None:
    with pytest.raises(InputError, match="None$" if or_none else "False$"):
        require_switch("record", value, or_none=or_none)


NUMPY = {
    "max_tokens": np.int64(3),
    "deadline_steps": np.int32(9),
    "deadline_s": np.float32(2.5),
    "stop_ids": np.array([4, 5]),
    "window": (np.int64(8), np.int64(2)),
    "temperature": np.float32(0.5),
    "top_k": np.int64(7),
    "top_p": np.float64(0.5),
    "min_p": np.float32(0.25),
    "repetition_penalty": np.float16(1.5),
    "logprobs": np.int64(2),
    "seed": np.int64(11),
    "logit_bias": {np.int64(3): np.float32(1.5)},
}


def test_options_of_numpy_equal_the_same_options_of_python_and_can_be_written() -> None:
    python = {
        "max_tokens": 3, "deadline_steps": 9, "deadline_s": 2.5, "stop_ids": (4, 5), "window": (8, 2), "temperature": 0.5,
        "top_k": 7, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "logprobs": 2, "seed": 11, "logit_bias": {3: 1.5},
    }  # fmt: skip
    given = read_options(NUMPY)
    assert given == read_options(python)
    assert repr(given) == repr(read_options(python))
    json.dumps([getattr(given, n, None) or getattr(given.sampling, n) for n in python])


def test_one_stop_id_of_numpy_is_one_id() -> None:
    assert read_options({"stop_ids": np.int64(5)}).stop_ids == (5,)


@pytest.mark.parametrize("name", sorted(NUMPY))
def test_a_bool_is_no_number_for_any_option(name: str) -> None:
    with pytest.raises(InputError, match="bias" if name == "logit_bias" else name):
        read_options({name: {3: True} if name == "logit_bias" else True})


def test_retentions_and_windows_take_numpys_numbers() -> None:
    kept = Retention(np.int64(0), np.int64(16), np.int64(80), np.float64(2.5))
    assert repr(kept) == repr(Retention(0, 16, 80, 2.5))
    assert repr(RetentionPolicy(np.int64(8), np.int64(0))) == repr(RetentionPolicy(8, 0))


@pytest.mark.parametrize("wish", [{"start": True}, {"priority": True}, {"duration_s": True}, {"stop": 2.0}])
def test_a_retention_takes_no_bool_and_no_part_of_a_slot(wish: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="retention"):
        Retention(**wish)
