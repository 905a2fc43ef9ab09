"""How a request wants its tokens chosen: the knobs, checked when they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.errors import InputError
from kvlab.options import is_number, is_whole, plain


@dataclass(frozen=True)
class SamplingParams:
    """The sampling knobs of one request; the defaults are greedy.

    They act in this order: ``repetition_penalty``, ``logit_bias`` and ``allowed`` on the logits, ``temperature``, ``top_k``,
    ``top_p`` (of what top_k left) and ``min_p`` (as a share of the likeliest token's probability).

    Args:
        temperature: 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 = all.
        top_p: keep the likeliest tokens that together reach this probability; 1 = all.
        min_p: keep tokens at least this share as likely as the likeliest; 0 = all.
        repetition_penalty: for ids of prompt and reply, logits > 0 are divided by it and logits < 0 multiplied; 1 = off.
        logit_bias: token id -> what is added to its logit.
        logprobs: None = report none; n = the sampled token's, and those of the n likeliest tokens.
        prompt_logprobs: report the logprob of each prompt token. Needs every prompt row, so that request skips its hit.
        seed: requests with equal seeds draw equal tokens whatever else runs; None = a stream of the request's own.
        allowed: given the ids generated so far, returns the ranges that the next id may be from; None = any id may come.

    Raises:
        InputError: a value out of range; the message names option, value and range.

    >>> SamplingParams(temperature=0.6, top_p=0.8).is_greedy
    False
    >>> SamplingParams(top_p=0)
    Traceback (most recent call last):
    kvlab.errors.InputError: top_p is 0; it must be a number in (0, 1]
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: bool = False
    seed: int | None = None
    allowed: Callable[[Sequence[int]], Sequence[range]] | None = None

    def __post_init__(self) -> None:
        count = "a whole number of at least 0"
        heat = self.temperature
        _require("temperature", heat, is_number(heat) and heat >= 0, "a number of at least 0 (0 = greedy)")
        _require("top_k", self.top_k, _is_count(self.top_k), f"{count} (0 = all)")
        _require("top_p", self.top_p, is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]")
        _require("min_p", self.min_p, is_number(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]")
        penalty = self.repetition_penalty
        _require("repetition_penalty", penalty, is_number(penalty) and penalty > 0, "a number above 0 (1 = off)")
        _require("logprobs", self.logprobs, self.logprobs is None or _is_count(self.logprobs), f"None or {count}")
        _require("prompt_logprobs", self.prompt_logprobs, isinstance(self.prompt_logprobs, bool), "True or False")
        _require("seed", self.seed, self.seed is None or is_whole(self.seed), "None or a whole number")
        _require("allowed", self.allowed, self.allowed is None or callable(self.allowed), "None or a function of ids")
        _check_bias(self.logit_bias)
        bias = {int(token): float(value) for token, value in self.logit_bias.items()}  # the client may go on changing its own
        object.__setattr__(self, "logit_bias", bias)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logprobs", "seed"):
            object.__setattr__(self, name, plain(getattr(self, name)))  # a seed is drawn from by how it is written

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def keeps_all(self) -> bool:
        """True when no token is cut from the distribution before the draw."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0

    @property
    def is_plain_argmax(self) -> bool:
        """True when the token is the argmax of the model's own logits and nothing else is asked for."""
        is_bare = self.repetition_penalty == 1 and not self.logit_bias and self.allowed is None
        return self.is_greedy and is_bare and self.logprobs is None


def _require(name: str, value: Any, is_legal: bool, legal: str) -> None:
    if not is_legal:
        raise InputError(f"{name} is {value!r}; it must be {legal}")


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 0


def _check_bias(bias: Any) -> None:
    legal = "a mapping of token id (at least 0) -> finite number"
    _require("logit_bias", bias, isinstance(bias, Mapping), legal)
    for token, value in bias.items():
        _require("logit_bias", {token: value}, _is_count(token) and is_number(value), legal)
