"""The results that views draw: frozen rows with units in their names, and a table that knows how to show itself."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from kvlab.errors import InputError, missing_extra
from kvlab.spec import Miss

MissRow: TypeAlias = Miss  # prompt tokens [start, stop) of a label, the cause they were computed, the evidence

MAX_ROWS_SHOWN = 100
MAX_COLUMNS_SHOWN = 24
MAX_TEXT_SHOWN = 200
MAX_TITLE_SHOWN = 1000


@dataclass(frozen=True)
class RequestRow:
    """One request of a run. ``cached_tokens`` were served from pages, ``misses`` say why the others were computed."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    pages_matched: int
    ttft_ms: float | None = None
    tokens_per_s: float | None = None
    generated_tokens: int = 0
    finish_reason: str = ""
    text: str = ""
    misses: tuple[MissRow, ...] = ()

    @classmethod
    def of(cls, result: Any) -> RequestRow:
        """Take what a table shows out of the result of ``engine.generate``."""
        return cls(
            name=result.name or f"request {result.rid}",
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            pages_matched=result.pages_matched,
            ttft_ms=result.ttft_ms,
            tokens_per_s=result.tokens_per_s,
            generated_tokens=len(result.ids),
            finish_reason=result.finish_reason,
            text=result.text,
            misses=tuple(result.misses),
        )

    def __repr__(self) -> str:
        return f"RequestRow({_short(self.name, 40)}: cached {self.cached_tokens} of {self.prompt_tokens} prompt tokens)"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from importlib import import_module

        return import_module("kvlab.viz.display").request_bundle(self)  # a view is above this layer: found at call time


@dataclass(frozen=True)
class LadderRow:
    """What the ``send``-th sending (from 1) of one prompt found cached."""

    prompt_tokens: int
    page_size: int
    send: int
    cached_tokens: int

    @property
    def pages_matched(self) -> int:
        """Whole pages served from the cache."""
        return self.cached_tokens // self.page_size

    @property
    def expected_tokens(self) -> int:
        """All whole pages before the last token: that one must be computed, its logits choose the reply's first token."""
        return (self.prompt_tokens - 1) // self.page_size * self.page_size if self.send > 1 else 0

    @property
    def recomputed_tokens(self) -> int:
        """Tokens after the served pages; on a repeated prompt these are the recomputed last page."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True)
class TtftRow:
    """Time to the first token of a prompt partly cached. ``ideal_ms`` = cold time x tail / all + one decode step."""

    prompt_tokens: int
    cached_tokens: int
    tail_tokens: int
    ttft_ms: float
    ideal_ms: float


@dataclass(frozen=True)
class PageSizeRow:
    """How much of ``shared_tokens`` common tokens a second request was served at one page size."""

    page_size: int
    shared_tokens: int
    cached_tokens: int
    prompt_tokens: int = 0
    ttft_ms: float | None = None


@dataclass(frozen=True)
class SharedPrompt:
    """How much of the prompt for one sentence in one voice was cached after those before it."""

    voice: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    page_size: int


@dataclass(frozen=True)
class DriftRow:
    """Two utterances of one sentence; shares of full scale, and beside them those that the codec's noise alone makes.

    ``cached_tokens`` of the ``prompt_tokens`` were cached for the second. ``first_frame``: the first one that differs, or where
    the shorter utterance ends; None when all are equal. ``logprob_drift``: the largest difference of log-probabilities up to
    the first token that differs.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int
    num_frames: int
    first_frame: int | None
    logprob_drift: float
    max_abs: float
    rms: float
    floor_max_abs: float
    floor_rms: float


@dataclass(frozen=True)
class PressureRow:
    """What became of a workload on a pool that may be too small. ``stalled_step``: where it stalled; None = it did not.

    ``pool_pages`` are usable ones. ``host_moves`` counts requests moved to host pages and back.
    """

    name: str
    pool_pages: int
    prefix_cache: bool
    requests: int
    completed: int
    steps: int
    stalled_step: int | None
    cached_tokens: int
    prompt_tokens: int
    evicted_pages: int
    preemptions: int
    host_moves: int = 0

    @property
    def is_stalled(self) -> bool:
        """True when every request waited for pages and nothing could free one."""
        return self.stalled_step is not None


@dataclass(frozen=True, repr=False)
class Wave:
    """The envelope of a signal: least and greatest value in each of equally long columns, in shares of full scale.

    ``drawn_gain``: how much larger it is to be drawn; the numbers stay as they are.
    """

    name: str
    duration_s: float
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    rms: float
    drawn_gain: float = 1.0

    @property
    def peak(self) -> float:
        """The greatest distance from zero."""
        return max((abs(v) for v in (*self.lows, *self.highs)), default=0.0)

    def __repr__(self) -> str:
        return f"Wave({_short(self.name, 40)}: {self.duration_s:.2f} s, peak {self.peak:.2g}, rms {self.rms:.2g})"


@dataclass(frozen=True, repr=False)
class Spectrogram:
    """Power by time and pitch: ``levels_db[band][column]``, whole decibels of full scale, bands equally wide from 0 up."""

    name: str
    duration_s: float
    max_hz: float
    levels_db: tuple[tuple[int, ...], ...]

    def __repr__(self) -> str:
        bands = len(self.levels_db)
        return f"Spectrogram({_short(self.name, 40)}: {self.duration_s:.2f} s, {bands} bands up to {self.max_hz:g} Hz)"


@dataclass(frozen=True, repr=False)
class Table:
    """Columns and rows that print as one line, show as HTML, and turn into dicts or a data frame.

    >>> table = Table(("page", "owners"), [(1, "A"), (2, "A B")], title="pages")
    >>> table
    Table(pages: 2 rows of page, owners)
    >>> table.to_dicts()[1]
    {'page': 2, 'owners': 'A B'}
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise InputError(f"row {index} has {len(row)} values for {len(self.columns)} columns; give one a column")

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        head = f"{_short(self.title, 60)}: " if self.title else ""
        rows = "1 row" if len(self.rows) == 1 else f"{len(self.rows)} rows"
        return f"Table({head}{rows} of {_short(', '.join(self.columns), 100)})"

    def _repr_html_(self) -> str:
        columns = slice(MAX_COLUMNS_SHOWN)
        sides = [_side(*(row[i] for row in self.rows[:MAX_ROWS_SHOWN])) for i in range(len(self.columns))]
        head = "".join(
            f'<th scope="col" style="text-align:{side}">{_escape(c)}</th>'
            for c, side in zip(self.columns[columns], sides, strict=False)
        )
        body = "".join(f"<tr>{''.join(map(_cell, row[columns]))}</tr>" for row in self.rows[:MAX_ROWS_SHOWN])
        for total, most, what in ((len(self.rows), MAX_ROWS_SHOWN, "rows"), (len(self.columns), MAX_COLUMNS_SHOWN, "columns")):
            if total > most:
                body += (
                    f'<tr><td colspan="{min(len(self.columns), MAX_COLUMNS_SHOWN)}">and {total - most} more {what}</td></tr>'
                )
        caption = f"<caption>{html.escape(_short(self.title, MAX_TITLE_SHOWN))}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict a row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_pandas(self) -> Any:
        """The table as a ``pandas.DataFrame``."""
        try:
            import pandas
        except ImportError as error:
            raise missing_extra("pandas", "lab", "to make a data frame of a table") from error
        return pandas.DataFrame([list(row) for row in self.rows], columns=list(self.columns))


def table_of(rows: Sequence[Any], title: str = "") -> Table:
    """Make a table of equal dataclasses, one column a field.

    >>> table_of([LadderRow(33, 16, 2, 32)], "ladder").to_dicts()
    [{'prompt_tokens': 33, 'page_size': 16, 'send': 2, 'cached_tokens': 32}]
    """
    columns = [f.name for f in fields(rows[0])] if rows else []
    return Table(columns, [[getattr(row, c) for c in columns] for row in rows], title)


def show_value(value: Any) -> str:
    """Return a value as a table shows it: few digits, a dash for nothing, long text cut.

    >>> [show_value(v) for v in (None, 1234, 0.12345, 1234.5, "text")]
    ['–', '1234', '0.123', '1234', 'text']
    """
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return _short(str(value), MAX_TEXT_SHOWN)


def printable(text: str) -> str:
    """Return ``text`` without what no page can hold: control characters and lone surrogates.

    >>> printable("a\\x00b\\udc80 c")
    'ab c'
    """
    return "".join(c for c in text if (c >= " " or c in "\n\t") and not "\ud800" <= c <= "\udfff")


def _short(text: str, most: int) -> str:
    text = " ".join(printable(text[: 4 * most]).split())  # cut first: a reply may be megabytes
    return text if len(text) <= most else text[: most - 1] + "…"


def _escape(text: str) -> str:
    return html.escape(_short(text, MAX_TEXT_SHOWN))


def _cell(value: Any) -> str:
    return f'<td style="text-align:{_side(value)}">{html.escape(show_value(value))}</td>'


def _side(*values: Any) -> str:
    """Numbers align right, everything else left; said for each cell, since notebooks align all of them right."""
    given = [value for value in values if value is not None]
    return "right" if all(isinstance(v, int | float) and not isinstance(v, bool) for v in given) else "left"
