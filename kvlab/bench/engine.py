"""The engine on a real model against transformers' generate and against the matrix products alone, interleaved in one run."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvlab.assemble import build_engine, load
from kvlab.bench.index import resident_bytes
from kvlab.bench.rows import Row, document, take_turns
from kvlab.bench.sides import Clock, EngineSide, GenerateSide, Ids, LinearSide, Side
from kvlab.engine.engine import Engine
from kvlab.models.loading import load_text_model, open_checkpoint
from kvlab.models.text import TextModel

MODEL = "smollm2-135m"
PAGE_SIZE = 16
HIT_SHARE = 7 / 8


@dataclass(frozen=True)
class Sizes:
    """How much is measured; the defaults take some minutes on two cores."""

    cold_tokens: tuple[int, ...] = (512, 1024)
    cold_rounds: int = 5
    batches: tuple[int, ...] = (1, 4, 8)
    decode_prompt_tokens: int = 128
    decode_tokens: int = 32
    decode_rounds: tuple[int, ...] = (8, 5, 4)  # a batch each
    hit_tokens: int = 512
    hit_rounds: int = 7
    no_hit_batch: int = 2
    no_hit_prompt_tokens: int = 32
    no_hit_tokens: int = 2
    no_hit_rounds: int = 81
    num_pages: int = 256


def run(
    model: str | Path = MODEL, sizes: Sizes | None = None, *, num_threads: int | None = None, clock: Clock = perf_counter
) -> dict[str, Any]:
    """Measure everything.

    Args:
        model: Name or path of a text model.
        sizes: How much.
        num_threads: Of torch, for all sides; torch's own choice when None.
        clock: Seconds. ``time.process_time`` on one thread keeps other load on the machine out of the numbers.
    """
    sizes = Sizes() if sizes is None else sizes
    with _threads(num_threads) as threads, closing(EngineBench(model, sizes, clock)) as bench:
        rows = list(bench.rows())
    return document(
        [*rows, load_row(model, sizes.num_pages)],
        threads=threads,
        torch=torch.__version__,
        transformers=version("transformers"),
        model=bench.model.identity,
        dtype="float32",
        clock=getattr(clock, "__name__", str(clock)),
        sizes=asdict(sizes),
        first_tokens_as_reference=bench.agreement(),
    )


@contextmanager
def _threads(num_threads: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


class EngineBench:
    """One model on three sides, all in this process."""

    def __init__(self, model: str | Path, sizes: Sizes, clock: Clock) -> None:
        checkpoint = open_checkpoint(model)
        self.model = load_text_model(checkpoint, dtype="float32", device="cpu")
        self.sizes = sizes
        self._rng = random.Random(7)
        self.engine = _engine(self.model, sizes, prefix_cache=True)
        self._ours = EngineSide(self.engine, clock)
        self._theirs = GenerateSide(checkpoint.folder, clock)
        self._linear = LinearSide(self._theirs.model, clock)
        self._clock = clock

    def rows(self) -> Iterator[Row]:
        """Measure row by row."""
        for tokens in self.sizes.cold_tokens:
            yield from self.cold_rows(tokens)
        for batch, rounds in zip(self.sizes.batches, self.sizes.decode_rounds, strict=True):
            yield from self.decode_rows(batch, rounds)
        yield self.hit_row()
        yield self.no_hit_row()

    def close(self) -> None:
        """Let go of the engine."""
        self.engine.close()

    def agreement(self) -> str:
        """How many cold prompts got the same first token from both."""
        pairs = list(zip(self._ours.firsts, self._theirs.firsts, strict=False))
        return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"

    def cold_rows(self, tokens: int) -> list[Row]:
        """Time to first token of prompts that share nothing, with the cache on."""
        rounds = self.sizes.cold_rounds
        prompts = [self._ids(tokens) for _ in range(rounds + 1)]
        sides = [_each(side.first_token_s, prompts) for side in self._sides()]
        ours, theirs, linear = take_turns(sides, rounds, label=f"cold, {tokens} tokens")
        return [
            Row.of(f"cold_ttft_{tokens}", _ms(ours), _ms(theirs), target=0.9, unit="ms"),
            Row.of(f"linear_cold_{tokens}", _ms(ours), _ms(linear), target=None, unit="ms"),
        ]

    def decode_rows(self, batch: int, rounds: int) -> list[Row]:
        """Tokens a second of a batch after its first tokens."""
        tokens = self.sizes.decode_tokens
        prompts = [[self._ids(self.sizes.decode_prompt_tokens) for _ in range(batch)] for _ in range(rounds + 1)]
        sides = [_each(partial(side.decode_rate, new_tokens=tokens), prompts) for side in self._sides()]
        ours, theirs, linear = take_turns(sides, rounds, label=f"decode, batch of {batch}")
        return [
            Row.of(f"decode_b{batch}", ours, theirs, target=1.15, unit="tokens/s", higher_is_better=True),
            Row.of(f"linear_decode_b{batch}", ours, linear, target=None, unit="tokens/s", higher_is_better=True),
        ]

    def hit_row(self) -> Row:
        """Time to first token with 7/8 of the prompt cached, against the same share of a cold run and one decode step."""
        tokens = self.sizes.hit_tokens
        held = int(tokens * HIT_SHARE) // PAGE_SIZE * PAGE_SIZE
        prefix: Ids = []

        def cold() -> float:
            nonlocal prefix
            ids = self._ids(tokens)
            prefix = ids[:held]
            return self._ours.first_token_s(ids)

        def hit() -> float:
            return self._ours.first_token_s([*prefix, *self._ids(tokens - held)])

        def step() -> float:
            return 1 / self._ours.decode_rate([self._ids(self.sizes.decode_prompt_tokens)], 9)

        cold()
        colds, hits, steps = take_turns([cold, hit, step], self.sizes.hit_rounds, label="7/8 cached")
        ideal = [c * (tokens - held) / tokens + s for c, s in zip(colds, steps, strict=True)]
        return Row.of("hit_ttft", _ms(hits), _ms(ideal), target=1.2, unit="ms")

    def no_hit_row(self) -> Row:
        """Whole time of a batch that shares nothing, with the cache on against off."""
        s = self.sizes
        off = EngineSide(_engine(self.model, s, prefix_cache=False), self._clock)
        prompts = [[self._ids(s.no_hit_prompt_tokens) for _ in range(s.no_hit_batch)] for _ in range(s.no_hit_rounds + 1)]
        sides = [_each(partial(side.batch_s, new_tokens=s.no_hit_tokens), prompts) for side in (self._ours, off)]
        ours, reference = take_turns(sides, s.no_hit_rounds, label="cache on, no hits")
        return Row.of("cache_on_no_hits", _ms(ours), _ms(reference), target=1.02, unit="ms")

    def _sides(self) -> tuple[Side, Side, Side]:
        return self._ours, self._theirs, self._linear

    def _ids(self, length: int) -> list[int]:
        return [self._rng.randrange(self.model.vocab_size) for _ in range(length)]


def _engine(model: TextModel, sizes: Sizes, *, prefix_cache: bool) -> Engine:
    return build_engine(model, num_pages=sizes.num_pages, page_size=PAGE_SIZE, prefix_cache=prefix_cache)


def _each(measure: Callable[[Any], float], prompts: list[Any]) -> Callable[[], float]:
    """Measure the next of ``prompts`` at each call."""
    following = iter(prompts)
    return lambda: measure(next(following))


def _ms(seconds: list[float]) -> list[float]:
    return [s * 1e3 for s in seconds]


# -- memory ------------------------------------------------------------------------------------------------------------


MIB = 1 << 20


def load_row(model: str | Path, num_pages: int) -> Row:
    """Resident memory that loading adds, over the bytes of weights and pool; in a fresh process, every page written."""
    open_checkpoint(model)  # a GGUF file is converted once and beforehand
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        added, needed = pool.apply(added_by_load, (model, num_pages))
    return Row.of("load_peak", [added / MIB], [needed / MIB], target=1.25, unit="MiB")


def added_by_load(model: str | Path, num_pages: int) -> tuple[int, int]:
    """Load a model in this process; returns the resident bytes it added and the bytes of its weights and pool."""
    import transformers  # noqa: F401  (what it takes is not the model's)

    before = resident_bytes()
    engine = load(model, num_pages=num_pages, dtype="float32", device="cpu")
    store = engine.attention.store
    store.pages.fill_(0)  # a page that was never written takes no memory
    added = resident_bytes() - before
    return added, open_checkpoint(model).weights_bytes("float32") + store.num_bytes
