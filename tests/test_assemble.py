"""What ``load`` says about settings that cannot be, and that numpy's numbers are numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlab
from kvlab.errors import InputError

BAD = [
    ({"record": "x"}, "record is 'x'; it must be True or False"),
    ({"check_invariants": "x"}, "check_invariants is 'x'; it must be True, False or None"),
    ({"event_log": 3}, "event log is 3; give the path"),
    ({"event_log": ""}, "event log cannot be written"),
    ({"resources": 3}, "resources is 3; give"),
    ({"resources": {"kv": 3}}, "resources has 3 for 'kv'; give"),
    ({"resources": {"kv": {"page_size": True}}}, "page_size is True"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_a_setting_of_the_wrong_kind_is_named_with_what_is_legal(tracer, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tracer(**settings)


@pytest.mark.parametrize(
    ("settings", "message"), [*BAD[:3], *(({"max_seq_len": v}, "max_seq_len") for v in (1.5, True, 0, "x"))]
)
def test_a_wrong_setting_is_refused_before_any_weights_are_looked_for(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kvlab.load("no-such-model", **settings)


def test_an_event_log_in_a_folder_that_is_not_there_is_refused(tracer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        tracer(event_log=tmp_path / "missing" / "log.jsonl")


@pytest.mark.parametrize("said", ["abc", "true", " 1"])
def test_an_environment_that_says_neither_is_refused(tracer, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("KVLAB_CHECK", said)
    with pytest.raises(InputError, match=f"KVLAB_CHECK is '{said}'; it must be 1 .* 0, or not set"):
        tracer()


@pytest.mark.parametrize(("said", "checks"), [("1", True), ("0", False), ("", False)])
def test_the_environment_decides_where_the_caller_does_not(tracer, monkeypatch, said: str, checks: bool) -> None:
    monkeypatch.setenv("KVLAB_CHECK", said)
    assert tracer().kv.checks is checks
    assert tracer(check_invariants=not checks).kv.checks is not checks


def test_settings_of_numpy_give_the_engine_that_pythons_own_give(tracer, tmp_path: Path) -> None:
    python = {
        "num_pages": 40, "page_size": 4, "seed": 3, "max_concurrent_requests": 2, "backfill_window": 5, "max_step_tokens": 6,
        "cpu_offload_pages": 4, "host_tier_pages": 4, "max_pinned_pages": 8,
    }  # fmt: skip
    numpy = {name: np.int64(value) for name, value in python.items()}
    ask = {"max_tokens": np.int64(5), "temperature": np.float32(0.5), "seed": np.int64(9)}
    results, logs = [], []
    for index, settings in enumerate((python, numpy)):
        engine = tracer(**settings, clock=lambda: 0.0, event_log=tmp_path / f"{index}.jsonl")
        results.append(engine.generate(list(range(1, 20)), **ask).ids)
        engine.close()
        _, *lines = (tmp_path / f"{index}.jsonl").read_text(encoding="utf-8").splitlines()  # the head says when
        logs.append([line for line in lines if "StepRan" not in line])  # a step says how long it took
    assert results[0] == results[1]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("kv_dtype", ["int64", "int8", "float"])
def test_keys_and_values_are_kept_in_formats_of_fractions_only(kv_dtype: str) -> None:
    pytest.importorskip("snac", reason="needs the extra audio")
    with pytest.raises(InputError, match=f"kv_dtype is '{kv_dtype}'; keys and values are kept as .*float32"):
        kvlab.load("orpheus-tiny", num_pages=8, kv_dtype=kv_dtype)
