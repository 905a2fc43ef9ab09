"""The released stream decoder, fault for fault, to compare with: what it drops, shifts and never plays is kept as it is.

It reads numbers out of text and assigns slots by counting accepted tokens; a code 0 is dropped without being counted, so that
what follows is read in wrong slots. It plays the second of every four frames: the first frame and the last two are never heard.

Source: canopyai/Orpheus-TTS, its token decoder as observed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from kvlab.models.orpheus.codec import Codec
from kvlab.models.orpheus.noise import NoiseSource
from kvlab.models.orpheus.tokens import SLOTS, OrpheusIds, to_levels

MARK = "<custom_token_"
WINDOW_TOKENS = 28
FIRST_NUMBER = 10  # the number of slot 0, code 0
_HEARD = slice(2048, 4096)


def prompt_string(text: str, voice: str | None = "tara", model_type: str = "larger") -> str:
    """Return the prompt as the released class writes it.

    >>> prompt_string("Hi.", "leo", "smaller")
    '<custom_token_3>Hi.[leo]<custom_token_4><custom_token_5>'
    """
    if model_type == "smaller":
        return f"{MARK}3>{text}{f'[{voice}]' if voice else ''}{MARK}4>{MARK}5>"
    spoken = f"{voice}: {text}" if voice else text
    return f"{MARK}3><|begin_of_text|>{spoken}<|eot_id|>{MARK}4>{MARK}5>{MARK}1>"


def token_value(text: str, index: int, codebook_size: int = 4096) -> int | None:
    """Return what the last token in ``text`` is taken for when ``index`` tokens were accepted before; None when it is none.

    >>> token_value("<custom_token_186>", 0), token_value("<custom_token_2>", 21), token_value("<custom_token_12x>", 0)
    (176, -8, None)
    """
    text = text.strip()
    begin = text.rfind(MARK)
    if begin < 0 or not text.endswith(">"):
        return None
    try:
        number = int(text[begin + len(MARK) : -1])
    except ValueError:
        return None
    return number - FIRST_NUMBER - index % SLOTS * codebook_size


def window_audio(codec: Codec, values: list[int], noise: NoiseSource | None = None) -> Tensor | None:
    """Return the samples played of a window: int16, none at all for one frame, None where it is void.

    Raises:
        IndexError: a code equals the size of the code book, which the check lets pass.
    """
    levels = window_levels(values)
    if not levels[0] or any(code < 0 or code > codec.codebook_size for level in levels for code in level):
        return None
    samples = codec.decode_levels(levels, noise=noise)[_HEARD]
    return (samples * 32767).to(torch.int16)


def window_levels(values: list[int]) -> tuple[list[int], ...]:
    """Return the code lists of the whole frames of a window."""
    whole = len(values) // SLOTS * SLOTS
    bounds = pairwise(range(0, whole + 1, SLOTS))
    return to_levels([values[start:stop] for start, stop in bounds])


@dataclass
class OfficialDecoder:
    """Takes tokens one by one, as text or as ids; plays from the 28th accepted token on, once every seven.

    ``accepted`` are the values taken for codes; ``tokens`` is (index used, value found) of everything that came.
    """

    codec: Codec
    noise: NoiseSource | None = None
    ids: OrpheusIds = field(default_factory=OrpheusIds)
    accepted: list[int] = field(default_factory=list)
    tokens: list[tuple[int, int | None]] = field(default_factory=list)

    def push_text(self, text: str) -> Tensor | None:
        """Take the text so far; returns the samples to play now, if any.

        Raises:
            IndexError: as ``window_audio``.
        """
        return self._take(token_value(text, len(self.accepted), self.ids.codebook_size))

    def push_id(self, token: int) -> Tensor | None:
        """Take a token as it would stand in the text."""
        number = token - self.ids.first_audio + FIRST_NUMBER
        return self.push_text(f"{MARK}{number}>" if number >= 0 else "")

    def _take(self, value: int | None) -> Tensor | None:
        self.tokens.append((len(self.accepted), value))
        if value is None or value <= 0:
            return None
        self.accepted.append(value)
        count = len(self.accepted)
        if count % SLOTS or count < WINDOW_TOKENS:
            return None
        return window_audio(self.codec, self.accepted[-WINDOW_TOKENS:], self.noise)

    def push(self, token: int) -> list[Tensor]:
        """As the other decoders: the samples to play now, or nothing."""
        samples = self.push_id(token)
        return [] if samples is None else [samples]

    def finish(self) -> list[Tensor]:
        """Nothing is flushed: what waits is never heard."""
        return []

    def skip(self, tokens: Iterable[int]) -> None:
        """Take the tokens of what was heard before."""
        for token in tokens:
            self.push_id(token)
