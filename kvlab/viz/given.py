"""What a figure is drawn from, checked where it is given: a log of events, rows of one kind, a panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlab.errors import InputError
from kvlab.recorder import Entry, Recorder


def require_events(events: Any) -> None:
    """Check that ``events`` is a log.

    Raises:
        InputError: it is anything else, such as the engine that has one.
    """
    if isinstance(events, Recorder):
        return
    if isinstance(events, str | bytes) or not isinstance(events, Sequence) or not all(isinstance(e, Entry) for e in events):
        raise InputError(
            f"this is drawn from events, and {_kind(events)} was given; give engine.events, or entries of a Recorder"
        )


def require_rows(rows: Any, kind: type, *, least: int = 1) -> None:
    """Check that ``rows`` are at least so many of ``kind``.

    Raises:
        InputError: too few, no list, or something else among them; the message names its place.
    """
    made = f"; make one with {kind.__name__}.of(...)" if hasattr(kind, "of") else ""
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence):
        raise InputError(f"this is drawn from a list of {kind.__name__}, and {_kind(rows)} was given{made}")
    for index, row in enumerate(rows):
        if not isinstance(row, kind):
            raise InputError(f"row {index} is {_kind(row)}, and this is drawn from a list of {kind.__name__}{made}")
    if len(rows) < least:
        raise InputError(f"no rows to draw; give at least one {kind.__name__}")


def require_panel(panel: Any, kind: type) -> None:
    """Raise InputError for what is no panel."""
    if not isinstance(panel, kind):
        raise InputError(f"a panel is needed, and {_kind(panel)} was given; the functions kvlab.viz.*_panel make them")


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"
