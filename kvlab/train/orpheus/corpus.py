"""Phrases of a small English, and espeak-ng to say them. Which phrases are held out is a property of their text alone."""

from __future__ import annotations

import io
import random
import shutil
import subprocess
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import cycle, islice, product

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import LoadError, missing_extra

SAMPLE_RATE = 24_000
FRAME_SAMPLES = 2048
ESPEAK_RATE = 22_050

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = ("red", "green", "blue", "yellow", "white")
SHAPES = ("circle", "square", "star")
RELATIONS = ("above", "below", "left of")
GLUE = ("the", "is", "and")

#: Orpheus' name of each voice -> espeak-ng's voice, its pitch and its speed in words a minute.
VOICES = {"tara": ("en-us+f2", 55, 175), "leo": ("en-us+m1", 45, 175), "zoe": ("en-us+f5", 60, 175)}

_SILENCE = 0.01  # of the peak
_PEAK = 0.7
_HELD_OUT_OF_256 = 26


@dataclass(frozen=True)
class Phrase:
    """One line to be said: by whom, how high, how fast, and after how much silence."""

    voice: str
    text: str
    pitch: int
    words_a_minute: int
    lead_samples: int = 0

    @property
    def prompt(self) -> str:
        return f"{self.voice}: {self.text}"


def words() -> list[str]:
    """Return every word a text can have.

    >>> len(words())
    27
    """
    plurals = [f"{shape}s" for shape in SHAPES]
    relations = [word for relation in RELATIONS for word in relation.split()]
    return sorted({*NUMBERS, *COLOURS, *SHAPES, *plurals, *relations, *GLUE})


def is_held_out(text: str) -> bool:
    """True for the tenth of all texts that no training ever sees, whatever the voice and the seed.

    >>> [text for text in texts()[:9] if is_held_out(text)]
    ['one one six', 'one one nine']
    """
    return blake2b(text.encode("utf-8"), digest_size=1).digest()[0] < _HELD_OUT_OF_256


def texts() -> list[str]:
    """Return every text there is: three numbers, a count of things, two things, or where one is to the other.

    >>> len(texts()), texts()[0], texts()[-1]
    (1764, 'one one one', 'the white star is left of the white star')
    """
    numbers = [" ".join(three) for three in product(NUMBERS, repeat=3)]
    counts = [_count(*words) for words in product(NUMBERS, COLOURS, SHAPES)]
    things = [f"the {colour} {shape}" for colour, shape in product(COLOURS, SHAPES)]
    pairs = [f"{one} and {other}" for one, other in product(things, repeat=2)]
    places = [f"{one} is {relation} {other}" for one, relation, other in product(things, RELATIONS, things)]
    return numbers + counts + pairs + places


def _count(number: str, colour: str, shape: str) -> str:
    return f"{number} {colour} {shape}{'' if number == 'one' else 's'}"


def phrases(count: int, *, seed: int, held_out: bool = False, varied: bool = False) -> list[Phrase]:
    """Return ``count`` phrases, the same for the same seed; voices take turns, ``varied`` ones a little higher or slower.

    A voice says every text once before it says one again.

    >>> first, second = phrases(2, seed=0)
    >>> first.voice, second.voice
    ('tara', 'leo')
    """
    asked = [text for text in texts() if is_held_out(text) == held_out]
    streams = {voice: _shuffled(asked, random.Random(f"{seed} {voice}")) for voice in VOICES}
    said = [_say(voice, next(streams[voice])) for voice in islice(cycle(VOICES), count)]
    return _vary(said, random.Random(f"{seed} voices")) if varied else said


def _shuffled(asked: Sequence[str], draw: random.Random) -> Iterator[str]:
    while True:
        yield from draw.sample(asked, len(asked))


def _say(voice: str, text: str) -> Phrase:
    _, pitch, speed = VOICES[voice]
    return Phrase(voice, text, pitch, speed)


def _vary(said: Sequence[Phrase], draw: random.Random) -> list[Phrase]:
    return [
        Phrase(
            phrase.voice,
            phrase.text,
            pitch=phrase.pitch + draw.randint(-4, 4),
            words_a_minute=phrase.words_a_minute + draw.randint(-8, 8),
            lead_samples=draw.randint(0, SAMPLE_RATE // 20),
        )
        for phrase in said
    ]


# -- sound -------------------------------------------------------------------------------------------------------------


def speak(phrase: Phrase) -> NDArray[np.float32]:
    """Return the phrase as espeak-ng says it: 24 kHz, mono, between -1 and 1, no silence but the lead and a short tail.

    Raises:
        LoadError: espeak-ng is not installed, or said nothing.
    """
    if shutil.which("espeak-ng") is None:
        raise LoadError(
            "espeak-ng says the phrases and is not on the path; install it (apt-get install espeak-ng) and try again"
        )
    name = VOICES[phrase.voice][0]
    command = ["espeak-ng", "-v", name, "-p", str(phrase.pitch), "-s", str(phrase.words_a_minute), "--stdout", phrase.text]
    spoken = subprocess.run(command, capture_output=True, check=True).stdout
    return _place(resample(_read_wave(spoken), ESPEAK_RATE, SAMPLE_RATE), phrase.lead_samples)


def _read_wave(content: bytes) -> NDArray[np.float32]:
    with wave.open(io.BytesIO(content)) as file:
        frames = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return frames.astype(np.float32) / np.float32(32768)


def _place(sound: NDArray[np.float32], lead_samples: int) -> NDArray[np.float32]:
    peak = float(np.abs(sound).max(initial=0.0))
    if peak == 0.0:
        raise LoadError("espeak-ng said nothing; check that its voices are installed")
    heard = np.flatnonzero(np.abs(sound) > _SILENCE * peak)
    kept = sound[heard[0] : heard[-1] + 1] * (_PEAK / peak)
    return np.pad(kept, (lead_samples, SAMPLE_RATE // 25)).astype(np.float32)


def resample(sound: NDArray[np.float32], from_hz: int, to_hz: int) -> NDArray[np.float32]:
    """Return the sound at another rate."""
    try:
        from scipy.signal import resample_poly
    except ImportError as missing:
        raise missing_extra("scipy", "audio", "to resample speech") from missing
    divisor = int(np.gcd(from_hz, to_hz))
    return np.asarray(resample_poly(sound, to_hz // divisor, from_hz // divisor), dtype=np.float32)
