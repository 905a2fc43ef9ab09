"""Sound to hear and to see: a player with its numbers under it, waveforms and spectrograms."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlab.errors import InputError, missing_extra
from kvlab.lab.results import Spectrogram, Table, Wave
from kvlab.options import whole
from kvlab.viz.display import as_figure
from kvlab.viz.given import require_rows
from kvlab.viz.marks import Axis, Heat, Label, Line, Panel, linear_axis
from kvlab.viz.theme import EVICTED, HEAT, LIVE, SHARED, SOFT_INK, Style

FULL_SCALE = 32767
LOUDEST_DB, DB_A_LEVEL = -10, 8  # the top level of a spectrogram, and the step between levels
_LANE = 1.2  # from one spectrogram to the next, in heights of one
_COLOURS = (LIVE, SHARED, EVICTED, SOFT_INK)


@dataclass(frozen=True, eq=False)
class Player:
    """Sound for Jupyter; its text form is the caption alone."""

    samples: Any
    sample_rate: int
    caption: str

    def __repr__(self) -> str:
        return f"Player({self.caption})"

    def _repr_html_(self) -> str:
        try:
            from IPython.display import Audio
        except ImportError as error:
            raise missing_extra("IPython", "lab", "to play sound") from error
        # scaled here: left to itself, Audio would make every recording equally loud
        audio = Audio(self.samples / FULL_SCALE, rate=self.sample_rate, normalize=False)
        return f"<figure>{audio._repr_html_()}<figcaption>{html.escape(self.caption)}</figcaption></figure>"


def audio_player(speech: Any, caption: str | None = None, *, sample_rate: int | None = None) -> Player:
    """Return a player of an utterance (16-bit ``samples``, ``sample_rate``, ``caption``).

    Args:
        sample_rate: of the sound in the player, where a page should be smaller; that of the utterance when None.

    Raises:
        InputError: what was given is no utterance.
    """
    lacks = [name for name in ("samples", "sample_rate", "caption") if not hasattr(speech, name)]
    if lacks:
        raise InputError(f"a {type(speech).__name__} is no utterance (it has no {lacks[0]}); give what kvlab's speech returns")
    if sample_rate is not None:
        whole("sample_rate", sample_rate, 1)
    samples, rate = speech.samples, speech.sample_rate
    if sample_rate is not None and sample_rate != rate:
        samples, rate = _resampled(samples, rate, sample_rate), sample_rate
    return Player(samples, rate, speech.caption if caption is None else caption)


def _resampled(samples: Any, rate: int, wanted: int) -> Any:
    try:
        from scipy.signal import resample_poly
    except ImportError as error:
        raise missing_extra("scipy", "audio", "to change a sample rate") from error
    common = math.gcd(rate, wanted)
    changed = resample_poly(samples / FULL_SCALE, wanted // common, rate // common)
    return (changed.clip(-1, 1) * FULL_SCALE).astype(samples.dtype)


# -- waveforms ---------------------------------------------------------------------------------------------------------


def waveforms(waves: Sequence[Wave], title: str = "") -> Any:
    """Draw envelopes one above the other on one scale, as a plotly figure; ``title`` is the finding."""
    return as_figure(waveforms_panel(waves, title))


def waveforms_panel(waves: Sequence[Wave], title: str = "") -> Panel:
    """Return the figure of ``waveforms`` as a panel."""
    require_rows(waves, Wave)
    loudest = max(wave.peak * wave.drawn_gain for wave in waves) or 1.0
    lanes = range(len(waves))
    return Panel(
        title=title or "Peaks, of full scale: " + ", ".join(f"{wave.name} {wave.peak:.2g}" for wave in waves),
        subtitle=f"Envelopes on one scale: half a lane is {loudest:.2g} of full scale; rms = root of the mean power",
        x=_seconds_axis([wave.duration_s for wave in waves]),
        y=Axis("", -0.5, len(waves) - 0.5, tuple((i, _lane_name(waves[i])) for i in lanes), False, True),
        marks=tuple(mark for i in lanes for mark in _lane(i, waves[i], loudest)),
        plot_height_px=62 * len(waves) + 10,
        table=Table(("signal", "seconds", "peak", "rms"), [(w.name, w.duration_s, w.peak, w.rms) for w in waves], "Waveforms"),
    )


def _lane_name(wave: Wave) -> str:
    return wave.name if wave.drawn_gain == 1 else f"{wave.name}, drawn ×{wave.drawn_gain:g}"


def _lane(index: int, wave: Wave, loudest: float) -> tuple[Line | Label, ...]:
    """The pen goes down and up in each column; a silent signal is two points."""
    columns = len(wave.lows)
    values = [value for pair in zip(wave.lows, wave.highs, strict=True) for value in pair] if wave.peak else [0.0, 0.0]
    step = wave.duration_s / (columns or 1)
    xs = [round((i + 0.5) * step, 4) for i in range(columns) for _ in "lh"] if wave.peak else [0.0, wave.duration_s]
    ys = [round(index - 0.48 * value * wave.drawn_gain / loudest, 3) for value in values]  # the axis is flipped
    line = Line(tuple(xs), tuple(ys), _COLOURS[index % len(_COLOURS)], width_px=1.2)
    return line, Label(wave.duration_s, index - 0.38, f"rms {wave.rms:.2g}", "end")


def _seconds_axis(durations: Sequence[float]) -> Axis:
    return replace(linear_axis("seconds", durations, room=0.0), grid=False)


# -- spectrograms ------------------------------------------------------------------------------------------------------


def spectrograms(pictures: Sequence[Spectrogram], title: str = "") -> Any:
    """Draw spectrograms one above the other, as a plotly figure; ``title`` is the finding."""
    return as_figure(spectrograms_panel(pictures, title))


def spectrograms_panel(pictures: Sequence[Spectrogram], title: str = "") -> Panel:
    """Return the figure of ``spectrograms`` as a panel, the first picture on top.

    Raises:
        InputError: none, one without levels, or pictures of other bands than the first.
    """
    require_rows(pictures, Spectrogram)
    for picture in pictures:
        if not picture.levels_db or not all(map(len, picture.levels_db)):
            raise InputError(f"the spectrogram {picture.name!r} has no levels; make it of at least one band and one column")
    if len({(picture.max_hz, len(picture.levels_db)) for picture in pictures}) > 1:
        raise InputError("the spectrograms have different bands; make all with the same bands and max_hz")
    bottoms = [(len(pictures) - 1 - i) * _LANE for i in range(len(pictures))]
    ticks = [tick for bottom, picture in zip(bottoms, pictures, strict=True) for tick in _pitch_ticks(bottom, picture)]
    return Panel(
        title=title or _spectrogram_title(pictures),
        subtitle=f"Power in {len(pictures[0].levels_db)} bands; brighter is louder; dB of full scale",
        x=_seconds_axis([picture.duration_s for picture in pictures]),
        y=Axis("kHz", -0.02, bottoms[0] + 1.02, tuple(ticks), False),
        marks=tuple(
            Heat(0, picture.duration_s, bottom, bottom + 1, tuple(tuple(map(level_of, row)) for row in picture.levels_db))
            for bottom, picture in zip(bottoms, pictures, strict=True)
        ),
        legend=tuple(Style(f"{LOUDEST_DB - DB_A_LEVEL * (len(HEAT) - 1 - i)} dB", HEAT[i]) for i in range(0, len(HEAT), 3)),
        plot_height_px=130 * len(pictures),
        table=_spectrogram_table(pictures),
    )


def level_of(db: float) -> int:
    """Return the level, an index of theme.HEAT, of a power in decibels.

    >>> level_of(0), level_of(-10), level_of(-18), level_of(-90)
    (9, 9, 8, 0)
    """
    return max(0, min(len(HEAT) - 1, len(HEAT) - 1 + round((db - LOUDEST_DB) / DB_A_LEVEL)))


def _pitch_ticks(bottom: float, picture: Spectrogram) -> list[tuple[float, str]]:
    khz = picture.max_hz / 1000
    return [(bottom, "0"), (bottom + 0.5, f"{picture.name}  {khz / 2:g}"), (bottom + 1, f"{khz:g}")]


def _spectrogram_title(pictures: Sequence[Spectrogram]) -> str:
    first, *others = pictures
    if not others:
        return f"{first.name}: {first.duration_s:.2f} s"
    parts = []
    for other in others:
        largest = difference_db(first, other)
        parts.append(f"{other.name} equals {first.name}" if largest == 0 else f"{other.name} differs by up to {largest} dB")
    return "; ".join(parts)


def difference_db(first: Spectrogram, second: Spectrogram) -> int:
    """Return the largest difference of two spectrograms in any band and column."""
    rows = zip(first.levels_db, second.levels_db, strict=True)
    return max((abs(a - b) for row, other in rows for a, b in zip(row, other, strict=False)), default=0)


def _spectrogram_table(pictures: Sequence[Spectrogram]) -> Table:
    rows = [(p.name, p.duration_s, max(map(max, p.levels_db)), difference_db(pictures[0], p)) for p in pictures]
    return Table(("signal", "seconds", "loudest band, dB", "differs from the first by up to, dB"), rows, "Spectrograms")
