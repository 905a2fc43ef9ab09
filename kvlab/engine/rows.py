"""One request's part of a step, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlab.engine.run import Run
from kvlab.engine.sampler import Sampled
from kvlab.spec import Refusal, RetentionPolicy, Segment, Walk, WalkInputs


@dataclass
class Row:
    """One request's part of a step: what runs now, and what later chunks run.

    ``counted``: ids its chain learns of with this step although none was sampled in it.
    """

    run: Run
    now: WalkInputs
    rest: WalkInputs | None
    samples: bool = False
    counted: Sequence[int] = ()

    def segments(self) -> list[Segment]:
        rid = self.run.rid
        texts = [Segment(rid, label, len(ids)) for label, ids in self.now.ids.items()]
        return texts + [Segment(rid, label, b.slots, b.advance, b.prefix) for label, b in self.now.blocks.items()]

    def window(self, walk: Walk) -> RetentionPolicy | None:
        """The window to declare: none of a prompt is released before it is whole, wherever it is cut into chunks."""
        asked = self.run.request.options.window_policy
        if asked is None or walk.loops or self.rest is None:
            return asked
        end = self.run.input_tokens - sum(len(ids) for ids in self.rest.ids.values())
        return replace(asked, context_budget=self.run.input_tokens) if end >= asked.protected_prefix else None


@dataclass
class Outcome:
    """What a step did with each run it was given; ``served`` runs are past the walk without a forward."""

    num_ran: int = 0
    held: list[tuple[Run, Refusal]] = field(default_factory=list)
    failed: list[tuple[Run, Exception]] = field(default_factory=list)
    served: list[Run] = field(default_factory=list)


@dataclass(frozen=True)
class Landed:
    """What a committed row leaves to settle: the token sampled, whether the walk's inputs are all written, main's output."""

    sampled: Sampled | Exception | None = None
    is_whole: bool = True
    output: Any = None
