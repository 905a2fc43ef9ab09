"""The command line: its words, its exit codes, and one clean line when kvlab says no."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvlab
from kvlab import cli
from kvlab.errors import FetchError, LoadError


def answer(monkeypatch: pytest.MonkeyPatch, target: str, function: Any) -> None:
    """Let the import string ``target`` lead to ``function``."""
    monkeypatch.setattr(cli, "_resolve", {target: function}.__getitem__)


def raising(error: BaseException) -> Any:
    def function(*args: object, **kwargs: object) -> None:
        raise error

    return function


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvlab {kvlab.__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in ("demo", "fetch", "bench", "doctor", "notebooks") if f"  {name} " not in shown] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["frob"], "No such command 'frob'"),
        (["bench", "speed"], "there is no bench 'speed'; there are: index, engine"),
        (["bench"], "Missing argument"),
        (["demo", "--pages", "many"], "Invalid value for '--pages'"),
        (["doctor", "--yaml"], "No such option: --yaml"),
        (["notebooks", "burn"], "No such command 'burn'"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line) == 2
    assert message in capsys.readouterr().err


def test_a_refusal_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, "kvlab.models.registry:fetch", raising(FetchError("no weights at hand; looked in two places")))
    assert cli.main(["fetch", "smollm2-135m"]) == 1
    assert capsys.readouterr() == ("", "kvlab: no weights at hand; looked in two places\n")


def test_an_error_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "kvlab.models.registry:fetch", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fetch", "smollm2-135m"])


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "kvlab.models.registry:fetch", raising(KeyboardInterrupt()))
    assert cli.main(["fetch", "smollm2-135m"]) == 130


def test_fetch_says_where_the_weights_lie(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, "kvlab.models.registry:fetch", lambda name: Path("weights") / name)
    assert cli.main(["fetch", "smollm2-135m"]) == 0
    assert capsys.readouterr().out.strip() == str(Path("weights") / "smollm2-135m")


def test_demo_passes_on_what_was_given_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def run(**options: Any) -> dict[str, Any]:
        seen.update(options)
        return {"requests": [], "name": "Überschrift"}

    answer(monkeypatch, "kvlab.demo:run", run)
    assert cli.main(["demo", "--json", "--pages", "64", "--out", "report.html"]) == 0
    assert seen.pop("console").stderr, "with --json only JSON goes to stdout"
    assert seen == {"as_json": True, "num_pages": 64, "out": Path("report.html")}
    assert json.loads(capsys.readouterr().out) == {"requests": [], "name": "Überschrift"}


ROWS = {
    "rows": [
        {"name": "fast", "unit": "s", "ours": 1250, "reference": 2.5, "ratio": 0.5, "target": 0.9, "ok": True},
        {"name": "slow", "unit": "us", "ours": 0.2, "reference": None, "ratio": None, "target": 0.15, "ok": False},
    ],
    "machine": {"cores": 2},
}


def test_bench_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, "kvlab.bench.index:run", lambda: ROWS)
    assert cli.main(["bench", "index", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ROWS


def test_bench_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, "kvlab.bench.index:run", lambda: ROWS)
    assert cli.main(["bench", "index"]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["fast", "s", "1,250", "2.5", "0.5", "0.9", "yes"] in rows
    assert ["slow", "us", "0.2", "-", "-", "0.15", "no"] in rows


def test_no_name_of_a_row_is_cut_on_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    large = {
        "unit": "bytes/page",
        "ours": 33_123_456,
        "reference": 33_123_456,
        "ratio": 1.234,
        "target": 33_554_432,
        "ok": False,
    }
    names = ["replay_pool_0.25x", "lookup_us_per_page", "codec_s_per_s_vs_one_go"]
    answer(monkeypatch, "kvlab.bench.index:run", lambda: {"rows": [large | {"name": name} for name in names]})
    assert cli.main(["bench", "index"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == names
    assert max(map(len, lines)) <= 80


def test_notebooks_are_listed_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "01_topic.ipynb").write_text("{}", encoding="utf-8")
    monkeypatch.setattr("kvlab.shipped.notebooks_dir", lambda: shipped)
    assert cli.main(["notebooks"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "01_topic"
    assert cli.main(["notebooks", "--copy", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "01_topic.ipynb").read_text(encoding="utf-8") == "{}"


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["01_topic: not built"], 1)])
def test_notebooks_check_fails_on_a_problem(
    problems: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvlab.notebooks.check", lambda names: problems)
    assert cli.main(["notebooks", "check"]) == code
    assert capsys.readouterr().err.splitlines() == problems


def test_a_missing_installation_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvlab.notebooks.names", raising(LoadError("kvlab's own notebooks are missing")))
    assert cli.main(["notebooks"]) == 1
    assert capsys.readouterr().err == "kvlab: kvlab's own notebooks are missing\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("line", [["doctor"], ["doctor", "--json"], ["notebooks"]])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(line: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        run = subprocess.run([sys.executable, "-m", "kvlab", *line], stdout=full, stderr=subprocess.PIPE, encoding="utf-8")
    assert run.returncode == 1
    assert run.stderr == "kvlab: what it has to say cannot be written (No space left on device); make room\n"


def test_other_errors_of_the_system_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "kvlab.models.registry:fetch", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(PermissionError):
        cli.main(["fetch", "smollm2-135m"])


def test_notebooks_copied_onto_a_file_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    for target in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "below"):
        assert cli.main(["notebooks", "--copy", str(target)]) == 1
        assert capsys.readouterr().err.startswith("kvlab: ")
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_python_m_kvlab_is_the_same_command() -> None:
    run = subprocess.run([sys.executable, "-m", "kvlab", "bench", "speed"], capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == 2
    assert "there is no bench 'speed'" in run.stderr
