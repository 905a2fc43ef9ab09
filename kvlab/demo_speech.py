"""What ``kvlab demo`` does with a model that speaks: one sentence cold and after a hit, two sound files, and what differs.

Tokens are compared first: equal, or the first that differs. Then samples, and beside them what the codec's noise alone makes.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvlab import __version__
from kvlab.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvlab.lab.audio import SampleDrift, SpeechDrift
    from kvlab.models.loading import Checkpoint
    from kvlab.models.orpheus.sound import Speech
    from kvlab.models.orpheus.spec import OrpheusModel

TEXT = "the red star is left of the blue square"
DEFAULT_PREFIX = "kvlab-demo"
PAGE_SIZE = 4  # a sentence is some 26 tokens
POOL_TOKENS = 4096
MAX_TOKENS = 420  # 60 frames, 5 s
SEED = 0
OTHER_NOISE = 1  # seed of the second noise that the noise floor is measured with
SMALL_VALUES = 50_000_000  # a model of no more values than these is quicker on one thread
RUNS = ("cold", "hit")


@dataclass(frozen=True)
class SpeechOutcome:
    """One sentence said twice. ``hit`` found pages that ``cold`` had filled."""

    model: dict[str, Any]
    num_pages: int
    page_size: int
    cold: Speech
    hit: Speech
    drift: SpeechDrift


def run(
    checkpoint: Checkpoint,
    *,
    num_pages: int | None = None,
    page_size: int | None = None,
    max_tokens: int | None = None,
    out: str | Path | None = None,
    as_json: bool = False,
    console: Console,
) -> dict[str, Any]:
    """Run the demo, print what it found, and write ``...-cold.wav`` and ``...-hit.wav``.

    Args:
        checkpoint: of an Orpheus model.
        num_pages: pages of the pool; 4096 slots when not given.
        page_size: tokens a page; 4 when not given.
        max_tokens: most audio tokens of the sentence, 7 in a frame and 82 in a second of sound; 420 when not given.
        out: an existing folder for the files, or what their names begin with; ``kvlab-demo`` when not given.
        as_json: print no tables: the caller prints what is returned.
        console: where lines and tables go.

    Returns:
        What was measured, ready for JSON.

    Raises:
        InputError: an illegal option, or files that cannot be written.
        LoadError: weights that are damaged or do not fit into memory.
        MissingExtraError: the extra ``audio`` is not installed.
    """
    from kvlab.bench.orpheus import one_thread
    from kvlab.models.orpheus.tokens import SLOTS

    begin = perf_counter()
    paths = sound_paths(out)
    size, most = PAGE_SIZE if page_size is None else page_size, MAX_TOKENS if max_tokens is None else max_tokens
    if most < SLOTS:
        raise InputError(
            f"max_tokens is {most} and a frame of sound is {SLOTS} tokens, so nothing would be heard; give at least {SLOTS}"
        )
    pages = POOL_TOKENS // max(size, 1) + 1 if num_pages is None else num_pages
    model = _load(checkpoint, console)
    with one_thread() if checkpoint.num_values <= SMALL_VALUES else nullcontext():
        outcome = play(model, pages, size, most, console)
    _save(outcome, paths)
    if not as_json:
        show(outcome, console)
    for path in paths:
        console.print(f"Sound: {path.resolve()}", soft_wrap=True, highlight=False, markup=False)
    seconds = round(perf_counter() - begin, 1)
    console.print(f"{seconds:.0f} s in all", highlight=False)
    files = {name: str(path.resolve()) for name, path in zip(RUNS, paths, strict=True)}
    return to_json(outcome) | {"files": files, "seconds": seconds}


def sound_paths(out: str | Path | None) -> tuple[Path, Path]:
    """Return where the two files go: into a folder that is there, or beside each other under a common beginning.

    Raises:
        InputError: there is no folder to write in.

    >>> [path.name for path in sound_paths("speech.wav")]
    ['speech-cold.wav', 'speech-hit.wav']
    """
    given = Path(DEFAULT_PREFIX if out is None else out)
    prefix = given / DEFAULT_PREFIX if given.is_dir() else given.with_suffix("") if given.suffix.lower() == ".wav" else given
    if not prefix.parent.is_dir() or not os.access(prefix.parent, os.W_OK):
        raise InputError(f"no sound can be written to {prefix}: {prefix.parent} is no folder to write in; use --out")
    cold, hit = (prefix.with_name(f"{prefix.name}-{name}.wav") for name in RUNS)
    return cold, hit


# -- running -----------------------------------------------------------------------------------------------------------


def _load(checkpoint: Checkpoint, console: Console) -> OrpheusModel:
    from kvlab.models.orpheus.loading import load_orpheus

    begin = perf_counter()
    with console.status(f"loading {checkpoint.name}"):
        model = load_orpheus(checkpoint)
    _say(console, f"{model.identity} loaded in {perf_counter() - begin:.1f} s")
    return model


def play(model: OrpheusModel, num_pages: int, page_size: int, max_tokens: int, console: Console) -> SpeechOutcome:
    """Say the sentence twice on one engine, and measure the noise floor on the second time."""
    import torch

    from kvlab.assemble import build_engine
    from kvlab.lab.audio import compare_speech
    from kvlab.lab.speech_studies import cold_and_hit
    from kvlab.models.orpheus.noise import SeededNoise
    from kvlab.models.orpheus.stream import say
    from kvlab.models.orpheus.tokens import SLOTS

    with build_engine(model, num_pages=num_pages, page_size=page_size, seed=SEED) as engine:
        say(engine, TEXT, max_tokens=2, prefix_cache=False, only_speech=True)  # the first pass of a process pays for buffers
        _say(console, f"Saying {TEXT!r} twice, in pages of {page_size} tokens")
        cold, hit = cold_and_hit(engine, say, TEXT, max_tokens=max_tokens, only_speech=True, seed=SEED)
        if not cold.frames:
            raise InputError(
                f"{model.name} ended the sentence after {len(cold.generation.ids)} tokens, before a whole frame of {SLOTS}, so "
                "there is nothing to hear or compare; is it trained to speak?"
            )
        noise_pair = (hit.samples, model.sound(hit.frames, noise=SeededNoise(OTHER_NOISE)))
        facts = {
            "name": model.name,
            "identity": model.identity,
            "dtype": engine.kv.layout.compute_dtype,
            "device": str(model.device),
            "threads": torch.get_num_threads(),
        }
        return SpeechOutcome(facts, num_pages, page_size, cold, hit, compare_speech(cold, hit, noise_pair=noise_pair))


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False)


def _save(outcome: SpeechOutcome, paths: tuple[Path, Path]) -> None:
    for speech, path in zip((outcome.cold, outcome.hit), paths, strict=True):
        try:
            speech.save(path)
        except OSError as error:
            raise InputError(f"no sound can be written to {path} ({error}); use --out") from error


# -- as JSON and as a table --------------------------------------------------------------------------------------------


def verdicts(outcome: SpeechOutcome) -> dict[str, tuple[bool, str]]:
    """What the run has shown: name -> (is as it should be, in one sentence)."""
    drift, hit = outcome.drift, outcome.hit.generation
    floor = drift.noise_floor
    return {
        "hit": (
            hit.cached_tokens > 0,
            f"The second time {hit.cached_tokens} of {hit.prompt_tokens} prompt tokens came from the cache.",
        ),
        "tokens_equal": (drift.first_difference is None, f"Tokens: {_token_words(drift)}."),
        "samples_equal": (drift.samples.is_equal, f"Samples: {_sample_words(drift.samples)}."),
        "noise_floor": (
            floor is not None,
            "Noise floor: two noises over the same codes " + ("were not compared." if floor is None else f"{_apart(floor)}."),
        ),
    }


def _token_words(drift: SpeechDrift) -> str:
    if drift.first_difference is None:
        return f"all {drift.num_tokens} are equal"
    return f"the first that differs is number {drift.first_difference}; {drift.equal_tokens} of {drift.num_tokens} are equal"


def _sample_words(drift: SampleDrift) -> str:
    if drift.is_equal:
        return f"all {drift.num_samples} are equal"
    longer = f", and one has {drift.extra_samples} more" if drift.extra_samples else ""
    return f"of {drift.num_samples}, {drift.equal_samples} are equal{longer}; they {_apart(drift)}"


def _apart(drift: SampleDrift) -> str:
    return f"differ by up to {drift.max_abs:.2g} of full scale (rms {drift.rms:.2g})"


def to_json(outcome: SpeechOutcome) -> dict[str, Any]:
    """The outcome in lists, numbers and strings."""
    drift = outcome.drift
    return {
        "kvlab": __version__,
        "model": outcome.model,
        "num_pages": outcome.num_pages,
        "page_size": outcome.page_size,
        "text": outcome.cold.text,
        "voice": outcome.cold.voice,
        **{name: _said(getattr(outcome, name)) for name in RUNS},
        "tokens": {
            "number": drift.num_tokens,
            "equal": drift.equal_tokens,
            "first_difference": drift.first_difference,
        },
        "samples": asdict(drift.samples),
        "noise_floor": None if drift.noise_floor is None else asdict(drift.noise_floor),
        "verdicts": {name: {"ok": ok, "says": says} for name, (ok, says) in verdicts(outcome).items()},
    }


def _said(speech: Speech) -> dict[str, Any]:
    result = speech.generation
    return {
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "pages_matched": result.pages_matched,
        "generated_tokens": len(result.ids),
        "finish_reason": result.finish_reason,
        "frames": len(speech.frames),
        "bad_frames": len(speech.bad_frames),
        "duration_s": round(speech.duration_s, 3),
        "first_sound_ms": None if speech.ttfa_ms is None else round(speech.ttfa_ms, 1),
        "total_ms": round(speech.total_ms, 1),
        "misses": result.misses.to_dicts(),
    }


def show(outcome: SpeechOutcome, console: Console) -> None:
    """Print both runs and the verdicts."""
    console.print(_run_table(outcome))
    for _, says in verdicts(outcome).values():
        console.print(says, highlight=False, markup=False)


def _run_table(outcome: SpeechOutcome) -> Table:
    from rich.table import Table

    table = Table(title=f"{outcome.cold.voice or 'no voice'}, in pages of {outcome.page_size} tokens", title_justify="left")
    table.add_column("run", no_wrap=True)
    for name in ("prompt tokens", "cached tokens", "first sound, ms", "all, ms", "frames", "seconds of sound"):
        table.add_column(name, justify="right", min_width=6)
    for name in RUNS:
        speech = getattr(outcome, name)
        result = speech.generation
        first = "-" if speech.ttfa_ms is None else f"{speech.ttfa_ms:.0f}"
        counts = (result.prompt_tokens, result.cached_tokens, first, f"{speech.total_ms:.0f}", len(speech.frames))
        table.add_row(name, *map(str, counts), f"{speech.duration_s:.2f}")
    return table
