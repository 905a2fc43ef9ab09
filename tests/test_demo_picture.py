"""The demo of a model that draws: what it measures, prints, writes and refuses; and over bagel-tiny where it is."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_bagel
from rich.console import Console

from kvlab import demo, demo_picture
from kvlab.errors import InputError
from kvlab.shipped import data_dir

pytest.importorskip("diffusers", reason="needs the extra bagel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bagel.write_folder(tmp_path_factory.mktemp("bagel") / "tiny")


@pytest.fixture(scope="module")
def ran(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """What one run returned, what it printed on a terminal of 80 columns, and its report."""
    printed, path = io.StringIO(), tmp_path_factory.mktemp("report") / "drawn.html"
    result = demo.run(model=str(folder), out=path, num_pages=64, console=Console(file=printed, width=80))
    return result, printed.getvalue(), path.read_text(encoding="utf-8")


# -- what it measures --------------------------------------------------------------------------------------------------


def test_the_second_time_all_whole_pages_before_the_last_token_are_found(ran: Any) -> None:
    found = {name: (ran[0][name]["prompt_tokens"], ran[0][name]["cached_tokens"]) for name in demo_picture.RUNS}
    assert found == {"cold": (14, 0), "hit": (14, 12), "again": (14, 0)}
    assert ran[0]["hit"]["cached_by_label"] == {"main": 12, "cfg_img": 12}


def test_drift_is_counted_and_cold_repeats_itself(ran: Any) -> None:
    result = ran[0]
    assert result["drift"]["pixels"] == 64 * 64
    assert result["drift"]["largest_of_255"] <= 1
    assert result["drift_cold_again"]["equal_pixels"] == 64 * 64
    assert {name: verdict["ok"] for name, verdict in result["verdicts"].items()} == {
        "hit": True, "pixels": True, "cold_again": True,
    }  # fmt: skip


def test_the_result_is_json(ran: Any) -> None:
    assert json.loads(json.dumps(ran[0])) == ran[0]


# -- what it prints and writes -----------------------------------------------------------------------------------------


def test_the_runs_and_every_verdict_are_printed(ran: Any) -> None:
    result, printed, _ = ran
    words = " ".join(printed.replace("│", " ").split())
    assert all(" ".join(verdict["says"].split()) in words for verdict in result["verdicts"].values())
    assert "cold again" in words


def test_the_report_shows_both_pictures_and_the_map_of_their_differences(ran: Any) -> None:
    result, _, page = ran
    assert page.count("<image ") == 3
    assert page.count("data:image/png;base64,") == 3
    assert [name in page for name in ("picture: cold", "picture: after a hit: 12 of 14 cached", "map: difference")] == [
        True
    ] * 3
    assert all(verdict["says"] in page for verdict in result["verdicts"].values())
    assert "<script" not in page


# -- what it refuses ---------------------------------------------------------------------------------------------------


def test_a_picture_has_no_tokens_to_generate(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_tokens is 8, and this model's demo is a picture"):
        demo.run(model=str(folder), max_tokens=8, out=tmp_path, console=Console(file=io.StringIO()))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_draws_nothing_is_refused(tmp_path: Path) -> None:
    from tiny_checkpoints import write_folder

    write_folder(tmp_path / "text")
    with pytest.raises(InputError, match="text draws no pictures"):
        demo_picture.run(tmp_path / "text", tmp_path / "x.html", console=Console(file=io.StringIO()))


# -- over the shipped model --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not (data_dir() / "checkpoints" / "bagel-tiny").is_dir(), reason="bagel-tiny is not here")
def test_bagel_tiny_draws_cold_and_after_a_hit_in_two_minutes_of_one_core(tmp_path: Path) -> None:
    begin = time.process_time()
    result = demo.run(model="bagel-tiny", out=tmp_path, console=Console(file=io.StringIO()))
    assert time.process_time() - begin < 120
    assert all(verdict["ok"] for verdict in result["verdicts"].values())
