"""One batched forward, from inputs to committed pages: every row runs the same walk.

    prepare -> skip what is cached -> cut a chunk -> admit -> plan -> forward -> sample -> commit -> settle

A row that cannot be prepared fails alone; a row without pages is held and leaves the step; a forward that raises is run again
row by row, so that only the row at fault ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from kvlab.attention.base import AttentionBackend
from kvlab.engine.chunks import ChunkRule
from kvlab.engine.interrupts import deferred_interrupts
from kvlab.engine.run import Run
from kvlab.engine.sampler import Sampled, Sampler, prompt_logprobs
from kvlab.engine.skip import SkipStage
from kvlab.errors import KvlabError
from kvlab.events import Event, StepRan
from kvlab.spec import (
    AdmitRuntimeError,
    ModelSpec,
    Refusal,
    Resource,
    RetentionPolicy,
    RowInputs,
    Segment,
    Step,
    StepContext,
    StreamKey,
    Walk,
    WalkInputs,
)


@dataclass
class _Row:
    """One request's part of a step: what runs now, and what later chunks run."""

    run: Run
    now: WalkInputs
    rest: WalkInputs | None

    def segments(self) -> list[Segment]:
        return [Segment(self.run.rid, label, len(ids)) for label, ids in self.now.ids.items()]

    def window(self, walk: Walk) -> RetentionPolicy | None:
        """The window to declare: none of a prompt is released before it is whole, wherever it is cut into chunks."""
        asked = self.run.request.options.window_policy
        if asked is None or walk.loops or self.rest is None:
            return asked
        end = self.run.input_tokens - sum(len(ids) for ids in self.rest.ids.values())
        return replace(asked, context_budget=self.run.input_tokens) if end >= asked.protected_prefix else None


@dataclass
class Outcome:
    """What a step did with each run it was given."""

    num_ran: int = 0
    held: list[tuple[Run, Refusal]] = field(default_factory=list)
    failed: list[tuple[Run, Exception]] = field(default_factory=list)


class Stepper:
    """Runs steps of one model over one set of resources.

    Args:
        resources: in the order of their hooks; ``kv``, ``attention``, ``positions`` and ``sampler`` are among them.
        make_room: called when a row lacks pages; True when it is worth trying again.
        settle: called for each row once its step is committed: (run, walk, sampled token or None, walk is complete).
        record: event sink, or None.
    """

    def __init__(
        self,
        model: ModelSpec,
        resources: Sequence[Resource],
        *,
        kv: Resource,
        attention: AttentionBackend,
        positions: Resource,
        sampler: Sampler,
        skip: SkipStage,
        chunks: ChunkRule,
        make_room: Callable[[Refusal], bool],
        settle: Callable[[Run, Walk, Sampled | Exception | None, bool], None],
        record: Callable[[Event], None] | None,
    ) -> None:
        self._model, self._resources, self._kv = model, tuple(resources), kv
        self._attention, self._positions, self._sampler = attention, positions, sampler
        self._skip, self._chunks, self._settle, self._record = skip, chunks, settle, record
        self._make_room = make_room

    def run(self, index: int, walk: Walk, runs: Sequence[Run]) -> Outcome:
        """Run one step of ``walk`` for as many of ``runs`` as the chunk budget and the pool allow."""
        outcome = Outcome()
        with deferred_interrupts():
            rows = self._prepare(walk, runs, outcome)
        self._execute(index, walk, rows, outcome)
        return outcome

    # -- before the forward

    def _prepare(self, walk: Walk, runs: Sequence[Run], outcome: Outcome) -> list[_Row]:
        rows: list[_Row] = []
        budget = self._chunks.max_step_tokens
        for run in runs:
            if run.rests:
                continue
            if budget <= 0 and not walk.loops:
                break
            try:
                row = self._prepare_row(walk, run, budget)
            except Exception as error:  # the others go on
                outcome.failed.append((run, error))
                continue
            if row is not None:
                rows.append(row)
                budget -= 0 if walk.loops else sum(s.span for s in row.segments())
        return rows

    def _prepare_row(self, walk: Walk, run: Run, budget: int) -> _Row | None:
        inputs = run.rest
        if inputs is None:
            whole = self._model.prepare_inputs(walk.name, run.record, run.generated)
            if whole is None:
                return None
            inputs, matches = self._skip(run.rid, walk, whole)
            run.note_match(matches)
        if walk.loops or not walk.causal or len(inputs.ids) != 1:
            return _Row(run, inputs, None)
        return self._cut(run, inputs, budget)

    def _cut(self, run: Run, inputs: WalkInputs, budget: int) -> _Row:
        ((label, ids),) = inputs.ids.items()
        start = run.input_tokens - len(ids)
        take = self._chunks.cut(start=start, remaining=len(ids), budget=budget)
        if take >= len(ids):
            return _Row(run, inputs, None)
        return _Row(run, replace(inputs, ids={label: ids[:take]}), replace(inputs, ids={label: ids[take:]}))

    def _admit(self, index: int, walk: Walk, rows: list[_Row], outcome: Outcome) -> tuple[Step, StepContext, list[_Row]] | None:
        while rows:
            segments = tuple(s for row in rows for s in row.segments())
            step = Step(index, walk.node, walk.name, segments, commit=walk.commits, windows=self._windows(walk, rows))
            ctx = StepContext(frozenset(row.run.rid for row in rows))
            refusal = self._retrieve(walk, rows)
            if refusal is None:
                refusal = next((r for r in (res.admit(step, ctx) for res in self._resources) if r is not None), None)
            if refusal is None:
                return step, ctx, rows
            if not self._make_room(refusal):
                rows = self._without_refused(rows, refusal, outcome)
        return None

    def _retrieve(self, walk: Walk, rows: list[_Row]) -> Refusal | None:
        """Read what requests begun elsewhere hold there."""
        for run in (row.run for row in rows if row.run.handed is not None):
            published = run.handed.published if run.handed is not None else {}
            for resource in self._resources:
                refusal = resource.admit_retrieve(run.rid, walk.node, walk.name, published.get(resource.key, {}))
                if refusal is not None:
                    return refusal
            run.handed = None
        return None

    def _windows(self, walk: Walk, rows: list[_Row]) -> dict[StreamKey, RetentionPolicy]:
        """Windows that begin or go on with this step."""
        windows = ((row, row.window(walk)) for row in rows if row.run.request.options.window is not None)
        return {(s.rid, s.label): window for row, window in windows if window is not None for s in row.segments()}

    def _without_refused(self, rows: list[_Row], refusal: Refusal, outcome: Outcome) -> list[_Row]:
        refused = [row for row in rows if row.run.rid == refusal.rid]
        if not refused:
            raise KvlabError(f"a resource refused request {refusal.rid}, which is not in the step")
        if isinstance(refusal, AdmitRuntimeError):
            outcome.failed.append((refused[0].run, KvlabError(refusal.message)))
        elif not refused[0].run.is_parked:
            outcome.held.append((refused[0].run, refusal))
        return [row for row in rows if row.run.rid != refusal.rid]

    # -- the forward and after

    def _execute(self, index: int, walk: Walk, rows: list[_Row], outcome: Outcome) -> None:
        with deferred_interrupts():
            admitted = self._admit(index, walk, rows, outcome)
        if admitted is None:
            return
        step, ctx, rows = admitted
        begin_s = perf_counter()
        try:
            logits = self._forward(step, ctx, rows, walk)
        except BaseException as error:
            with deferred_interrupts():
                for resource in self._resources:
                    resource.abort(step, ctx)
            if not isinstance(error, Exception):
                raise
            self._blame(index, walk, rows, error, outcome)
            return
        with deferred_interrupts():
            self._finish(step, ctx, rows, walk, logits, (perf_counter() - begin_s) * 1e3)
            outcome.num_ran += len(rows)

    def _blame(self, index: int, walk: Walk, rows: list[_Row], error: Exception, outcome: Outcome) -> None:
        if len(rows) == 1:
            outcome.failed.append((rows[0].run, error))
            return
        for row in rows:
            self._execute(index, walk, [row], outcome)

    def _forward(self, step: Step, ctx: StepContext, rows: list[_Row], walk: Walk) -> Sequence[Any]:
        plans = {resource.key: resource.plan(step, ctx) for resource in self._resources}
        self._attention.begin(replace(plans[self._kv.key], causal=walk.causal))
        rope_ids = plans[self._positions.key]
        inputs = [
            RowInputs(ids, rope_ids[row.run.rid, label], self._logits_from(walk, row, label, len(ids)))
            for row in rows
            for label, ids in row.now.ids.items()
        ]
        return self._model.forward(walk.name, inputs, self._attention)

    def _logits_from(self, walk: Walk, row: _Row, label: str, num_ids: int) -> int | None:
        if label != "main":
            return None
        if row.run.wants_prompt_logprobs and not walk.loops:
            return 0
        return num_ids - 1 if self._samples(walk, row) else None

    def _samples(self, walk: Walk, row: _Row) -> bool:
        return walk.samples and row.rest is None and row.run.request.options.max_tokens > 0

    def _finish(
        self, step: Step, ctx: StepContext, rows: list[_Row], walk: Walk, logits: Sequence[Any], duration_ms: float
    ) -> None:
        by_rid = {s.rid: x for s, x in zip(step.segments, logits, strict=True) if s.label == "main"}
        for row in rows:
            if not walk.loops and "main" in row.now.ids:
                self._note_prompt(row, by_rid[row.run.rid])
        sampling = [row for row in rows if self._samples(walk, row)]
        tokens = self._sampler.sample([row.run.rid for row in sampling], [by_rid[row.run.rid][-1] for row in sampling])
        sampled = dict(zip((row.run.rid for row in sampling), tokens, strict=True))
        for resource in self._resources:
            resource.commit(step, ctx)
        if self._record is not None:
            self._record(StepRan(walk.name, [(s.rid, s.label, s.span) for s in step.segments], duration_ms))
        for row in rows:
            row.run.rest, row.run.last_ran_round = row.rest, step.index
            self._settle(row.run, walk, sampled.get(row.run.rid), row.rest is None)

    def _note_prompt(self, row: _Row, logits: Any) -> None:
        """Tell the sampler which prompt ids were computed, and take the prompt's logprobs where they were asked for."""
        run, ids = row.run, row.now.ids["main"]
        self._sampler.observe(run.rid, ids)
        if run.wants_prompt_logprobs:
            start = len(run.prompt_logprobs) or 1
            if not run.prompt_logprobs:
                run.prompt_logprobs.append(None)
            targets = run.prompt_ids[start : start + len(ids)]
            run.prompt_logprobs.extend(prompt_logprobs(logits[: len(targets)], targets))
