"""Where an event log may lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvlab.errors import InputError
from kvlab.recorder import Recorder


@pytest.mark.parametrize("path", [3, True, b"log", ["log"]])
def test_a_log_is_the_path_of_a_file(path: Any) -> None:
    with pytest.raises(InputError, match="give the path of a file"):
        Recorder(clock=lambda: 0.0, log_path=path)


def test_a_log_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        Recorder(clock=lambda: 0.0, log_path=tmp_path)
    with pytest.raises(InputError, match="no folder"):
        Recorder(clock=lambda: 0.0).to_jsonl(tmp_path / "missing" / "log.jsonl")
    assert os.listdir(tmp_path) == []


def test_what_is_no_event_number_cannot_be_replayed_to() -> None:
    with pytest.raises(InputError, match="until_seq is 'x'"):
        Recorder(clock=lambda: 0.0).replay("x")  # type: ignore[arg-type]


def test_a_log_to_read_is_a_path_too() -> None:
    with pytest.raises(InputError, match="give the path of a file"):
        Recorder.from_jsonl(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, True, 2.5, "x"])
def test_a_bound_that_keeps_too_little_or_is_no_number_is_refused(count: Any) -> None:
    with pytest.raises(InputError, match="max_events"):
        Recorder(clock=lambda: 0.0, max_events=count)
