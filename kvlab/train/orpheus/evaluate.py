"""What the judge hears in recordings, in their codec round trips and in kvlab's own speech, on held-out phrases."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvlab
from kvlab.errors import LoadError
from kvlab.models.orpheus import Speech, collect, speak
from kvlab.models.orpheus.codec import Codec
from kvlab.models.orpheus.spec import OrpheusModel
from kvlab.train.orpheus import corpus
from kvlab.train.orpheus.judge import Judge

NUM_PHRASES = 60
EVALUATION_SEED = 2
MAX_FRAMES = 60
NUM_PAGES = 2048

Sounds = list[NDArray[np.float32]]


def evaluate(folder: Path, *, num_phrases: int = NUM_PHRASES, seed: int = EVALUATION_SEED) -> dict[str, Any]:
    """Return the judged shares of a checkpoint; what needs espeak-ng is None, with the reason, where that is missing.

    Raises:
        LoadError: the folder holds no Orpheus model, or one that lacks a voice of the corpus.
        MissingExtraError: pocketsphinx, scipy or snac is not installed.
    """
    judge, phrases = Judge(), corpus.phrases(num_phrases, seed=seed, held_out=True)
    found = {"phrases": len(phrases), "words": sum(len(phrase.text.split()) for phrase in phrases)}
    with kvlab.load(folder, num_pages=NUM_PAGES) as engine:
        if not isinstance(engine.model, OrpheusModel):
            raise LoadError(f"{folder} holds {engine.model.name}, which does not speak; give the folder of an Orpheus model")
        found |= _of_recordings(judge, phrases, engine.model.codec)
        return found | _of_speech(judge, phrases, synthesise(engine, phrases))


def synthesise(engine: Any, phrases: Sequence[corpus.Phrase]) -> list[Speech]:
    """Say all phrases side by side, with the checkpoint's own sampling."""
    asked = [
        speak(engine, phrase.text, voice=phrase.voice, seed=i, max_tokens=7 * MAX_FRAMES) for i, phrase in enumerate(phrases)
    ]
    return collect(asked)


def _of_speech(judge: Judge, phrases: Sequence[corpus.Phrase], spoken: Sequence[Speech]) -> dict[str, Any]:
    texts, sounds = [phrase.text for phrase in phrases], [_floats(speech) for speech in spoken]
    return {
        "synthesised": judge.share(texts, sounds),
        "synthesised_by_voice": _by_voice(judge, phrases, sounds),
        "synthesised_against_other_texts": judge.share(texts[1:] + texts[:1], sounds),
        "ended_by_themselves": sum(speech.generation.finish_reason == "stop" for speech in spoken) / len(spoken),
        "bad_frames": sum(len(speech.bad_frames) for speech in spoken),
        "seconds_a_phrase": sum(speech.duration_s for speech in spoken) / len(spoken),
    }


def _floats(speech: Speech) -> NDArray[np.float32]:
    return speech.samples.astype(np.float32) / np.float32(32768)


def _by_voice(judge: Judge, phrases: Sequence[corpus.Phrase], sounds: Sounds) -> dict[str, float]:
    shares = {}
    for voice in corpus.VOICES:
        places = [i for i, phrase in enumerate(phrases) if phrase.voice == voice]
        shares[voice] = judge.share([phrases[i].text for i in places], [sounds[i] for i in places])
    return shares


def _of_recordings(judge: Judge, phrases: Sequence[corpus.Phrase], codec: Codec) -> dict[str, Any]:
    if shutil.which("espeak-ng") is None:
        return {"original": None, "codec": None, "skipped": "original and codec need espeak-ng, which is not installed"}
    texts, originals = [phrase.text for phrase in phrases], [corpus.speak(phrase) for phrase in phrases]
    through = [codec.decode(codec.encode(sound, corpus.SAMPLE_RATE)).numpy() for sound in originals]
    return {"original": judge.share(texts, originals), "codec": judge.share(texts, through)}
