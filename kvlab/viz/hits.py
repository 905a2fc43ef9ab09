"""What the cache served: the ladder by prompt length, time to the first token, page sizes, and every miss with its cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvlab.lab.results import LadderRow, MissRow, PageSizeRow, RequestRow, Table, TtftRow
from kvlab.viz.display import as_figure
from kvlab.viz.given import require_rows
from kvlab.viz.marks import Line, Panel, Points, Rect, Rects, count, cut, linear_axis, named_axis, page_axis
from kvlab.viz.theme import COMPUTED, LAST_PAGE, LIVE, SERVED, SOFT_INK, cause_style

MAX_BARS = 40
MAX_RANGES = 24  # a request
_HALF = 0.34  # half the thickness of a bar


def hit_ladder(rows: Sequence[LadderRow]) -> Any:
    """Draw what each sending of prompts of growing length found cached, as a plotly figure."""
    return as_figure(hit_ladder_panel(rows))


def ttft_vs_cached(rows: Sequence[TtftRow]) -> Any:
    """Draw time to the first token against cached tokens, with the ideal line, as a plotly figure."""
    return as_figure(ttft_panel(rows))


def page_size_study(rows: Sequence[PageSizeRow]) -> Any:
    """Draw how much of a shared prefix each page size can reuse, as a plotly figure."""
    return as_figure(page_size_panel(rows))


def misses(rows: Sequence[RequestRow], title: str = "") -> Any:
    """Draw the prompt of each request: what was served, and why the rest was computed, as a plotly figure."""
    return as_figure(misses_panel(rows, title))


# -- the ladder --------------------------------------------------------------------------------------------------------


def hit_ladder_panel(rows: Sequence[LadderRow]) -> Panel:
    """Return the figure of ``hit_ladder`` as a panel."""
    require_rows(rows, LadderRow)
    shown = rows[:MAX_BARS]
    names = [f"{row.prompt_tokens} tokens, {_nth(row.send)} sending" for row in shown]
    bars = tuple(rect for i, row in enumerate(shown) for rect in _ladder_bars(i, row))
    sizes = sorted({row.page_size for row in rows})
    parts = [f"Page size {', '.join(map(str, sizes))} tokens: a prefix shorter than a page cannot be reused"]
    parts += [f"{len(rows) - len(shown)} rows not drawn"] if len(rows) > len(shown) else []
    return Panel(
        title=_ladder_title(rows),
        subtitle="; ".join(parts),
        x=page_axis("tokens of the prompt", [row.prompt_tokens for row in shown], min(sizes)),
        y=named_axis("", names, flipped=True),
        marks=(Rects(bars),),
        legend=(SERVED, LAST_PAGE, COMPUTED),
        plot_height_px=len(shown) * 24 + 20,
        table=ladder_table(rows),
    )


def _ladder_bars(index: int, row: LadderRow) -> list[Rect]:
    """Served pages, then the computed rest; on a repeated prompt that rest is the recomputed last page."""
    low, high = index - _HALF, index + _HALF
    pages = count(row.pages_matched, "page")
    bars = []
    if row.cached_tokens:
        note = f"{row.cached_tokens} tokens from {pages}"
        bars.append(Rect(0, row.cached_tokens, low, high, SERVED, f"{row.cached_tokens} ({pages})", note))
    if row.recomputed_tokens:
        style = LAST_PAGE if _is_last_page(row) else COMPUTED
        note = f"{count(row.recomputed_tokens, 'token')} computed"
        bars.append(Rect(row.cached_tokens, row.prompt_tokens, low, high, style, str(row.recomputed_tokens), note))
    return bars


def _is_last_page(row: LadderRow) -> bool:
    return row.send > 1 and row.recomputed_tokens <= row.page_size


def _ladder_title(rows: Sequence[LadderRow]) -> str:
    again = [row for row in rows if row.send > 1]
    if not again:
        return "Sent once, no prompt finds anything cached"
    other = sum(row.cached_tokens != row.expected_tokens for row in again)
    if other:
        return f"{other} of {len(again)} repeated prompts were not served exactly their whole pages before the last token"
    return "A repeated prompt is served all whole pages before its last token; the last page is recomputed"


def _nth(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def ladder_table(rows: Sequence[LadderRow]) -> Table:
    """Return tokens, matched pages and the recomputed last page of each sending."""
    require_rows(rows, LadderRow, least=0)
    columns = (
        "prompt tokens",
        "page size",
        "sending",
        "cached tokens",
        "pages matched",
        "computed tokens",
        "of these in the last page",
    )
    body = [
        (r.prompt_tokens, r.page_size, r.send, r.cached_tokens, r.pages_matched, r.recomputed_tokens,
         r.recomputed_tokens if _is_last_page(r) else (r.prompt_tokens - 1) % r.page_size + 1)
        for r in rows
    ]  # fmt: skip
    return Table(columns, body, "Hit ladder")


# -- time to the first token -------------------------------------------------------------------------------------------


def ttft_panel(rows: Sequence[TtftRow]) -> Panel:
    """Return the figure of ``ttft_vs_cached`` as a panel."""
    require_rows(rows, TtftRow)
    ordered = sorted(rows, key=lambda row: row.cached_tokens)
    ideal = sorted({(row.cached_tokens, row.ideal_ms) for row in ordered})
    notes = tuple(
        f"{r.cached_tokens} of {r.prompt_tokens} tokens cached: {r.ttft_ms:.0f} ms, ideal {r.ideal_ms:.0f} ms" for r in ordered
    )
    measured = Points(
        tuple(row.cached_tokens for row in ordered), tuple(row.ttft_ms for row in ordered), LIVE, "circle", "measured",
        tuple(f"{row.ttft_ms:.0f}" for row in ordered) if len(ordered) <= 12 else (), notes,
    )  # fmt: skip
    line = Line(tuple(x for x, _ in ideal), tuple(y for _, y in ideal), SOFT_INK, "dash")
    values = [v for row in ordered for v in (row.ttft_ms, row.ideal_ms)]
    return Panel(
        title=_ttft_title(ordered),
        subtitle="Dots: measured, in ms; dashed line: ideal = cold time x tail tokens / all tokens + one decode step",
        x=linear_axis("cached tokens", [row.cached_tokens for row in ordered], low=-0.04 * ordered[-1].cached_tokens),
        y=linear_axis("time to first token, ms", values, room=0.12),
        marks=(line, measured),
        table=ttft_table(rows),
    )


def _ttft_title(ordered: Sequence[TtftRow]) -> str:
    least, most = ordered[0], ordered[-1]
    if most.cached_tokens == least.cached_tokens:
        return f"With {most.cached_tokens} cached tokens the first token takes {most.ttft_ms:.0f} ms"
    ratio = least.ttft_ms / most.ttft_ms if most.ttft_ms > 0 else float("inf")
    verb = f"{ratio:.1f} times sooner" if ratio >= 1.05 else f"in {1 / ratio:.1f} times the time" if ratio else "later"
    return (
        f"{most.cached_tokens} cached tokens bring the first token {verb}: "
        f"{most.ttft_ms:.0f} ms instead of {least.ttft_ms:.0f} ms with {least.cached_tokens} cached"
    )


def ttft_table(rows: Sequence[TtftRow]) -> Table:
    """Return measured and ideal times side by side."""
    require_rows(rows, TtftRow, least=0)
    columns = ("prompt tokens", "cached tokens", "tail tokens", "first token, ms", "ideal, ms", "ratio")
    body = [
        (
            r.prompt_tokens,
            r.cached_tokens,
            r.tail_tokens,
            r.ttft_ms,
            r.ideal_ms,
            r.ttft_ms / r.ideal_ms if r.ideal_ms > 0 else None,
        )
        for r in rows
    ]
    return Table(columns, body, "Time to first token")


# -- page sizes --------------------------------------------------------------------------------------------------------


def page_size_panel(rows: Sequence[PageSizeRow]) -> Panel:
    """Return the figure of ``page_size_study`` as a panel: one group of bars for each shared length."""
    require_rows(rows, PageSizeRow)
    shown = rows[:MAX_BARS]
    names = [f"page {row.page_size}, {row.shared_tokens} shared" for row in shown]
    bars = tuple(rect for i, row in enumerate(shown) for rect in _page_size_bars(i, row))
    return Panel(
        title=_page_size_title(rows),
        subtitle="The page size is the least reusable length: a shared prefix is reused in whole pages only",
        x=linear_axis("tokens of the shared prefix", [max(row.shared_tokens, row.cached_tokens) for row in shown], room=0.02),
        y=named_axis("", names, flipped=True),
        marks=(Rects(bars),),
        legend=(SERVED, COMPUTED),
        plot_height_px=len(shown) * 26 + 20,
        table=page_size_table(rows),
    )


def _page_size_bars(index: int, row: PageSizeRow) -> list[Rect]:
    low, high = index - _HALF, index + _HALF
    lost = row.shared_tokens - row.cached_tokens
    bars = []
    if row.cached_tokens > 0:
        note = f"{row.cached_tokens} of {row.shared_tokens} shared tokens served"
        bars.append(Rect(0, row.cached_tokens, low, high, SERVED, str(row.cached_tokens), note))
    if lost > 0:
        note = f"{lost} shared tokens computed again: they fill no whole page of {row.page_size}"
        bars.append(Rect(row.cached_tokens, row.shared_tokens, low, high, COMPUTED, str(lost), note))
    return bars


def _page_size_title(rows: Sequence[PageSizeRow]) -> str:
    shared: dict[int, int] = {}
    cached: dict[int, int] = {}
    for row in rows:
        shared[row.page_size] = shared.get(row.page_size, 0) + row.shared_tokens
        cached[row.page_size] = cached.get(row.page_size, 0) + row.cached_tokens
    order = sorted(shared, key=lambda size: (cached[size] / max(shared[size], 1), -size))
    worst, best = order[0], order[-1]
    head = f"{best}-token pages reuse {cached[best]} of {shared[best]} shared tokens"
    if cached[best] * shared[worst] == cached[worst] * shared[best]:
        return head if best == worst else f"{head}, and so does every other page size"
    return f"{head}, {worst}-token pages only {cached[worst]} of {shared[worst]}"


def page_size_table(rows: Sequence[PageSizeRow]) -> Table:
    """Return what each page size reused and lost."""
    require_rows(rows, PageSizeRow, least=0)
    columns = ("page size", "shared tokens", "cached tokens", "shared, computed again", "first token, ms")
    body = [(r.page_size, r.shared_tokens, r.cached_tokens, r.shared_tokens - r.cached_tokens, r.ttft_ms) for r in rows]
    return Table(columns, body, "Page sizes")


# -- misses ------------------------------------------------------------------------------------------------------------


def misses_panel(rows: Sequence[RequestRow], title: str = "") -> Panel:
    """Return the figure of ``misses`` as a panel; ``title`` is the finding, where it is not the hit and its commonest miss."""
    require_rows(rows, RequestRow)
    shown = rows[:MAX_BARS]
    bars = tuple(rect for i, row in enumerate(shown) for rect in _prompt_bars(i, row))
    looks = sorted(dict.fromkeys(rect.style for rect in bars), key=lambda style: style != SERVED)
    parts = ["Bars are prompts from their first token; colours say where each token came from"]
    hidden = sum(max(0, len(_merged(_first_label(row))) - MAX_RANGES) for row in shown)
    parts += [f"{len(rows) - len(shown)} requests not drawn"] if len(rows) > len(shown) else []
    parts += [f"{count(hidden, 'range')} not drawn"] if hidden else []
    return Panel(
        title=title or _misses_title(rows),
        subtitle="; ".join(parts),
        x=linear_axis("tokens of the prompt", [row.prompt_tokens for row in shown], room=0.02),
        y=named_axis("", [cut(row.name, 34) for row in shown], flipped=True),
        marks=(Rects(bars),),
        legend=tuple(looks),
        plot_height_px=len(shown) * 30 + 20,
        table=miss_table(rows),
    )


def _prompt_bars(index: int, row: RequestRow) -> list[Rect]:
    low, high = index - _HALF, index + _HALF
    bars = []
    if row.cached_tokens:
        note = f"{row.name}: {row.cached_tokens} tokens from {count(row.pages_matched, 'page')}"
        bars.append(Rect(0, row.cached_tokens, low, high, SERVED, f"{row.cached_tokens} served", note))
    for miss in _merged(_first_label(row))[:MAX_RANGES]:
        style = cause_style(miss.cause)
        note = f"{row.name}: tokens {miss.start} to {miss.stop} computed: {miss.cause}. {miss.evidence}"
        bars.append(Rect(miss.start, miss.stop, low, high, style, f"{miss.stop - miss.start} {style.name}", note))
    return bars


def _merged(ranges: Sequence[MissRow]) -> list[MissRow]:
    """Neighbouring ranges of one cause as one: their evidence stands in the table."""
    merged: list[MissRow] = []
    for miss in sorted(ranges, key=lambda m: m.start):
        if merged and (merged[-1].stop, merged[-1].cause) == (miss.start, miss.cause):
            merged[-1] = replace(merged[-1], stop=miss.stop)
        else:
            merged.append(miss)
    return merged


def _first_label(row: RequestRow) -> list[MissRow]:
    """Misses of the prompt's own stream: other labels have their own token numbers and stand in the table."""
    labels = [m.label for m in row.misses]
    own = "main" if "main" in labels or not labels else labels[0]
    return [m for m in row.misses if m.label == own]


def _misses_title(rows: Sequence[RequestRow]) -> str:
    prompt, cached = sum(r.prompt_tokens for r in rows), sum(r.cached_tokens for r in rows)
    lost: dict[str, int] = {}
    for miss in (m for row in rows for m in _first_label(row)):
        lost[miss.cause] = lost.get(miss.cause, 0) + miss.stop - miss.start
    head = f"{cached} of {count(prompt, 'prompt token')} came from the cache"
    if not lost:
        return head
    cause = max(lost, key=lambda c: lost[c])
    return f"{head}; commonest reason for the rest: {cause_style(cause).name} ({count(lost[cause], 'token')})"


def miss_table(rows: Sequence[RequestRow]) -> Table:
    """Return one row for each range of computed prompt tokens: who, where, why, and the evidence."""
    require_rows(rows, RequestRow, least=0)
    body = [(row.name, m.label, m.start, m.stop, m.stop - m.start, m.cause, m.evidence) for row in rows for m in row.misses]
    return Table(("request", "label", "start", "stop", "tokens", "cause", "evidence"), body, "Why prompt tokens were computed")


def request_table(rows: Sequence[RequestRow]) -> Table:
    """Return one row for each request of a run."""
    require_rows(rows, RequestRow, least=0)
    columns = (
        "request",
        "prompt tokens",
        "cached tokens",
        "pages matched",
        _first_output(rows),
        "tokens/s",
        "generated",
        "ended by",
    )
    body = [
        (
            r.name,
            r.prompt_tokens,
            r.cached_tokens,
            r.pages_matched,
            r.ttft_ms,
            r.tokens_per_s,
            r.generated_tokens,
            r.finish_reason,
        )
        for r in rows
    ]
    return Table(columns, body, "Requests")


def _first_output(rows: Sequence[RequestRow]) -> str:
    """Name what ends the wait: a picture without a written plan has no token, and its first denoising step is timed."""
    kinds = {"token" if row.generated_tokens else "step" for row in rows if row.ttft_ms is not None} or {"token"}
    return f"first {' or '.join(sorted(kinds, reverse=True))}, ms"
