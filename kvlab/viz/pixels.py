"""How far pictures drift: shares of pixels over a threshold, drift against matched tokens and noise, and a sweep of seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvlab.errors import InputError
from kvlab.lab.picture_results import FAR, FULL, MAX_THRESHOLD, NoiseRow, PixelDrift, PixelRow, SweepRow
from kvlab.lab.results import Table
from kvlab.viz.display import as_figure
from kvlab.viz.given import require_rows
from kvlab.viz.marks import Axis, Line, Mark, Panel, Points, Rect, Rects, Ticks, count, cut, linear_axis, named_axis
from kvlab.viz.pictures import drift_table
from kvlab.viz.theme import CACHED, COMPUTED, EVICTED, INK, LAST, LIVE, SERVED, SHARED, Style

_LOOKS = ((LIVE, "solid"), (EVICTED, "dash"), (CACHED, "dot"), (SHARED, "solid"), (LAST, "dash"), (INK, "dot"))
_SYMBOLS = ("circle", "square", "diamond", "triangle")
_NONE = -1.0  # where "none" stands below the lowest decade of a share axis
_HALF = 0.34  # half the thickness of a bar


# -- shares over a threshold -------------------------------------------------------------------------------------------


def pixel_shares(drifts: Sequence[PixelDrift], threshold: int = FAR) -> Any:
    """Draw the share of pixels over each threshold from 0 to 64, as a plotly figure. Arguments: ``pixel_shares_panel``."""
    return as_figure(pixel_shares_panel(drifts, threshold))


def pixel_shares_panel(drifts: Sequence[PixelDrift], threshold: int = FAR) -> Panel:
    """Return the figure of ``pixel_shares`` as a panel.

    Args:
        drifts: named; a line each.
        threshold: of 255, marked by a vertical line; its shares stand in the title, the three largest if there are more.
    """
    require_rows(drifts, PixelDrift)
    axis = share_axis(drifts)
    lines: list[Mark] = [Line((threshold, threshold), (axis.low, axis.high), INK, "dot")]
    thresholds = range(MAX_THRESHOLD + 1)
    for index, drift in enumerate(drifts):
        colour, dash = _LOOKS[index % len(_LOOKS)]
        ys = tuple(share_place(drift.share_over(t), drift.num_pixels) for t in thresholds)
        lines.append(Line(tuple(thresholds), ys, colour, dash))
    return Panel(
        title=_shares_title(drifts, threshold),
        subtitle="Share of pixels of which a channel differs by more than the threshold; each tick is ten times the one below",
        x=linear_axis("threshold, of 255", [MAX_THRESHOLD], room=0.0),
        y=axis,
        marks=tuple(lines),
        legend=tuple(Style(cut(d.name, 40), _LOOKS[i % len(_LOOKS)][0]) for i, d in enumerate(drifts)),
        table=drift_table(drifts, (0, 1, 2, 4, 8, 16, 32, 64)),
    )


def _shares_title(drifts: Sequence[PixelDrift], threshold: int) -> str:
    largest = sorted(range(len(drifts)), key=lambda i: drifts[i].share_over(threshold), reverse=True)[:3]
    named = [drifts[i] for i in sorted(largest)]
    shares = ", ".join(f"{share_words(drift, threshold)} ({cut(drift.name, 30)})" for drift in named)
    more = f", and {len(drifts) - 3} more" if len(drifts) > 3 else ""
    return f"Pixels over {threshold} of {FULL}: {shares}{more}"


def share_words(drift: PixelDrift, threshold: int) -> str:
    """Return the share of pixels over a threshold in words.

    >>> share_words(PixelDrift(1, 4, (2, 1, 1), 0.25, 50.0), 1), share_words(PixelDrift(1, 4, (4,), 0.0, None), 1)
    ('25.00%', 'none')
    """
    share = drift.share_over(threshold)
    return f"{share:.2%}" if share else "none"


def share_axis(drifts: Sequence[PixelDrift]) -> Axis:
    """Return the axis of shares: a decade from tick to tick, "none" at the bottom."""
    lowest = _lowest_decade(max(drift.num_pixels for drift in drifts))
    decades: Ticks = tuple((float(d), f"{100 * 10.0 ** (d + lowest):g} %") for d in range(-lowest + 1))
    return Axis("share of pixels", _NONE - 0.3, -lowest + 0.4, ((_NONE, "none"), *decades))


def _lowest_decade(num_pixels: int) -> int:
    """The power of ten that a single pixel's share is not below."""
    return math.floor(-math.log10(num_pixels))


def share_place(share: float, num_pixels: int) -> float:
    """Return where a share stands on ``share_axis``: decades above the lowest one, -1 for none.

    >>> share_place(0.0, 4096), round(share_place(1 / 4096, 4096), 2), share_place(1.0, 4096)
    (-1.0, 0.39, 4.0)
    """
    return math.log10(share) - _lowest_decade(num_pixels) if share else _NONE


# -- noise -------------------------------------------------------------------------------------------------------------


def noise_curve(rows: Sequence[NoiseRow], thresholds: Sequence[int] = (0, 1, 8, FAR)) -> Any:
    """Draw the share of pixels over some thresholds against injected noise. Arguments: ``noise_curve_panel``."""
    return as_figure(noise_curve_panel(rows, thresholds))


def noise_curve_panel(rows: Sequence[NoiseRow], thresholds: Sequence[int] = (0, 1, 8, FAR)) -> Panel:
    """Return the figure of ``noise_curve`` as a panel: one line a threshold, one point a strength of noise."""
    require_rows(rows, NoiseRow)
    ordered = sorted(rows, key=lambda row: row.log2_noise)
    xs = tuple(float(row.log2_noise) for row in ordered)
    marks: list[Mark] = []
    for index, threshold in enumerate(thresholds):
        colour, dash = _LOOKS[index % len(_LOOKS)]
        ys = tuple(share_place(row.drift.share_over(threshold), row.drift.num_pixels) for row in ordered)
        marks.append(Line(xs, ys, colour, dash))
        marks.append(Points(xs, ys, colour, _SYMBOLS[index % len(_SYMBOLS)]))
    return Panel(
        title=_noise_title(ordered),
        subtitle=f"Injected: each value v of the {ordered[0].cached_tokens} cached slots of main became v·(1 + 2^x·normal)",
        x=Axis("injected noise, relative", xs[0] - 0.4, xs[-1] + 0.4, tuple((x, f"2^{x:.0f}") for x in xs)),
        y=share_axis([row.drift for row in ordered]),
        marks=tuple(marks),
        legend=tuple(Style(f"over {t} of {FULL}", _LOOKS[i % len(_LOOKS)][0]) for i, t in enumerate(thresholds)),
        table=noise_table(ordered, thresholds),
    )


def noise_table(rows: Sequence[NoiseRow], thresholds: Sequence[int] = (0, 1, 8, FAR)) -> Table:
    """Return one row a strength of noise."""
    require_rows(rows, NoiseRow)
    columns = ("injected noise", "largest of 255", *(f"pixels over {t}" for t in thresholds), "PSNR, dB")
    body = [
        (f"2^{r.log2_noise}", r.drift.max_abs, *(share_words(r.drift, t) for t in thresholds), r.drift.psnr_db) for r in rows
    ]
    return Table(columns, body, "Noise injected into the cached K and V")


def _noise_title(rows: Sequence[NoiseRow]) -> str:
    strongest = rows[-1]
    reached = next((row for row in rows if row.drift.share_over(FAR) >= 0.01), None)
    if reached is not None:
        return f"1 % of pixels over {FAR} is reached with injected noise of 2^{reached.log2_noise}"
    most = f"{share_words(strongest.drift, FAR)} over {FAR}, at most {strongest.drift.max_abs} of {FULL}"
    return f"Even injected noise of 2^{strongest.log2_noise} moves few pixels: {most}"


# -- cold against hit --------------------------------------------------------------------------------------------------


def pixel_table(rows: Sequence[PixelRow]) -> Table:
    """Return settings, what was cached, and drift: equality first, then the largest difference, then shares."""
    require_rows(rows, PixelRow)
    columns = (
        "picture", "format", "timesteps", "guided", "cached of main", "cached, all labels", "equal pixels", "largest of 255",
        "over 0", "over 1", f"over {FAR}", "cold again",
    )  # fmt: skip
    body = [
        (r.name, r.dtype, r.num_timesteps, "yes" if r.is_guided else "no", f"{r.cached_tokens} of {r.prompt_tokens}",
         r.cached_slots, r.drift.equal_pixels, r.drift.max_abs, share_words(r.drift, 0), share_words(r.drift, 1),
         share_words(r.drift, FAR), "equal" if r.again.is_equal else f"up to {r.again.max_abs}")
        for r in rows
    ]  # fmt: skip
    return Table(columns, body, "Pictures after a hit, against the same drawn cold")


def drift_by_match(rows: Sequence[PixelRow]) -> Any:
    """Draw how many pixels move against how many slots were cached, as a plotly figure."""
    return as_figure(drift_by_match_panel(rows))


def drift_by_match_panel(rows: Sequence[PixelRow]) -> Panel:
    """Return the figure of ``drift_by_match`` as a panel: a symbol each number format, the largest difference above it."""
    require_rows(rows, PixelRow)
    formats = list(dict.fromkeys(row.dtype for row in rows))
    marks = []
    for index, dtype in enumerate(formats):
        shown = sorted((row for row in rows if row.dtype == dtype), key=lambda row: row.cached_tokens)
        colour = _LOOKS[index % len(_LOOKS)][0]
        marks.append(
            Points(
                tuple(float(row.cached_tokens) for row in shown),
                tuple(share_place(row.drift.share_over(0), row.drift.num_pixels) for row in shown),
                colour,
                _SYMBOLS[index % len(_SYMBOLS)],
                texts=tuple(str(row.drift.max_abs) for row in shown),
                notes=tuple(f"{row.name}: {row.drift.verdict}" for row in shown),
            )
        )
    return Panel(
        title=_match_title(rows),
        subtitle="Share of pixels that differ from the cold picture; the number on a mark is the largest difference of 255",
        x=linear_axis("cached slots of main", [row.cached_tokens for row in rows]),
        y=share_axis([row.drift for row in rows]),
        marks=tuple(marks),
        legend=tuple(Style(dtype, _LOOKS[i % len(_LOOKS)][0]) for i, dtype in enumerate(formats)),
        table=pixel_table(rows),
    )


def _match_title(rows: Sequence[PixelRow]) -> str:
    worst = max(rows, key=lambda row: (row.drift.max_abs, row.drift.share_over(0)))
    if worst.drift.is_equal:
        return f"{count(len(rows), 'picture')} after a hit: each equals its cold one in every pixel"
    return f"A hit moves pixels by at most {worst.drift.max_abs} of {FULL} ({worst.cached_tokens} slots cached, {worst.dtype})"


# -- a sweep of seeds --------------------------------------------------------------------------------------------------


def guided_sweep(rows: Sequence[SweepRow]) -> Any:
    """Draw what guided prefill costs over a sweep of seeds, with its reuse and without, as a plotly figure."""
    return as_figure(guided_sweep_panel(rows))


def guided_sweep_panel(rows: Sequence[SweepRow]) -> Panel:
    """Return the figure of ``guided_sweep`` as a panel: computed and served slots of each seed.

    Raises:
        InputError: a sweep that has only one side.
    """
    require_rows(rows, SweepRow)
    sides = {reuse: [row for row in rows if row.reuse == reuse] for reuse in (False, True)}
    if not all(sides.values()):
        raise InputError("a sweep with one side only; give rows with reuse and without")
    ordered = [*sides[False], *sides[True]]
    bars = tuple(rect for i, row in enumerate(ordered) for rect in _slots_bars(i, row))
    return Panel(
        title=_sweep_title(sides),
        subtitle="Prompt slots of all labels by seed; what is not served is computed before the first denoise step",
        x=linear_axis("prompt slots, all labels", [row.prompt_slots for row in rows], room=0.02),
        y=named_axis("", [f"seed {row.seed}, {'with' if row.reuse else 'without'} reuse" for row in ordered], flipped=True),
        marks=(Rects(bars),),
        legend=(SERVED, COMPUTED),
        plot_height_px=len(ordered) * 24 + 20,
        table=sweep_table(rows),
    )


def _slots_bars(index: int, row: SweepRow) -> list[Rect]:
    low, high, served = index - _HALF, index + _HALF, row.prompt_slots - row.computed_slots
    bars = [Rect(0, served, low, high, SERVED, str(served))] if served else []
    if row.computed_slots:
        bars.append(Rect(served, row.prompt_slots, low, high, COMPUTED, str(row.computed_slots)))
    return bars


def sweep_table(rows: Sequence[SweepRow]) -> Table:
    """Return both sides of a sweep, one row a seed, times included."""
    require_rows(rows, SweepRow)
    columns = ("seed", "reuse", "prompt slots", "computed slots", "prefill, ms", "whole, ms", "prefill's share")
    body = [
        (r.seed, "yes" if r.reuse else "no", r.prompt_slots, r.computed_slots, round(r.prefill_ms, 1), round(r.total_ms, 1),
         f"{r.prefill_share:.1%}")
        for r in rows
    ]  # fmt: skip
    return Table(columns, body, "A sweep of seeds, with and without reuse of guided prefill")


def _sweep_title(sides: dict[bool, list[SweepRow]]) -> str:
    without, with_reuse = (sum(row.computed_slots for row in sides[reuse]) for reuse in (False, True))
    return f"Reuse in guided prefill: {without} slots computed without it, {with_reuse} with it"
