"""A progress bar on everything that takes over a second."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def is_static() -> bool:
    """True in a static build (``KVLAB_STATIC=1``), where nothing live may be drawn."""
    return os.environ.get("KVLAB_STATIC") == "1"


def progress(iterable: Iterable[T], label: str, *, total: float | None = None, unit: str = "it") -> Iterator[T]:
    """Yield the items of ``iterable`` under a tqdm bar on stderr; silent in a static build.

    >>> list(progress([1, 2], "counting"))
    [1, 2]
    """
    if is_static():
        yield from iterable
        return
    from tqdm.auto import tqdm

    yield from tqdm(iterable, desc=label, total=total, unit=unit, leave=False, delay=1.0)
