"""What ``kvlab demo`` does with a model that draws: one prompt cold and after a hit, side by side, and the map of what differs.

Equality comes first: how many pixels are the same. Then the largest difference, and the share of pixels that most people see.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvlab import __version__
from kvlab.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvlab.engine.request import GenerationResult
    from kvlab.lab.picture_results import PixelDrift
    from kvlab.lab.picture_studies import Triplet
    from kvlab.models.bagel.spec import BagelModel
    from kvlab.recorder import Recorder
    from kvlab.spec import ModelSpec
    from kvlab.viz.marks import Panel

TEXT = "a red circle left of a blue square on a white background"
PAGE_SIZE = 4  # a caption is some 20 tokens
POOL_TOKENS = 512  # few enough to see every page in the report
SEED = 0
SMALL_VALUES = 50_000_000  # a model of no more values than these is quicker on one thread
RUNS = ("cold", "hit", "again")


@dataclass(frozen=True)
class PictureOutcome:
    """One prompt drawn three times. ``hit`` found pages that ``cold`` had filled; nothing was cached for ``again``."""

    model: dict[str, Any]
    num_pages: int
    page_size: int
    found: Triplet
    drift: PixelDrift
    again: PixelDrift


def run(
    model: str | Path,
    path: Path,
    *,
    num_pages: int | None = None,
    page_size: int | None = None,
    max_tokens: int | None = None,
    as_json: bool = False,
    console: Console,
) -> dict[str, Any]:
    """Run the demo, print what it found, and write the HTML report.

    Args:
        model: name or path of one that draws.
        path: where the report goes.
        num_pages: pages of the pool; 512 slots when not given.
        page_size: tokens a page; 4 when not given.
        max_tokens: refused: a picture is no answer in words.
        as_json: print no tables: the caller prints what is returned.
        console: where lines and tables go.

    Returns:
        What was measured, ready for JSON.

    Raises:
        InputError: an illegal option, a model that does not draw, or a report that cannot be written.
        LoadError: weights that are damaged or do not fit into memory.
        MissingExtraError: the extra ``bagel`` is not installed.
    """
    from kvlab.bench.orpheus import one_thread

    begin = perf_counter()
    if max_tokens is not None:
        raise InputError(f"max_tokens is {max_tokens}, and this model's demo is a picture, which has none; leave it out")
    size = PAGE_SIZE if page_size is None else page_size
    pages = POOL_TOKENS // max(size, 1) + 1 if num_pages is None else num_pages
    loaded = _load(model, console)
    num_values = sum(parameter.numel() for parameter in loaded.net.parameters())
    with one_thread() if num_values <= SMALL_VALUES else nullcontext():
        outcome, events = play(loaded, pages, size, console)
    _write(path, outcome, events)
    if not as_json:
        show(outcome, console)
    seconds = round(perf_counter() - begin, 1)
    console.print(f"Report: {path.resolve()} ({seconds:.0f} s in all)", soft_wrap=True, highlight=False, markup=False)
    return to_json(outcome) | {"report": str(path.resolve()), "seconds": seconds}


# -- running -----------------------------------------------------------------------------------------------------------


def _load(model: str | Path, console: Console) -> BagelModel:
    from kvlab.models.bagel.spec import BagelModel
    from kvlab.models.loading import load_model

    begin = perf_counter()
    with console.status(f"loading {model}"):
        loaded = load_model(model)
    if not isinstance(loaded, BagelModel):
        raise InputError(f"{loaded.name} draws no pictures; this demo is that of a BAGEL model")
    _say(console, f"{loaded.identity} loaded in {perf_counter() - begin:.1f} s")
    return loaded


def play(model: ModelSpec, num_pages: int, page_size: int, console: Console) -> tuple[PictureOutcome, Recorder]:
    """Draw the prompt three times on one engine; returns the outcome and the log."""
    import torch

    from kvlab.assemble import build_engine
    from kvlab.lab.picture_studies import draw_triplet
    from kvlab.lab.pixels import compare_pictures
    from kvlab.spec import draw

    with build_engine(model, num_pages=num_pages, page_size=page_size, seed=SEED) as engine:
        warm_up = draw(TEXT, num_timesteps=2)  # the first pass of a process pays for buffers
        engine.generate(warm_up, prefix_cache=False, seed=SEED, name="warm-up")
        _say(console, f"Drawing {TEXT!r} cold, after a hit, and cold again, in pages of {page_size} tokens")
        found = draw_triplet(engine, draw(TEXT), seed=SEED)
        facts = {
            "name": model.name,
            "identity": model.identity,
            "dtype": engine.kv.layout.compute_dtype,
            "device": str(model.device),
            "threads": torch.get_num_threads(),
        }
        drift, again = (compare_pictures(found.cold, other, other.name) for other in (found.hit, found.again))
        return PictureOutcome(facts, num_pages, page_size, found, drift, again), engine.events


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False)


# -- the report --------------------------------------------------------------------------------------------------------


def panel(outcome: PictureOutcome) -> Panel:
    """Return the two pictures side by side, and the map of their differences."""
    from kvlab.lab.pixels import difference_map, to_draw
    from kvlab.viz.pictures import pictures_panel

    cold, hit = outcome.found.cold, outcome.found.hit
    shown = (
        to_draw(cold, "cold"),
        to_draw(hit, f"after a hit: {hit.cached_tokens} of {hit.prompt_tokens} cached"),
        difference_map(cold, hit, "difference"),
    )
    return pictures_panel(shown, drift=outcome.drift)


def _write(path: Path, outcome: PictureOutcome, events: Recorder) -> None:
    from kvlab.lab.results import RequestRow
    from kvlab.report import write_report

    facts, found = outcome.model, outcome.found
    try:
        write_report(
            path,
            title="What a hit does to a picture",
            rows=[RequestRow.of(result) for result in (found.cold, found.hit, found.again)],
            events=events,
            model_line=f"{facts['identity']}, {facts['dtype']} on {facts['device']}",
            notes=[f"Drawn: {TEXT}.", *(says for _, says in verdicts(outcome).values())],
            figures=[("Cold and after a hit", panel(outcome))],
        )
    except OSError as error:
        raise InputError(f"the report cannot be written to {path} ({error.strerror}); use --out") from error


# -- as JSON and as a table --------------------------------------------------------------------------------------------


def verdicts(outcome: PictureOutcome) -> dict[str, tuple[bool, str]]:
    """What the run has shown: name -> (is as it should be, in one sentence)."""
    hit = outcome.found.hit
    return {
        "hit": (
            hit.cached_tokens > 0,
            f"The second time {hit.cached_tokens} of {hit.prompt_tokens} prompt slots came from the cache.",
        ),
        "pixels": (outcome.drift.share_over(32) < 0.01, f"After the hit {outcome.drift.verdict}."),
        "cold_again": (outcome.again.is_equal, f"Drawn cold again {outcome.again.verdict}."),
    }


def to_json(outcome: PictureOutcome) -> dict[str, Any]:
    """The outcome in lists, numbers and strings."""
    return {
        "kvlab": __version__,
        "model": outcome.model,
        "num_pages": outcome.num_pages,
        "page_size": outcome.page_size,
        "text": TEXT,
        **{name: _drawn(getattr(outcome.found, name)) for name in RUNS},
        "drift": _drift(outcome.drift),
        "drift_cold_again": _drift(outcome.again),
        "verdicts": {name: {"ok": ok, "says": says} for name, (ok, says) in verdicts(outcome).items()},
    }


def _drawn(result: GenerationResult) -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "cached_by_label": dict(result.cached_by_label),
        "pages_matched": result.pages_matched,
        "first_step_ms": None if result.first_pass_ms is None else round(result.first_pass_ms, 1),
        "total_ms": round(result.total_ms, 1),
        "misses": result.misses.to_dicts(),
    }


def _drift(drift: PixelDrift) -> dict[str, Any]:
    return {
        "pixels": drift.num_pixels,
        "equal_pixels": drift.equal_pixels,
        "largest_of_255": drift.max_abs,
        "share_over": {str(t): round(drift.share_over(t), 6) for t in (0, 1, 8, 32)},
        "psnr_db": None if drift.psnr_db is None else round(drift.psnr_db, 2),
    }


def show(outcome: PictureOutcome, console: Console) -> None:
    """Print the three runs and the verdicts."""
    console.print(_run_table(outcome))
    for _, says in verdicts(outcome).values():
        _say(console, says)


def _run_table(outcome: PictureOutcome) -> Table:
    from rich.table import Table

    table = Table(title=f"{TEXT}, in pages of {outcome.page_size} tokens", title_justify="left")
    table.add_column("run", no_wrap=True)
    for name in ("prompt slots", "cached slots", "first step, ms", "all, ms"):
        table.add_column(name, justify="right", min_width=6)
    for name in RUNS:
        result = getattr(outcome.found, name)
        first = "-" if result.first_pass_ms is None else f"{result.first_pass_ms:.0f}"
        table.add_row(result.name, str(result.prompt_tokens), str(result.cached_tokens), first, f"{result.total_ms:.0f}")
    return table
