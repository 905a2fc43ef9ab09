"""How a row's step changes its request, and how requests end."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import fields

from kvlab.cache.kv import KVResource
from kvlab.engine.gate import Gate
from kvlab.engine.intake import Intake
from kvlab.engine.interrupts import deferred_interrupts
from kvlab.engine.preprocess import PreprocessWorker
from kvlab.engine.request import GenerationResult
from kvlab.engine.rows import Landed
from kvlab.engine.run import Run
from kvlab.engine.sampler import Sampled
from kvlab.errors import DeadlineError, KvlabError
from kvlab.events import RequestFinished, TokenSampled, TokensMissed
from kvlab.recorder import Recorder
from kvlab.spec import ModelSpec, RequestId, Resource, Walk


class Endings(ABC):
    """The part of an engine that takes in what a step left and lets requests go; the engine makes what it uses."""

    model: ModelSpec
    kv: KVResource
    preprocess: PreprocessWorker
    recorder: Recorder | None
    _resources: tuple[Resource, ...]
    _clock: Callable[[], float]
    _gate: Gate
    _intake: Intake
    _walks: dict[str, Walk]
    _waiting: list[Run]
    _running: list[Run]
    _in_flight: dict[RequestId, Run]
    _round: int
    _in_step: bool

    # -- after a step

    def _settle(self, run: Run, walk: Walk, landed: Landed) -> None:
        """A row's step is committed: take its token or its pass, check for the end, and move on in the schedule."""
        try:
            if self._is_complete(run, walk, landed):
                self._move_on(run)
        except Exception as error:  # its own: a row that cannot be sampled, a client's callback, the model's own code
            self._end(run, "error", error)
            return
        if run.walk_index == len(run.schedule):
            self._end(run, run.reply_reason or ("length" if run.first_pass_s is None else "stop"), None)
        elif run.cancel_requested:
            self._end(run, "cancelled", None)
        elif run.request.options.window is not None:
            self._gate.amend(self._intake.claim(run))

    def _is_complete(self, run: Run, walk: Walk, landed: Landed) -> bool:
        """Take in what landed; True when the walk is over."""
        if isinstance(landed.sampled, Exception):
            raise landed.sampled
        if landed.sampled is not None:
            self._take_token(run, walk, landed.sampled)
        if walk.loops and walk.samples:
            run.replays = False
            return run.reply_reason is not None
        if not walk.loops:
            return landed.is_whole
        run.first_pass_s = self._clock() if run.first_pass_s is None else run.first_pass_s
        return self.model.finish_pass(walk.name, run.state, landed.output)

    def _move_on(self, run: Run) -> None:
        """Go to the next walk; a reply that its prefill ended already needs no decode."""
        run.walk_index += 1
        while run.walk_index < len(run.schedule) and run.reply_reason is not None and not run.replays:
            walk = self._walks[run.walk]
            if not (walk.loops and walk.samples):
                break
            run.walk_index += 1
        if run.walk_index == len(run.schedule) and run.first_pass_s is not None:
            run.outputs = self._outputs(run)

    def _take_token(self, run: Run, walk: Walk, sampled: Sampled) -> None:
        """Append a token and tell the client.

        Raises:
            Exception: what the client's ``on_token`` raised.
        """
        chunk, run.reply_reason = run.take(sampled, self._clock())
        if self.recorder is not None:
            self.recorder(TokenSampled(run.rid, sampled.token))
        if run.request.options.on_token is not None:
            run.request.options.on_token(chunk)
        if run.reply_reason is None:
            self._count(run, walk, [sampled.token])

    def _count(self, run: Run, walk: Walk, ids: Sequence[int]) -> None:
        """The streams that decode writes hold ``ids`` next."""
        outputs = {tensor: [list(ids)] for tensor in self._decode_tensors()}
        for resource in self._resources:
            resource.extend_prefix_chain(run.rid, walk.node, walk.name, outputs)

    def _decode_tensors(self) -> set[str]:
        streams = self.model.prefix_key_streams().values()
        return {s.tensor for by_label in streams for s in by_label.values() if s.decode_walk is not None}

    def _outputs(self, run: Run) -> dict[str, object]:
        outputs = dict(self.model.outputs(run.state))
        unknown = sorted(outputs.keys() - {f.name for f in fields(GenerationResult)})
        if unknown:
            raise KvlabError(f"model {self.model.name} hands out {', '.join(unknown)}, and a result has no such field")
        return outputs

    # -- how requests end

    def _end_overdue(self) -> None:
        now_s = self._clock()
        for run in [*self._running, *self._waiting]:
            if run.cancel_requested:
                self._end(run, "cancelled", None)
            elif run.past_deadline(now_s, self._round):
                message = (
                    f"request {run.rid} passed its deadline ({run.request.options.deadlines}) after "
                    f"{self._round - run.submitted_step} steps and {now_s - run.submitted_s:.1f} s: "
                    f"{len(run.generated)} tokens generated, {run.held_steps} steps held"
                )
                self._end(run, "deadline", DeadlineError(message))

    def _cancel(self, run: Run) -> None:
        if self._in_step:
            run.cancel_requested = True
            return
        with deferred_interrupts():
            self._end(run, "cancelled", None)

    def _end(self, run: Run, reason: str, error: Exception | None) -> None:
        if run.result is not None:
            return
        (self._running if run in self._running else self._waiting).remove(run)
        del self._in_flight[run.rid]
        run.future.cancel()
        self._gate.release(run.rid)
        misses = [miss for resource in self._resources for miss in resource.cached_misses(run.rid)]
        if run.prepared:  # otherwise no resource has heard of it
            self._remember_keys(run)
        for resource in self._resources:
            resource.remove_request(run.rid)
        run.result = run.to_result(
            reason,
            now_s=self._clock(),
            page_size=self.kv.page_size,
            model=self.model.identity,
            misses=misses,
            error=error,
            starts_with=self._starts_with(run),
            keying=self.kv.keying,
        )
        run.state = None
        if self.recorder is not None:
            for m in run.result.misses:
                self.recorder(TokensMissed(run.rid, m.label, m.start, m.stop, m.cause, m.evidence))
            message = "" if error is None else str(error)
            cached, ttft_ms = run.result.cached_tokens, run.result.ttft_ms
            self.recorder(RequestFinished(run.rid, reason, cached, len(run.generated), ttft_ms, message))

    def _starts_with(self, run: Run) -> int | None:
        """Return the id that opens its reply, None where a prefill samples the first one."""
        opened = (self._walks[name].starts_with for name in run.schedule)
        return next((token for token in opened if token is not None), None)

    def _remember_keys(self, run: Run) -> None:
        """Leave the key list with the worker, so that a follow-up hashes only what it adds.

        Only of plain text, whose ids alone make its keys: elsewhere they also name pictures, or ids that nobody sampled.
        """
        if run.is_laid_out or self._starts_with(run) is not None:
            return
        keys = self.kv.page_keys(run.rid, "main")
        if keys:
            ids = [*run.prompt_ids, *run.generated][: len(keys) * self.kv.page_size]
            self.preprocess.remember(self.kv.key, ids, keys)
