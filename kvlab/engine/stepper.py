"""One batched forward, from inputs to committed pages: every row runs the same walk.

    prepare -> skip what is cached -> cut a chunk -> admit -> plan -> forward -> sample -> commit -> settle

A row that cannot be prepared fails alone; a row without pages is held and leaves the step; a forward that raises is run again
row by row, so that only the row at fault ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from kvlab.attention.base import AttentionBackend
from kvlab.engine.chunks import ChunkRule
from kvlab.engine.encoders import EncoderMemo
from kvlab.engine.interrupts import deferred_interrupts
from kvlab.engine.rows import Landed, Outcome, Row
from kvlab.engine.run import Run
from kvlab.engine.sampler import Sampler, prompt_logprobs
from kvlab.engine.skip import SkipStage
from kvlab.errors import KvlabError
from kvlab.events import Event, StepRan, WalkServed
from kvlab.spec import (
    AdmitRuntimeError,
    ModelSpec,
    Refusal,
    Resource,
    RetentionPolicy,
    RowInputs,
    Step,
    StepContext,
    StreamKey,
    Walk,
    WalkInputs,
)


class Stepper:
    """Runs steps of one model over one set of resources.

    Args:
        resources: in the order of their hooks; ``kv``, ``attention``, ``positions`` and ``sampler`` are among them.
        encoders: what blocks of walks that encode become.
        count: called with the ids that a stream holds or will hold next: (run, walk, ids).
        make_room: called when a row lacks pages; True when it is worth trying again.
        settle: called for each row once its step is committed, or once it was served: (run, walk, what landed).
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
        encoders: EncoderMemo,
        count: Callable[[Run, Walk, Sequence[int]], None],
        make_room: Callable[[Refusal], bool],
        settle: Callable[[Run, Walk, Landed], None],
        record: Callable[[Event], None] | None,
    ) -> None:
        self._model, self._resources, self._kv = model, tuple(resources), kv
        self._attention, self._positions, self._sampler = attention, positions, sampler
        self._skip, self._chunks, self._settle, self._record = skip, chunks, settle, record
        self._encoders, self._count, self._make_room = encoders, count, make_room

    def run(self, index: int, walk: Walk, runs: Sequence[Run]) -> Outcome:
        """Run one step of ``walk`` for as many of ``runs`` as the chunk budget and the pool allow."""
        outcome = Outcome()
        with deferred_interrupts():
            rows = self._prepare(walk, runs, outcome)
        self._execute(index, walk, rows, outcome)
        return outcome

    # -- before the forward

    def _prepare(self, walk: Walk, runs: Sequence[Run], outcome: Outcome) -> list[Row]:
        rows: list[Row] = []
        budget = self._chunks.max_step_tokens
        for run in runs:
            if run.rests:
                continue
            if budget <= 0 and not walk.loops:
                break
            try:
                row = self._prepare_row(walk, run, budget)
                if row is not None and not row.segments():
                    self._serve(walk, run, outcome)
                    continue
            except Exception as error:  # the others go on
                outcome.failed.append((run, error))
                continue
            if row is not None:
                rows.append(row)
                budget -= 0 if walk.loops else sum(s.span for s in row.segments())
        return rows

    def _prepare_row(self, walk: Walk, run: Run, budget: int) -> Row | None:
        if walk.loops and walk.samples:
            return self._sampling_row(walk, run)
        inputs = run.rest
        if inputs is None:
            whole = self._model.prepare_inputs(walk.name, run.record, run.generated, run.state, run.walk_index)
            if whole is None:
                return None
            inputs, matches = self._skip(run.rid, walk, whole)
            run.probed = matches
        return self._cut(walk, run, replace(inputs, ids={label: ids for label, ids in inputs.ids.items() if len(ids)}), budget)

    def _sampling_row(self, walk: Walk, run: Run) -> Row | None:
        """A loop reads what was just sampled: its opening id at first, and all it had read when it was sent back."""
        opens = not run.generated and walk.starts_with is not None
        generated = [walk.starts_with] if opens and walk.starts_with is not None else run.generated
        inputs = self._model.prepare_inputs(walk.name, run.record, generated, run.state, run.walk_index)
        if inputs is None:
            return None
        if not run.replays:
            return Row(run, inputs, None, samples=True, counted=generated if opens else ())
        ids = run.replay(walk.starts_with)
        again = replace(inputs, ids={"main": ids} if ids else {})
        last = () if run.reply_reason is None else run.generated[-1:]
        return Row(run, again, None, samples=run.reply_reason is None, counted=(*ids, *last))

    def _serve(self, walk: Walk, run: Run, outcome: Outcome) -> None:
        """Nothing of the walk is left to run: it is complete, and the next one's turn comes in this very round."""
        if self._record is not None:
            self._record(WalkServed(run.rid, walk.name, run.walk_index))
        run.note_match()
        self._settle(run, walk, Landed())
        outcome.served.append(run)

    def _cut(self, walk: Walk, run: Run, inputs: WalkInputs, budget: int) -> Row:
        """Cut a chunk. Blocks are never cut, nor are texts that several labels read at once."""
        samples = walk.samples and run.request.options.max_tokens > 0 and not run.replays
        if walk.loops or not walk.causal or inputs.blocks or len(inputs.ids) != 1:
            return Row(run, inputs, None, samples)
        ((label, ids),) = inputs.ids.items()
        take = self._chunks.cut(remaining=len(ids), budget=budget)
        if take >= len(ids):
            return Row(run, inputs, None, samples)
        return Row(run, replace(inputs, ids={label: ids[:take]}), replace(inputs, ids={label: ids[take:]}))

    def _admit(self, index: int, walk: Walk, rows: list[Row], outcome: Outcome) -> tuple[Step, StepContext, list[Row]] | None:
        while rows:
            segments = tuple(s for row in rows for s in row.segments())
            step = Step(index, walk.node, walk.name, segments, commit=walk.commits, windows=self._windows(walk, rows))
            ctx = StepContext(frozenset(row.run.rid for row in rows))
            refusal = self._retrieve(walk, rows)
            if refusal is None:
                refusal = next((r for r in (res.admit(step, ctx) for res in self._resources) if r is not None), None)
            if refusal is None:
                for row in rows:
                    row.run.note_match()
                return step, ctx, rows
            if not self._make_room(refusal):
                rows = self._without_refused(rows, refusal, outcome)
        return None

    def _retrieve(self, walk: Walk, rows: list[Row]) -> Refusal | None:
        """Read what requests begun elsewhere hold there."""
        for run in (row.run for row in rows if row.run.handed is not None):
            published = run.handed.published if run.handed is not None else {}
            for resource in self._resources:
                refusal = resource.admit_retrieve(run.rid, walk.node, walk.name, published.get(resource.key, {}))
                if refusal is not None:
                    return refusal
            run.handed = None
        return None

    def _windows(self, walk: Walk, rows: list[Row]) -> dict[StreamKey, RetentionPolicy]:
        """Windows that begin or go on with this step."""
        windows = ((row, row.window(walk)) for row in rows if row.run.request.options.window is not None)
        return {(s.rid, s.label): window for row, window in windows if window is not None for s in row.segments()}

    def _without_refused(self, rows: list[Row], refusal: Refusal, outcome: Outcome) -> list[Row]:
        refused = [row for row in rows if row.run.rid == refusal.rid]
        if not refused:
            raise KvlabError(f"a resource refused request {refusal.rid}, which is not in the step")
        if isinstance(refusal, AdmitRuntimeError):
            outcome.failed.append((refused[0].run, KvlabError(refusal.message)))
        elif not refused[0].run.is_parked:
            outcome.held.append((refused[0].run, refusal))
        return [row for row in rows if row.run.rid != refusal.rid]

    # -- the forward and after

    def _execute(self, index: int, walk: Walk, rows: list[Row], outcome: Outcome) -> None:
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

    def _blame(self, index: int, walk: Walk, rows: list[Row], error: Exception, outcome: Outcome) -> None:
        if len(rows) == 1:
            outcome.failed.append((rows[0].run, error))
            return
        for row in rows:
            self._execute(index, walk, [row], outcome)

    def _forward(self, step: Step, ctx: StepContext, rows: list[Row], walk: Walk) -> Sequence[Any]:
        plans = {resource.key: resource.plan(step, ctx) for resource in self._resources}
        inputs = [x for row in rows for x in self._row_inputs(walk, row, plans[self._positions.key])]
        self._attention.begin(replace(plans[self._kv.key], causal=walk.causal, commit=walk.commits))
        return self._model.forward(walk.name, inputs, self._attention)

    def _row_inputs(self, walk: Walk, row: Row, rope_ids: Mapping[StreamKey, Sequence[int]]) -> list[RowInputs]:
        """What the model runs of one row, in the order of its segments."""
        run = row.run
        texts = [
            RowInputs(ids, rope_ids[run.rid, label], self._logits_from(walk, row, label, len(ids)))
            for label, ids in row.now.ids.items()
        ]
        return texts + [
            RowInputs(
                (),
                rope_ids[run.rid, label],
                block=self._encoders.content(walk, run, block) if walk.encodes else block.content,
            )
            for label, block in row.now.blocks.items()
        ]

    def _logits_from(self, walk: Walk, row: Row, label: str, num_ids: int) -> int | None:
        if label != "main":
            return None
        if row.run.wants_prompt_logprobs and not walk.loops:
            return 0
        return num_ids - 1 if row.samples else None

    def _finish(
        self, step: Step, ctx: StepContext, rows: list[Row], walk: Walk, outputs: Sequence[Any], duration_ms: float
    ) -> None:
        of_main = {s.rid: x for s, x in zip(step.segments, outputs, strict=True) if s.label == "main"}
        for row in rows:
            self._note_ids(walk, row, of_main.get(row.run.rid))
        sampling = [row for row in rows if row.samples]
        tokens = self._sampler.sample([row.run.rid for row in sampling], [of_main[row.run.rid][-1] for row in sampling])
        sampled = dict(zip((row.run.rid for row in sampling), tokens, strict=True))
        for resource in self._resources:
            resource.commit(step, ctx)
        if self._record is not None:
            self._record(StepRan(walk.name, [(s.rid, s.label, s.span) for s in step.segments], duration_ms))
        for row in rows:
            run = row.run
            run.rest, run.last_ran_round = row.rest, step.index
            self._settle(run, walk, Landed(sampled.get(run.rid), row.rest is None, of_main.get(run.rid)))

    def _note_ids(self, walk: Walk, row: Row, logits: Any) -> None:
        """Tell who keeps account of ids which of them were run, and take the prompt's logprobs where they were asked for."""
        run, ids = row.run, row.now.ids.get("main", ())
        if row.counted:
            self._count(run, walk, row.counted)
        if row.counted or (ids and not walk.loops):
            self._sampler.observe(run.rid, ids)
        if run.wants_prompt_logprobs and not walk.loops:
            start = len(run.prompt_logprobs) or 1
            if not run.prompt_logprobs:
                run.prompt_logprobs.append(None)
            targets = run.prompt_ids[start : start + len(ids)]
            run.prompt_logprobs.extend(prompt_logprobs(logits[: len(targets)], targets))
