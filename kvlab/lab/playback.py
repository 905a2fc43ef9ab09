"""Play a workload against an engine: who completed, who did not, and whether anything was wrong, stuck or lost."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import StallError
from kvlab.events import PageEvicted, Stalled
from kvlab.lab.workloads import WorkItem
from kvlab.progress import progress

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine
    from kvlab.engine.handle import RequestHandle
    from kvlab.engine.request import GenerationResult

Verify = Callable[["GenerationResult"], bool]


@dataclass
class PlayReport:
    """What came of a workload. ``stall`` is None, or the facts of the stall that ended it."""

    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    resumed_from_file: int = 0
    not_run: int = 0
    wrong_values: int = 0
    leaked_pages: int = 0
    preemptions: int = 0
    host_moves: int = 0
    held_steps: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    stall: dict[str, Any] | None = None

    @property
    def is_clean(self) -> bool:
        """True when nothing stalled, was wrong, or leaked."""
        return self.stall is None and self.wrong_values == 0 and self.leaked_pages == 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class Player:
    """Submits each request at its step and takes its result when it ends.

    Args:
        verify: says whether a completed result is right; None = not checked.
        check_every: steps between checks of every invariant; 0 = never.
        output: JSONL file of results; requests already in it are not run again.
    """

    def __init__(
        self, engine: Engine, *, verify: Verify | None = None, check_every: int = 0, output: Path | None = None
    ) -> None:
        self._engine, self._verify, self._check_every, self._output = engine, verify, check_every, output
        self._done: dict[str, dict[str, Any]] = _read_results(output)
        self._flying: list[tuple[WorkItem, RequestHandle, int]] = []
        self._step = 0
        self.report = PlayReport(resumed_from_file=len(self._done))

    def play(self, items: Iterable[WorkItem], *, total: int | None = None) -> PlayReport:
        """Run the workload to its end, or to a stall.

        Raises:
            KeyboardInterrupt: what has ended so far is in the output file, and a second call goes on from there.
        """
        try:
            for item in progress(items, "workload", total=total, unit="request"):
                if item.id not in self._done:
                    self._wait_for(item)
                    self._submit(item)
            while self._flying:
                self._advance()
        except StallError as error:
            self._note_stall(error)
        finally:
            self._close()
        return self.report

    def _wait_for(self, item: WorkItem) -> None:
        while self._step < item.at_step or (item.follows is not None and item.follows not in self._done):
            if item.follows is not None and item.follows not in self._done and not self._flying:
                return  # what it follows was never run; _submit says so
            if not self._flying:
                self._step = item.at_step
                return
            self._advance()

    def _submit(self, item: WorkItem) -> None:
        prompt: Any = list(item.ids)
        if item.follows is not None:
            before = self._done.get(item.follows)
            if before is None or before["reason"] == "error":
                self.report.not_run += 1
                return
            prompt = [*before["prompt_ids"], *before["ids"], *item.ids]
        options = {"max_tokens": item.max_tokens, "seed": item.seed, "temperature": item.temperature, "ignore_eos": True}
        self._flying.append((item, self._engine.submit(prompt, name=item.id, **options), self._step))

    def _advance(self) -> None:
        self._engine.step()
        self._step += 1
        for item, handle, since in self._flying:
            if item.cancel_after is not None and self._step - since >= item.cancel_after:
                handle.cancel()
        ended = [(item, handle.outcome) for item, handle, _ in self._flying if handle.outcome is not None]
        if ended:
            self._flying = [entry for entry in self._flying if not entry[1].done]
            for item, result in ended:
                self._take(item, result)
        if self._check_every and self._step % self._check_every == 0:
            self._engine.check()

    def _take(self, item: WorkItem, result: Any) -> None:
        report = self.report
        is_right = result.error is None and (self._verify is None or self._verify(result))
        outcome = {"cancelled": "cancelled", "error": "failed", "deadline": "failed"}.get(result.finish_reason, "completed")
        setattr(report, outcome, getattr(report, outcome) + 1)
        report.wrong_values += result.error is None and not is_right
        report.preemptions += result.preemptions
        report.host_moves += result.offloads
        report.held_steps += result.held_steps
        report.cached_tokens += result.cached_tokens
        report.prompt_tokens += result.prompt_tokens
        row = {"id": item.id, "reason": result.finish_reason, "prompt_ids": result.prompt_ids, "ids": result.ids}
        self._done[item.id] = row
        if self._output is not None:
            with open(self._output, "a", encoding="utf-8", newline="\n") as f:
                f.write(json.dumps(row | {"cached_tokens": result.cached_tokens, "error": str(result.error or "")}) + "\n")

    def _note_stall(self, error: StallError) -> None:
        facts: dict[str, Any] = {"message": str(error), "step": self._step}
        if self._engine.recorder is not None:
            for entry in self._engine.recorder.filter(Stalled)[-1:]:
                facts |= asdict(entry.event)
        self.report.stall = facts
        for item, handle, _ in self._flying:
            if handle.outcome is not None:
                self._take(item, handle.outcome)

    def _close(self) -> None:
        for _, handle, _ in self._flying:
            handle.cancel()
        self._flying = []
        self._engine.check()
        kv = self._engine.kv
        indexed = 0 if kv.index is None else len(kv.index)
        self.report.leaked_pages = kv.usable_pages - kv.arena.num_free - indexed
        self.report.steps = self._step
        if self._engine.recorder is not None:
            evicted = Counter(
                "asked" if e.event.for_rid is None else "allocation"  # type: ignore[attr-defined]
                for e in self._engine.recorder.filter(PageEvicted)
            )
            self.report.evictions = dict(evicted)


def _read_results(output: Path | None) -> dict[str, dict[str, Any]]:
    if output is None or not output.exists():
        return {}
    rows = (json.loads(line) for line in output.read_text(encoding="utf-8").splitlines() if line.endswith("}"))
    return {row["id"]: row for row in rows}


@contextmanager
def failing_forwards(model: Any, share: float, seed: int = 0) -> Iterator[Mapping[str, int]]:
    """Let ``share`` of the model's forwards raise, so that one sees what the engine makes of it."""
    draw, real, counts = random.Random(seed), model.forward, {"raised": 0}

    def forward(*args: Any, **kwargs: Any) -> Any:
        if draw.random() < share:
            counts["raised"] += 1
            raise RuntimeError("a fault put in on purpose")
        return real(*args, **kwargs)

    model.forward = forward
    try:
        yield counts
    finally:
        model.forward = real
