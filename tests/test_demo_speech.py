"""The demo of a model that speaks: what it measures, prints, writes and refuses; and over orpheus-tiny where it is."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_orpheus
from rich.console import Console

from kvlab import demo, demo_speech
from kvlab.errors import InputError, LoadError
from kvlab.lab.audio import compare_speech
from kvlab.shipped import data_dir

soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
pytest.importorskip("snac", reason="needs the extra audio")

POOL: dict[str, Any] = {"num_pages": 64, "page_size": 8, "max_tokens": 42}
PROMPT_TOKENS = len("SB" + f"tara: {demo_speech.TEXT}" + "EHAS")  # one id a character, and six marks around


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_orpheus.write_folder(tmp_path_factory.mktemp("orpheus") / "tiny")


@pytest.fixture(scope="module")
def ran(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """What one run returned, what it printed on a terminal of 80 columns, and the folder of its sounds."""
    printed, folder = io.StringIO(), tmp_path_factory.mktemp("sounds")
    result = demo.run(model=str(model), out=folder / "said", console=Console(file=printed, width=80), **POOL)
    return result, printed.getvalue(), folder


# -- what it measures --------------------------------------------------------------------------------------------------


def test_the_second_time_all_whole_pages_before_the_last_token_are_found(ran: Any) -> None:
    cold, hit = ran[0]["cold"], ran[0]["hit"]
    assert (cold["prompt_tokens"], cold["cached_tokens"]) == (PROMPT_TOKENS, 0)
    assert (hit["prompt_tokens"], hit["cached_tokens"]) == (PROMPT_TOKENS, (PROMPT_TOKENS - 1) // 8 * 8)
    assert [miss["cause"] for miss in cold["misses"] + hit["misses"]] == ["never_seen", "last_page_cap"]


def test_equal_tokens_give_equal_samples_and_the_noise_floor_stands_beside(ran: Any) -> None:
    result = ran[0]
    assert result["tokens"] == {"number": 42, "equal": 42, "first_difference": None}
    assert result["samples"]["equal_samples"] == result["samples"]["num_samples"] == 6 * 2048
    assert result["noise_floor"]["max_abs"] > 0
    assert {name: verdict["ok"] for name, verdict in result["verdicts"].items()} == {
        "hit": True, "tokens_equal": True, "samples_equal": True, "noise_floor": True,
    }  # fmt: skip


def test_the_result_is_json(ran: Any) -> None:
    assert json.loads(json.dumps(ran[0])) == ran[0]


# -- what it prints and writes -----------------------------------------------------------------------------------------


def test_two_sound_files_hold_what_was_said(ran: Any) -> None:
    result, _, folder = ran
    assert result["files"] == {name: str((folder / f"said-{name}.wav").resolve()) for name in ("cold", "hit")}
    cold, hit = (soundfile.read(result["files"][name], dtype="int16") for name in ("cold", "hit"))
    assert (cold[1], len(cold[0])) == (24000, result["cold"]["frames"] * 2048)
    assert np.array_equal(cold[0], hit[0])


def test_both_runs_and_every_verdict_are_printed(ran: Any) -> None:
    result, printed, folder = ran
    words = " ".join(printed.replace("│", " ").split())
    assert all(verdict["says"] in words for verdict in result["verdicts"].values())
    assert f"hit {PROMPT_TOKENS} {result['hit']['cached_tokens']}" in words
    assert f"Sound: {(folder / 'said-hit.wav').resolve()}" in printed.splitlines()  # whole, so that it can be copied


def test_as_json_prints_no_table(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.run(model=str(model), out=tmp_path, as_json=True, **POOL | {"max_tokens": 7})
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "┏" not in printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvlab-demo-cold.wav", "kvlab-demo-hit.wav"]


def test_a_small_model_computes_on_one_thread_and_the_number_is_as_before(model: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = demo.run(model=str(model), out=tmp_path, console=Console(file=io.StringIO()), **POOL | {"max_tokens": 7})
        assert (result["model"]["threads"], torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)


# -- differences -------------------------------------------------------------------------------------------------------


def said(ids: list[int], samples: list[int]) -> Any:
    generation = SimpleNamespace(ids=tuple(ids), prompt_tokens=9, cached_tokens=0)
    return SimpleNamespace(generation=generation, samples=np.asarray(samples, np.int16))


def test_the_first_token_that_differs_is_named_and_samples_come_with_their_floor(ran: Any) -> None:
    cold, hit = said([1, 2, 3], [0, 3277, 0, 0]), said([1, 5, 3], [0, 0, 0])
    drift = compare_speech(cold, hit, noise_pair=([0, 0], [0, 0.001]))
    says = demo_speech.verdicts(demo_speech.SpeechOutcome({}, 9, 4, cold, hit, drift))
    assert says["hit"] == (False, "The second time 0 of 9 prompt tokens came from the cache.")
    assert says["tokens_equal"] == (False, "Tokens: the first that differs is number 1; 2 of 3 are equal.")
    assert says["samples_equal"] == (
        False,
        "Samples: of 3, 2 are equal, and one has 1 more; they differ by up to 0.1 of full scale (rms 0.058).",
    )
    assert "differ by up to 0.001 of full scale" in says["noise_floor"][1]


def test_a_run_without_a_noise_floor_says_so() -> None:
    one = said([1], [0])
    drift = replace(compare_speech(one, one), noise_floor=None)
    outcome = demo_speech.SpeechOutcome({}, 9, 4, one, one, drift)
    assert demo_speech.verdicts(outcome)["noise_floor"][0] is False


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 6}, "max_tokens is 6 and a frame of sound is 7 tokens, so nothing would be heard; give at least 7"),
        ({"page_size": 0}, "page_size is 0"),
        ({"num_pages": 1}, "num_pages is 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(model: Path, tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        demo.run(model=str(model), out=tmp_path, console=Console(file=io.StringIO()), **POOL | wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_take_the_sounds_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder to write in"):
        demo.run(model=str(tmp_path / "no model"), out=tmp_path / "no" / "such" / "place")
    with pytest.raises(InputError, match="no sound can be written to"):
        demo_speech.sound_paths(tmp_path / "no" / "such" / "place")


def test_a_sentence_that_ends_before_its_first_frame_is_no_crash(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvlab.lab import speech_studies

    said = speech_studies.cold_and_hit
    monkeypatch.setattr(speech_studies, "cold_and_hit", lambda *asked, **how: said(*asked, **how | {"max_tokens": 1}))
    with pytest.raises(InputError, match="after 1 tokens, before a whole frame of 7"):
        demo.run(model=str(model), out=tmp_path / "said", console=Console(file=io.StringIO()), **POOL)
    assert list(tmp_path.iterdir()) == []


def test_a_codec_that_is_damaged_is_refused(tmp_path: Path) -> None:
    folder = tiny_orpheus.write_folder(tmp_path / "bad")
    (folder / "snac" / "pytorch_model.bin").write_bytes(b"none")
    with pytest.raises(LoadError, match=r"pytorch_model.bin is no plain file of tensors"):
        demo.run(model=str(folder), out=tmp_path, console=Console(file=io.StringIO()), **POOL)


# -- the shipped model -------------------------------------------------------------------------------------------------


def test_orpheus_tiny_says_the_same_cold_and_after_a_hit_within_a_minute(tmp_path: Path) -> None:
    folder = data_dir() / "checkpoints" / "orpheus-tiny"
    if not (folder / "model.safetensors").is_file():
        pytest.skip("data/checkpoints/orpheus-tiny is not here; make it with python -m kvlab.train.orpheus --out")
    result = demo.run(model=str(folder), out=tmp_path, console=Console(file=io.StringIO()))
    assert result["hit"]["cached_tokens"] >= result["hit"]["prompt_tokens"] - 4
    assert result["cold"]["bad_frames"] == 0
    assert 1 < result["cold"]["duration_s"] < 5
    assert result["cold"]["finish_reason"] == "stop"
    assert {name: verdict["ok"] for name, verdict in result["verdicts"].items()} == dict.fromkeys(
        ("hit", "tokens_equal", "samples_equal", "noise_floor"), True
    )
    assert result["seconds"] < 60
