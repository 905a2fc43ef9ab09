"""What a KV resource counts beside the index's own counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class KVCounters:
    """Running totals since the resource was made.

    ``probes`` = prompts looked up, each try counted; ``hits`` = those admitted with pages lent, and ``matched_*`` what was
    lent to them. ``offloads`` and ``reloads`` count requests, ``dropped_commits`` steps whose stream went to the
    host under them. ``host_hits`` = hits for which cached pages came back from the host, ``host_matched_pages`` of
    ``matched_pages``; ``host_kept_pages`` went there when they were evicted, and ``host_dropped_pages`` had to leave again.
    ``ends_kept`` copies of pages cut at a picture's end were filed, and ``ends_lent`` times one was copied for a repeat.
    ``resumed_tokens`` were found again by requests that had been sent back, and are no hits. ``chains_ended`` counts by reason.
    """

    probes: int = 0
    prompts_admitted: int = 0
    hits: int = 0
    matched_pages: int = 0
    matched_tokens: int = 0
    committed_tokens: int = 0
    refused_admits: int = 0
    offloads: int = 0
    offloaded_pages: int = 0
    reloads: int = 0
    dropped_commits: int = 0
    host_hits: int = 0
    host_matched_pages: int = 0
    host_kept_pages: int = 0
    host_dropped_pages: int = 0
    ends_kept: int = 0
    ends_lent: int = 0
    resumed_tokens: int = 0
    chains_ended: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return a copy as plain values."""
        return {**vars(self), "chains_ended": dict(self.chains_ended)}
