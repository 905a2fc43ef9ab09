from __future__ import annotations

import shutil

import numpy as np
import pytest

from kvlab.errors import LoadError
from kvlab.train.orpheus import corpus


def test_the_same_seed_gives_the_same_phrases() -> None:
    assert corpus.phrases(50, seed=3) == corpus.phrases(50, seed=3)
    assert corpus.phrases(50, seed=3) != corpus.phrases(50, seed=4)


def test_more_phrases_begin_with_the_fewer() -> None:
    assert corpus.phrases(80, seed=0)[:30] == corpus.phrases(30, seed=0)


def test_held_out_texts_are_never_seen_whatever_the_seeds() -> None:
    seen = {phrase.text for seed in range(3) for phrase in corpus.phrases(2000, seed=seed)}
    unseen = {phrase.text for seed in range(3) for phrase in corpus.phrases(300, seed=seed, held_out=True)}
    assert len(unseen) > 150
    assert seen & unseen == set()
    assert seen | unseen <= set(corpus.texts())


def test_a_voice_says_every_text_once_before_it_says_one_again() -> None:
    known = [text for text in corpus.texts() if not corpus.is_held_out(text)]
    said = corpus.phrases(3 * len(known) + 3, seed=0)
    for first, voice in enumerate(corpus.VOICES):
        texts = [phrase.text for phrase in said[first::3]]
        assert {phrase.voice for phrase in said[first::3]} == {voice}
        assert sorted(texts[: len(known)]) == sorted(known)
        assert texts[len(known)] in known


def test_texts_are_of_four_kinds_and_each_is_there_once() -> None:
    texts = corpus.texts()
    assert len(set(texts)) == len(texts) == 9**3 + 9 * 15 + 15**2 + 15 * 3 * 15
    for text in ("seven two nine", "one red star", "two red stars", "the red star and the blue circle"):
        assert text in texts
    assert "the red star is left of the blue circle" in texts


def test_every_word_is_said_and_no_other() -> None:
    said = {word for phrase in corpus.phrases(500, seed=0) for word in phrase.text.split()}
    assert said == set(corpus.words())


def test_every_voice_says_a_third() -> None:
    voices = [phrase.voice for phrase in corpus.phrases(300, seed=0)]
    assert {voice: voices.count(voice) for voice in voices} == dict.fromkeys(corpus.VOICES, 100)


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")
def test_a_phrase_sounds_the_same_twice_and_keeps_its_lead() -> None:
    pytest.importorskip("scipy", reason="needs the extra audio")
    phrase = corpus.Phrase("leo", "three red stars", pitch=50, words_a_minute=170, lead_samples=1000)
    sound = corpus.speak(phrase)
    assert np.array_equal(sound, corpus.speak(phrase))
    assert sound.dtype == np.float32
    assert not sound[:1000].any()
    assert 0.5 < np.abs(sound).max() < 0.9
    assert 0.5 < len(sound) / corpus.SAMPLE_RATE < 3


def test_a_missing_espeak_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LoadError, match="install it .apt-get install espeak-ng"):
        corpus.speak(corpus.Phrase("leo", "one", pitch=50, words_a_minute=170))
