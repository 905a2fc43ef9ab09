"""What a figure says, before anything draws it: a panel of marks on two axes.

One panel becomes plotly JSON, a static SVG, and a sentence, so the three cannot disagree.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlab.lab.results import Table, printable
from kvlab.viz.theme import LIVE, Style

Ticks = tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Axis:
    """One axis from ``low`` to ``high``; ``title`` names the unit. ``flipped``: high values at the bottom (or left)."""

    title: str
    low: float
    high: float
    ticks: Ticks = ()
    grid: bool = True
    flipped: bool = False


@dataclass(frozen=True)
class Rect:
    """A rectangle in axis units, with a text on it and a note for the pointer."""

    x0: float
    x1: float
    y0: float
    y1: float
    style: Style
    text: str = ""
    note: str = ""


@dataclass(frozen=True)
class Rects:
    """One series of rectangles."""

    rects: tuple[Rect, ...]


@dataclass(frozen=True)
class Line:
    """A polyline; None in ``xs`` lifts the pen. ``dash``: solid | dash | dot. ``label`` is written at its end."""

    xs: tuple[float | None, ...]
    ys: tuple[float | None, ...]
    colour: str = LIVE
    dash: str = "solid"
    label: str = ""
    width_px: float = 2.0


@dataclass(frozen=True)
class Points:
    """Markers. ``symbol``: circle | square | diamond | triangle. ``texts`` stand above them."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    colour: str = LIVE
    symbol: str = "circle"
    label: str = ""
    texts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Label:
    """Free text at a place; ``anchor``: start | middle | end."""

    x: float
    y: float
    text: str
    anchor: str = "start"


@dataclass(frozen=True)
class Heat:
    """A grid of magnitudes over [x0, x1) and [y0, y1): ``levels[row][column]``, row 0 at ``y0``, are indices of theme.HEAT."""

    x0: float
    x1: float
    y0: float
    y1: float
    levels: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Bitmap:
    """A picture over [x0, x1) and [y0, y1) as a PNG of ``columns`` by ``rows`` pixels, its top row at the top of the figure.

    ``alt`` says in words what it shows.
    """

    x0: float
    x1: float
    y0: float
    y1: float
    png: bytes
    columns: int
    rows: int
    alt: str

    @property
    def uri(self) -> str:
        """The PNG as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


Mark = Rects | Line | Points | Label | Heat | Bitmap


@dataclass(frozen=True)
class Panel:
    """One figure. ``title`` states the finding; ``legend`` names the looks; ``table`` has the same numbers."""

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    subtitle: str = ""
    legend: tuple[Style, ...] = ()
    width_px: int = 760
    plot_height_px: int = 300
    table: Table | None = None

    @property
    def sentence(self) -> str:
        """The figure in words."""
        return printable(f"{self.title}. {self.subtitle}" if self.subtitle else f"{self.title}.")

    def __repr__(self) -> str:
        title = self.title if len(self.title) <= 100 else self.title[:99] + "…"
        return f"Panel({title!r}, {len(self.marks)} marks)"


def linear_axis(title: str, values: Iterable[float], *, low: float | None = 0.0, room: float = 0.06) -> Axis:
    """Return an axis that holds ``values``, from ``low`` (None = the least value), with round ticks.

    >>> linear_axis("tokens", [3, 95]).ticks
    ((0, '0'), (20, '20'), (40, '40'), (60, '60'), (80, '80'), (100, '100'))
    """
    seen = [v for v in values if math.isfinite(v)] or [1.0]
    begin = min(seen) if low is None else low
    end = max(max(seen), begin + 1e-9)
    end += (end - begin) * room
    if end - begin < 1e-6:
        end = begin + 1.0
    return Axis(title, begin, end, round_ticks(begin, end))


def round_ticks(low: float, high: float, about: int = 6) -> Ticks:
    """Return ticks at 1, 2 or 5 times a power of ten.

    >>> round_ticks(0, 1)
    ((0.0, '0'), (0.2, '0.2'), (0.4, '0.4'), (0.6, '0.6'), (0.8, '0.8'), (1.0, '1'))
    """
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if step >= 1:
        return tuple((round(i * step), f"{round(i * step)}") for i in range(first, last + 1))
    digits = -math.floor(math.log10(step))
    return tuple(
        (round(i * step, digits), f"{i * step:.{digits}f}".rstrip("0").rstrip(".") or "0") for i in range(first, last + 1)
    )


def page_axis(title: str, values: Iterable[float], page_size: int, *, room: float = 0.04) -> Axis:
    """Return a token axis from 0 whose ticks are page boundaries.

    >>> page_axis("tokens", [48], 16).ticks
    ((0, '0'), (16, '16'), (32, '32'), (48, '48'))
    """
    end = max([*values, page_size]) * (1 + room)
    every = page_size * max(1, math.ceil(end / page_size / 9))
    return Axis(title, 0, end, tuple((t, str(t)) for t in range(0, math.floor(end) + 1, every)))


def named_axis(title: str, names: Sequence[str], *, flipped: bool = False, grid: bool = False) -> Axis:
    """Return an axis with one place a name: 0, 1, 2, ..."""
    return Axis(title, -0.6, len(names) - 0.4, tuple((i, name) for i, name in enumerate(names)), grid, flipped)


def cut(text: str, most: int) -> str:
    """Return ``text`` on one line, at most ``most`` characters long."""
    text = " ".join(printable(text[: 4 * most]).split())
    return text if len(text) <= most else text[: most - 1] + "…"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    >>> count(1, "page"), count(3, "page"), count(2, "branch", "branches")
    ('1 page', '3 pages', '2 branches')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
