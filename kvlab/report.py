"""One HTML file about a run: figures as SVG, the same numbers as tables, no script, nothing fetched."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvlab.events import ModelLoaded
from kvlab.lab.results import RequestRow, Table, TtftRow, printable
from kvlab.viz.hits import miss_table, misses_panel, request_table, ttft_panel
from kvlab.viz.marks import Panel, count, cut
from kvlab.viz.moments import Events, moment, step_moments
from kvlab.viz.pages import page_map_panel, page_timeline_panel
from kvlab.viz.static import as_svg
from kvlab.viz.tree import prefix_tree_panel

MAX_TEXTS = 40

_STYLE = """
:root { --ink: #1f2430; --soft: #5b6270; --paper: #ffffff; --page: #f2f4f7; --grid: #e3e6eb; --link: #0072B2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaee; --soft: #a9b0bd; --paper: #1b1f27; --page: #12151b; --grid: #343a46; --link: #56B4E9; }
}
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 34px 0 8px; }
p { margin: 4px 0; max-width: 76ch; } .soft { color: var(--soft); }
figure { margin: 12px 0; display: flex; flex-wrap: wrap; gap: 18px; align-items: flex-start; }
figure > :first-child { flex: 0 1 760px; min-width: 0; }
figure > * + div { overflow: auto; max-height: 460px; max-width: 100%; }
table { border-collapse: collapse; font-size: 13px; background: var(--paper); }
caption { text-align: left; color: var(--soft); padding: 4px 8px; }
th, td { padding: 4px 9px; border-bottom: 1px solid var(--grid); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; } .wide { overflow-x: auto; }
.wide td:first-child { white-space: nowrap; }
svg { display: block; } .kv-paper { fill: var(--paper); } .kv-ink { fill: var(--ink); } .kv-soft { fill: var(--soft); }
.kv-grid { stroke: var(--grid); } .kv-line { stroke: var(--soft); } .kv-edge { stroke: var(--ink); }
.kv-free { fill: var(--page); } .kv-free[stroke] { stroke: var(--grid); }
dt { font-weight: 600; margin-top: 10px; } dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-width: 90ch; }
"""


def write_report(
    path: str | Path,
    *,
    title: str,
    rows: Sequence[RequestRow],
    ttft_rows: Sequence[TtftRow] = (),
    events: Events = (),
    model_line: str = "",
    notes: Sequence[str] = (),
    uncached: Sequence[RequestRow] = (),
    figures: Sequence[tuple[str, Panel]] = (),
) -> Path:
    """Write the report of a run as one self-contained HTML file.

    Args:
        rows: the requests, in order.
        ttft_rows: times to the first token by cached tokens; no figure without them.
        events: the log of the run; no page map and tree without it.
        model_line: which model and machine, in one line.
        notes: paragraphs under the headline.
        uncached: the same requests with the cache off, for the table of requests; they have no misses to explain.
        figures: what the run was about, under their headings, before everything else.

    Returns:
        The path written.

    Raises:
        InputError: a log that begins in the middle of a run.
    """
    path = Path(path)
    page = report_html(title, rows, ttft_rows, events, model_line, notes, uncached, figures)
    path.write_text(page, encoding="utf-8", newline="\n")
    return path


def report_html(
    title: str,
    rows: Sequence[RequestRow],
    ttft_rows: Sequence[TtftRow],
    events: Events,
    model_line: str,
    notes: Sequence[str],
    uncached: Sequence[RequestRow] = (),
    figures: Sequence[tuple[str, Panel]] = (),
) -> str:
    """Return the report as HTML."""
    body = "\n".join(
        [
            f"<h1>{_text(title)}</h1>",
            *(f'<p class="soft">{_text(line)}</p>' for line in _facts(events, model_line) if line),
            *(f"<p>{_text(note)}</p>" for note in notes),
            *(part for heading, panel in figures for part in (f"<h2>{_text(heading)}</h2>", _figure(panel))),
            *_requests(rows, uncached),
            *_times(ttft_rows),
            *_pages(events),
            *_replies(rows),
        ]
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _facts(events: Events, model_line: str) -> Iterator[str]:
    """What is known of the model and the pool; the page size as the least length that can be reused."""
    yield model_line
    for entry in events:
        if isinstance(entry.event, ModelLoaded) and entry.event.identity not in model_line:
            yield f"Model {entry.event.name}, identity {cut(entry.event.identity, 40)}"
    pool = moment(events).pool
    if pool.num_pages:
        size = count(pool.page_size, "token")
        yield f"Pool of {count(pool.num_pages - 1, 'page')} of {size}."
        yield f"The page size, {size}, is the least reusable length: a shorter shared prefix cannot be served from the cache."


def _requests(rows: Sequence[RequestRow], uncached: Sequence[RequestRow]) -> Iterator[str]:
    if not rows:
        yield "<p>No request was recorded.</p>"
        return
    yield "<h2>Requests</h2>"
    yield f'<div class="wide">{_table(request_table([*rows, *uncached]))}</div>'
    yield "<h2>What the cache served, and why the rest was computed</h2>"
    panel = misses_panel(rows)
    yield _picture(panel)
    yield f'<div class="wide">{_table(miss_table(rows))}</div>'


def _times(rows: Sequence[TtftRow]) -> Iterator[str]:
    if rows:
        yield "<h2>Time to the first token</h2>"
        yield _figure(ttft_panel(rows))


def _pages(events: Events) -> Iterator[str]:
    steps = _chosen_steps(events)
    if not steps:
        return
    yield "<h2>Who owns which page</h2>"
    for step, why in steps:
        yield f'<p class="soft">{why}</p>'
        yield _figure(page_map_panel(events, step=step))
    yield "<h2>The pool over time</h2>"
    yield _picture(page_timeline_panel(events))
    yield "<h2>The prefix tree</h2>"
    yield _figure(prefix_tree_panel(events))


def _chosen_steps(events: Events) -> list[tuple[int, str]]:
    """The moments worth a map: most sharing, most pages in use, the end."""
    most_shared, most_used, last = (0, -1), (0, -1), -1
    for now in step_moments(events):
        if not now.pool.num_pages:
            continue
        last = now.step
        shared = sum(max(0, len({rid for rid, _ in state.owners}) - 1) for state in now.pool.pages.values())
        used = sum(bool(state.owners) for state in now.pool.pages.values())
        most_shared, most_used = max(most_shared, (shared, -last)), max(most_used, (used, -last))
    if last < 0:
        return []
    chosen = {last: "At the end of the run"}
    if most_used[0]:
        chosen[-most_used[1]] = "When most pages were in use"
    if most_shared[0]:
        chosen[-most_shared[1]] = "When requests shared most"
    return sorted(chosen.items())


def _replies(rows: Sequence[RequestRow]) -> Iterator[str]:
    said = [row for row in rows if row.text]
    if said:
        yield "<h2>Replies</h2><dl>"
        for row in said[:MAX_TEXTS]:
            yield f"<dt>{_text(cut(row.name, 80))}</dt><dd>{_text(row.text[:2000])}</dd>"
        yield "</dl>"
        if len(said) > MAX_TEXTS:
            yield f"<p>and {len(said) - MAX_TEXTS} more</p>"


def _figure(panel: Panel) -> str:
    table = f'<div tabindex="0" role="region" aria-label="table">{_table(panel.table)}</div>' if panel.table else ""
    return f"<figure>{as_svg(panel)}{table}</figure>"


def _picture(panel: Panel) -> str:
    """A figure whose numbers stand in a table below or above it."""
    return f"<figure>{as_svg(panel)}</figure>"


def _table(table: Table) -> str:
    return table._repr_html_()


def _text(text: str) -> str:
    return html.escape(printable(text))
