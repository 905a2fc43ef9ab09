"""``kvlab run`` and ``kvlab size`` as they are called: exit codes, one clear line, and what they print."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvlab import cli
from kvlab.lab.workloads import WORKLOADS
from kvlab.recorder import Recorder
from kvlab.run import size, tracer_engine

SMALL = ["--requests", "6", "--prefix-pages", "4", "--page-size", "4", "--tail", "3", "--max-tokens", "6", "--pages", "33"]
STALL = ["run", "--workload", "shared-prefix", *SMALL, "--pages", "12", "--admission", "none"]
HAS_FULL_DISK = pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_STATIC", "1")


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    code = cli.main(["run", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("workload", cli.RUN_WORKLOADS)
def test_each_workload_runs_to_its_end_and_is_right(capsys: pytest.CaptureFixture[str], workload: str) -> None:
    code, out, err = run(capsys, "--workload", workload, *SMALL, "--check", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert (report["completed"], report["wrong_values"], report["leaked_pages"], report["stall"]) == (6, 0, 0, None)


def test_the_help_names_every_workload() -> None:
    assert tuple(WORKLOADS) == cli.RUN_WORKLOADS


def test_a_stall_is_exit_code_1_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(STALL) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stall: ")]
    assert line.startswith("stall: all ")
    assert "{" not in line
    assert cli.main([*STALL, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["stall"]["usable_pages"] == 11


def test_pages_are_those_of_the_pool_the_sink_included(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *STALL[1:], "--json")
    assert json.loads(out)["stall"]["usable_pages"] == 12 - 1


def test_faults_that_were_asked_for_are_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--workload", "churn", "--requests", 300, "--faults", 0.05, "--check", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["failed"] > 0
    assert report["cancelled"] > 0
    assert report["completed"] + report["failed"] + report["cancelled"] == 300
    assert (report["wrong_values"], report["leaked_pages"]) == (0, 0)


def test_a_wrong_value_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlab.models.tracer.TracerAttention.last_digests", lambda self: [7] * len(self._planned().rows))
    code, out, _ = run(capsys, "--workload", "churn", *SMALL, "--check", "--json")
    assert code == 1
    assert json.loads(out)["wrong_values"] > 0


# -- wrong input: one line, exit code 2 --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workload", "chat"], "there is no workload 'chat'"),
        (["--workload", "churn", "--policy", "mru"], "no eviction policy is called 'mru'"),
        (["--workload", "churn", "--policy", "belady"], "policy belady must know the future"),
        (["--workload", "churn", "--admission", "maybe"], "admission is 'maybe'"),
        (["--workload", "churn", "--requests", "0"], "requests is 0"),
        (["--workload", "churn", "--model", "nosuch"], "no model is called 'nosuch'"),
        (["--workload", "shared-prefix", "--pages", "10"], "request r0 of the workload: the request needs up to"),
        (["--workload", "churn", "--out", "nowhere/out.jsonl"], "results cannot be written to"),
        (["--workload", "churn", "--event-log", "nowhere/log.jsonl"], "cannot be written"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("content", "message"), [(b"", "holds no request"), (b"\xff", "line 1: not UTF-8")])
def test_a_broken_workload_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "work.jsonl").write_bytes(content)
    code, _, err = run(capsys, "--workload", tmp_path / "work.jsonl")
    assert code == 2
    assert message in err


# -- results and logs --------------------------------------------------------------------------------------------------


def test_a_second_run_goes_on_from_the_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for resumed in (0, 6):
        code, out, _ = run(capsys, "--workload", "chats", *SMALL, "--out", tmp_path / "out.jsonl", "--json")
        assert (code, json.loads(out)["resumed_from_file"]) == (0, resumed)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--seed", "1"], "shape.seed is 0, here 1"),
        (["--policy", "arc"], "engine.policy is 'lru', here 'arc'"),
        (["--tail", "4"], "shape.tail is 3, here 4"),
    ],
)
def test_results_of_another_run_are_not_mixed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str], field: str
) -> None:
    first = ["--workload", "chats", *SMALL, "--out", tmp_path / "out.jsonl"]
    assert run(capsys, *first)[0] == 0
    code, _, err = run(capsys, *first, *args)
    assert code == 2
    assert f"there {field}" in err


def test_the_event_log_may_differ_between_the_parts_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = ["--workload", "chats", *SMALL, "--out", tmp_path / "out.jsonl"]
    assert run(capsys, *first)[0] == run(capsys, *first, "--event-log", tmp_path / "log.jsonl")[0] == 0


def test_the_event_log_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "--workload", "churn", *SMALL, "--event-log", tmp_path / "log.jsonl")[0] == 0
    assert len(Recorder.from_jsonl(tmp_path / "log.jsonl")) > 50


@HAS_FULL_DISK
def test_a_full_disk_under_the_results_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--workload", "churn", *SMALL, "--out", "/dev/full")
    assert (code, out) == (1, "")
    assert "a result cannot be written to /dev/full" in err
    assert err.count("\n") == 1


@HAS_FULL_DISK
def test_a_full_disk_under_the_event_log_is_told_and_the_run_completes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--workload", "churn", *SMALL, "--event-log", "/dev/full", "--json")
    report = json.loads(out)
    assert code == 1
    assert report["completed"] == 6
    assert "the event log /dev/full is incomplete" in report["log_error"]


# -- size --------------------------------------------------------------------------------------------------------------


def test_the_settings_of_size_load_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    facts = size("tracer", concurrency=4, context=100, shared=0, page_size=16)
    settings = {name: int(value) for name, value in (entry.split("=") for entry in facts["settings"].split(", "))}
    with caplog.at_level(logging.WARNING, "kvlab"), tracer_engine(**settings):
        assert caplog.records == []
    assert "note" not in facts


def test_size_says_when_loading_will_warn(caplog: pytest.LogCaptureFixture) -> None:
    facts = size("tracer", concurrency=4, context=100, shared=60, page_size=16)
    settings = {name: int(value) for name, value in (entry.split("=") for entry in facts["settings"].split(", "))}
    with caplog.at_level(logging.WARNING, "kvlab"), tracer_engine(**settings):
        assert "do not hold max_concurrent_requests=4" in caplog.text
    assert facts["note"].startswith("loading warns that 4 contexts do not fit")


def test_size_sends_a_model_that_draws_to_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["size", "bagel-tiny", "--concurrency", "2", "--context", "100"]) == 2
    assert "see kvlab doctor --model bagel-tiny" in capsys.readouterr().err


def test_a_context_beyond_the_models_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["size", "tracer", "--concurrency", "1", "--context", "70000"]) == 2
    assert "context is 70000 tokens and the context of tracer is 65536" in capsys.readouterr().err
