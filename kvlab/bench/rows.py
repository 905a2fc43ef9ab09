"""The one form of a measurement: rows of ours against a reference and a target, and the machine they hold for."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from kvlab.progress import progress


@dataclass(frozen=True)
class Row:
    """One measurement. ``ours`` and ``reference`` are in ``unit``; ``ratio`` = ours / reference, None without a reference.

    ``target`` bounds the ratio, or ours where there is no ratio; without one ``ok`` is None. ``spread`` = (max - min) / median
    of ours over the rounds.
    """

    name: str
    ours: float
    reference: float | None
    ratio: float | None
    target: float | None
    ok: bool | None
    unit: str = ""
    spread: float | None = None

    @classmethod
    def of(
        cls,
        name: str,
        ours: Sequence[float],
        reference: Sequence[float] = (),
        *,
        target: float | None,
        unit: str,
        higher_is_better: bool = False,
    ) -> Row:
        """Make a row of the medians of several rounds.

        >>> row = Row.of("t", [3.0, 2.0, 4.0], [2.0, 2.0, 2.0], target=1.6, unit="us")
        >>> row.ours, row.reference, row.ratio, row.ok, row.spread
        (3.0, 2.0, 1.5, True, 0.667)
        """
        mine = median(ours)
        theirs = median(reference) if reference else None
        judged = mine if theirs is None else mine / theirs
        ok = None if target is None else judged >= target if higher_is_better else judged <= target
        spread = (max(ours) - min(ours)) / mine if len(ours) > 1 and mine else None
        return cls(
            name,
            _rounded(mine),
            None if theirs is None else _rounded(theirs),
            None if theirs is None else _rounded(judged),
            target,
            ok,
            unit,
            None if spread is None else _rounded(spread),
        )


def _rounded(value: float) -> float:
    return round(value, 3) if abs(value) < 1000 else round(value)


def take_turns(
    sides: Sequence[Callable[[], float]], rounds: int, *, warm_up: bool = True, label: str = ""
) -> list[list[float]]:
    """Call every side ``rounds`` times in turn, another one first each round, and return what each measured.

    Args:
        sides: Each measures once and returns the number.
        warm_up: One more round first, whose numbers are dropped.
        label: What a progress bar says meanwhile; without it there is none.

    >>> take_turns([lambda: 1.0, lambda: 2.0, lambda: 3.0], rounds=2)
    [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    """
    measured: list[list[float]] = [[] for _ in sides]
    numbers = range(-1 if warm_up else 0, rounds)
    for number in progress(numbers, label, unit="round") if label else numbers:
        order = [(number + 1 + i) % len(sides) for i in range(len(sides))]
        for side in order:
            value = sides[side]()
            if number >= 0:
                measured[side].append(value)
    return measured


def interleave(
    ours: Callable[[], float], reference: Callable[[], float], rounds: int, *, warm_up: bool = True
) -> tuple[list[float], list[float]]:
    """Take turns between two.

    >>> interleave(lambda: 1.0, lambda: 2.0, rounds=2)
    ([1.0, 1.0], [2.0, 2.0])
    """
    mine, theirs = take_turns([ours, reference], rounds, warm_up=warm_up)
    return mine, theirs


def machine_facts() -> dict[str, Any]:
    """What a measurement depends on and a reader cannot know.

    >>> sorted(machine_facts())
    ['cpu', 'cpus', 'platform', 'python']
    """
    return {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {sys.version.split()[0]}",
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"


def document(rows: Iterable[Row], **facts: Any) -> dict[str, Any]:
    """What ``--json`` prints: {"rows": [...], "machine": {...}}; ``facts`` join the machine's."""
    return {"rows": [asdict(row) for row in rows], "machine": machine_facts() | facts}
