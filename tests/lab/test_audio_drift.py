"""Drift of sound: tokens first, then samples, beside the noise floor; and clicks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvlab.errors import InputError
from kvlab.lab.audio import (
    FLOOR_DB,
    compare_samples,
    compare_speech,
    difference,
    envelope,
    find_clicks,
    first_difference,
    spectrogram,
)


def speech(ids: list[int], samples: Any) -> Any:
    return SimpleNamespace(generation=SimpleNamespace(ids=tuple(ids)), samples=np.asarray(samples))


def test_equal_speech_is_equal_in_tokens_and_samples():
    one = speech([1, 2, 3], np.arange(100, dtype=np.int16))
    found = compare_speech(one, one)
    assert (found.first_difference, found.samples.is_equal, found.samples.snr_db) == (None, True, None)
    assert found.verdict == "all 3 tokens are equal; all 100 samples are equal"


def test_tokens_come_before_samples_and_the_floor_stands_beside():
    one, other = speech([1, 2, 3, 4], np.zeros(10, np.int16)), speech([1, 2, 9, 4], np.full(10, 3277, np.int16))
    floor = (np.zeros(5, np.int16), np.full(5, 33, np.int16))
    found = compare_speech(one, other, noise_pair=floor)
    assert (found.first_difference, found.equal_tokens, found.num_tokens) == (2, 3, 4)
    assert found.verdict == (
        "tokens differ from index 2 on (3 of 4 are equal); samples differ by up to 0.1 of full scale (rms 0.1); "
        "noise alone makes up to 0.001 (rms 0.001)"
    )


def test_lengths_that_differ_are_no_equality():
    assert not compare_samples([0.0, 0.5], [0.0]).is_equal
    assert compare_samples([0.0, 0.5], [0.0]).extra_samples == 1
    assert first_difference([1, 2], [1]) == 1


def test_snr_is_that_of_the_first_signal_to_the_difference():
    signal = np.sin(np.arange(1000) / 9)
    assert compare_samples(signal, signal * 0.9).snr_db == pytest.approx(20.0)


def test_a_smooth_signal_has_no_clicks_and_speech_like_noise_has_none():
    noise = np.random.default_rng(0).normal(size=24000) * 0.1
    assert find_clicks(np.sin(np.arange(5000) / 20)) == []
    assert find_clicks(noise) == []
    assert find_clicks(np.zeros(100)) == find_clicks([]) == []


@pytest.mark.parametrize("place", [1, 300, 1999])
def test_a_jump_is_found_where_it_is(place):
    signal = np.sin(np.arange(2000) / 50) * 0.5
    signal[place:] += 0.2
    assert find_clicks(signal) == [place]


def test_signals_that_are_none_are_refused():
    with pytest.raises(InputError, match=r"shape \[2, 3\]; give one channel"):
        compare_samples(np.zeros((2, 3)), np.zeros(3))
    with pytest.raises(InputError, match="1 of 3 samples are NaN"):
        find_clicks([0.0, float("nan"), 0.0])


def test_an_envelope_keeps_every_extreme():
    signal = np.zeros(1000)
    signal[[3, 997]] = 0.9, -0.8
    wave = envelope(signal, 500, "spikes", columns=10)
    assert (wave.duration_s, len(wave.lows), wave.highs[0], wave.lows[-1]) == (2.0, 10, 0.9, -0.8)
    assert set(wave.highs[1:]) == set(wave.lows[:-1]) == {0.0}
    assert wave.peak == 0.9


def test_an_envelope_of_nothing_and_of_integers():
    assert envelope([], 24000, "none").peak == 0.0
    assert envelope(np.full(4, 32767, np.int16), 24000, "full", columns=2).highs == (1.0, 1.0)


def test_a_full_scale_tone_stands_at_0_db_in_its_band_alone():
    seconds = np.arange(24000) / 24000
    tone = spectrogram(np.sin(2 * np.pi * 1125 * seconds), 24000, "tone", columns=10, bands=32, max_hz=8000)
    inner = [row[2:8] for row in tone.levels_db]
    assert set(inner[4]) <= {-1, 0, 1, 2}  # 1000 to 1250 Hz
    assert max(max(row) for row in (*inner[:3], *inner[6:])) < -60


def test_silence_is_at_the_floor_and_every_column_is_there():
    quiet = spectrogram(np.zeros(500), 24000, "quiet", columns=7, bands=8)
    assert {(len(row), *row) for row in quiet.levels_db} == {(7, *[FLOOR_DB] * 7)}


def test_bands_that_cannot_be_told_apart_are_refused():
    with pytest.raises(InputError, match="600 bands up to 8000 Hz cannot be told apart at 24000"):
        spectrogram(np.zeros(5000), 24000, "x", bands=600)
    with pytest.raises(InputError, match="up to 20000 Hz"):
        spectrogram(np.zeros(5000), 24000, "x", max_hz=20000)


def test_a_difference_is_taken_over_what_both_have():
    assert difference([0.5, 0.25, 0.0], [0.25, 0.25]).tolist() == [-0.25, 0.0]


@pytest.mark.parametrize(("draw", "wrong"), [(spectrogram, "columns"), (spectrogram, "bands"), (envelope, "columns")])
def test_a_picture_of_a_signal_has_at_least_one_of_each(draw, wrong):
    with pytest.raises(InputError, match=f"{wrong} is 0; it must be a whole number of at least 1"):
        draw(np.zeros(2000), 24000, "cold", **{wrong: 0})


def test_a_spectrogram_of_no_sample_is_silence():
    picture = spectrogram(np.zeros(0), 24000, "nothing")
    assert (picture.duration_s, {level for row in picture.levels_db for level in row}) == (0.0, {-90})
