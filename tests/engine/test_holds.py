"""How often a wait for pages is told."""

from __future__ import annotations

import re

from kvlab.engine.holds import HoldLog


def test_k8_5_a_thousand_refused_tries_in_a_minute_are_a_handful_of_lines():
    now_s = iter(i * 0.06 for i in range(1000))
    lines: list[str] = []
    log = HoldLog(clock=lambda: next(now_s), warn=lines.append)
    for attempt in range(1000):
        log.held("LLM", attempt % 4, 1)
    assert len(lines) <= 5  # one in fifteen seconds
    hidden = [int(n) for line in lines for n in re.findall(r"(\d+) like it were not shown", line)]
    assert len(hidden) == len(lines) - 1
    assert sum(hidden) + len(lines) >= 750  # the rest comes with the next line


def test_each_node_has_a_line_of_its_own():
    lines: list[str] = []
    log = HoldLog(clock=lambda: 0.0, warn=lines.append)
    for node in ("LLM", "LLM", "codec"):
        log.held(node, 1, 1)
    assert [line.split(":")[0] for line in lines] == ["LLM", "codec"]
