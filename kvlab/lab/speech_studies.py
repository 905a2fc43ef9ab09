"""Experiments on speech that return utterances and rows: cold against hit, what is shared, and what the sampler must be told.

They take ``say(engine, text, **how)``, which returns what was said with its ``frames``, ``samples`` and ``generation``:
``kvlab.models.orpheus.say``, or something like it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvlab.lab.audio import compare_speech, first_difference
from kvlab.lab.results import DriftRow, SharedPrompt
from kvlab.progress import progress

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from kvlab.engine.engine import Engine

Say = Callable[..., Any]


def cold_and_hit(engine: Engine, say: Say, text: Any, **how: Any) -> tuple[Any, Any]:
    """Say one thing twice: with nothing cached, and again on the pages of the first time; the requests are called so."""
    engine.reset_prefix_cache()
    return say(engine, text, name="cold", **how), say(engine, text, name="hit", **how)


def drift_row(name: str, first: Any, second: Any, noise_pair: tuple[ArrayLike, ArrayLike]) -> DriftRow:
    """Compare two utterances, frames first.

    Args:
        noise_pair: samples of one utterance decoded with two noises.
    """
    drift = compare_speech(first, second, noise_pair=noise_pair)
    floor = drift.noise_floor
    return DriftRow(
        name=name,
        prompt_tokens=second.generation.prompt_tokens,
        cached_tokens=second.generation.cached_tokens,
        num_frames=max(len(first.frames), len(second.frames)),
        first_frame=first_difference(first.frames, second.frames),
        logprob_drift=logprob_drift(first.generation, second.generation),
        max_abs=drift.samples.max_abs,
        rms=drift.samples.rms,
        floor_max_abs=0.0 if floor is None else floor.max_abs,
        floor_rms=0.0 if floor is None else floor.rms,
    )


def logprob_drift(first: Any, second: Any) -> float:
    """Return the largest difference of log-probabilities over the tokens before two results part; ask for ``logprobs=1``."""
    parting = first_difference(first.ids, second.ids)
    pairs = zip(first.logprobs[:parting], second.logprobs[:parting], strict=False)
    return max((abs(a["logprob"] - b["logprob"]) for a, b in pairs), default=0.0)


def sharing_map(engine: Engine, voices: Sequence[str], texts: Sequence[str]) -> list[SharedPrompt]:
    """Send the prompt of every sentence in every voice, voice by voice, and note how much of it was cached.

    Args:
        engine: its cache is forgotten first.
    """
    engine.reset_prefix_cache()
    asked = [(voice, text) for voice in voices for text in texts]
    rows = []
    for voice, text in progress(asked, "voices and sentences", unit="prompt"):
        result = engine.generate(text, fields={"voice": voice}, max_tokens=0)
        rows.append(SharedPrompt(voice, text, result.prompt_tokens, result.cached_tokens, result.page_size))
    return rows


# -- the repetition penalty --------------------------------------------------------------------------------------------


def penalised_ids(engine: Engine, prompt: Any, **options: Any) -> list[int]:
    """Return the ids that the repetition penalty of a request covers once its first token is chosen, that one included."""
    arrived: list[Any] = []
    handle = engine.submit(prompt, on_token=arrived.append, max_tokens=2, ignore_eos=True, **options)
    while not arrived and not handle.done:
        engine.step()
    if handle.done:  # it cannot have ended well
        handle.result()
    covered = engine.sampler.seen_ids(handle.rid)
    handle.cancel()
    return covered


@contextmanager
def untold_sampler(engine: Engine) -> Iterator[None]:
    """Within it the sampler is not told which prompt ids the cache stands in for: a fault, to see what it does."""
    engine.sampler.apply_cached_prefix = lambda *args: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.sampler.apply_cached_prefix


__all__ = ["cold_and_hit", "drift_row", "logprob_drift", "penalised_ids", "sharing_map", "untold_sampler"]
