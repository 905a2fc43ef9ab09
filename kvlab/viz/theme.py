"""Colours, hatches and the plotly template: one look for every figure, told apart without colour too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LIVE, CACHED, SHARED, EVICTED, LAST = "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#E69F00"
INK, SOFT_INK, GRID, PAPER = "#1f2430", "#5b6270", "#e3e6eb", "#ffffff"
FREE_OUTLINE, DARK_OUTLINE, NO_FILL, PALE = "#c3c8d0", "#1f2430", "#f7f8fa", "#d7dbe2"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

#: Magnitudes from low to high: cividis, which reads without colour too.
HEAT = ("#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838")

#: Signed differences from most negative to most positive: blue to orange, paper at zero.
SIGNED = (
    "#0072B2",
    "#3a91c3",
    "#73b0d4",
    "#a9cde4",
    "#d5e6f2",
    "#ffffff",
    "#f9e0cf",
    "#f2bf9d",
    "#ea9c68",
    "#e07a34",
    "#D55E00",
)


@dataclass(frozen=True)
class Style:
    """How one kind of mark looks. ``hatch``: "" | "/" | "\\\\" | "x" | "." | "-", the names plotly uses."""

    name: str
    fill: str
    outline: str = ""
    outline_px: float = 1.0
    hatch: str = ""

    @property
    def ink(self) -> str:
        """Text colour that reads on the fill."""
        return ink_on(self.fill)


def ink_on(fill: str) -> str:
    """Return white or black, whichever contrasts more with ``fill``.

    >>> ink_on("#0072B2"), ink_on("#E69F00")
    ('#ffffff', '#000000')
    """
    light = luminance(fill)
    return "#ffffff" if 1.05 / (light + 0.05) >= (light + 0.05) / 0.05 else "#000000"


def luminance(colour: str) -> float:
    """Relative luminance (0 black, 1 white) of a ``#rrggbb`` colour."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


STATES = {
    "live": Style("live: in use", LIVE),
    "shared": Style("shared: in use and reusable", SHARED, DARK_OUTLINE, 1.5, "x"),
    "cached": Style("cached: reusable later", CACHED, hatch="/"),
    "free": Style("free", NO_FILL, FREE_OUTLINE),
}
SINK = Style("page 0, the sink", GRID, FREE_OUTLINE, hatch="-")
STATE_ORDER = ("live", "shared", "cached", "free")

SERVED = Style("served from the cache", CACHED)
LAST_PAGE = Style("last page, recomputed", LAST, DARK_OUTLINE)
COMPUTED = Style("computed", LIVE, hatch="/")

#: cause of a computed prompt token -> its look; rare ones share one grey (cause_style)
CAUSES = {
    "never_seen": Style("never seen", LIVE),
    "short_prefix": Style("shares less than a page", "#56B4E9", hatch="."),
    "diverged": Style("diverged", SHARED, hatch="/"),
    "evicted": Style("evicted", EVICTED, hatch="x"),
    "last_page_cap": LAST_PAGE,
    "other_root": Style("other root", "#999999", hatch="\\"),
    "opted_out": Style("opted out", PALE, DARK_OUTLINE, hatch="/"),
    "no_keys": Style("no keys", PALE, DARK_OUTLINE, hatch="."),
    "gate_refused": Style("gate refused", EVICTED, hatch="-"),
}


def cause_style(cause: str) -> Style:
    """Return the look of a miss cause; rare causes share one grey and differ by their label."""
    return CAUSES.get(cause, Style(cause.replace("_", " "), PALE, DARK_OUTLINE))


def plotly_template() -> dict[str, Any]:
    """Return the template ``kvlab``: small, and with its own paper, so that it reads on a dark page too."""
    axis = {
        "gridcolor": GRID, "linecolor": SOFT_INK, "zeroline": False, "showline": False, "ticks": "",
        "title": {"font": {"size": 12, "color": SOFT_INK}}, "tickfont": {"size": 11, "color": SOFT_INK},
    }  # fmt: skip
    return {
        "layout": {
            "font": {"family": FONT, "size": 12, "color": INK},
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
            "title": {"x": 0.0, "xanchor": "left", "xref": "container", "pad": {"l": 16}, "font": {"size": 15}},
            "barmode": "overlay",
            "uniformtext": {"mode": "hide", "minsize": 8},  # no text rather than one too small to read
            "modebar": {"orientation": "v", "remove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]},
            "hoverlabel": {"align": "left"},
            "xaxis": axis,
            "yaxis": axis,
        }
    }
