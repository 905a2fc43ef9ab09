"""Sound as it is handed out: chunks, whole utterances with their numbers, and WAV files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import InputError, missing_extra
from kvlab.models.orpheus.codec import check_wave
from kvlab.models.orpheus.speech import to_int16
from kvlab.models.orpheus.tokens import BadFrame, Frame
from kvlab.spec import Continued

MAX_RATE = 384_000


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """Samples [first_sample, first_sample + len) of a stream: 16-bit PCM, one channel."""

    samples: NDArray[np.int16]
    first_sample: int
    sample_rate: int

    def __repr__(self) -> str:
        return f"AudioChunk({len(self.samples)} samples from {self.first_sample})"


@dataclass(frozen=True, eq=False)
class Speech:
    """What was said: samples, the frames they were made of (one that was repeated in place of a bad one too), how it went.

    ``bad_frames`` could not be read, ``left_over_tokens`` began a frame that never became whole, ``ignored_tokens`` were no
    audio. ``voice`` is the name written before the text: None without one, and for a whole prompt or an utterance that goes on,
    which have theirs in them. ``ttfa_ms`` runs from the call to the first samples. ``generation`` is the engine's
    GenerationResult.
    """

    text: str
    voice: str | None
    samples: NDArray[np.int16]
    sample_rate: int
    frames: tuple[Frame, ...]
    bad_frames: tuple[BadFrame, ...]
    left_over_tokens: int
    ignored_tokens: int
    ttfa_ms: float | None
    total_ms: float
    generation: Any

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate

    @property
    def caption(self) -> str:
        """The numbers that belong under a player."""
        result, text = self.generation, self.text if len(self.text) <= 40 else self.text[:37] + "..."
        damage = f", {len(self.bad_frames)} frames could not be read" if self.bad_frames else ""
        return (
            f"{f'{self.voice}: ' if self.voice else ''}{text!r}, {self.duration_s:.2f} s in {len(self.frames)} frames, "
            f"cached {result.cached_tokens} of {result.prompt_tokens} prompt tokens{damage}"
        )

    def __repr__(self) -> str:
        return f"Speech({self.caption})"

    def continued(self) -> Continued:
        """Return the prompt that goes on with this utterance: every id is kept, so that all whole pages can be hit."""
        prompt: Continued = self.generation.follow_up("")
        return prompt

    def save(self, path: str | Path) -> Path:
        """Write a WAV file; returns its path."""
        return write_wav(path, self.samples, self.sample_rate)


def write_wav(path: str | Path, samples: Any, sample_rate: int) -> Path:
    """Write mono samples as 16-bit PCM; floats are clipped to [-1, 1].

    Raises:
        InputError: samples that are not one channel of finite numbers, a sample rate that no file can have, another suffix, or
            a place that cannot be written to.
        MissingExtraError: ``soundfile`` is not installed.
    """
    path = Path(path)
    if path.suffix.lower() != ".wav":
        raise InputError(f"{path.name!r} does not end in .wav; only WAV files are written")
    if isinstance(sample_rate, bool) or not isinstance(sample_rate, int) or not 1 <= sample_rate <= MAX_RATE:
        raise InputError(f"the sample rate is {sample_rate!r}; give a whole number from 1 to {MAX_RATE}")
    wave = check_wave(samples)
    pcm = np.asarray(samples) if np.asarray(samples).dtype == np.int16 else to_int16(wave).numpy()
    try:
        import soundfile
    except ImportError as e:
        raise missing_extra("soundfile", "audio", "to write WAV files") from e
    try:
        with open(path, "wb") as file:
            soundfile.write(file, pcm, sample_rate, subtype="PCM_16", format="WAV")
    except OSError as error:
        raise InputError(
            f"no sound can be written to {path} ({error.strerror}); give a file in a folder that is there"
        ) from error
    return path
