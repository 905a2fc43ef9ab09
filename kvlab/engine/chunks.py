"""Where a prefill is cut into chunks: the one place that decides it."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.errors import InputError


@dataclass(frozen=True)
class ChunkRule:
    """Cut a prefill so that one step computes at most ``max_step_tokens`` prompt tokens over all its rows.

    What cannot be cut, a picture or a text that several labels read, runs whole whatever its size.

    >>> ChunkRule(8).cut(remaining=20, budget=8)
    8
    """

    max_step_tokens: int = 2048

    def __post_init__(self) -> None:
        if isinstance(self.max_step_tokens, bool) or not isinstance(self.max_step_tokens, int) or self.max_step_tokens < 1:
            raise InputError(f"max_step_tokens is {self.max_step_tokens!r}; it must be a whole number of at least 1")

    def cut(self, *, remaining: int, budget: int) -> int:
        """Return how many of ``remaining`` tokens run in this step."""
        return min(remaining, budget)
