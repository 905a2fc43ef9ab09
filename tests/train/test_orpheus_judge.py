from __future__ import annotations

import shutil

import numpy as np
import pytest

from kvlab.errors import MissingExtraError
from kvlab.train.orpheus import corpus
from kvlab.train.orpheus.judge import Judge, grammar, word_errors

needs_espeak = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")


@pytest.fixture(scope="module")
def judge() -> Judge:
    pytest.importorskip("pocketsphinx", reason="needs the extra train")
    pytest.importorskip("scipy", reason="needs the extra audio")
    return Judge()


@pytest.mark.parametrize(
    ("said", "heard", "wrong"),
    [
        ("two red stars", "two red stars", 0),
        ("two red stars", "", 3),
        ("two red stars", "two stars", 1),
        ("two red stars", "three red stars and", 2),
        ("one two three", "three one two", 2),
    ],
)
def test_word_errors_are_counted_by_the_fewest_changes(said: str, heard: str, wrong: int) -> None:
    assert word_errors(said.split(), heard.split()) == wrong


def test_the_grammar_has_every_word_of_the_corpus() -> None:
    assert all(word in grammar() for word in corpus.words())


def test_silence_is_no_sentence(judge: Judge) -> None:
    assert judge.hear(np.zeros(24_000, dtype=np.float32)) == []


@needs_espeak
def test_clear_recordings_are_heard_right_and_do_not_pass_for_other_texts(judge: Judge) -> None:
    phrases = [phrase for phrase in corpus.phrases(18, seed=4, held_out=True) if phrase.voice == "tara"]
    texts, sounds = [phrase.text for phrase in phrases], [corpus.speak(phrase) for phrase in phrases]
    assert judge.share(texts, sounds) <= 0.1
    assert judge.share(texts[1:] + texts[:1], sounds) > 0.5


def test_a_missing_listener_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pocketsphinx", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[train\]"):
        Judge()
