from __future__ import annotations

import numpy as np
import pytest

import kvlab
from kvlab.models.orpheus import say
from kvlab.shipped import data_dir
from kvlab.train.orpheus import corpus, vocabulary

pytest.importorskip("snac", reason="needs the extra audio")

FOLDER = data_dir() / "checkpoints" / "orpheus-tiny"


def test_the_shipped_folder_stays_under_20_mb() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 20_000_000


def test_it_says_a_held_out_phrase_and_ends_by_itself() -> None:
    phrase = corpus.phrases(1, seed=2, held_out=True)[0]
    with kvlab.load("orpheus-tiny", num_pages=64, device="cpu") as engine:
        speech = say(engine, phrase.text, voice=phrase.voice, seed=0, max_tokens=420)
    assert speech.generation.ids[-1] == vocabulary.custom(vocabulary.END_OF_SPEECH)
    assert len(speech.bad_frames) <= 2  # nothing but what it learnt keeps codes to their slots
    assert 0.5 < speech.duration_s < 5
    assert np.abs(speech.samples).max() > 3000


def test_with_only_speech_allowed_every_frame_is_well_formed() -> None:
    phrase = corpus.phrases(1, seed=2, held_out=True)[0]
    with kvlab.load("orpheus-tiny", num_pages=64, device="cpu") as engine:
        speech = say(engine, phrase.text, voice=phrase.voice, seed=0, max_tokens=420, only_speech=True)
    assert speech.generation.ids[-1] == vocabulary.custom(vocabulary.END_OF_SPEECH)
    assert speech.bad_frames == ()
