"""``kvlab study``: what each study tells of a random BAGEL, as a table, as JSON and in one sentence; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_bagel

from kvlab import cli, study
from kvlab.errors import InputError

pytest.importorskip("diffusers", reason="needs the extra bagel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bagel.write_folder(tmp_path_factory.mktemp("bagel") / "tiny")


def test_a_sweep_reports_tokens_time_and_share(folder: Path) -> None:
    found = study.guided_sweep(folder, num_seeds=2)
    assert [row["computed slots"] for row in found.table.to_dicts()] == [28, 28, 28, 4]
    assert found.totals["saved_slots_share"] == round(24 / 56, 4)
    assert set(found.totals) >= {"prefill_ms_without", "total_ms_with", "prefill_share_without", "saved_time_share"}
    assert found.finding.startswith("reuse saved 43% of the prompt slots of 2 seeds")


def test_noise_says_that_it_was_injected(folder: Path) -> None:
    found = study.pixel_noise(folder)
    assert [row["injected noise"] for row in found.table.to_dicts()] == [f"2^{level}" for level in range(-10, 0)]
    largest = list(found.totals["largest_of_255"].values())
    assert largest[0] < largest[-1]


def test_the_wrong_walk_is_named_where_it_was_walked(folder: Path) -> None:
    found = study.wrong_walk(folder)
    assert found.totals == {"cached_tokens_right": 0, "cached_tokens_wrong": 12}
    right, wrong = found.table.to_dicts()
    assert (right["equal"], wrong["pair"]) == (right["pixels"], "keying=ignore-walk")


def test_the_command_prints_json_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", "guided-sweep", "--model", str(folder), "--seeds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["study"], len(found["rows"])) == ("guided-sweep", 2)


def test_the_command_prints_the_table_and_the_finding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", "guided-sweep", "--model", str(folder), "--seeds", "1"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "A sweep of seeds" in words
    assert "Reuse saved 0% of the prompt slots of 1 seed" in words


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["study", "speed"], "there is no study 'speed'; there are: guided-sweep, pixel-noise, wrong-walk"),
        (["study", "pixel-noise", "--seeds", "3"], "pixel-noise is no sweep of seeds"),
    ],
)
def test_what_is_no_study_is_a_usage_error(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_every_study_of_the_command_is_there() -> None:
    assert all(callable(cli._resolve(target)) for target in cli.STUDIES.values())


def test_no_seeds_and_models_that_do_not_draw_are_refused(folder: Path, tmp_path: Path) -> None:
    from tiny_checkpoints import write_folder

    with pytest.raises(InputError, match="num_seeds is 0"):
        study.guided_sweep(folder, num_seeds=0)
    write_folder(tmp_path / "text")
    with pytest.raises(InputError, match="text draws no pictures"):
        study.pixel_noise(tmp_path / "text")
