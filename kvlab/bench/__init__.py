"""What ``kvlab bench`` measures: ours against a reference, interleaved in one run, as ratios."""

from __future__ import annotations

from kvlab.bench.rows import Row, document, interleave, machine_facts

__all__ = ["Row", "document", "interleave", "machine_facts"]
