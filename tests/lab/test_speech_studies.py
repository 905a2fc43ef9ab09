"""Studies of speech, over a random Orpheus: what is shared, what stays equal, and what an untold sampler forgets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_orpheus

from kvlab.lab import speech_studies
from kvlab.lab.results import SharedPrompt

pytest.importorskip("snac", reason="needs the extra audio")

HOW: dict[str, Any] = {"only_speech": True, "seed": 7, "logprobs": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from kvlab.models.orpheus.loading import load_orpheus

    folder: Path = tiny_orpheus.write_folder(tmp_path_factory.mktemp("orpheus") / "tiny")
    return load_orpheus(folder, device="cpu")


@pytest.fixture
def make(model: Any, engine_over: Any) -> Callable[..., Any]:
    return lambda **settings: engine_over(model, **({"num_pages": 96, "page_size": 4} | settings))


def say(*args: Any, **how: Any) -> Any:
    from kvlab.models.orpheus import say

    return say(*args, **how)


# -- cold and hit ------------------------------------------------------------------------------------------------------


def test_the_first_is_cold_and_the_second_finds_its_pages(make):
    engine = make()
    say(engine, "Hello", max_tokens=7, **HOW)  # forgotten
    cold, hit = speech_studies.cold_and_hit(engine, say, "Hello", max_tokens=28, **HOW)
    assert [(s.generation.name, s.generation.cached_tokens) for s in (cold, hit)] == [("cold", 0), ("hit", 16)]


def test_a_row_has_frames_first_and_the_floor_beside(make):
    cold, hit = speech_studies.cold_and_hit(make(), say, "Hello", max_tokens=28, **HOW)
    row = speech_studies.drift_row("twice", cold, hit, (np.zeros(4), np.full(4, 0.25)))
    assert (row.num_frames, row.first_frame, row.max_abs, row.rms) == (4, None, 0.0, 0.0)
    assert (row.prompt_tokens, row.cached_tokens) == (17, 16)
    assert (row.floor_max_abs, row.floor_rms) == (0.25, 0.25)
    assert 0 <= row.logprob_drift < 1e-4


def test_frames_that_part_are_found_and_log_probabilities_compared_before_them_only():
    def speech(ids: list[int], logprobs: list[float], frames: list[Any]) -> Any:
        said = [{"token": i, "logprob": p, "top": {}} for i, p in zip(ids, logprobs, strict=True)]
        result = SimpleNamespace(ids=tuple(ids), logprobs=tuple(said), prompt_tokens=9, cached_tokens=8)
        return SimpleNamespace(generation=result, frames=frames, samples=np.zeros(3))

    first = speech([1, 2, 3], [-1.0, -2.0, -3.0], [(0,), (1,), (2,)])
    second = speech([1, 2, 4], [-1.0, -2.5, -9.0], [(0,), (1,), (3,)])
    row = speech_studies.drift_row("parted", first, second, (np.zeros(1), np.zeros(1)))
    assert (row.first_frame, row.logprob_drift) == (2, 0.5)
    assert speech_studies.logprob_drift(first.generation, first.generation) == 0.0


# -- what is shared ----------------------------------------------------------------------------------------------------


def test_the_map_shares_voice_and_words_and_nothing_across_voices(make):
    rows = speech_studies.sharing_map(make(), ("tara", "leo"), ("one red star", "one red circle"))
    whole, common = len("SB" + "tara: one red ") + len("star" + "EHAS"), len("SB" + "tara: one red ") // 4 * 4
    assert rows[:2] == [
        SharedPrompt("tara", "one red star", whole, 0, 4),
        SharedPrompt("tara", "one red circle", whole + 2, common, 4),
    ]
    assert [row.cached_tokens for row in rows[2:]] == [0, len("SB" + "leo: one red ") // 4 * 4]


def test_the_map_is_the_same_on_an_engine_that_was_used_before(make):
    engine = make()
    asked = (("tara",), ("one red star", "one red circle"))
    assert speech_studies.sharing_map(engine, *asked) == speech_studies.sharing_map(engine, *asked)


# -- the penalty -------------------------------------------------------------------------------------------------------


def utterance(engine: Any) -> Any:
    """The prompt that goes on with an utterance: its audio ids are all under the penalty."""
    return say(engine, "Hello", max_tokens=28, **HOW).continued()


def test_the_penalty_covers_the_same_ids_cold_and_after_a_hit(make):
    engine = make()
    prompt = utterance(engine)
    hit = speech_studies.penalised_ids(engine, prompt, **{"seed": 7})
    cold = speech_studies.penalised_ids(make(prefix_cache=False), prompt, **{"seed": 7})
    assert hit == cold
    assert set(prompt.kept_ids) <= set(hit)


def test_an_untold_sampler_forgets_what_was_cached_and_only_inside_the_block(make):
    engine = make()
    prompt = utterance(engine)
    told = speech_studies.penalised_ids(engine, prompt, seed=7)
    with speech_studies.untold_sampler(engine):
        untold = speech_studies.penalised_ids(engine, prompt, seed=7)
    assert len(untold) <= 4 + 1 < len(told)  # the last page of the prompt, and the token chosen
    assert len(set(untold) - set(told)) <= 1  # that token may be another: the fault is heard at once
    assert speech_studies.penalised_ids(engine, prompt, seed=7) == told


def test_a_request_that_cannot_run_says_why(make):
    with pytest.raises(Exception, match="no idea"):
        speech_studies.penalised_ids(make(), "Hello", allowed=lambda ids: (_ for _ in ()).throw(RuntimeError("no idea")))
