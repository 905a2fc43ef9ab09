"""Experiments on drawn pictures: cold, hit and cold again; noise on the cached K and V; a sweep of seeds; the wrong-walk fault.

They take an engine, or ``make_engine(**settings)`` where they need several: ``partial(kvlab.assemble.build_engine, model)``.
Everything but times is the same in every run. Engines need their log of events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvlab.errors import InputError
from kvlab.events import PageIndexed, RequestSubmitted, StepRan
from kvlab.lab.picture_results import NoiseRow, PixelDrift, PixelRow, SweepRow
from kvlab.lab.pixels import compare_pictures
from kvlab.progress import progress
from kvlab.spec import Prompt, draw

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine
    from kvlab.engine.request import GenerationResult

MakeEngine = Callable[..., "Engine"]

DENOISE = "image_gen"  # the walk that draws
UNGUIDED: dict[str, Any] = {"cfg_text_scale": 1.0, "cfg_img_scale": 1.0}
LEVELS = range(-10, 0)  # powers of two of the injected noise: from what rounding makes to half of each value
IGNORE_WALK = "ignore-walk"  # the lab switch that brings the historical fault back


# -- cold, hit, cold again ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Triplet:
    """One picture drawn with nothing cached, on the pages of the first time, and with nothing cached again."""

    cold: GenerationResult
    hit: GenerationResult
    again: GenerationResult


def draw_triplet(engine: Engine, prompt: Prompt, *, seed: int = 0, **options: Any) -> Triplet:
    """Draw a picture cold, after a hit, and cold again.

    Args:
        engine: its cache is forgotten first, and before the third time.
        options: of every request.

    Raises:
        InputError: the comparison would be vacuous: the hit found nothing, or a cold run found something.
    """
    options |= {"seed": seed}
    engine.reset_prefix_cache()
    cold = engine.generate(prompt, name="cold", **options)
    hit = engine.generate(prompt, name="hit", **options)
    engine.reset_prefix_cache()
    again = engine.generate(prompt, name="cold again", **options)
    _require_hit(engine, hit)
    for result in (cold, again):
        if cached_slots(result):
            raise InputError(f"{result.name} found {cached_slots(result)} slots cached; another request is using this engine")
    return Triplet(cold, hit, again)


def cached_slots(result: GenerationResult) -> int:
    """Return the prompt slots of all labels that were cached."""
    return sum(result.cached_by_label.values())


def _require_hit(engine: Engine, hit: GenerationResult) -> None:
    if hit.cached_tokens == 0:
        raise InputError(
            f"{hit.name or 'the second run'} found none of its {hit.prompt_tokens} slots cached: there is nothing to compare; "
            f"give a prompt of more than {engine.kv.page_size} slots (the page size), or an engine with smaller pages and its "
            "prefix cache on"
        )


def cold_against_hit(
    engine: Engine, text: str, *, num_timesteps: int = 25, guided: bool = True, seed: int = 0, name: str = "", **settings: Any
) -> tuple[Triplet, PixelRow]:
    """Draw a text cold, after a hit and cold again, and compare.

    Args:
        guided: with the model's guidance, or with scales of 1.
        settings: of ``kvlab.draw``.
    """
    settings |= {"num_timesteps": num_timesteps} | ({} if guided else UNGUIDED)
    found = draw_triplet(engine, draw(text, **settings), seed=seed)
    return found, pixel_row(engine, found, name or text, num_timesteps, guided)


def drift_by_setting(
    engine: Engine, text: str, schedules: Iterable[int] = (9, 25), *, seed: int = 0, **settings: Any
) -> list[PixelRow]:
    """Draw a text cold, after a hit and cold again, with guidance and without, for several numbers of timesteps."""
    chosen = [(guided, points) for guided in (True, False) for points in schedules]
    rows = []
    for guided, points in progress(chosen, "settings", unit="setting"):
        how = settings | {"num_timesteps": points, "guided": guided, "seed": seed}
        rows.append(cold_against_hit(engine, text, name=f"{points - 1} steps", **how)[1])
    return rows


def pixel_row(engine: Engine, found: Triplet, name: str, num_timesteps: int, guided: bool) -> PixelRow:
    """Return what a table shows of a triplet."""
    return PixelRow(
        name=name,
        dtype=engine.kv.layout.compute_dtype,
        num_timesteps=num_timesteps,
        is_guided=guided,
        prompt_tokens=found.hit.prompt_tokens,
        cached_tokens=found.hit.cached_tokens,
        cached_slots=cached_slots(found.hit),
        drift=compare_pictures(found.cold, found.hit, name),
        again=compare_pictures(found.cold, found.again, name),
    )


def drift_against_match(
    engine: Engine,
    text: str,
    matches: Iterable[int] | None = None,
    *,
    num_timesteps: int = 25,
    guided: bool = True,
    seed: int = 0,
    **settings: Any,
) -> list[PixelRow]:
    """Draw a text after growing parts of its prompt were prefilled, and compare each with the cold picture.

    Args:
        engine: its cache is forgotten before each picture; pages of few tokens allow many parts.
        matches: tokens of the prompt to be found cached, whole pages before its last token; None = every such number.
        guided, settings: as in ``cold_against_hit``.

    Raises:
        InputError: a number that cannot be matched, or that was not.
    """
    prompt = draw(text, **settings | {"num_timesteps": num_timesteps} | ({} if guided else UNGUIDED))
    cold, again = (engine.generate(prompt, seed=seed, prefix_cache=False) for _ in range(2))
    size, ids = engine.kv.page_size, list(cold.prompt_ids)
    rows = []
    for tokens in progress(list(range(size, len(ids), size) if matches is None else matches), "matched tokens", unit="picture"):
        if tokens % size or not 0 < tokens < len(ids):
            raise InputError(
                f"{tokens} of {len(ids)} tokens are not whole pages of {size} before the end, and cannot be matched"
            )
        engine.reset_prefix_cache()
        engine.generate(ids[:tokens], max_tokens=0)
        hit = engine.generate(prompt, seed=seed, name=f"{tokens} cached")
        if hit.cached_tokens != tokens:
            raise InputError(f"{hit.cached_tokens} tokens were found cached where {tokens} had just been prefilled")
        rows.append(pixel_row(engine, Triplet(cold, hit, again), hit.name, num_timesteps, guided))
    return rows


# -- injected noise ----------------------------------------------------------------------------------------------------


def noise_sensitivity(
    engine: Engine, prompt: Prompt, levels: Iterable[int] = LEVELS, *, seed: int = 0, **options: Any
) -> list[NoiseRow]:
    """Draw a picture from cached pages that noise was put on, and compare it with the picture from clean pages.

    The noise is injected, between two requests, into K and V of every page that the first filed. No cache makes it; it stands
    for hits that differ from a cold run by more than this model's do.

    Args:
        engine: its cache is forgotten before each level, and at the end.
        levels: the noise as powers of two, relative to each value.

    Raises:
        InputError: nothing of the prompt was found cached.
    """
    options |= {"seed": seed}
    engine.reset_prefix_cache()
    engine.generate(prompt, **options)
    clean = engine.generate(prompt, name="clean hit", **options)
    _require_hit(engine, clean)
    rows = []
    for level in progress(levels, "injected noise", unit="picture"):
        noisy = draw_from_noise(engine, prompt, level, **options)
        rows.append(NoiseRow(level, noisy.cached_tokens, compare_pictures(clean, noisy, noisy.name)))
    return rows


def draw_from_noise(engine: Engine, prompt: Prompt, log2_noise: int, *, seed: int = 0, **options: Any) -> GenerationResult:
    """Prefill a prompt, inject noise into its pages, and draw from them; the cache is forgotten before and after.

    Raises:
        InputError: nothing of the prompt was found cached.
    """
    options |= {"seed": seed}
    engine.reset_prefix_cache()
    donor = engine.generate(prompt, **options | {"max_tokens": 0})
    put_noise(engine, filed_pages(engine, donor.rid), log2_noise, seed)
    noisy = engine.generate(prompt, name=f"injected noise 2^{log2_noise}", **options)
    engine.reset_prefix_cache()
    _require_hit(engine, noisy)
    return noisy


def filed_pages(engine: Engine, rid: Any) -> list[int]:
    """Return the pages that a request filed in the index, of all labels."""
    return [entry.event.page for entry in engine.events if isinstance(entry.event, PageIndexed) and entry.event.rid == rid]


def put_noise(engine: Engine, pages: Sequence[int], log2_noise: int, seed: int = 0) -> None:
    """Inject noise into pages: every value v of K and V becomes v * (1 + 2 ** log2_noise * g), g standard normal.

    Changes:
        The pages, as no engine ever would: forget the cache afterwards.
    """
    stored = engine.attention.store.pages  # [layers, 2, num_pages, page_size, kv_heads, head_dim]
    index = torch.tensor(list(pages), dtype=torch.int64, device=stored.device)
    clean = stored.index_select(2, index).float()
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed)).to(clean.device)
    stored.index_copy_(2, index, (clean * (1 + 2.0**log2_noise * noise)).to(stored.dtype))


# -- a sweep of seeds --------------------------------------------------------------------------------------------------


def guided_sweep(make_engine: MakeEngine, prompt: Prompt, seeds: Iterable[int] = range(8), **options: Any) -> list[SweepRow]:
    """Draw one prompt with several seeds, with reuse of guided prefill and without.

    Without is what the published system does: its profile never probes guided prefill. Both sides take turns, so that a slow
    moment of the machine touches both; one picture each, which is neither cached nor counted, warms them up.

    Args:
        make_engine: called with ``profile``.
    """
    rows: list[SweepRow] = []
    with make_engine(profile="published") as without, make_engine(profile="kvlab") as with_reuse:
        sides = [(without, False), (with_reuse, True)]
        for engine, _ in sides:
            engine.generate(prompt, prefix_cache=False, seed=0, **options)
        for number, seed in enumerate(progress(list(seeds), "seeds", unit="seed")):
            for engine, reuse in sides if number % 2 else sides[::-1]:
                result = engine.generate(prompt, seed=seed, name=f"seed {seed}", **options)
                rows.append(_sweep_row(engine, result, seed, reuse))
    return sorted(rows, key=lambda row: row.reuse)


def _sweep_row(engine: Engine, result: GenerationResult, seed: int, reuse: bool) -> SweepRow:
    begin_ms = next(e.at_ms for e in engine.events if isinstance(e.event, RequestSubmitted) and e.event.rid == result.rid)
    computed, prefilled_ms = 0, begin_ms
    for entry in engine.events:
        step = entry.event
        if isinstance(step, StepRan) and step.walk != DENOISE and step.spans[0][0] == result.rid:
            computed += sum(tokens for _, _, tokens in step.spans)
            prefilled_ms = entry.at_ms
    return SweepRow(seed, reuse, computed + cached_slots(result), computed, prefilled_ms - begin_ms, result.total_ms)


def sweep_totals(rows: Sequence[SweepRow]) -> dict[str, Any]:
    """Return what reuse saves over a whole sweep: slots, time before the first denoise step, time, and shares."""
    without, reuse = ([row for row in rows if row.reuse is side] for side in (False, True))
    slots = [sum(row.computed_slots for row in side) for side in (without, reuse)]
    prefill = [sum(row.prefill_ms for row in side) for side in (without, reuse)]
    total = [sum(row.total_ms for row in side) for side in (without, reuse)]
    return {
        "seeds": len(reuse),
        "computed_slots_without": slots[0],
        "computed_slots_with": slots[1],
        "saved_slots_share": round(1 - slots[1] / slots[0], 4),
        "prefill_ms_without": round(prefill[0], 1),
        "prefill_ms_with": round(prefill[1], 1),
        "total_ms_without": round(total[0], 1),
        "total_ms_with": round(total[1], 1),
        "prefill_share_without": round(prefill[0] / total[0], 4),
        "saved_time_share": round((prefill[0] - prefill[1]) / total[0], 4),
    }


# -- the wrong-walk fault ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrongWalk:
    """A text drawn uncached, and after an edit that showed a picture first: on keys that know their walk, and that do not."""

    uncached: GenerationResult
    right: GenerationResult
    wrong: GenerationResult


def wrong_walk(make_engine: MakeEngine, picture: Any, text: str, *, seed: int = 0, **settings: Any) -> WrongWalk:
    """Edit a picture, then draw the edit's text alone, both without guidance, on three kinds of keys.

    The edit's first pages hold the picture. Keys that ignore the walk file them under the ids of the text, which then finds
    them: a picture where it expects words. kvlab's keys never do that.

    Args:
        make_engine: called with ``keying`` for the fault.
        settings: of ``kvlab.draw``, for both; a ``size`` is that of the drawing alone.
    """
    edit_settings = {name: value for name, value in settings.items() if name != "size"}
    edit, alone = draw(picture, text, **edit_settings, **UNGUIDED), draw(text, **settings, **UNGUIDED)
    with make_engine() as engine:
        uncached = engine.generate(alone, seed=seed, name="uncached", prefix_cache=False)
        engine.generate(edit, seed=seed, name="edit")
        right = engine.generate(alone, seed=seed, name="after the edit")
    with make_engine(keying=IGNORE_WALK) as engine:
        engine.generate(edit, seed=seed, name="edit")
        wrong = engine.generate(alone, seed=seed, name=f"after the edit, keying={IGNORE_WALK}")
    return WrongWalk(uncached, right, wrong)


def wrong_walk_drifts(found: WrongWalk) -> tuple[PixelDrift, PixelDrift]:
    """Return how far the pictures after the edit are from the uncached one: on right keys, and on wrong ones."""
    return (
        compare_pictures(found.uncached, found.right, "keys that know the walk"),
        compare_pictures(found.uncached, found.wrong, f"keying={IGNORE_WALK}"),
    )


__all__ = [
    "Triplet",
    "WrongWalk",
    "cached_slots",
    "cold_against_hit",
    "draw_from_noise",
    "draw_triplet",
    "drift_by_setting",
    "drift_against_match",
    "filed_pages",
    "guided_sweep",
    "noise_sensitivity",
    "pixel_row",
    "put_noise",
    "sweep_totals",
    "wrong_walk",
    "wrong_walk_drifts",
]
