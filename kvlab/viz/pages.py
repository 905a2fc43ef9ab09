"""Every page and its owners: a map of the pool at one moment, and the pool over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvlab.errors import InputError
from kvlab.lab.results import Table
from kvlab.viz.display import as_figure
from kvlab.viz.marks import Axis, Panel, Points, Rect, Rects, count, linear_axis
from kvlab.viz.moments import Events, Moment, moment, step_moments
from kvlab.viz.theme import EVICTED, SINK, STATE_ORDER, STATES, Style

MAX_CELLS = 1024  # one page a cell up to here; bigger pools draw several pages a cell
MAX_BARS = 160
EVICTED_PX = 2.5


def page_map(events: Events, *, step: int | None = None, until_seq: int | None = None) -> Any:
    """Draw every page with its state and owners, after ``step``, after event ``until_seq``, or at the end.

    Returns:
        A ``plotly.graph_objects.Figure``; ``page_map_panel`` needs no plotly.
    """
    return as_figure(page_map_panel(events, step=step, until_seq=until_seq))


def page_timeline(events: Events) -> Any:
    """Draw how many pages are live, shared, cached and free after each step, as a plotly figure."""
    return as_figure(page_timeline_panel(events))


def page_map_panel(events: Events, *, step: int | None = None, until_seq: int | None = None) -> Panel:
    """Return the map of ``page_map`` as a panel."""
    return map_of(moment(events, step=step, until_seq=until_seq))


def page_table(events: Events, *, step: int | None = None, until_seq: int | None = None) -> Table:
    """Return the owners of every page in use or cached, runs of pages with equal owners in one row."""
    return owner_table(moment(events, step=step, until_seq=until_seq))


def map_of(now: Moment) -> Panel:
    """Return the map of one moment."""
    num_pages = max(now.pool.num_pages, 1)
    per_cell = -(-num_pages // MAX_CELLS)
    num_cells = -(-num_pages // per_cell)
    columns = 16 if num_cells <= 256 else 32
    rows = -(-num_cells // columns)
    cells = tuple(_cell(now, i, per_cell, columns) for i in range(num_cells))
    row_ticks = tuple((r + 0.5, str(r * columns * per_cell)) for r in range(rows) if rows <= 16 or r % 2 == 0)
    column_ticks = tuple((c + 0.5, f"+{c * per_cell}") for c in range(0, columns, 1 if columns <= 16 else 4))
    return Panel(
        title=_map_title(now),
        subtitle=_map_subtitle(now, per_cell),
        x=Axis("page number, added to the row's", 0, columns, column_ticks, grid=False),
        y=Axis("first page", 0, rows, row_ticks, grid=False, flipped=True),
        marks=(Rects(cells),),
        legend=tuple(replace(STATES[s], hatch="") for s in STATE_ORDER),
        plot_height_px=max(76, min(rows * (30 if columns <= 16 else 20), 640)),
        table=owner_table(now),
    )


def _cell(now: Moment, index: int, per_cell: int, columns: int) -> Rect:
    row, column = divmod(index, columns)
    pages = range(index * per_cell, min((index + 1) * per_cell, max(now.pool.num_pages, 1)))
    style, text, note = _look(now, pages[0]) if per_cell == 1 else _group_look(now, pages)
    return Rect(column + 0.05, column + 0.95, row + 0.07, row + 0.93, style, text, note)


def _look(now: Moment, page: int) -> tuple[Style, str, str]:
    if page == 0:
        return SINK, "sink", "page 0: the sink, where padding writes go; it belongs to no request"
    state = _state(now, page)
    style = replace(STATES[state], hatch="")
    note = f"page {page}: {state}{_owner_note(now, page)}" if state != "free" else f"page {page}: free"
    if page in now.evicted:
        style, note = replace(style, outline=EVICTED, outline_px=EVICTED_PX), f"{note}; evicted in this step"
    return style, _cell_text(now, page), note


def _group_look(now: Moment, pages: Sequence[int]) -> tuple[Style, str, str]:
    seen = {_state(now, p) for p in pages if p}
    first = next((s for s in ("shared", "live", "cached") if s in seen), "free")
    number = sum(_state(now, p) == first for p in pages if p)
    note = f"pages {pages[0]}-{pages[-1]}: " + ", ".join(s for s in STATE_ORDER if s in seen)
    return replace(STATES[first], hatch=""), "" if first == "free" else f"{first[0]}{number}", note


def _state(now: Moment, page: int) -> str:
    state = now.pool.pages.get(page)
    return state.state if state else "free"


def _cell_text(now: Moment, page: int) -> str:
    """Letters of the requests that list the page, then c if the index keeps it; many owners as their number."""
    letters = [now.letters[rid] for rid in now.owners(page)]
    state = now.pool.pages.get(page)
    kept = "c" if state and state.key is not None else ""
    return (f"{len(letters)}×" if len(letters) > 3 else "".join(letters)) + kept


def _owner_note(now: Moment, page: int) -> str:
    parts = [now.called(rid) for rid in now.owners(page)]
    state = now.pool.pages.get(page)
    if state and state.key is not None:
        parts.append(f"c: the index, as page {state.position} of its chain, key {state.key[:12]}")
    if len(parts) > 8:
        parts = [*parts[:8], f"and {len(parts) - 8} more"]
    return ", owned by " + "; ".join(parts) if parts else ""


def _map_title(now: Moment) -> str:
    usable = now.pool.num_pages - 1
    if usable < 1:
        return "The log has no page pool yet"
    counts = now.pool.counts()
    owners = [now.owners(p) for p in range(1, now.pool.num_pages)]
    sharers = [o for o in owners if len(o) > 1]
    if sharers:
        requests = len({rid for o in sharers for rid in o})
        verb = "is" if len(sharers) == 1 else "are"
        return f"{len(sharers)} of {count(usable, 'page')} {verb} in use by several requests ({requests} in all)"
    running = len({rid for o in owners for rid in o})
    used = counts["live"] + counts["shared"]
    if used:
        return f"{used} of {count(usable, 'page')} in use by {count(running, 'request')}, none by two at once"
    if counts["cached"]:
        return f"No request holds a page; {counts['cached']} of {count(usable, 'page')} cached for later"
    return f"All {count(usable, 'page')} are free" if usable > 1 else "The only page is free"


def _map_subtitle(now: Moment, per_cell: int) -> str:
    counts = now.pool.counts()
    parts = [f"After step {now.step}" + (f" ({', '.join(dict.fromkeys(now.walks))})" if now.walks else "")]
    parts.append(", ".join(f"{counts[s]} {s}" for s in STATE_ORDER))
    if now.pool.page_size:
        parts.append(f"{now.pool.page_size} tokens a page")
    if now.evicted:
        parts.append(f"{count(len(now.evicted), 'page')} evicted in this step")
    if per_cell > 1:
        parts.append(f"a cell is {per_cell} pages, coloured by the first of shared, live, cached among them")
    else:
        parts.append("letters = requests, c = also kept in the index")
    return "; ".join(parts)


def owner_table(now: Moment) -> Table:
    """Return one row for each run of neighbouring pages with the same state and owners."""
    runs: list[tuple[int, int, str, str, str]] = []
    for page in range(1, now.pool.num_pages):
        state = now.pool.pages.get(page)
        if state is None or state.state == "free":
            continue
        owners = " ".join(now.letters[rid] for rid in now.owners(page))
        facts = (state.state, owners or "–", "yes" if state.key is not None else "no")
        if runs and runs[-1][1] == page - 1 and runs[-1][2:] == facts:
            runs[-1] = (runs[-1][0], page, *facts)
        else:
            runs.append((page, page, *facts))
    rows = [(_span(first, last), last - first + 1, *facts) for first, last, *facts in runs]
    listed = dict.fromkeys(rid for page in range(1, now.pool.num_pages) for rid in now.owners(page))
    legend = "; ".join(now.called(rid) for rid in listed)
    title = f"Page owners after step {now.step}" + (f". {legend}" if legend else "")
    return Table(("pages", "number", "state", "requests", "in the index"), rows, title)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def page_timeline_panel(events: Events) -> Panel:
    """Return the figure of ``page_timeline`` as a panel.

    Raises:
        InputError: the log has no events.
    """
    samples = [(now.step, now.pool.counts(), len(now.evicted)) for now in step_moments(events) if now.pool.num_pages]
    if not samples:
        raise InputError("the log has no page pool; record a run before drawing its pages over time")
    usable = sum(samples[-1][1].values())
    last = samples[-1][0]
    every = -(-len(samples) // MAX_BARS)
    shown = samples[::every] if every == 1 else [*samples[::every], samples[-1]]
    bars = _stacked_bars([(step, counts) for step, counts, _ in shown], last + 1)
    evictions = [(step, number) for step, _, number in samples if number]
    rows = [(step, *(counts[s] for s in STATE_ORDER), number) for step, counts, number in shown]
    return Panel(
        title=_timeline_title(samples, usable),
        subtitle=_timeline_subtitle(every, evictions),
        x=replace(linear_axis("engine step", [samples[0][0], last + 1], low=samples[0][0], room=0), grid=False),
        y=linear_axis("pages", [usable], room=0.08),
        marks=(Rects(bars), *_eviction_marks(evictions, usable)),
        legend=tuple(STATES[s] for s in STATE_ORDER),
        plot_height_px=260,
        table=Table(("step", *STATE_ORDER, "evicted"), rows, "Pages after each step"),
    )


def _stacked_bars(samples: list[tuple[int, dict[str, int]]], end: int) -> tuple[Rect, ...]:
    """Stack the counts of each step; equal steps in a row become one bar."""
    bars: list[Rect] = []
    changes = [s for i, s in enumerate(samples) if i == 0 or s[1] != samples[i - 1][1]]
    for i, (step, counts) in enumerate(changes):
        until = changes[i + 1][0] if i + 1 < len(changes) else end
        base = 0
        for state in STATE_ORDER:
            top = base + counts[state]
            if counts[state]:
                note = f"steps {step} to {until - 1}: {count(counts[state], 'page')} {state}"
                bars.append(Rect(step, until, base, top, replace(STATES[state], outline=""), note=note))
            base = top
    return tuple(bars)


def _eviction_marks(evictions: list[tuple[int, int]], usable: int) -> tuple[Points, ...]:
    if not evictions:
        return ()
    shown = evictions[:MAX_BARS]
    notes = tuple(f"step {step}: {count(number, 'page')} evicted" for step, number in shown)
    ys = (usable * 1.04,) * len(shown)
    return (Points(tuple(s + 0.5 for s, _ in shown), ys, EVICTED, "triangle", "evictions", notes=notes),)


def _timeline_title(samples: list[tuple[int, dict[str, int], int]], usable: int) -> str:
    step, most = max(((s, c["live"] + c["shared"]) for s, c, _ in samples), key=lambda pair: pair[1])
    cached = samples[-1][1]["cached"]
    return f"At most {most} of {count(usable, 'page')} were in use at once (step {step}); {cached} cached at the end"


def _timeline_subtitle(every: int, evictions: list[tuple[int, int]]) -> str:
    number = sum(n for _, n in evictions)
    parts = [f"{count(number, 'page')} evicted" if number else "No page was evicted"]
    if every > 1:
        parts.append(f"one of {every} steps is drawn")
    return "; ".join(parts)
