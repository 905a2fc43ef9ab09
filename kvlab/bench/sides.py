"""What ``bench engine`` compares: kvlab's engine, transformers' generate, and the network's matrix products alone.

Each side answers the same two questions: how long until the first token, and how fast tokens come after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.engine.engine import Engine

Ids = Sequence[int]
Clock = Callable[[], float]


class Side(Protocol):
    """One competitor. Times are in seconds of the clock it was made with."""

    def first_token_s(self, ids: Ids) -> float:
        """Time from handing over a prompt to holding its first token."""

    def decode_rate(self, prompts: Sequence[Ids], new_tokens: int) -> float:
        """Tokens a second of a batch of equally long prompts, from its first tokens to its last ones."""


class EngineSide:
    """kvlab. A prompt must be new to its cache unless a hit is what is measured.

    ``firsts`` keeps the first token of each prompt given to ``first_token_s``.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine, self._clock = engine, clock
        self.firsts: list[int] = []

    def first_token_s(self, ids: Ids) -> float:
        begin = self._clock()
        result = self.engine.generate(list(ids), max_tokens=1, ignore_eos=True)
        taken = self._clock() - begin
        self.firsts += result.ids
        return taken

    def decode_rate(self, prompts: Sequence[Ids], new_tokens: int) -> float:
        arrivals: list[float] = []
        self._generate(prompts, new_tokens, on_token=lambda chunk: arrivals.append(self._clock()))
        # The batch is prefilled in one step, so its first arrivals are the first token of each prompt.
        return len(prompts) * (new_tokens - 1) / (arrivals[-1] - arrivals[len(prompts) - 1])

    def batch_s(self, prompts: Sequence[Ids], new_tokens: int) -> float:
        """Time of a whole batch, prefill and decode."""
        begin = self._clock()
        self._generate(prompts, new_tokens)
        return self._clock() - begin

    def _generate(self, prompts: Sequence[Ids], new_tokens: int, **options: Any) -> None:
        self.engine.generate([list(ids) for ids in prompts], max_tokens=new_tokens, ignore_eos=True, **options)


class GenerateSide:
    """transformers' own generate in float32: greedy, over its own cache. ``firsts`` as in EngineSide."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.model.generation_config.eos_token_id = None  # it runs to the last token, as the other side does
        self.model.generation_config.pad_token_id = 0
        self._clock = clock
        self.firsts: list[int] = []

    def first_token_s(self, ids: Ids) -> float:
        begin = self._clock()
        token = int(self._generate([ids], 1)[0, -1])
        taken = self._clock() - begin
        self.firsts.append(token)
        return taken

    def decode_rate(self, prompts: Sequence[Ids], new_tokens: int) -> float:
        arrivals: list[float] = []

        def note(ids: Tensor, logits: Tensor) -> Tensor:
            arrivals.append(self._clock())
            return logits

        self._generate(prompts, new_tokens, logits_processor=[note])
        return len(prompts) * (new_tokens - 1) / (arrivals[-1] - arrivals[0])

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Ids], new_tokens: int, **options: Any) -> Tensor:
        ids = torch.tensor(prompts)  # [rows, tokens]
        out: Tensor = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, **options
        )
        return out


class LinearSide:
    """The matrix products of transformers' network on the same shapes, and nothing else."""

    def __init__(self, model: Any, clock: Clock) -> None:
        self._head: nn.Linear = model.lm_head
        self._layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not self._head]
        self._clock = clock

    def first_token_s(self, ids: Ids) -> float:
        return self._products_s(len(ids), num_logits=1, steps=1)

    def decode_rate(self, prompts: Sequence[Ids], new_tokens: int) -> float:
        rows, steps = len(prompts), new_tokens - 1
        return rows * steps / self._products_s(rows, num_logits=rows, steps=steps)

    @torch.inference_mode()
    def _products_s(self, num_tokens: int, num_logits: int, steps: int) -> float:
        inputs = {size: torch.randn(num_tokens, size) for size in {layer.in_features for layer in self._layers}}
        last = torch.randn(num_logits, self._head.in_features)
        begin = self._clock()
        for _ in range(steps):
            for layer in self._layers:
                F.linear(inputs[layer.in_features], layer.weight, layer.bias)  # [tokens, out_features]
            F.linear(last, self._head.weight)  # [logits, vocab]
        return self._clock() - begin
