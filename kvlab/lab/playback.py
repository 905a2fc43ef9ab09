"""Play a workload against an engine: who completed, who did not, and whether anything was wrong, stuck or lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvlab.errors import InputError, StallError
from kvlab.events import PageEvicted, Stalled
from kvlab.lab.result_file import ResultFile
from kvlab.lab.workloads import WorkItem
from kvlab.progress import progress

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine
    from kvlab.engine.handle import RequestHandle
    from kvlab.engine.request import GenerationResult

Verify = Callable[["GenerationResult"], bool]


@dataclass
class PlayReport:
    """What came of a workload.

    ``completed``, ``cancelled``, ``failed``, ``resumed_from_file`` and ``not_run`` together are its requests; one still
    queued at a stall was not run. ``stall`` is None, or the facts of the stall that ended it, its sentence as ``message``.
    ``evictions`` counts pages by why they went: "allocation" for a request that needed one, "asked" for none. ``log_error``
    says why an event log is incomplete.
    """

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
    log_error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class Player:
    """Submits each request at its step and takes its result when it ends.

    Args:
        verify: says whether a completed result is right; None = not checked.
        check_every: steps between checks of every invariant; 0 = never.
        results: where results are written; requests already in it are not run again.
    """

    def __init__(
        self, engine: Engine, *, verify: Verify | None = None, check_every: int = 0, results: ResultFile | None = None
    ) -> None:
        self._engine, self._verify, self._check_every, self._results = engine, verify, check_every, results
        self._done: dict[str, Mapping[str, Any]] = {} if results is None else {row["id"]: row for row in results.rows}
        self._flying: list[tuple[WorkItem, RequestHandle, int]] = []
        self._followers: dict[str, list[WorkItem]] = {}  # by what they wait for
        self._step = 0
        self._next_event = 0
        self._evictions: Counter[str] = Counter()
        self.report = PlayReport(resumed_from_file=len(self._done))

    def play(self, items: Iterable[WorkItem], *, total: int | None = None) -> PlayReport:
        """Run the workload to its end, or to a stall.

        Raises:
            InputError: a request that this engine cannot serve.
            KeyboardInterrupt: what has ended so far is in the result file, and another player goes on from there.
        """
        arrivals = iter(progress(items, "workload", total=total, unit="request"))
        try:
            for item in arrivals:
                if item.id not in self._done:
                    self.report.not_run += 1  # until it is submitted
                    self._wait_until(item.at_step)
                    self._offer(item)
            while self._flying:
                self._advance()
        except StallError as error:
            self._note_stall(error)
            self.report.not_run += sum(1 for _ in arrivals)
        finally:
            self._close()
        return self.report

    def _wait_until(self, step: int) -> None:
        while self._step < step and self._flying:
            self._advance()
        self._step = max(self._step, step)

    def _offer(self, item: WorkItem) -> None:
        """Submit ``item``, or keep it until what it follows has ended."""
        if item.follows is None or item.follows in self._done:
            self._submit(item)
        else:
            self._followers.setdefault(item.follows, []).append(item)

    def _submit(self, item: WorkItem) -> None:
        prompt: Any = list(item.ids)
        if item.follows is not None:
            before = self._done[item.follows]
            if before["reason"] == "error":
                self._end(item, {"reason": "error"})
                return
            prompt = [*before["prompt_ids"], *before["ids"], *item.ids]
        options = {"max_tokens": item.max_tokens, "seed": item.seed, "temperature": item.temperature, "ignore_eos": True}
        try:
            handle = self._engine.submit(prompt, name=item.id, **options)
        except InputError as error:
            raise InputError(f"request {item.id} of the workload: {error}") from error
        self._flying.append((item, handle, self._step))
        self.report.not_run -= 1

    def _advance(self) -> None:
        self._engine.step()
        self._step += 1
        self._count_evictions()
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
        if self._results is not None and not isinstance(result.error, StallError):  # what a stall ended, another run may try
            self._results.append(row | {"cached_tokens": result.cached_tokens, "error": str(result.error or "")})
        self._end(item, row)

    def _end(self, item: WorkItem, row: Mapping[str, Any]) -> None:
        self._done[item.id] = row
        for follower in self._followers.pop(item.id, ()):
            self._submit(follower)

    def _note_stall(self, error: StallError) -> None:
        facts: dict[str, Any] = {"message": str(error), "step": self._step}
        if self._engine.recorder is not None:
            for entry in self._engine.recorder.filter(Stalled)[-1:]:
                facts |= asdict(entry.event)
        self.report.stall = facts
        for item, handle, _ in self._flying:
            if handle.outcome is None:  # still queued: the stall ends what runs
                self.report.not_run += 1
            else:
                self._take(item, handle.outcome)

    def _close(self) -> None:
        for _, handle, _ in self._flying:
            handle.cancel()
        self._flying = []
        self._engine.check()
        kv = self._engine.kv
        indexed = 0 if kv.index is None else len(kv.index)
        self.report.leaked_pages = kv.usable_pages - kv.arena.num_free - indexed
        self._count_evictions()
        self.report.steps = self._step
        self.report.evictions = dict(self._evictions)

    def _count_evictions(self) -> None:
        recorder = self._engine.recorder
        if recorder is not None:
            for entry in recorder.since(self._next_event):
                if isinstance(entry.event, PageEvicted):
                    self._evictions["asked" if entry.event.for_rid is None else "allocation"] += 1
            self._next_event = recorder.num_folded + len(recorder)


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
