"""What ``kvlab study`` does: a named experiment of ``kvlab.lab`` on a model, as a table, totals and one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

from kvlab import __version__
from kvlab.errors import InputError
from kvlab.lab.results import Table
from kvlab.options import whole

MODEL = "bagel-tiny"
PROMPT = "a red circle left of a blue square on a white background"
SHOWN = "a yellow triangle on a black background"  # the picture of an image-first edit
PAGE_SIZE = 4  # a prompt of the small model is some 20 tokens
NUM_PAGES = 512


@dataclass(frozen=True)
class Outcome:
    """What a study found: rows to read, totals by name, and ``finding`` in one sentence."""

    study: str
    finding: str
    table: Table
    totals: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The outcome in lists, numbers and strings."""
        rows = self.table.to_dicts()
        return {"kvlab": __version__, "study": self.study, "finding": self.finding, "rows": rows, "totals": self.totals}


@contextmanager
def _drawing_engines(model: str | Path) -> Iterator[Callable[..., Any]]:
    """Within it ``make_engine(**settings)`` makes engines over one model that draws."""
    from kvlab.assemble import build_engine
    from kvlab.bench.orpheus import one_thread
    from kvlab.models.loading import load_model

    loaded: Any = load_model(model)
    if "image_gen" not in loaded.walks():
        raise InputError(f"{loaded.name} draws no pictures, which this study is about; give a BAGEL model")
    with one_thread():
        # times are those that the core worked: neighbours on the machine do not slow it
        yield partial(build_engine, loaded, num_pages=NUM_PAGES, page_size=PAGE_SIZE, clock=process_time)


def guided_sweep(model: str | Path = MODEL, *, prompt: str = PROMPT, num_seeds: int = 8, seed: int = 0) -> Outcome:
    """Draw one prompt with several seeds, with reuse of guided prefill and without.

    Args:
        model: name or path of a model that draws.
        seed: the first of the seeds.

    Raises:
        InputError: a model that does not draw, or no seeds.
        FetchError, LoadError: as ``kvlab.load``.
    """
    from kvlab.lab.picture_studies import guided_sweep, sweep_totals
    from kvlab.spec import draw
    from kvlab.viz.marks import count
    from kvlab.viz.pixels import sweep_table

    whole("num_seeds", num_seeds, 1)
    with _drawing_engines(model) as make_engine:
        rows = guided_sweep(make_engine, draw(prompt), range(seed, seed + num_seeds))
    totals = sweep_totals(rows)
    finding = (
        f"reuse saved {totals['saved_slots_share']:.0%} of the prompt slots of {count(num_seeds, 'seed')} and "
        f"{totals['saved_time_share']:.1%} of the core's time; without it prefill takes {totals['prefill_share_without']:.1%}"
    )
    return Outcome("guided-sweep", finding, sweep_table(rows), totals)


def pixel_noise(model: str | Path = MODEL, *, prompt: str = PROMPT, seed: int = 0) -> Outcome:
    """Count the pixels that move when noise is injected into the cached K and V of a prompt; as ``guided_sweep`` otherwise."""
    from kvlab.lab.picture_studies import noise_sensitivity
    from kvlab.spec import draw
    from kvlab.viz.pixels import noise_curve_panel, noise_table

    with _drawing_engines(model) as make_engine, make_engine() as engine:
        rows = noise_sensitivity(engine, draw(prompt), seed=seed)
    totals = {"largest_of_255": {f"2^{row.log2_noise}": row.drift.max_abs for row in rows}}
    return Outcome("pixel-noise", noise_curve_panel(rows).title, noise_table(rows), totals)


def wrong_walk(model: str | Path = MODEL, *, prompt: str = PROMPT, seed: int = 0) -> Outcome:
    """Draw a text after an image-first edit with it, on keys that know their walk and on keys that ignore it.

    Args:
        prompt: the text of both; the picture that is edited is drawn by the model. The rest is as in ``guided_sweep``.
    """
    from kvlab.lab.picture_studies import wrong_walk, wrong_walk_drifts
    from kvlab.spec import draw
    from kvlab.viz.pictures import drift_table

    with _drawing_engines(model) as make_engine:
        with make_engine() as engine:
            picture = engine.generate(draw(SHOWN), seed=seed).image
        found = wrong_walk(make_engine, picture, prompt, seed=seed)
    right, wrong = wrong_walk_drifts(found)
    totals = {"cached_tokens_right": found.right.cached_tokens, "cached_tokens_wrong": found.wrong.cached_tokens}
    finding = (
        f"on keys that know their walk {found.right.cached_tokens} tokens are found, {right.verdict}; on keys that ignore it "
        f"{found.wrong.cached_tokens} are found, {wrong.verdict}"
    )
    return Outcome("wrong-walk", finding, drift_table([right, wrong]), totals)
