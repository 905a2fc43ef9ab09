"""The prefix cache as a tree: which pages follow which, and who used them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvlab.lab.results import Table
from kvlab.spec import RequestId
from kvlab.viz.display import as_figure
from kvlab.viz.marks import Axis, Label, Line, Panel, Rect, Rects, count, cut, page_axis
from kvlab.viz.moments import Events, Moment, moment
from kvlab.viz.theme import SOFT_INK, STATES

MAX_LEAVES = 32
_ROW = 1.0
_MARGIN_PX, _CHARACTER_PX = 48, 7  # beside the plot; a character of a label
_ROOMS = (0.08, 0.16)  # shares of the axis beyond the last token
_LEAST_CHARACTERS = 6  # of a label that had to be cut


@dataclass
class Run:
    """Indexed pages that follow one another, with the same users and state: one box of the tree."""

    pages: list[int]
    first: int  # position of the first page in its chain
    users: tuple[RequestId, ...]
    state: str
    root: str
    children: list[Run] = field(default_factory=list)
    row: float = 0.0

    @property
    def stop(self) -> int:
        """Position after the last page."""
        return self.first + len(self.pages)

    @property
    def name(self) -> str:
        """The pages in words: a range where the numbers follow one another."""
        first, last = self.pages[0], self.pages[-1]
        if len(self.pages) == 1:
            return f"page {first}"
        if self.pages == list(range(first, last + 1)):
            return f"pages {first}-{last}"
        shown = ", ".join(map(str, self.pages[:4]))
        return f"{len(self.pages)} pages: {shown}" + (", …" if len(self.pages) > 4 else "")


def prefix_tree(events: Events, *, step: int | None = None, until_seq: int | None = None) -> Any:
    """Draw the indexed pages as a tree along the prompt, with the requests that filed or reused them.

    Returns:
        A ``plotly.graph_objects.Figure``; ``prefix_tree_panel`` needs no plotly.
    """
    return as_figure(prefix_tree_panel(events, step=step, until_seq=until_seq))


def prefix_tree_panel(events: Events, *, step: int | None = None, until_seq: int | None = None) -> Panel:
    """Return the figure of ``prefix_tree`` as a panel."""
    return tree_of(moment(events, step=step, until_seq=until_seq))


def runs_of(now: Moment) -> list[Run]:
    """Return the top runs of the tree, children inside; single-child pages with equal users and state are one run."""
    children: dict[int | None, list[int]] = {}
    indexed = now.pool.indexed()
    for page in indexed:
        parent = now.pool.pages[page].parent
        children.setdefault(parent if parent in indexed else None, []).append(page)
    tops: list[Run] = []
    waiting = [(page, tops) for page in children.get(None, [])]
    while waiting:  # a loop: chains are longer than Python's stack
        page, siblings = waiting.pop(0)
        run = _start_run(now, page)
        while len(following := children.get(run.pages[-1], [])) == 1 and _continues(now, run, following[0]):
            run.pages.append(following[0])
        siblings.append(run)
        waiting += [(child, run.children) for child in following]
    return tops


def _start_run(now: Moment, page: int) -> Run:
    state = now.pool.pages[page]
    return Run([page], state.position or 0, _users(now, page), state.state, state.root or "")


def _continues(now: Moment, run: Run, page: int) -> bool:
    return _users(now, page) == run.users and now.pool.pages[page].state == run.state


def _users(now: Moment, page: int) -> tuple[RequestId, ...]:
    return tuple(dict.fromkeys([*now.users.get(page, []), *now.owners(page)]))


def walk_runs(tops: list[Run]) -> Iterator[Run]:
    """Yield every run, parents before children, siblings in order."""
    waiting = list(reversed(tops))
    while waiting:
        run = waiting.pop()
        yield run
        waiting += reversed(run.children)


def tree_of(now: Moment) -> Panel:
    """Return the tree of one moment."""
    tops = runs_of(now)
    shown, num_hidden = _place(tops)
    rows = max((run.row for run in shown), default=0) + 1
    page_size = max(now.pool.page_size, 1)
    boxes = tuple(_box(now, run, page_size) for run in shown)
    tokens, names = _axis_and_names(shown, page_size)
    return Panel(
        title=_title(now, tops),
        subtitle=_subtitle(now, tops, num_hidden),
        x=tokens,
        y=Axis("", -0.6, rows - 0.4, grid=False, flipped=True),
        marks=(
            Line(*_connectors(shown, page_size), SOFT_INK, width_px=1.5),
            Rects(boxes),
            *names,
        ),
        legend=tuple(replace(STATES[s], hatch="") for s in ("shared", "cached")),
        plot_height_px=int(max(70, min(rows * 44, 900))),
        table=tree_table(now),
    )


def _place(tops: list[Run]) -> tuple[list[Run], int]:
    """Give each run a row: a leaf the next free one, a parent that of its first child. Returns those that fit."""
    shown: list[Run] = []
    leaves = 0
    everything = list(walk_runs(tops))
    for run in everything:
        if leaves >= MAX_LEAVES:
            break
        run.row = leaves * _ROW
        shown.append(run)
        leaves += not run.children
    return shown, len(everything) - len(shown)


def _box(now: Moment, run: Run, page_size: int) -> Rect:
    style = replace(STATES[run.state], hatch="")
    letters = [now.letters[rid] for rid in run.users]
    text = " ".join(letters) if len(letters) <= 6 else f"{len(letters)} requests"
    users = "; ".join(now.called(rid) for rid in run.users[:8]) or "unknown requests"
    more = f"; and {len(run.users) - 8} more" if len(run.users) > 8 else ""
    note = f"{run.name}: tokens {run.first * page_size} to {run.stop * page_size}, {run.state}, used by {users}{more}"
    gap = 0.04 * page_size
    return Rect(run.first * page_size + gap, run.stop * page_size - gap, run.row - 0.22, run.row + 0.22, style, text, note)


def _connectors(shown: list[Run], page_size: int) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    """Elbows from the end of a run down to the rows of its children."""
    visible = {id(run) for run in shown}
    xs: list[float | None] = []
    ys: list[float | None] = []
    for run in shown:
        for child in run.children:
            if id(child) in visible and child.row != run.row:
                end = run.stop * page_size
                xs += [end, end, end + 0.04 * page_size, None]
                ys += [run.row, child.row, child.row, None]
    return tuple(xs), tuple(ys)


def _axis_and_names(shown: list[Run], page_size: int) -> tuple[Axis, tuple[Label, ...]]:
    """The axis of tokens, with more room at its end where a name would be cut otherwise."""
    stops, whole = [run.stop * page_size for run in shown], {run.name for run in shown}
    for room in _ROOMS:
        axis = page_axis("tokens from the start of the prompt", stops, page_size, room=room)
        names = _names(shown, page_size, axis.high)
        if all(name.text in whole or not name.text.endswith("…") for name in names):
            break
    return axis, names


def _names(shown: list[Run], page_size: int, end_tokens: float) -> tuple[Label, ...]:
    """One label a box, or one for boxes of a row that are too narrow to stand apart; the table names every box."""
    rows: dict[float, list[Run]] = {}
    for run in sorted(shown, key=lambda run: run.first):
        rows.setdefault(run.row, []).append(run)
    page_px = (Panel.width_px - _MARGIN_PX) * page_size / end_tokens
    return tuple(label for runs in rows.values() for label in _row_names(runs, page_size, page_px, end_tokens / page_size))


def _row_names(runs: list[Run], page_size: int, page_px: float, end_pages: float) -> Iterator[Label]:
    groups: list[list[Run]] = []
    for run in runs:
        if groups and len(_joined(groups[-1])) > _fitting(groups[-1], run.first, page_px):
            groups[-1].append(run)
        else:
            groups.append([run])
    for group, end in zip(groups, [*(later[0].first for later in groups[1:]), end_pages], strict=True):
        most = _fitting(group, end, page_px)
        if len(_joined(group)) <= most or most >= _LEAST_CHARACTERS:
            yield Label((group[0].first + 0.04) * page_size, group[0].row + 0.4, cut(_joined(group), most))


def _fitting(group: list[Run], end_pages: float, page_px: float) -> int:
    """Characters that fit from the first box of ``group`` to position ``end_pages``."""
    return int((end_pages - group[0].first) * page_px / _CHARACTER_PX)


def _joined(group: list[Run]) -> str:
    if len(group) == 1:
        return group[0].name
    return "pages " + ", ".join(run.name.removeprefix("pages ").removeprefix("page ") for run in group)


def _title(now: Moment, tops: list[Run]) -> str:
    runs = list(walk_runs(tops))
    pages = sum(len(run.pages) for run in runs)
    if not pages:
        return "The prefix cache is empty"
    common = [run for run in runs if len(run.users) > 1]
    if not common:
        return f"No two requests used the same page of {count(pages, 'indexed page')}"
    reused = sum(len(run.pages) for run in common)
    requests = len({rid for run in common for rid in run.users})
    verb = "was" if reused == 1 else "were"
    return f"{reused} of {count(pages, 'indexed page')} {verb} used by several requests ({requests} in all)"


def _subtitle(now: Moment, tops: list[Run], num_hidden: int) -> str:
    leaves = sum(not run.children for run in walk_runs(tops))
    roots = len({run.root for run in tops})
    parts = [f"After step {now.step}: {count(leaves, 'branch', 'branches')} under {count(roots, 'root')}"]
    parts.append("letters = requests that filed or reused the pages")
    if num_hidden:
        parts.append(f"{count(num_hidden, 'box', 'boxes')} not drawn")
    return "; ".join(parts)


def tree_table(now: Moment) -> Table:
    """Return one row for each box of the tree."""
    page_size = max(now.pool.page_size, 1)
    rows = [
        (run.name, run.first * page_size, run.stop * page_size, run.state, ", ".join(now.letters[r] for r in run.users) or "–")
        for run in walk_runs(runs_of(now))
    ]
    return Table(("pages", "from token", "to token", "state", "used by"), rows, f"Prefix tree after step {now.step}")
