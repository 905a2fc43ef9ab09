"""Named, seeded experiments that return rows. Notebooks and the command line call these and nothing else.

A study that needs several engines takes ``make_engine(**settings)``, for example ``partial(kvlab.load, "smollm2-135m")``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from kvlab.errors import InputError
from kvlab.lab.results import LadderRow, PageSizeRow, RequestRow, TtftRow
from kvlab.progress import progress
from kvlab.spec import chat

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine
    from kvlab.engine.request import GenerationResult

MakeEngine = Callable[..., "Engine"]


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Return ``count`` ids that mean nothing, the lowest sixteenth of the vocabulary (special tokens) left out.

    >>> random_ids(3, 1600, seed=0) == random_ids(3, 1600, seed=0)
    True
    """
    draw = random.Random(seed)
    return [draw.randrange(vocab_size // 16, vocab_size) for _ in range(count)]


def hit_ladder(engine: Engine, lengths: Sequence[int], *, sends: int = 3, seed: int = 0) -> list[LadderRow]:
    """Send a prompt of each length several times and note how much of it was cached.

    Args:
        engine: its cache is forgotten first.
        lengths: prompt lengths in tokens.
        sends: how often each prompt is sent.
    """
    engine.reset_prefix_cache()
    rows = []
    for length in progress(lengths, "hit ladder", unit="prompt"):
        prompt = random_ids(length, engine.model.vocab_size, seed + length)
        for send in range(1, sends + 1):
            result = engine.generate(prompt, max_tokens=1, ignore_eos=True)
            rows.append(LadderRow(length, engine.kv.page_size, send, result.cached_tokens))
    return rows


def ttft_against_cached(
    engine: Engine,
    *,
    prompt_tokens: int = 512,
    shares: Sequence[float] = (0, 0.25, 0.5, 0.75, 0.9),
    rounds: int = 3,
    seed: int = 0,
) -> list[TtftRow]:
    """Time to first token of prompts of one length, a growing share of them cached; medians over ``rounds``.

    The ideal is the cold time in proportion to the tokens left to compute, plus one decode step. Rounds go over all shares in
    turn, so that a slow moment of the machine touches every share.
    """
    if rounds < 1 or any(not 0 <= share < 1 for share in shares):
        raise InputError(f"rounds is {rounds} and shares are {list(shares)}; give at least 1 round and shares in [0, 1)")
    times: dict[int, list[float]] = {}
    decode_ms: list[float] = []
    for number in progress(range(rounds), "time to first token", unit="round"):
        for share in shares:
            cached, result = _timed(engine, prompt_tokens, int(prompt_tokens * share), seed + 1000 * number + int(share * 100))
            times.setdefault(cached, []).append(result.ttft_ms or 0.0)
            decode_ms.append(1e3 / result.tokens_per_s if result.tokens_per_s else 0.0)
    cold_ms, step_ms = median(times[min(times)]), median(decode_ms)
    rows = []
    for cached in sorted(times):
        tail = prompt_tokens - cached
        rows.append(TtftRow(prompt_tokens, cached, tail, median(times[cached]), cold_ms * tail / prompt_tokens + step_ms))
    return rows


def _timed(engine: Engine, prompt_tokens: int, shared_tokens: int, seed: int) -> tuple[int, GenerationResult]:
    """Cache ``shared_tokens`` of a new prompt, then time the whole prompt."""
    engine.reset_prefix_cache()
    prompt = random_ids(prompt_tokens, engine.model.vocab_size, seed)
    if shared_tokens:
        engine.generate(prompt[:shared_tokens], max_tokens=0)
    result = engine.generate(prompt, max_tokens=4, ignore_eos=True)
    return result.cached_tokens, result


def page_size_study(
    make_engine: MakeEngine, *, page_sizes: Sequence[int] = (8, 16, 32, 64, 128), shared_tokens: int = 200, tail_tokens: int = 20,
    pool_tokens: int = 4096, seed: int = 0,
) -> list[PageSizeRow]:  # fmt: skip
    """Two prompts share ``shared_tokens``; how many of them does the second find cached at each page size?"""
    rows = []
    for page_size in progress(page_sizes, "page sizes", unit="size"):
        engine = make_engine(page_size=page_size, num_pages=pool_tokens // page_size + 1)
        shared = random_ids(shared_tokens, engine.model.vocab_size, seed)
        tails = [random_ids(tail_tokens, engine.model.vocab_size, seed + 1 + i) for i in range(2)]
        engine.generate(shared + tails[0], max_tokens=1, ignore_eos=True)
        result = engine.generate(shared + tails[1], max_tokens=1, ignore_eos=True)
        rows.append(PageSizeRow(page_size, shared_tokens, result.cached_tokens, result.prompt_tokens, result.ttft_ms))
        engine.close()
    return rows


def shared_system_prompt(
    engine: Engine, system: str, questions: Iterable[str], *, max_tokens: int = 24, tag: str = ""
) -> list[GenerationResult]:
    """Ask several questions under one system prompt, one after the other."""
    asked = list(questions)
    return [
        engine.generate(chat(question, system=system), max_tokens=max_tokens, name=f"{tag}question {number}")
        for number, question in enumerate(progress(asked, "questions", unit="question"), 1)
    ]


def two_turn_chat(
    engine: Engine, system: str, turns: Sequence[str], *, max_tokens: int = 32, tag: str = ""
) -> list[GenerationResult]:
    """Hold a chat; each turn keeps the ids of those before it."""
    results: list[GenerationResult] = []
    prompt: Any = chat(turns[0], system=system)
    for number, _ in enumerate(progress(turns, "turns", unit="turn"), 1):
        results.append(engine.generate(prompt, max_tokens=max_tokens, name=f"{tag}turn {number}"))
        if number < len(turns):
            prompt = results[-1].follow_up(turns[number])
    return results


def replay_prompts(engine: Engine, results: Sequence[GenerationResult], *, tag: str) -> list[GenerationResult]:
    """Ask the prompts of ``results`` again with the same options on ``engine``, for comparison."""
    again = []
    for result in progress(results, "the same again", unit="request"):
        options = result.request.options
        again.append(engine.generate(list(result.prompt_ids), max_tokens=options.max_tokens, name=f"{tag}{result.name}"))
    return again


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token at which two replies part, None when they are equal.

    >>> first_difference([1, 2, 3], [1, 2, 4]), first_difference([1], [1])
    (2, None)
    """
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def request_rows(results: Iterable[GenerationResult]) -> list[RequestRow]:
    """The rows that tables and reports show."""
    return [RequestRow.of(result) for result in results]


__all__ = [
    "first_difference",
    "hit_ladder",
    "page_size_study",
    "random_ids",
    "replay_prompts",
    "request_rows",
    "shared_system_prompt",
    "ttft_against_cached",
    "two_turn_chat",
]
