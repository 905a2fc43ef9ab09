"""A player with its numbers under it."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from kvlab.errors import missing_extra

FULL_SCALE = 32767


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


def audio_player(speech: Any, caption: str | None = None) -> Player:
    """Return a player of an utterance (16-bit ``samples``, ``sample_rate``, ``caption``)."""
    return Player(speech.samples, speech.sample_rate, speech.caption if caption is None else caption)
