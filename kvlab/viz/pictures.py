"""Pictures side by side, the map of where they differ, and the pixels that moved by more than a threshold."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.errors import InputError, missing_extra
from kvlab.lab.picture_results import FAR, FULL, DifferenceMap, Picture, PixelDrift
from kvlab.lab.results import Table
from kvlab.viz.display import as_figure
from kvlab.viz.given import require_rows
from kvlab.viz.marks import Axis, Bitmap, Label, Mark, Panel, cut
from kvlab.viz.theme import DARK_OUTLINE, HEAT, LAST, SIGNED, SOFT_INK, Style

Shown = Picture | DifferenceMap

MAX_PICTURES = 6
_LEAST_PLACES = 3  # a single picture is drawn no larger than a third of the figure
_GAP = 0.07  # between pictures, in widths of one
_NAME_PX = 26  # above each picture
_INNER_PX = 712  # of a figure, between its margins


@dataclass(frozen=True)
class _Tile:
    name: str
    png: bytes
    alt: str


# -- side by side ------------------------------------------------------------------------------------------------------


def pictures(shown: Sequence[Shown], title: str = "", *, subtitle: str = "", drift: PixelDrift | None = None) -> Any:
    """Draw pictures and difference maps in a row, as a plotly figure. Arguments: ``pictures_panel``."""
    return as_figure(pictures_panel(shown, title, subtitle=subtitle, drift=drift))


def pictures_panel(shown: Sequence[Shown], title: str = "", *, subtitle: str = "", drift: PixelDrift | None = None) -> Panel:
    """Return the figure of ``pictures`` as a panel.

    Args:
        shown: one to six, of one shape. Maps are drawn on one scale, that of the largest difference in any of them.
        title: the finding; the verdict of ``drift`` when there is none.
        drift: what differs, for title and table.

    Raises:
        InputError: none or too many, or shapes that differ.
        MissingExtraError: Pillow is not installed.
    """
    size = _size_of_all(shown)
    maps = [one for one in shown if isinstance(one, DifferenceMap)]
    most = max((one.max_abs for one in maps), default=0)
    return _row_of(
        [_tile(one, most) for one in shown],
        size,
        title=title or (_sentence(drift.verdict) if drift else ", ".join(cut(one.name, 40) for one in shown)),
        subtitle=subtitle or _scale_words(shown, most),
        legend=tuple(_scale(maps, most)),
        table=None if drift is None else drift_table([drift]),
    )


def _row_of(tiles: Sequence[_Tile], size: tuple[int, int], **said: Any) -> Panel:
    """Tiles of ``size`` (columns, rows) from left to right, each under its name; the unit of both axes is a pixel of a tile."""
    columns, rows = size
    places = max(len(tiles), _LEAST_PLACES)
    width = places * columns * (1 + _GAP)
    room = _NAME_PX * width / _INNER_PX
    marks: list[Mark] = []
    for index, tile in enumerate(tiles):
        left = index * columns * (1 + _GAP)
        marks.append(Bitmap(left, left + columns, 0, rows, tile.png, columns, rows, tile.alt))
        marks.append(Label(left, -room / 2, cut(tile.name, 105 // places)))
    return Panel(
        x=Axis("", 0, width, grid=False),
        y=Axis("", -room, rows, grid=False, flipped=True),
        marks=tuple(marks),
        plot_height_px=round(_INNER_PX / width * (rows + room)),
        **said,
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _size_of_all(shown: Sequence[Shown]) -> tuple[int, int]:
    for one in shown:
        if not isinstance(one, Picture | DifferenceMap):
            raise InputError(
                f"a {type(one).__name__} is to be drawn; make a picture with lab.pixels.to_draw, or a difference_map"
            )
    if not 1 <= len(shown) <= MAX_PICTURES:
        raise InputError(f"{len(shown)} pictures to draw in a row; give 1 to {MAX_PICTURES}")
    sizes = {_size(one) for one in shown}
    if len(sizes) > 1:
        raise InputError(f"the pictures are of {' and '.join(f'{c} x {r}' for c, r in sorted(sizes))} pixels; give equal ones")
    return sizes.pop()


def _size(one: Shown) -> tuple[int, int]:
    """Columns and rows."""
    if isinstance(one, Picture):
        return one.width, one.height
    return (len(one.values[0]) if one.values else 0), len(one.values)


def _tile(one: Shown, most: int) -> _Tile:
    if isinstance(one, Picture):
        return _Tile(one.name, picture_png(one), f"picture: {one.name}")
    return _Tile(one.name, map_png(one, most), f"map: {one.name}, at most {one.max_abs} of {FULL}")


def _scale_words(shown: Sequence[Shown], most: int) -> str:
    maps = [one for one in shown if isinstance(one, DifferenceMap)]
    parts = []
    if maps:
        how = "second minus first" if maps[0].is_signed else "the larger the brighter"
        scale = f"the channel furthest off, {how}, up to {most} of {FULL}" if most else "nothing differs"
        parts.append(f"Difference map: {scale}")
    larger = max((one.shrunk if isinstance(one, Picture) else one.cell_px for one in shown), default=1)
    if larger > 1:
        parts.append(f"drawn {larger} times smaller; a map shows the largest difference of {larger} x {larger} pixels")
    return "; ".join(parts)


# -- scales ------------------------------------------------------------------------------------------------------------


def level_of(value: int, most: int) -> int:
    """Return the index in theme.HEAT of a magnitude: 0 only for 0, the last for ``most``.

    >>> [level_of(value, 30) for value in (0, 1, 15, 30)]
    [0, 1, 5, 9]
    """
    return 0 if most == 0 else -(-value * (len(HEAT) - 1) // most)


def signed_level_of(value: int, most: int) -> int:
    """Return the index in theme.SIGNED of a signed difference: the middle only for 0.

    >>> [signed_level_of(value, 30) for value in (-30, -1, 0, 1, 30)]
    [0, 4, 5, 6, 10]
    """
    middle = len(SIGNED) // 2
    size = 0 if most == 0 else -(-abs(value) * middle // most)
    return middle + (size if value > 0 else -size)


def _scale(maps: Sequence[DifferenceMap], most: int) -> Iterator[Style]:
    """A few looks of the maps with what they stand for."""
    if not maps:
        return
    is_signed = maps[0].is_signed
    values = {0, most, most // 2} | ({-most, -(most // 2)} if is_signed else set())
    for value in sorted(values):
        fill = SIGNED[signed_level_of(value, most)] if is_signed else HEAT[level_of(value, most)]
        sign = "+" if is_signed and value > 0 else ""
        yield Style(f"{sign}{value}".replace("-", "−"), fill, SOFT_INK)


# -- what moved --------------------------------------------------------------------------------------------------------


def moved_pixels(first: Picture, second: Picture, apart: DifferenceMap, drift: PixelDrift, threshold: int = FAR) -> Any:
    """Draw two pictures and the pixels that differ by more than a threshold. Arguments: ``moved_pixels_panel``."""
    return as_figure(moved_pixels_panel(first, second, apart, drift, threshold))


def moved_pixels_panel(first: Picture, second: Picture, apart: DifferenceMap, drift: PixelDrift, threshold: int = FAR) -> Panel:
    """Return the figure of ``moved_pixels`` as a panel.

    Args:
        apart: the map of their differences.
        drift: counts over all pixels, for title and table.
        threshold: of 255; pixels of which a channel differs by more are marked.

    Raises:
        InputError: shapes that differ, or a threshold that is none.
    """
    share = drift.share_over(threshold)
    size = _size_of_all([first, second, apart])
    alt = f"{second.name} in grey, with the pixels that differ by more than {threshold} marked"
    mask = _Tile(f"moved by more than {threshold}", _mask_png(second, apart, threshold), alt)
    return _row_of(
        [_tile(first, 0), _tile(second, 0), mask],
        size,
        title=f"{share:.2%} of {drift.num_pixels} pixels differ by more than {threshold} of {FULL}",
        subtitle=_sentence(drift.verdict),
        legend=(Style(f"pixels over {threshold}", LAST, DARK_OUTLINE),),
        table=drift_table([drift], (0, threshold, FAR)),
    )


def drift_table(drifts: Sequence[PixelDrift], thresholds: Sequence[int] = (0, 1, 8, FAR)) -> Table:
    """Return equality first, then the largest difference, then shares of pixels over thresholds."""
    require_rows(drifts, PixelDrift)
    shares = sorted(set(thresholds))
    columns = ("pair", "pixels", "equal", "largest of 255", *(f"over {t}" for t in shares), "PSNR, dB")
    body = [
        (d.name, d.num_pixels, d.equal_pixels, d.max_abs, *(f"{d.share_over(t):.2%}" for t in shares), d.psnr_db)
        for d in drifts
    ]
    return Table(columns, body, "What differs between two pictures")


# -- PNG ---------------------------------------------------------------------------------------------------------------


def picture_png(picture: Picture) -> bytes:
    """Return a picture as a PNG."""
    image = _pillow().frombytes("RGB", (picture.width, picture.height), picture.rgb)
    return _encoded(image)


def map_png(apart: DifferenceMap, most: int | None = None) -> bytes:
    """Return a difference map in the colours of the theme; ``most`` is what the last colour stands for."""
    top = apart.max_abs if most is None else most
    level, colours = (signed_level_of, SIGNED) if apart.is_signed else (level_of, HEAT)
    image = _pillow().frombytes("P", _size(apart), bytes(level(value, top) for row in apart.values for value in row))
    image.putpalette(b"".join(map(_rgb, colours)))
    return _encoded(image)


def _mask_png(picture: Picture, apart: DifferenceMap, threshold: int) -> bytes:
    pillow = _pillow()
    size = picture.width, picture.height
    grey = pillow.frombytes("RGB", size, picture.rgb).convert("L").point(lambda v: 90 + v * 165 // FULL).convert("RGB")
    over = bytes(FULL * (abs(value) > threshold) for row in apart.values for value in row)
    marked = pillow.new("RGB", size, tuple(_rgb(LAST)))
    return _encoded(pillow.composite(marked, grey, pillow.frombytes("L", size, over)))


def _rgb(colour: str) -> bytes:
    return bytes.fromhex(colour[1:])


def _encoded(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("Pillow", "bagel", "to draw pictures") from error
    return Image
