"""The judge of speech: pocketsphinx listens with a grammar of the corpus, and its words are compared with the text."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import missing_extra
from kvlab.train.orpheus import corpus

JUDGE_RATE = 16_000


def word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Return the fewest words to change, drop or add to turn ``said`` into ``heard``.

    >>> word_errors("two red stars".split(), "two stars and".split())
    2
    """
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        above, row = row, [i]
        for j, other in enumerate(heard, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (word != other)))
    return row[-1]


def grammar() -> str:
    """Return the corpus' sentences as a JSGF grammar."""

    def either(choices: Sequence[str]) -> str:
        return "(" + " | ".join(choices) + ")"

    rules = {
        "number": either(corpus.NUMBERS),
        "colour": either(corpus.COLOURS),
        "shape": either(corpus.SHAPES),
        "shapes": either([f"{shape}s" for shape in corpus.SHAPES]),
        "thing": "the <colour> <shape>",
        "count": f"(one <colour> <shape> | {either(corpus.NUMBERS[1:])} <colour> <shapes>)",
        "relation": either(corpus.RELATIONS),
    }
    sentences = "<number> <number> <number> | <count> | <thing> and <thing> | <thing> is <relation> <thing>"
    lines = [f"<{name}> = {rule};" for name, rule in rules.items()]
    return "\n".join(["#JSGF V1.0;", "grammar corpus;", *lines, f"public <sentence> = {sentences};", ""])


class Judge:
    """Hears the corpus' sentences. ``hear`` gives the words; ``share`` the word error over many recordings."""

    def __init__(self) -> None:
        try:
            from pocketsphinx import Decoder
        except ImportError as missing:
            raise missing_extra("pocketsphinx", "train", "to judge speech") from missing
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "corpus.gram"
            path.write_text(grammar(), encoding="utf-8")
            self._decoder: Any = Decoder(jsgf=str(path), lm=None, samprate=JUDGE_RATE, loglevel="FATAL")

    def hear(self, sound: NDArray[np.float32]) -> list[str]:
        """Return the words heard in a 24 kHz recording; none when it fits no sentence."""
        quiet = np.zeros(corpus.SAMPLE_RATE // 4, dtype=np.float32)
        slow = corpus.resample(np.concatenate([quiet, sound, quiet]), corpus.SAMPLE_RATE, JUDGE_RATE)
        samples = (np.clip(slow, -1, 1) * 32767).astype("<i2")
        self._decoder.start_utt()
        self._decoder.process_raw(samples.tobytes(), no_search=False, full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return found.hypstr.split() if found is not None else []

    def share(self, texts: Sequence[str], sounds: Sequence[NDArray[np.float32]]) -> float:
        """Return wrong words per word said."""
        wrong = sum(word_errors(text.split(), self.hear(sound)) for text, sound in zip(texts, sounds, strict=True))
        return wrong / sum(len(text.split()) for text in texts)
