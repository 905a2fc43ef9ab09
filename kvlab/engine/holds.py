"""How often a wait for pages is reported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger("kvlab.engine")


@dataclass
class HoldLog:
    """Warns that requests wait for pages: at most one line per node and ``interval_s``, with the number left out.

    >>> lines = []
    >>> log = HoldLog(clock=iter([0.0, 1.0, 2.0, 16.0]).__next__, warn=lines.append)
    >>> for rid in range(4):
    ...     log.held("LLM", rid, 3)
    >>> len(lines), lines[-1].endswith("2 like it were not shown")
    (2, True)
    """

    clock: Callable[[], float]
    interval_s: float = 15.0
    warn: Callable[[str], None] = logger.warning
    _last_s: dict[str, float] = field(default_factory=dict)
    _hidden: dict[str, int] = field(default_factory=dict)

    def held(self, node: str, rid: int | str, pages_short: int) -> None:
        """Report that ``rid`` left a step of ``node`` because it lacks pages."""
        now_s = self.clock()
        if node in self._last_s and now_s - self._last_s[node] < self.interval_s:
            self._hidden[node] = self._hidden.get(node, 0) + 1
            return
        self._last_s[node] = now_s
        hidden = self._hidden.pop(node, 0)
        tail = f"; {hidden} like it were not shown" if hidden else ""
        self.warn(f"{node}: request {rid} waits for {pages_short} more pages{tail}")
