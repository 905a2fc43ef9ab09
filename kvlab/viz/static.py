"""Panels as small SVGs that need no library and no script, with a title and a description for those who cannot see them.

Colours stand in attributes; what depends on light and dark also has a class (``kv-ink``, ``kv-soft``, ``kv-paper``,
``kv-grid``, ``kv-line``, ``kv-free``, ``kv-edge``), so that a page with a dark theme can change those and leave the rest.
"""

from __future__ import annotations

import hashlib
import html
import textwrap
from dataclasses import dataclass
from itertools import groupby

from kvlab.lab.results import printable
from kvlab.viz.given import require_panel
from kvlab.viz.marks import Axis, Bitmap, Heat, Label, Line, Mark, Panel, Points, Rect, Rects, cut
from kvlab.viz.theme import DARK_OUTLINE, FONT, GRID, HEAT, INK, NO_FILL, PAPER, SOFT_INK, Style

_DASHES = {"solid": "", "dash": ' stroke-dasharray="7 5"', "dot": ' stroke-dasharray="2 4"'}
_HATCHES = {
    "/": '<path d="M0 6L6 0"/>',
    "\\": '<path d="M0 0L6 6"/>',
    "x": '<path d="M0 6L6 0M0 0L6 6"/>',
    "-": '<path d="M0 3H6"/>',
    ".": '<circle cx="3" cy="3" r="0.9"/>',
}
TITLE_WIDTH, SUBTITLE_WIDTH = 76, 110  # characters a line
_CHARACTER = 0.56  # mean width of a character, in font sizes


@dataclass(frozen=True)
class _Frame:
    """Where the plot lies in the picture, and how axis units become pixels."""

    panel: Panel
    left: float
    top: float
    width: float
    height: float

    def x(self, value: float) -> float:
        return self.left + _share(self.panel.x, value) * self.width

    def y(self, value: float) -> float:
        return self.top + (1 - _share(self.panel.y, value)) * self.height


def _share(axis: Axis, value: float) -> float:
    extent = axis.high - axis.low
    share = (value - axis.low) / extent if extent else 0.5  # the one place of an axis of no extent is its middle
    return 1 - share if axis.flipped else share


def wrap(text: str, width: int, most: int = 3) -> list[str]:
    """Return ``text`` in at most ``most`` lines of about ``width`` characters."""
    return textwrap.wrap(" ".join(text.split()), width, max_lines=most, placeholder=" …")


def as_svg(panel: Panel) -> str:
    """Return ``panel`` as one SVG element."""
    require_panel(panel, Panel)
    title_lines, subtitle_lines = wrap(panel.title, TITLE_WIDTH), wrap(panel.subtitle, SUBTITLE_WIDTH)
    legend, legend_rows = _legend(panel, 34 + 20 * len(title_lines) + 16 * len(subtitle_lines))
    top = 26 + 20 * len(title_lines) + 16 * len(subtitle_lines) + 22 * legend_rows
    left = _left_margin(panel)
    frame = _Frame(panel, left, top, panel.width_px - left - 24, panel.plot_height_px)
    height = top + panel.plot_height_px + (56 if panel.x.title else 36)
    body = [
        _text_block(title_lines, 16, 28, 16, 20, "kv-ink", INK, ' font-weight="600"'),
        _text_block(subtitle_lines, 16, 28 + 20 * len(title_lines) - 2, 12, 16, "kv-soft", SOFT_INK),
        legend,
        _axes(frame),
        *(_mark(frame, mark) for mark in panel.marks),
    ]
    return _document(panel, height, "\n".join(part for part in body if part))


def _document(panel: Panel, height: float, body: str) -> str:
    name = "kv" + hashlib.sha1(body.encode()).hexdigest()[:10]  # two figures in one page must not share ids
    styles = {s.hatch: s for s in _styles(panel) if s.hatch}
    inks = sorted({(s.hatch, s.ink) for s in _styles(panel) if s.hatch})
    patterns = "".join(_pattern(f"{name}-{_hatch_id(h, ink)}", h, ink) for h, ink in inks) if styles else ""
    box = f'viewBox="0 0 {panel.width_px} {_n(height)}" width="{panel.width_px}" height="{_n(height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-labelledby="{name}-t {name}-d" '
        f'font-family="{html.escape(FONT)}" style="max-width:100%;height:auto">'
        f'<title id="{name}-t">{_escape(panel.title)}</title><desc id="{name}-d">{_escape(panel.sentence)}</desc>'
        f"{f'<defs>{patterns}</defs>' if patterns else ''}"
        f'<rect class="kv-paper" width="100%" height="100%" rx="6" fill="{PAPER}"/>\n'
        f"{body.replace('url(#', f'url(#{name}-')}</svg>"
    )


def _styles(panel: Panel) -> list[Style]:
    drawn = [rect.style for mark in panel.marks if isinstance(mark, Rects) for rect in mark.rects]
    return [*panel.legend, *drawn]


def _hatch_id(hatch: str, ink: str) -> str:
    return f"h{ord(hatch)}-{ink[1:]}"


def _pattern(name: str, hatch: str, ink: str) -> str:
    look = f'stroke="{ink}" stroke-opacity="0.5" fill="{ink}" fill-opacity="0.6"'
    return f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse"><g {look}>{_HATCHES[hatch]}</g></pattern>'


def _legend(panel: Panel, y: float) -> tuple[str, int]:
    """Swatches with names, in as many rows as they need."""
    parts: list[str] = []
    x, row = 16.0, 0
    for style in panel.legend:
        width = 30 + len(style.name) * 12 * _CHARACTER
        if x + width > panel.width_px - 16 and x > 16:
            x, row = 16.0, row + 1
        place = y + 22 * row
        parts.append(_box(x, place - 10, 14, 14, style))
        look = f'font-size="12" class="kv-ink" fill="{INK}"'
        parts.append(f'<text x="{_n(x + 20)}" y="{_n(place + 1)}" {look}>{_escape(style.name)}</text>')
        x += width + 8
    return "".join(parts), row + 1 if panel.legend else 0


def _left_margin(panel: Panel) -> float:
    widest = max((len(text) for _, text in panel.y.ticks), default=0)
    return min(240.0, 24 + min(widest, 34) * 11 * _CHARACTER + (20 if panel.y.title else 0))


def _axes(frame: _Frame) -> str:
    panel, parts = frame.panel, []
    bottom, right = frame.top + frame.height, frame.left + frame.width
    grid = f'class="kv-grid" stroke="{GRID}"'
    soft = f'font-size="11" class="kv-soft" fill="{SOFT_INK}"'
    for value, text in panel.x.ticks:
        x = frame.x(value)
        if panel.x.grid:
            parts.append(f'<path d="M{_n(x)} {_n(frame.top)}V{_n(bottom)}" {grid}/>')
        parts.append(f'<text x="{_n(x)}" y="{_n(bottom + 16)}" text-anchor="middle" {soft}>{_escape(text)}</text>')
    for value, text in panel.y.ticks:
        y = frame.y(value)
        if panel.y.grid:
            parts.append(f'<path d="M{_n(frame.left)} {_n(y)}H{_n(right)}" {grid}/>')
        shown = _escape(cut(text, 34))
        parts.append(f'<text x="{_n(frame.left - 8)}" y="{_n(y + 4)}" text-anchor="end" {soft}>{shown}</text>')
    middle = f'text-anchor="middle" font-size="12" class="kv-soft" fill="{SOFT_INK}"'
    if panel.x.title:
        parts.append(
            f'<text x="{_n(frame.left + frame.width / 2)}" y="{_n(bottom + 40)}" {middle}>{_escape(panel.x.title)}</text>'
        )
    if panel.y.title:
        y = frame.top + frame.height / 2
        parts.append(f'<text transform="translate(18 {_n(y)}) rotate(-90)" {middle}>{_escape(panel.y.title)}</text>')
    return "".join(parts)


def _mark(frame: _Frame, mark: Mark) -> str:
    if isinstance(mark, Rects):
        return f'<g text-anchor="middle">{"".join(_rect(frame, rect) for rect in mark.rects)}</g>'
    if isinstance(mark, Line):
        return _line(frame, mark)
    if isinstance(mark, Points):
        return _points(frame, mark)
    if isinstance(mark, Heat):
        return _heat(frame, mark)
    if isinstance(mark, Bitmap):
        return _bitmap(frame, mark)
    return _label(frame, mark)


def _rect(frame: _Frame, rect: Rect) -> str:
    x0, x1 = sorted((frame.x(rect.x0), frame.x(rect.x1)))
    y0, y1 = sorted((frame.y(rect.y0), frame.y(rect.y1)))
    note = f"<title>{_escape(cut(rect.note, 300))}</title>" if rect.note else ""
    drawn = f"{_box(x0, y0, x1 - x0, y1 - y0, rect.style)}{_rect_text(rect, x0, x1, y0, y1)}"
    return f"<g>{note}{drawn}</g>" if note else drawn


def _rect_text(rect: Rect, x0: float, x1: float, y0: float, y1: float) -> str:
    """The text in the size that fits; none where it would be too small to read."""
    if not rect.text:
        return ""
    size = min(12.0, (y1 - y0) * 0.8, (x1 - x0 - 3) / (len(rect.text) * (_CHARACTER + 0.06)))
    if size < 6:
        return ""
    place = f'x="{_n((x0 + x1) / 2)}" y="{_n((y0 + y1) / 2 + size * 0.36)}"'
    # on a hatch, letters stand on a rim of the fill
    rim = (
        f' stroke="{rect.style.fill}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"' if rect.style.hatch else ""
    )
    return f'<text {place} font-size="{_n(size)}" fill="{rect.style.ink}"{rim}>{_escape(rect.text)}</text>'


def _box(x: float, y: float, width: float, height: float, style: Style) -> str:
    corner = ' rx="1.5"' if style.outline else ""  # rounded corners would leave seams between stacked bars
    place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0.5))}" height="{_n(max(height, 0.5))}"{corner}'
    stroke = f' stroke="{style.outline}" stroke-width="{_n(style.outline_px)}"' if style.outline else ""
    hatch = f'<rect {place} fill="url(#{_hatch_id(style.hatch, style.ink)})"/>' if style.hatch else ""
    themed = {NO_FILL: ' class="kv-free"'}.get(style.fill, ' class="kv-edge"' if style.outline == DARK_OUTLINE else "")
    return f'<rect {place} fill="{style.fill}"{stroke}{themed}/>{hatch}'


def _line(frame: _Frame, mark: Line) -> str:
    path, pen = [], "M"
    for x, y in zip(mark.xs, mark.ys, strict=True):
        if x is None or y is None:
            pen = "M"
            continue
        path.append(f"{pen}{_n(frame.x(x))} {_n(frame.y(y))}")
        pen = "L"
    ink = ' class="kv-line"' if mark.colour in (INK, SOFT_INK) else ""
    look = f'fill="none" stroke="{mark.colour}" stroke-width="{_n(mark.width_px)}"{_DASHES[mark.dash]}{ink}'
    end = ""
    if mark.label and mark.xs[-1] is not None and mark.ys[-1] is not None:
        place = f'x="{_n(frame.x(mark.xs[-1]))}" y="{_n(frame.y(mark.ys[-1]) - 8)}" text-anchor="end"'
        end = f'<text {place} font-size="12" class="kv-ink" fill="{INK}">{_escape(mark.label)}</text>'
    return f'<path d="{"".join(path)}" {look}/>{end}'


def _points(frame: _Frame, mark: Points) -> str:
    parts = []
    for i, (x, y) in enumerate(zip(mark.xs, mark.ys, strict=True)):
        note = f"<title>{_escape(cut(mark.notes[i], 300))}</title>" if mark.notes else ""
        shape = _symbol(mark.symbol, frame.x(x), frame.y(y))
        parts.append(f'<g fill="{mark.colour}" stroke="{DARK_OUTLINE}">{note}{shape}</g>')
        if mark.texts:
            place = f'x="{_n(frame.x(x))}" y="{_n(frame.y(y) - 10)}" text-anchor="middle"'
            parts.append(f'<text {place} font-size="11" class="kv-ink" fill="{INK}">{_escape(mark.texts[i])}</text>')
    return "".join(parts)


def _heat(frame: _Frame, mark: Heat) -> str:
    """One path a level on a grid of whole numbers, equal neighbours in a row as one stroke: a tenth of a rectangle a cell."""
    paths: dict[int, list[str]] = {}
    for index, row in enumerate(mark.levels):
        start = 0
        for level, cells in groupby(row):
            length = len(list(cells))
            paths.setdefault(level, []).append(f"M{start} {index}h{length}")
            start += length
    x, y = frame.x(mark.x0), frame.y(mark.y0)
    dx, dy = (frame.x(mark.x1) - x) / len(mark.levels[0]), (frame.y(mark.y1) - y) / len(mark.levels)
    drawn = (f'<path d="{"".join(parts)}" stroke="{HEAT[level]}"/>' for level, parts in sorted(paths.items()))
    place = f"translate({_n(x)} {_n(y + dy / 2)}) scale({dx:.4f} {dy:.4f})"
    return f'<g shape-rendering="crispEdges" transform="{place}">{"".join(drawn)}</g>'


def _bitmap(frame: _Frame, mark: Bitmap) -> str:
    """Pixels stay squares, whatever the scale."""
    x0, x1 = sorted((frame.x(mark.x0), frame.x(mark.x1)))
    y0, y1 = sorted((frame.y(mark.y0), frame.y(mark.y1)))
    place = f'x="{_n(x0)}" y="{_n(y0)}" width="{_n(x1 - x0)}" height="{_n(y1 - y0)}"'
    look = 'preserveAspectRatio="none" style="image-rendering:pixelated"'
    return f'<image {place} {look} href="{mark.uri}"><title>{_escape(cut(mark.alt, 300))}</title></image>'


def _symbol(symbol: str, x: float, y: float) -> str:
    if symbol == "circle":
        return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="5"/>'
    paths = {"square": "m-4.5 -4.5h9v9h-9z", "diamond": "m0 -6l6 6l-6 6l-6 -6z", "triangle": "m-5.5 -5h11l-5.5 9z"}
    return f'<path d="M{_n(x)} {_n(y)}{paths[symbol]}"/>'


def _label(frame: _Frame, mark: Label) -> str:
    place = f'x="{_n(frame.x(mark.x))}" y="{_n(frame.y(mark.y) + 4)}" text-anchor="{mark.anchor}"'
    return f'<text {place} font-size="12" class="kv-ink" fill="{INK}">{_escape(mark.text)}</text>'


def _text_block(lines: list[str], x: float, y: float, size: int, step: int, name: str, fill: str, more: str = "") -> str:
    spans = "".join(f'<tspan x="{_n(x)}" y="{_n(y + i * step)}">{_escape(line)}</tspan>' for i, line in enumerate(lines))
    return f'<text font-size="{size}" class="{name}" fill="{fill}"{more}>{spans}</text>' if lines else ""


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _escape(text: str) -> str:
    return html.escape(printable(text))
