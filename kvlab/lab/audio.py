"""Two utterances compared: tokens first, then samples, and beside every difference the one that noise alone makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.errors import InputError
from kvlab.lab.results import Spectrogram, Wave
from kvlab.options import whole

FULL_SCALE = 32767  # of 16-bit samples
_NEIGHBOURS = 64  # steps to either side that a step is held against
_QUIET = 8 / FULL_SCALE  # steps below this are not heard as clicks
_WINDOW = 1024  # samples of a spectrum
FLOOR_DB = -90


@dataclass(frozen=True)
class SampleDrift:
    """How far apart two signals are over the samples both have; values are shares of full scale.

    ``snr_db``: the first signal's power over that of the difference; None where there is no difference, or no signal.
    """

    num_samples: int
    equal_samples: int
    max_abs: float
    rms: float
    snr_db: float | None
    extra_samples: int = 0  # that only the longer one has

    @property
    def is_equal(self) -> bool:
        """True when both are the same, sample for sample."""
        return self.equal_samples == self.num_samples and self.extra_samples == 0


@dataclass(frozen=True)
class SpeechDrift:
    """What differs between two utterances.

    ``first_difference`` is the index of the first token that differs, or where the shorter one ends; None when all are equal.
    ``noise_floor`` is the drift of one utterance decoded with two noises: less than that cannot be told from noise.
    """

    num_tokens: int
    equal_tokens: int
    first_difference: int | None
    samples: SampleDrift
    noise_floor: SampleDrift | None = None

    @property
    def verdict(self) -> str:
        """One sentence with the numbers."""
        if self.first_difference is not None:
            tokens = f"tokens differ from index {self.first_difference} on ({self.equal_tokens} of {self.num_tokens} are equal)"
        else:
            tokens = f"all {self.num_tokens} tokens are equal"
        found = self.samples
        sound = (
            f"all {found.num_samples} samples are equal"
            if found.is_equal
            else f"samples differ by up to {found.max_abs:.2g} of full scale (rms {found.rms:.2g})"
        )
        floor = self.noise_floor
        beside = "" if floor is None else f"; noise alone makes up to {floor.max_abs:.2g} (rms {floor.rms:.2g})"
        return f"{tokens}; {sound}{beside}"

    def __repr__(self) -> str:
        return f"SpeechDrift({self.verdict})"


def compare_samples(first: ArrayLike, second: ArrayLike) -> SampleDrift:
    """Compare two mono signals, 16-bit or float.

    >>> compare_samples(np.zeros(3, np.int16), np.zeros(4, np.int16))
    SampleDrift(num_samples=3, equal_samples=3, max_abs=0.0, rms=0.0, snr_db=None, extra_samples=1)
    """
    a, b = full_scale(first), full_scale(second)
    apart, extra = difference(a, b), abs(len(a) - len(b))
    num = len(apart)
    if num == 0:
        return SampleDrift(0, 0, 0.0, 0.0, None, extra)
    noise, signal = float(np.mean(apart**2)), float(np.mean(a[:num] ** 2))
    snr_db = 10 * float(np.log10(signal / noise)) if noise and signal else None
    equal = int(np.count_nonzero(apart == 0))
    return SampleDrift(num, equal, float(np.abs(apart).max()), noise**0.5, snr_db, extra)


def difference(first: ArrayLike, second: ArrayLike) -> NDArray[np.float64]:
    """Return ``second`` minus ``first`` over the samples both have, in shares of full scale."""
    a, b = full_scale(first), full_scale(second)
    num = min(len(a), len(b))
    return b[:num] - a[:num]


def compare_speech(first: Any, second: Any, *, noise_pair: tuple[ArrayLike, ArrayLike] | None = None) -> SpeechDrift:
    """Compare two utterances.

    Args:
        first, second: Have ``samples`` and ``generation.ids``, as ``kvlab.models.orpheus.stream.say`` returns them.
        noise_pair: The samples of one utterance decoded with two noises.
    """
    ids, others = list(first.generation.ids), list(second.generation.ids)
    floor = None if noise_pair is None else compare_samples(*noise_pair)
    equal = sum(a == b for a, b in zip(ids, others, strict=False))
    longest = max(len(ids), len(others))
    return SpeechDrift(longest, equal, first_difference(ids, others), compare_samples(first.samples, second.samples), floor)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the first index at which two lists differ, None when they are equal.

    >>> first_difference([1, 2, 3], [1, 5, 3]), first_difference([1, 2], [1, 2, 3]), first_difference([1], [1])
    (1, 2, None)
    """
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def find_clicks(samples: ArrayLike, *, ratio: float = 4.0) -> list[int]:
    """Return the samples at which a signal jumps: the step to them is ``ratio`` times as large as any step near it.

    >>> smooth = np.sin(np.arange(1000) / 50)
    >>> smooth[600:] += 0.3
    >>> find_clicks(smooth)
    [600]
    """
    x = full_scale(samples)
    if len(x) < 2:
        return []
    steps = np.abs(np.diff(x))
    padded = np.pad(steps, _NEIGHBOURS)
    views = np.lib.stride_tricks.sliding_window_view(padded, _NEIGHBOURS)  # [steps + neighbours + 1, neighbours]
    largest = views.max(axis=1)
    before, after = largest[: len(steps)], largest[_NEIGHBOURS + 1 :]
    is_click = steps > ratio * np.maximum(np.maximum(before, after), _QUIET)
    return [int(i) + 1 for i in np.flatnonzero(is_click)]


# -- what a signal looks like ------------------------------------------------------------------------------------------


def envelope(samples: ArrayLike, sample_rate: int, name: str, *, columns: int = 100, drawn_gain: float = 1.0) -> Wave:
    """Return the envelope of a signal; a shorter one has a column a sample.

    >>> wave = envelope([0.5, -0.25, 0.0, 0.125], 2, "four", columns=2)
    >>> wave, wave.lows, wave.highs
    (Wave(four: 2.00 s, peak 0.5, rms 0.29), (-0.25, 0.0), (0.5, 0.125))
    """
    whole("columns", columns, 1)
    x = full_scale(samples)
    parts = np.array_split(x, min(columns, len(x))) if len(x) else []
    lows, highs = (tuple(round(float(pick(part)), 4) for part in parts) for pick in (np.min, np.max))
    rms = round(float(np.mean(x**2)) ** 0.5, 6) if len(x) else 0.0
    return Wave(name, len(x) / sample_rate, lows, highs, rms, drawn_gain)


def spectrogram(
    samples: ArrayLike, sample_rate: int, name: str, *, columns: int = 60, bands: int = 24, max_hz: float = 8000.0
) -> Spectrogram:
    """Return the power of a signal in equal bands up to ``max_hz``; a full-scale tone is 0 dB, silence ``FLOOR_DB``.

    Raises:
        InputError: no column, no band, or more bands than frequencies can be told apart below ``max_hz``.
    """
    whole("columns", columns, 1)
    whole("bands", bands, 1)
    x = full_scale(samples)
    edges = np.linspace(0, max_hz / sample_rate * _WINDOW, bands + 1).round().astype(int)
    if (np.diff(edges) < 1).any() or edges[-1] > _WINDOW // 2:
        raise InputError(f"{bands} bands up to {max_hz:g} Hz cannot be told apart at {sample_rate} samples a second")
    window = np.hanning(_WINDOW)
    starts = np.linspace(0, len(x), columns, endpoint=False).astype(int)
    padded = np.pad(x, (_WINDOW // 2, _WINDOW // 2))
    cut = np.stack([padded[start : start + _WINDOW] for start in starts])  # [columns, window]
    power = np.abs(np.fft.rfft(cut * window)) ** 2 * (2 / window.sum()) ** 2  # [columns, frequencies]
    summed = np.stack([power[:, a:b].sum(axis=1) for a, b in pairwise(edges)])  # [bands, columns]
    levels = np.maximum(10 * np.log10(np.maximum(summed, 1e-12)), FLOOR_DB).round().astype(int)
    return Spectrogram(name, len(x) / sample_rate, max_hz, tuple(map(tuple, levels.tolist())))


def full_scale(samples: ArrayLike) -> NDArray[np.float64]:
    """Return a mono signal as shares of full scale.

    Raises:
        InputError: several channels, or samples that are not finite.
    """
    x = np.asarray(samples)
    if x.ndim != 1:
        raise InputError(f"the signal has shape {list(x.shape)}; give one channel")
    x = x.astype(np.float64) / (FULL_SCALE if np.issubdtype(x.dtype, np.integer) else 1)
    if not np.isfinite(x).all():
        raise InputError(f"{int((~np.isfinite(x)).sum())} of {len(x)} samples are NaN or infinite")
    return x
