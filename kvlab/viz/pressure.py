"""Pools under pressure: who holds the pages over time, who evicts whose, and what settings, policies and pool sizes change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvlab.events import PageEvicted, PageIndexed, RequestPreempted, RequestSubmitted, Stalled
from kvlab.lab.results import PressureRow, Table
from kvlab.viz.display import as_figure
from kvlab.viz.given import require_events, require_rows
from kvlab.viz.marks import Line, Panel, Points, Rect, Rects, count, cut, linear_axis, named_axis
from kvlab.viz.moments import Events, step_moments
from kvlab.viz.pages import page_timeline_panel
from kvlab.viz.theme import CACHED, DARK_OUTLINE, EVICTED, INK, LAST, LIVE, SERVED, Style

MAX_BARS = 40
MAX_REQUESTS = 12
COMPLETED = Style("completed", CACHED)
LOST = Style("ended by a stall", EVICTED, DARK_OUTLINE)
MADE_ROOM = Style("pages that had to go", EVICTED, DARK_OUTLINE)
BY_HAND = "nobody, by hand"  # in place of the request that a page was evicted for
_HALF = 0.34  # half the thickness of a bar


def occupancy(events: Events) -> Any:
    """Draw who holds the pages after each step, with evictions, preemptions, a stall, and host pages where there are some."""
    return as_figure(occupancy_panel(events))


def evictions(events: Events) -> Any:
    """Draw how many cached pages had to go for each request, as a plotly figure."""
    return as_figure(evictions_panel(events))


def cures(rows: Sequence[PressureRow]) -> Any:
    """Draw how many requests completed under each setting, as a plotly figure."""
    return as_figure(cures_panel(rows))


def policies(rows: Sequence[PressureRow]) -> Any:
    """Draw what each eviction policy served from the cache on one workload, as a plotly figure."""
    return as_figure(policies_panel(rows))


def stall_curve(rows: Sequence[PressureRow]) -> Any:
    """Draw how many requests complete on pools of growing size, with the cache on and off, as a plotly figure."""
    return as_figure(stall_curve_panel(rows))


# -- over steps --------------------------------------------------------------------------------------------------------


def occupancy_panel(events: Events) -> Panel:
    """Return the figure of ``occupancy`` as a panel.

    Raises:
        InputError: the log has no page pool.
    """
    panel = page_timeline_panel(events)
    marks, parts = list(panel.marks), [panel.subtitle]
    host = [(now.step, len(now.pool.host) + len(now.pool.host_cached)) for now in step_moments(events)]
    most = max(pages for _, pages in host)
    if most:
        marks.append(_stairs(host))
        parts.append(f"dashed: pages on the host, at most {most}")
    preempted = Counter(e.step for e in events if isinstance(e.event, RequestPreempted))
    if preempted:
        marks.append(_preemption_marks(preempted, panel.y.high))
        parts.append(f"{count(preempted.total(), 'preemption')} (diamonds)")
    y = panel.y if most <= panel.y.high else linear_axis("pages", [most])
    panel = replace(panel, y=y, marks=tuple(marks), subtitle="; ".join(parts))
    stalls = [e for e in events if isinstance(e.event, Stalled)]
    return _with_stall(panel, stalls[-1].step, stalls[-1].event) if stalls else panel


def _stairs(samples: Sequence[tuple[int, int]]) -> Line:
    """A line that holds each value until the next step."""
    xs = [x for step, _ in samples for x in (step, step + 1)]
    return Line(tuple(xs), tuple(pages for _, pages in samples for _ in range(2)), INK, "dash", "host", 2.0)


def _with_stall(panel: Panel, step: int, stall: Any) -> Panel:
    line = Line((step + 0.5,) * 2, (0, panel.y.high), INK, "dot", "stall", 2.5)
    title = f"Stalled in step {step}: {stall.live_pages} of {count(stall.usable_pages, 'page')} in use"
    waits = f"all {count(len(stall.held), 'running request')} wait for pages and nothing can free one"
    return replace(panel, title=title, marks=(*panel.marks, line), subtitle=f"{panel.subtitle}; {waits}")


def _preemption_marks(preempted: Counter[int], top: float) -> Points:
    steps = sorted(preempted)[:MAX_BARS]
    notes = tuple(f"step {step}: {count(preempted[step], 'request')} sent back" for step in steps)
    return Points(tuple(s + 0.5 for s in steps), (top * 0.93,) * len(steps), LAST, "diamond", "preemptions", notes=notes)


# -- who evicts whose --------------------------------------------------------------------------------------------------


def evictions_panel(events: Events) -> Panel:
    """Return the figure of ``evictions`` as a panel; its table also says who had filed the pages."""
    table = eviction_table(events)
    by_request: Counter[str] = Counter()
    for cause, _, pages in table.rows:
        by_request[cause] += pages
    shown = by_request.most_common(MAX_REQUESTS)
    bars = tuple(
        Rect(0, pages, i - _HALF, i + _HALF, MADE_ROOM, str(pages), f"{count(pages, 'page')} evicted for {name}")
        for i, (name, pages) in enumerate(shown)
    )
    return Panel(
        title=_evictions_title(by_request),
        subtitle=f"{hidden} more in the table" if (hidden := len(by_request) - len(shown)) else "",
        x=linear_axis("pages evicted", [pages for _, pages in shown]),
        y=named_axis("for request", [cut(name, 30) for name, _ in shown] or ["nobody"], flipped=True),
        marks=(Rects(bars),),
        legend=(MADE_ROOM,),
        plot_height_px=max(len(shown), 2) * 24 + 20,
        table=table,
    )


def _evictions_title(by_request: Counter[str]) -> str:
    if not by_request:
        return "No page was evicted"
    by_hand = by_request[BY_HAND]
    needed = Counter({name: pages for name, pages in by_request.items() if name != BY_HAND})
    if not needed:
        return f"{count(by_hand, 'cached page')} {_were(by_hand)} evicted by hand, none for a request"
    (name, pages), *_ = needed.most_common(1)
    gone = count(needed.total(), "cached page")
    beside = f"; {by_hand} more {_were(by_hand)} evicted by hand" if by_hand else ""
    return f"{gone} had to go for {count(len(needed), 'request')}, {pages} of them for {cut(name, 40)}{beside}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def eviction_table(events: Events) -> Table:
    """Return how many pages were evicted for each request, by the request that had filed them."""
    require_events(events)
    pages: Counter[tuple[str, str]] = Counter()
    names: dict[Any, str] = {}
    filed_by: dict[int, Any] = {}
    for entry in events:
        event = entry.event
        if isinstance(event, RequestSubmitted):
            names[event.rid] = event.name or f"request {event.rid}"
        elif isinstance(event, PageIndexed):
            filed_by[event.page] = event.rid
        elif isinstance(event, PageEvicted):
            asked_by, owner = event.for_rid, filed_by.get(event.page)
            cause = BY_HAND if asked_by is None else names.get(asked_by, f"request {asked_by}")
            pages[cause, names.get(owner, f"request {owner}")] += 1
    rows = [(cause, owner, number) for (cause, owner), number in pages.items()]
    return Table(("evicted for", "filed by", "pages"), rows, "Evicted pages")


# -- settings, policies, pool sizes ------------------------------------------------------------------------------------


def cures_panel(rows: Sequence[PressureRow]) -> Panel:
    """Return the figure of ``cures`` as a panel."""
    require_rows(rows, PressureRow)
    shown = rows[:MAX_BARS]
    bars = tuple(bar for i, row in enumerate(shown) for bar in _cure_bars(i, row))
    return Panel(
        title=_cures_title(rows),
        subtitle=f"{count(rows[0].requests, 'request')} on {count(rows[0].pool_pages, 'page')}",
        x=linear_axis("requests", [row.requests for row in shown]),
        y=named_axis("", [cut(row.name, 34) for row in shown], flipped=True),
        marks=(Rects(bars),),
        legend=(COMPLETED, LOST),
        plot_height_px=len(shown) * 26 + 20,
        table=pressure_table(rows),
    )


def _is_complete(row: PressureRow) -> bool:
    return not row.is_stalled and row.completed >= row.requests


def _cures_title(rows: Sequence[PressureRow]) -> str:
    complete, stalled = sum(map(_is_complete, rows)), sum(row.is_stalled for row in rows)
    lossy = len(rows) - complete - stalled
    end = f"; {lossy} lost some without a stall" if lossy else ""
    verb = "stalls" if stalled == 1 else "stall"
    return f"{count(complete, 'setting')} of {len(rows)} let every request complete; {stalled} {verb}{end}"


def _cure_bars(index: int, row: PressureRow) -> list[Rect]:
    low, high, bars = index - _HALF, index + _HALF, []
    if row.completed:
        is_lossy = not row.is_stalled and not _is_complete(row)
        text = f"{row.completed}{f' of {row.requests}' if is_lossy else ''} in {row.steps} steps"
        bars.append(Rect(0, row.completed, low, high, COMPLETED, text, f"{row.name}: {text}"))
    if row.is_stalled:
        text = f"stalled in step {row.stalled_step}"
        bars.append(Rect(row.completed, row.requests, low, high, LOST, text, f"{row.name}: {text}"))
    return bars


def policies_panel(rows: Sequence[PressureRow]) -> Panel:
    """Return the figure of ``policies`` as a panel, the policy that served most first."""
    require_rows(rows, PressureRow)
    ranked = sorted(rows, key=lambda row: (-row.cached_tokens, row.name))[:MAX_BARS]
    bars = tuple(
        Rect(0, row.cached_tokens, i - _HALF, i + _HALF, SERVED, _policy_text(row), f"{row.name}: {_policy_text(row)}")
        for i, row in enumerate(ranked)
    )
    best, worst = ranked[0], ranked[-1]
    return Panel(
        title=_policies_title(best, worst),
        subtitle=f"{count(best.requests, 'request')} of together {best.prompt_tokens} prompt tokens on "
        f"{count(best.pool_pages, 'page')}; the same requests for each policy",
        x=linear_axis("prompt tokens served from the cache", [row.cached_tokens for row in ranked]),
        y=named_axis("", [row.name for row in ranked], flipped=True),
        marks=(Rects(bars),),
        legend=(SERVED,),
        plot_height_px=len(ranked) * 26 + 20,
        table=pressure_table(ranked),
    )


def _policy_text(row: PressureRow) -> str:
    return f"{row.cached_tokens} tokens, {row.evicted_pages} evicted"


def _policies_title(best: PressureRow, worst: PressureRow) -> str:
    if best.cached_tokens == worst.cached_tokens:
        return f"All policies serve the same {count(best.cached_tokens, 'token')} from the cache"
    shares = [row.cached_tokens / max(row.prompt_tokens, 1) for row in (best, worst)]
    return f"{best.name} serves {shares[0]:.0%} of all prompt tokens from the cache, {worst.name} {shares[1]:.0%}"


def stall_curve_panel(rows: Sequence[PressureRow]) -> Panel:
    """Return the figure of ``stall_curve`` as a panel."""
    require_rows(rows, PressureRow)
    sides = [(on, sorted((r for r in rows if r.prefix_cache == on), key=lambda r: r.pool_pages)) for on in (True, False)]
    marks = [mark for on, side in sides if side for mark in _curve(on, side)]
    parts = [f"cache {_word(on)}: {sum(r.is_stalled for r in side)} of {count(len(side), 'pool')} stall" for on, side in sides]
    survived = "every request completed" if all(r.is_stalled or _is_complete(r) for r in rows) else "no stall"
    return Panel(
        title=_curve_title(dict(sides)),
        subtitle="; ".join([*parts, f"squares: {survived}; triangles: a stall"]),
        x=linear_axis("usable pages in the pool", [r.pool_pages for r in rows], low=min(r.pool_pages for r in rows)),
        y=linear_axis("requests completed before a stall", [rows[0].requests], room=0.12),
        marks=tuple(marks),
        legend=(Style("cache on (solid)", CACHED), Style("cache off (dashed)", LIVE)),
        plot_height_px=260,
        table=pressure_table(rows),
    )


def _word(is_on: bool) -> str:
    return "on" if is_on else "off"


def _curve(is_on: bool, side: Sequence[PressureRow]) -> list[Line | Points]:
    colour, dash = (CACHED, "solid") if is_on else (LIVE, "dash")
    xs, ys = tuple(r.pool_pages for r in side), tuple(r.completed for r in side)
    marks: list[Line | Points] = [Line(xs, ys, colour, dash)]
    for stalled, symbol, look in ((True, "triangle", EVICTED), (False, "square", colour)):
        some = [r for r in side if r.is_stalled == stalled]
        notes = tuple(f"{r.pool_pages} pages, cache {_word(is_on)}: {r.completed} completed" for r in some)
        places = tuple(r.pool_pages for r in some), tuple(r.completed for r in some)
        marks += [Points(*places, look, symbol, notes=notes)] if some else []
    return marks


def _curve_title(sides: dict[bool, Sequence[PressureRow]]) -> str:
    largest = {on: max((r.pool_pages for r in side if r.is_stalled), default=0) for on, side in sides.items()}
    stalling = [on for on, pages in largest.items() if pages]
    if not stalling:
        return "No pool of these stalls"
    if len(stalling) == 1:
        (on,) = stalling
        beside = f"; with it {_word(not on)} none of these does" if sides[not on] else ""
        return f"With the cache {_word(on)}, pools of up to {largest[on]} pages stall{beside}"
    return f"Pools stall with the cache on (up to {largest[True]} pages) and with it off (up to {largest[False]})"


def pressure_table(rows: Sequence[PressureRow]) -> Table:
    """Return what became of the workload, one row a setting."""
    require_rows(rows, PressureRow, least=0)
    columns = ("setting", "cache", "pages", "completed", "steps", "stalled in step", "cached tokens", "evicted", "preemptions")
    return Table(columns, [_pressure_values(row) for row in rows], "Under pressure")


def _pressure_values(row: PressureRow) -> tuple[Any, ...]:
    completed = f"{row.completed} of {row.requests}"
    ran = (completed, row.steps, row.stalled_step, row.cached_tokens, row.evicted_pages, row.preemptions)
    return (row.name, _word(row.prefix_cache), row.pool_pages, *ran)
