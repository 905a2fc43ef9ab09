"""The player: sound as loud as it is, and its numbers under it."""

from __future__ import annotations

import base64
import io
import re
from types import SimpleNamespace

import numpy as np
import pytest

from kvlab.viz import audio_player

pytest.importorskip("IPython")
soundfile = pytest.importorskip("soundfile")


@pytest.mark.parametrize("num_samples", [1, 2048, 240_000])
def test_the_player_holds_the_samples_unscaled_and_the_caption(num_samples):
    samples = (np.sin(np.arange(num_samples)) * 8000).astype(np.int16)
    shown = audio_player(SimpleNamespace(samples=samples, sample_rate=24000, caption="tara: 'a < b', 0.1 s"))
    page = shown._repr_html_()
    assert "<figcaption>tara: &#x27;a &lt; b&#x27;, 0.1 s</figcaption>" in page
    (wav,) = re.findall(r"data:audio/wav;base64,([^\"]+)", page)
    found, rate = soundfile.read(io.BytesIO(base64.b64decode(wav)), dtype="int16")
    assert rate == 24000
    assert np.abs(found.astype(int) - samples).max() <= 1


def test_the_text_form_is_the_caption():
    speech = SimpleNamespace(samples=np.zeros(4, np.int16), sample_rate=24000, caption="quiet")
    assert repr(audio_player(speech)) == "Player(quiet)"
    assert repr(audio_player(speech, "said twice")) == "Player(said twice)"


def test_a_player_of_another_rate_holds_the_same_tone_in_fewer_samples():
    pytest.importorskip("scipy")
    seconds = np.arange(24000) / 24000
    tone = SimpleNamespace(samples=(np.sin(2 * np.pi * 440 * seconds) * 8000).astype(np.int16), sample_rate=24000, caption="a")
    player = audio_player(tone, sample_rate=12000)
    expected = np.sin(2 * np.pi * 440 * np.arange(12000) / 12000) * 8000
    assert (player.sample_rate, len(player.samples), player.samples.dtype) == (12000, 12000, np.int16)
    assert np.abs(player.samples[100:-100] - expected[100:-100]).max() < 80
    assert audio_player(tone, sample_rate=24000).samples is tone.samples
