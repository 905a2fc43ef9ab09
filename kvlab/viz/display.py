"""From panels to what Jupyter shows: plotly JSON, a figure, and bundles that also carry an SVG and a sentence."""

from __future__ import annotations

import base64
import functools
import html
import io
import json
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from kvlab.errors import missing_extra
from kvlab.lab.results import RequestRow, printable
from kvlab.viz.given import require_panel
from kvlab.viz.marks import Axis, Bitmap, Heat, Line, Mark, Panel, Points, Rects, cut
from kvlab.viz.static import SUBTITLE_WIDTH, TITLE_WIDTH, as_svg, wrap
from kvlab.viz.theme import DARK_OUTLINE, HEAT, INK, SOFT_INK, Style, plotly_template

PLOTLY_MIME = "application/vnd.plotly.v1+json"
MANY_NUMBERS = 100
_SYMBOLS = {"circle": "circle", "square": "square", "diamond": "diamond", "triangle": "triangle-down"}
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def as_figure(panel: Panel) -> Any:
    """Return ``panel`` as a ``plotly.graph_objects.Figure`` that shows itself with an SVG and a sentence beside it."""
    require_panel(panel, Panel)
    return _figure_class()(plotly_json(panel), panel)


@functools.cache
def _figure_class() -> type:
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise missing_extra("plotly", "lab", "to draw figures") from error

    class Figure(go.Figure):
        """A plotly figure that remembers the panel it was drawn from until someone changes the figure."""

        # Jupyter asks these before the bundle, and plotly's answers carry no SVG
        _ipython_display_ = None
        _repr_html_ = None

        def __init__(self, data: dict[str, Any], panel: Panel) -> None:
            super().__init__(data)
            self._panel, self._drawn = panel, self.to_dict()

        def __reduce__(self) -> Any:
            return go.Figure, (self.to_dict(),)  # a copy is a plain figure

        def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **options: Any) -> dict[str, Any]:
            if self.to_dict() != self._drawn:  # changed by hand: our SVG would tell another story
                return {PLOTLY_MIME: json.loads(self.to_json())}
            return mimebundle(self._panel)

        def __repr__(self) -> str:
            return f"Figure({cut(self._panel.title, 100)!r})"

    return Figure


def mimebundle(panel: Panel) -> dict[str, Any]:
    """Return the panel for every front end: plotly JSON where it is live, SVG where it is not, a sentence at least.

    A panel with pictures has no plotly part, which would carry every picture a second time.
    """
    require_panel(panel, Panel)
    both = {"image/svg+xml": as_svg(panel), "text/plain": panel.sentence}
    return both if has_bitmaps(panel) else {PLOTLY_MIME: plotly_json(panel)} | both


def has_bitmaps(panel: Panel) -> bool:
    """True when the panel shows pictures."""
    return any(isinstance(mark, Bitmap) for mark in panel.marks)


def request_bundle(result: Any) -> dict[str, Any]:
    """Return the picture a request made, or how its prompt was served, as a bundle whose text is the result's own repr.

    Args:
        result: a RequestRow, or what ``engine.generate`` returned.
    """
    from kvlab.viz.hits import misses_panel

    image = getattr(result, "image", None)
    if image is not None:
        return {"image/png": _png(image), "text/plain": repr(result)}
    row = result if isinstance(result, RequestRow) else RequestRow.of(result)
    return mimebundle(misses_panel([row])) | {"text/plain": repr(result)}


def _png(image: Any) -> str:
    """Return a PIL image as Jupyter wants a PNG."""
    written = io.BytesIO()
    image.save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode("ascii")


def bundle_of(drawing: Any) -> dict[str, Any]:
    """Return the mimebundle of anything a drawing function may return."""
    if isinstance(drawing, Panel):
        return mimebundle(drawing)
    if hasattr(drawing, "_repr_mimebundle_"):
        bundle = drawing._repr_mimebundle_()
        return dict(bundle[0] if isinstance(bundle, tuple) else bundle)
    bundle = {"text/plain": repr(drawing)}
    if hasattr(drawing, "_repr_html_"):
        bundle["text/html"] = drawing._repr_html_()
    return bundle


# -- plotly JSON -------------------------------------------------------------------------------------------------------


def _words(text: str) -> str:
    """Plotly reads markup in every text: what is text shall stay text."""
    return html.escape(printable(text), quote=False)


def plotly_json(panel: Panel) -> dict[str, Any]:
    """Return the figure as plotly's JSON; needs no plotly."""
    traces: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for mark in panel.marks:
        _add_mark(mark, traces, annotations)
    traces += [_legend_trace(style) for style in panel.legend]
    title_lines, subtitle_lines = _title_lines(panel)
    top = 20 + 20 * len(title_lines) + 16 * len(subtitle_lines) + 22 * _legend_rows(panel)
    layout = {
        "template": plotly_template(),
        "title": {"text": _title_html(title_lines, subtitle_lines), "y": 1, "yref": "container", "yanchor": "top",
                  "pad": {"t": 14, "l": 16}},
        "xaxis": _axis_json(panel.x),
        "yaxis": _axis_json(panel.y),
        "height": panel.plot_height_px + top + 56,
        "margin": {"l": _left_margin(panel), "r": 40, "t": top, "b": 56},
        "showlegend": bool(panel.legend),
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "itemclick": False, "itemdoubleclick": False},
        "annotations": annotations,
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _title_lines(panel: Panel) -> tuple[list[str], list[str]]:
    return wrap(panel.title, TITLE_WIDTH), wrap(panel.subtitle, SUBTITLE_WIDTH)


def _title_html(title: list[str], subtitle: list[str]) -> str:
    head = "<br>".join(f"<b>{_words(line)}</b>" for line in title)
    size = f"<span style='font-size:12px;color:{SOFT_INK}'>"
    return head + "".join(f"<br>{size}{_words(line)}</span>" for line in subtitle)


def _legend_rows(panel: Panel) -> int:
    """Rows that plotly needs: it gives every entry the width of the widest."""
    widest = max((len(style.name) for style in panel.legend), default=0)
    a_row = max(1, int((panel.width_px - _left_margin(panel) - 40) // (6.5 * widest + 48)))
    return -(-len(panel.legend) // a_row)


def _left_margin(panel: Panel) -> int:
    widest = max((len(text) for _, text in panel.y.ticks), default=0)
    return int(min(260, 24 + 6.6 * widest + (22 if panel.y.title else 0)))


def _axis_json(axis: Axis) -> dict[str, Any]:
    return {
        "title": {"text": _words(axis.title)},
        "range": [axis.high, axis.low] if axis.flipped else [axis.low, axis.high],
        "tickvals": [value for value, _ in axis.ticks],
        "ticktext": [_words(text) for _, text in axis.ticks],
        "showgrid": axis.grid,
    }


def _add_mark(mark: Mark, traces: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> None:
    if isinstance(mark, Rects):
        traces.append(_rects_trace(mark))
    elif isinstance(mark, Line):
        traces.append(_line_trace(mark))
        annotations += _line_label(mark)
    elif isinstance(mark, Points):
        traces.append(_points_trace(mark))
    elif isinstance(mark, Heat):
        traces.append(_heat_trace(mark))
    elif isinstance(mark, Bitmap):
        traces.append(_bitmap_trace(mark))
    else:
        annotations.append(_annotation(mark.x, mark.y, mark.text, _ANCHORS[mark.anchor]))


def _rects_trace(mark: Rects) -> dict[str, Any]:
    """Bars with a base draw any rectangle in axis units, and one trace is one update."""
    rects = mark.rects
    return {
        "type": "bar",
        "x": [(r.x0 + r.x1) / 2 for r in rects],
        "width": _one_or_all([round(r.x1 - r.x0, 6) for r in rects]),
        "base": [r.y0 for r in rects],
        "y": [r.y1 - r.y0 for r in rects],
        "text": [_words(r.text) for r in rects],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {
            "color": _one_or_all([r.style.ink for r in rects]),
            "size": 12,
            "shadow": _one_or_all([_rim(r.style) for r in rects]),
        },
        "hovertext": _one_or_all([_words(cut(r.note, 300)) for r in rects]),
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": _bar_marker([r.style for r in rects]),
        "showlegend": False,
    }


def _one_or_all(values: list[Any]) -> Any:
    """What is the same for all is said once: a map of pages would be a third larger."""
    return values[0] if len(set(values)) == 1 else values


def _rim(style: Style) -> str:
    """On a hatch, letters stand on a rim of the fill."""
    return ", ".join([f"0 0 3px {style.fill}"] * 4) if style.hatch else "none"


def _bar_marker(styles: Sequence[Style]) -> dict[str, Any]:
    marker: dict[str, Any] = {
        "color": _one_or_all([s.fill for s in styles]),
        "line": {
            "color": _one_or_all([s.outline or s.fill for s in styles]),
            "width": _one_or_all([s.outline_px if s.outline else 0 for s in styles]),
        },
    }
    if any(s.hatch for s in styles):
        marker["pattern"] = {
            "shape": _one_or_all([s.hatch for s in styles]),
            "fgcolor": _one_or_all([s.ink for s in styles]),
            "fgopacity": 0.4, "size": 7, "solidity": 0.2, "fillmode": "overlay",
        }  # fmt: skip
    return marker


def _legend_trace(style: Style) -> dict[str, Any]:
    marker = _bar_marker([style])
    return {
        "type": "bar",
        "x": [None],
        "y": [None],
        "name": _words(style.name),
        "marker": marker,
        "showlegend": True,
        "hoverinfo": "skip",
    }


def _line_trace(mark: Line) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "x": _numbers(mark.xs), "y": _numbers(mark.ys), "name": _words(mark.label),
        "line": {"color": mark.colour, "dash": mark.dash, "width": mark.width_px},
        "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip


def _numbers(values: Sequence[float | None]) -> Any:
    """Many numbers as bytes: a notebook writes each number of a list on a line of its own."""
    whole = [value for value in values if value is not None]
    return _packed("f", whole) if len(whole) == len(values) > MANY_NUMBERS else list(values)


def _packed(code: str, values: Sequence[float], num_rows: int = 0) -> dict[str, Any]:
    """Return numbers as plotly's typed arrays; ``code`` is that of the array module, of signed bytes or of 32-bit floats."""
    numbers = array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    packed = {"dtype": {"b": "i1", "f": "f4"}[code], "bdata": base64.b64encode(numbers.tobytes()).decode()}
    return packed | ({"shape": f"{num_rows}, {len(values) // num_rows}"} if num_rows else {})


def _line_label(mark: Line) -> list[dict[str, Any]]:
    if not mark.label or mark.xs[-1] is None or mark.ys[-1] is None:
        return []
    return [_annotation(mark.xs[-1], mark.ys[-1], mark.label, "right", mark.colour, lift=10)]


def _annotation(x: float, y: float, text: str, anchor: str, colour: str = INK, lift: int = 0) -> dict[str, Any]:
    return {
        "x": x, "y": y, "text": _words(text), "xanchor": anchor, "yanchor": "middle", "showarrow": False,
        "yshift": lift, "font": {"size": 12, "color": colour},
    }  # fmt: skip


def _points_trace(mark: Points) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers+text" if mark.texts else "markers",
        "x": list(mark.xs),
        "y": list(mark.ys),
        "name": _words(mark.label),
        "marker": {
            "color": mark.colour,
            "symbol": _SYMBOLS[mark.symbol],
            "size": 10,
            "line": {"color": DARK_OUTLINE, "width": 1},
        },
        "hovertext": [_words(cut(n, 300)) for n in mark.notes],
        "hovertemplate": "%{hovertext}<extra></extra>" if mark.notes else "%{x}, %{y}<extra></extra>",
        "showlegend": False,
        "cliponaxis": False,
    }
    if mark.texts:
        trace |= {"text": [_words(t) for t in mark.texts], "textposition": "top center"}
    return trace


def _heat_trace(mark: Heat) -> dict[str, Any]:
    dx, dy = (mark.x1 - mark.x0) / len(mark.levels[0]), (mark.y1 - mark.y0) / len(mark.levels)
    return {
        "type": "heatmap", "z": _packed("b", [level for row in mark.levels for level in row], len(mark.levels)),
        "x0": mark.x0 + dx / 2, "dx": dx, "y0": mark.y0 + dy / 2, "dy": dy,
        "zmin": 0, "zmax": len(HEAT) - 1, "colorscale": [[i / (len(HEAT) - 1), colour] for i, colour in enumerate(HEAT)],
        "showscale": False, "hoverinfo": "skip",
    }  # fmt: skip


def _bitmap_trace(mark: Bitmap) -> dict[str, Any]:
    dx, dy = (mark.x1 - mark.x0) / mark.columns, (mark.y1 - mark.y0) / mark.rows
    return {
        "type": "image", "source": mark.uri, "x0": mark.x0 + dx / 2, "dx": dx, "y0": mark.y0 + dy / 2, "dy": dy,
        "name": _words(cut(mark.alt, 300)), "hoverinfo": "name+color",
    }  # fmt: skip
