"""Speech as tokens and pages: the codes of two utterances beside each other, how they drift, and what prompts share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from kvlab.errors import InputError
from kvlab.lab.results import DriftRow, SharedPrompt, Table
from kvlab.options import whole
from kvlab.viz.display import as_figure
from kvlab.viz.given import require_rows
from kvlab.viz.marks import Axis, Label, Panel, Rect, Rects, count, cut, linear_axis, named_axis
from kvlab.viz.theme import CACHED, COMPUTED, EVICTED, PALE, SERVED, Style

Frames = Sequence[Sequence[int]]

SAME = Style("same code", PALE)
OTHER = Style("another code, old→new", EVICTED)
EQUAL_FRAMES = Style("equal frames", CACHED)
OTHER_FRAMES = Style("frames from the first that differs on", EVICTED, hatch="/")
SLOTS = ("0 coarse", "1 middle", "2 fine", "3 fine", "4 middle", "5 fine", "6 fine")
_HALF = 0.34  # half the thickness of a bar
_LABELS_WIDTH = 120  # characters of the labels along an axis


# -- codes -------------------------------------------------------------------------------------------------------------


def token_grid(first: Frames, second: Frames, names: tuple[str, str] = ("cold", "hit"), *, columns: int = 10) -> Any:
    """Draw the codes of two utterances around the first frame that differs, as a plotly figure."""
    return as_figure(token_grid_panel(first, second, names, columns=columns))


def token_grid_panel(first: Frames, second: Frames, names: tuple[str, str] = ("cold", "hit"), *, columns: int = 10) -> Panel:
    """Return the figure of ``token_grid`` as a panel.

    Args:
        columns: frames drawn: the first one that differs, and those around it; the first ones where none does.
    """
    whole("columns", columns, 1)
    for name, frames in zip(names, (first, second), strict=True):
        _check_frames(name, frames)
    pairs = list(zip_longest(first, second))
    if not pairs:
        raise InputError("no frames to draw; give utterances of at least one frame")
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    start = max(0, min(differing[0] - columns // 3, len(pairs) - columns)) if differing else 0
    shown = range(start, min(start + columns, len(pairs)))
    return Panel(
        title=_grid_title(pairs, differing, names),
        subtitle=f"Codes by slot, frames {shown[0]} to {shown[-1]} of {len(pairs)}; {names[0]} → {names[1]} where they differ",
        x=Axis("frame", shown[0] - 0.5, shown[-1] + 0.5, tuple((i, str(i)) for i in shown), False),
        y=named_axis("slot", SLOTS, flipped=True),
        marks=(Rects(tuple(rect for i in shown for rect in _code_cells(i, *pairs[i]))),),
        legend=(SAME, OTHER),
        plot_height_px=7 * 26 + 10,
        table=_grid_table(pairs, differing),
    )


def _check_frames(name: str, frames: Any) -> None:
    try:
        fits = all(len(frame) == len(SLOTS) for frame in frames)
    except TypeError:
        fits = False
    if not fits:
        raise InputError(f"the frames of {name} are no list of {len(SLOTS)} codes each; give those of an utterance")


def _code_cells(index: int, a: Sequence[int] | None, b: Sequence[int] | None) -> list[Rect]:
    cells = []
    for slot in range(len(SLOTS)):
        old, new = ("–" if frame is None else str(frame[slot]) for frame in (a, b))
        text = old if old == new else f"{old}→{new}"
        style = SAME if old == new else OTHER
        cells.append(Rect(index - 0.47, index + 0.47, slot - 0.45, slot + 0.45, style, text))
    return cells


def _grid_title(pairs: Sequence[tuple[Any, Any]], differing: Sequence[int], names: tuple[str, str]) -> str:
    if not differing:
        return f"{names[0]} and {names[1]}: all {count(len(pairs), 'frame')} have the same codes"
    a, b = pairs[differing[0]]
    equal = len(pairs) - len(differing)
    if a is None or b is None:
        return f"{names[b is None]} ends at frame {differing[0]}; the {equal} frames before have the same codes"
    slot = next(s for s, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return (
        f"Frame {differing[0]} is the first that differs, in slot {slot}: code {a[slot]} in {names[0]}, {b[slot]} in "
        f"{names[1]}; {equal} of {len(pairs)} frames are equal"
    )


def _grid_table(pairs: Sequence[tuple[Any, Any]], differing: Sequence[int]) -> Table:
    body = [(i, *(" ".join(map(str, frame or ())) for frame in pairs[i])) for i in differing]
    return Table(("frame", "first", "second"), body, "Frames that differ")


# -- drift -------------------------------------------------------------------------------------------------------------


def speech_drift(rows: Sequence[DriftRow], title: str = "") -> Any:
    """Draw how far each pair of utterances is equal, its drift beside the noise floor, as a plotly figure."""
    return as_figure(speech_drift_panel(rows, title))


def speech_drift_panel(rows: Sequence[DriftRow], title: str = "") -> Panel:
    """Return the figure of ``speech_drift`` as a panel; ``title`` is the finding, where it is not how many are equal."""
    require_rows(rows, DriftRow)
    longest = max(row.num_frames for row in rows)
    bars = tuple(rect for i, row in enumerate(rows) for rect in _drift_bars(i, row))
    axis = linear_axis("frames", [longest], room=0.0)
    labels = tuple(Label(axis.high * 1.03, i, drift_words(row)) for i, row in enumerate(rows))
    return Panel(
        title=title or _drift_title(rows),
        subtitle="Right: how far the samples differ (rms, of full scale); in brackets what noise alone makes of equal codes",
        x=Axis(axis.title, 0, axis.high * 1.62, axis.ticks, axis.grid),
        y=named_axis("", [cut(row.name, 34) for row in rows], flipped=True),
        marks=(Rects(bars), *labels),
        legend=(EQUAL_FRAMES, OTHER_FRAMES),
        plot_height_px=len(rows) * 30 + 20,
        table=speech_drift_table(rows),
    )


def drift_words(row: DriftRow) -> str:
    """Return the sample drift of a row and its noise floor in a few words."""
    found = "samples equal" if row.max_abs == 0 and row.first_frame is None else f"rms {row.rms:.2g}"
    return f"{found} (noise {row.floor_rms:.2g})"


def _drift_bars(index: int, row: DriftRow) -> list[Rect]:
    low, high = index - _HALF, index + _HALF
    equal = row.num_frames if row.first_frame is None else row.first_frame
    bars = []
    if equal:
        bars.append(Rect(0, equal, low, high, EQUAL_FRAMES, f"{count(equal, 'frame')} equal"))
    if equal < row.num_frames:
        bars.append(Rect(equal, row.num_frames, low, high, OTHER_FRAMES, str(row.num_frames - equal)))
    return bars


def _drift_title(rows: Sequence[DriftRow]) -> str:
    if not any(row.num_frames for row in rows):
        return f"{count(len(rows), 'pair')} of utterances without a whole frame: nothing to compare"
    parted = [row for row in rows if row.first_frame is not None]
    if not parted:
        return f"{count(len(rows), 'pair')} of utterances: equal in every frame"
    first = min(parted, key=lambda row: row.first_frame or 0)
    return f"{len(parted)} of {count(len(rows), 'pair')} part; the earliest at frame {first.first_frame} ({first.name})"


def speech_drift_table(rows: Sequence[DriftRow]) -> Table:
    """Return tokens first, then log-probabilities, then samples, each sample column with its noise floor beside it."""
    require_rows(rows, DriftRow, least=0)
    columns = (
        "pair", "prompt tokens", "cached tokens", "frames", "first frame that differs", "log-probability drift",
        "sample drift, most", "noise, most", "sample drift, rms", "noise, rms",
    )  # fmt: skip
    body = [
        (r.name, r.prompt_tokens, r.cached_tokens, r.num_frames, r.first_frame, float(f"{r.logprob_drift:.0e}"),
         r.max_abs, r.floor_max_abs, r.rms, r.floor_rms)
        for r in rows
    ]  # fmt: skip
    return Table(columns, body, "Drift, and beside it the noise floor")


# -- what prompts share ------------------------------------------------------------------------------------------------


def sharing_map(rows: Sequence[SharedPrompt]) -> Any:
    """Draw voices by sentences and how much of each prompt was cached when it came, as a plotly figure."""
    return as_figure(sharing_map_panel(rows))


def sharing_map_panel(rows: Sequence[SharedPrompt]) -> Panel:
    """Return the figure of ``sharing_map`` as a panel: rows in the order they were asked, left to right and then down."""
    require_rows(rows, SharedPrompt)
    voices, texts = list(dict.fromkeys(row.voice for row in rows)), list(dict.fromkeys(row.text for row in rows))
    cells = tuple(rect for row in rows for rect in _prompt_cell(texts.index(row.text), voices.index(row.voice), row))
    sizes = ", ".join(map(str, sorted({row.page_size for row in rows})))
    label_width = max(12, _LABELS_WIDTH // len(texts))
    return Panel(
        title=_sharing_title(rows),
        subtitle=f"Each cell is a prompt, asked row by row; its left part was served from the cache; pages of {sizes} tokens",
        x=Axis("", -0.5, len(texts) - 0.5, tuple((i, cut(text, label_width)) for i, text in enumerate(texts)), False),
        y=named_axis("", voices, flipped=True),
        marks=(Rects(cells),),
        legend=(SERVED, COMPUTED),
        plot_height_px=44 * len(voices) + 10,
        table=Table(
            ("voice", "sentence", "prompt tokens", "cached tokens", "page size"),
            [(r.voice, r.text, r.prompt_tokens, r.cached_tokens, r.page_size) for r in rows],
            "What prompts share",
        ),
    )


def _prompt_cell(column: int, line: int, row: SharedPrompt) -> list[Rect]:
    left, right, low, high = column - 0.46, column + 0.46, line - 0.4, line + 0.4
    parting = left + (right - left) * row.cached_tokens / max(row.prompt_tokens, 1)
    cells = []
    if row.cached_tokens:
        cells.append(Rect(left, parting, low, high, SERVED, f"{row.cached_tokens}"))
    rest = f"{row.prompt_tokens - row.cached_tokens}" + ("" if row.cached_tokens else f" of {row.prompt_tokens}")
    return [*cells, Rect(parting, right, low, high, COMPUTED, rest)]


def _sharing_title(rows: Sequence[SharedPrompt]) -> str:
    prompt, cached = sum(r.prompt_tokens for r in rows), sum(r.cached_tokens for r in rows)
    first_of_voice = {row.voice: row for row in reversed(rows)}
    later = list(first_of_voice.values())[:-1]  # the first sentence of every voice but the first
    crossed = sum(row.cached_tokens for row in later)
    across = "" if not later else "; a new voice finds nothing" if not crossed else f"; new voices find {crossed} tokens"
    return f"{cached} of {count(prompt, 'prompt token')} came from the cache{across}"
