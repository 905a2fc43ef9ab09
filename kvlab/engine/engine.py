"""The engine: requests join and leave between steps, share pages where they may, and stream their tokens."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, overload

from kvlab.attention.base import AttentionBackend
from kvlab.cache.kv import KVResource
from kvlab.engine.chunks import ChunkRule
from kvlab.engine.declare import check_declaration, moved_root, open_caches
from kvlab.engine.gate import AdmissionOptions, Gate
from kvlab.engine.handle import RequestHandle, finished
from kvlab.engine.handover import HandedOver
from kvlab.engine.holds import HoldLog
from kvlab.engine.intake import Intake
from kvlab.engine.interrupts import deferred_interrupts
from kvlab.engine.offloads import Offloads
from kvlab.engine.positions import Positions
from kvlab.engine.preprocess import PreprocessWorker
from kvlab.engine.request import GenerationResult, Request, RequestOptions, StreamChunk, read_options
from kvlab.engine.run import Run
from kvlab.engine.sampler import Sampled, Sampler
from kvlab.engine.skip import SkipStage
from kvlab.engine.stepper import Outcome, Stepper
from kvlab.errors import DeadlineError, InputError, StallError
from kvlab.events import (
    ModelLoaded,
    RequestFinished,
    RequestHeld,
    RequestPreempted,
    RequestStarted,
    RequestSubmitted,
    Stalled,
    TokenSampled,
    TokensMissed,
)
from kvlab.recorder import Recorder
from kvlab.spec import (
    AllocationFailed,
    ModelSpec,
    Prompt,
    ReadPending,
    RequestConfig,
    RequestId,
    Resource,
    Walk,
)

logger = logging.getLogger("kvlab.engine")


class Engine:
    """Continuous batching over a paged KV cache with cross-request prefix reuse.

    Args:
        model: what to run.
        kv: the pages and their index.
        attention: the backend over the same pages.
        positions, sampler: made for the model when not given.
        preprocess: tokenises and keys prompts; inline when not given.
        admission: who may start, and whether a running request may be sent back.
        chunks: where prefills are cut.
        recorder: keeps events; None records nothing and costs nothing.
        clock: seconds, monotone.
        seed: of all sampling; a request's own ``seed`` overrides it.
        offload_policy: which request goes to the host when an older one lacks pages: "lru" or "priority".
        profile: "kvlab", or "published" for the published system's boundaries.

    Raises:
        LoadError: the model declares reuse that one of the resources cannot honour.

    Changes:
        opens the prefix cache of every resource.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        kv: KVResource,
        attention: AttentionBackend,
        positions: Positions | None = None,
        sampler: Sampler | None = None,
        preprocess: PreprocessWorker | None = None,
        admission: AdmissionOptions | None = None,
        chunks: ChunkRule | None = None,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
        offload_policy: str = "lru",
        profile: str = "kvlab",
    ) -> None:
        self.model, self.kv, self.attention = model, kv, attention
        self.positions = Positions() if positions is None else positions
        self.sampler = Sampler(model.vocab_size, seed=seed) if sampler is None else sampler
        self.preprocess = preprocess or PreprocessWorker(model.processor, model.prefix_key_streams(), {kv.key: kv.page_size})
        self.recorder = recorder
        self._resources: tuple[Resource, ...] = (kv, attention, self.positions, self.sampler)
        self._clock, self._hold_log = clock, HoldLog(clock)
        self._intake = Intake(model, kv, self._resources)
        self._walks = dict(model.walks())
        self._waiting: list[Run] = []
        self._running: list[Run] = []
        self._in_flight: dict[RequestId, Run] = {}
        self._rids = itertools.count(1)
        self._gate = Gate(kv, admission or AdmissionOptions(), rounds_left=self._rounds_left, record=recorder)
        kv.guard_grants(self._gate.may_grant, self._gate.may_recall)
        self._offloads = Offloads(kv, self._gate, self._running, self._intake.claim, policy=offload_policy)
        kv.pins.can_spare = self._gate.can_spare
        self._is_short = False  # an admitted request was held in the last round
        self._round, self._in_step = 0, False
        check_declaration(model, self._resources)
        if recorder is not None:
            recorder(ModelLoaded(model.name, model.identity))
        self._weights_version, self._weights_epoch = model.weights_version(), 0
        self._roots = open_caches(model, self._resources)
        self._stepper = Stepper(
            model,
            self._resources,
            kv=kv,
            attention=attention,
            positions=self.positions,
            sampler=self.sampler,
            skip=SkipStage(model, self._resources, profile=profile),
            chunks=chunks or ChunkRule(),
            make_room=self._offloads.make_room,
            settle=self._settle,
            record=recorder,
        )

    # -- what a user calls

    @property
    def events(self) -> Recorder:
        """The recorder.

        Raises:
            InputError: this engine does not record.
        """
        if self.recorder is None:
            raise InputError("this engine does not record; make it with record=True (kvlab.load) or recorder=Recorder(...)")
        return self.recorder

    def submit(self, prompt: Prompt, **options: Any) -> RequestHandle:
        """Queue a request; nothing runs until the engine steps.

        Args:
            prompt: text, token ids, a chat, or a result's ``follow_up``.
            options: fields of RequestOptions and SamplingParams; those not given are the model's own defaults.

        Raises:
            InputError: an unknown or illegal option, a prompt that cannot be tokenised, that overflows the context, or that
                needs more pages than the pool has.
        """
        return self._handle(self._submit(prompt, read_options({**self.model.default_options, **options})))

    def _handle(self, run: Run) -> RequestHandle:
        return RequestHandle(run, step=self.step, cancel=self._cancel)

    def _submit(self, prompt: Prompt, options: RequestOptions, handed: HandedOver | None = None) -> Run:
        request = Request(next(self._rids), prompt, options)
        self._notice_changed_weights()
        run = Run(request, self.preprocess.submit(prompt, request.options.fields), self._clock(), self._round, handed=handed)
        if run.future.done():
            self._prepare(run)
        self._waiting.append(run)
        self._in_flight[run.rid] = run
        return run

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[StreamChunk]:
        """Yield the tokens of one request as they come; leaving the loop early cancels it."""
        handle = self.submit(prompt, **options)
        try:
            yield from handle
        finally:
            handle.cancel()
        handle.result()

    @overload
    def generate(self, prompt: list[Prompt], **options: Any) -> list[GenerationResult]: ...
    @overload
    def generate(self, prompt: Prompt, **options: Any) -> GenerationResult: ...
    def generate(self, prompt: Any, **options: Any) -> GenerationResult | list[GenerationResult]:
        """Run one prompt, or a list of prompts side by side, to the end.

        A list of numbers is one prompt of token ids. A single prompt that fails raises; in a list of prompts each result
        carries its own ``error`` and the others are complete.

        Raises:
            InputError: as ``submit``; then none of the prompts has run.
            StallError: every request waits for pages and none can be freed; all of them ended.
        """
        several = isinstance(prompt, list) and any(not isinstance(p, Number) for p in prompt)
        handles: list[RequestHandle] = []
        try:
            for one in prompt if several else [prompt]:
                handles.append(self.submit(one, **options))
            while not all(handle.done for handle in handles):
                self.step()
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return finished(handles) if several else handles[0].result()

    def step(self) -> int:
        """Advance every request that can by one chunk or one token; returns the number of rows that ran.

        Raises:
            StallError: every running request waits for pages, nothing can free one, and none has a deadline. They end with
                this error, their pages return, and the engine goes on.
        """
        self._refuse_in_step("step")
        self._round += 1
        if self.recorder is not None:
            self.recorder.step = self._round
        with deferred_interrupts():
            self._collect_prepared()
            self._end_overdue()
            self._offloads.bring_back()
            self._start_waiting()
        self._in_step = True
        try:
            outcomes = [self._stepper.run(self._round, walk, runs) for walk, runs in self._groups()]
        finally:
            self._in_step = False
        with deferred_interrupts():
            for outcome in outcomes:
                self._take_outcome(outcome)
            num_ran = sum(outcome.num_ran for outcome in outcomes)
            num_ran += self._await_reads(outcomes) if num_ran == 0 else 0
            held = [run for o in outcomes for run, why in o.held if run.result is None and not isinstance(why, ReadPending)]
            self._is_short = bool(held)
            held = held or (self._offloads.parked if num_ran == 0 else [])
            if held and not self._preempt_for(held, num_ran) and num_ran == 0:
                self._stop_if_stalled(held)
        return num_ran

    def _refuse_in_step(self, verb: str) -> None:
        if self._in_step:
            raise InputError(f"on_token cannot {verb} the engine that is calling it; it may submit and cancel requests")

    def hand_over(self, handle: RequestHandle) -> HandedOver:
        """Let a request that has begun to generate rest here, so that another engine can go on with it.

        Its pages stay until ``handle.cancel()``, which is due once the other engine has taken it over.

        Raises:
            InputError: the request has no token yet, or has ended.
        """
        run = next((r for r in self._running if r.rid == handle.rid), None)
        if run is None or not run.generated or run.is_parked:
            raise InputError(f"request {handle.rid} cannot be handed over: it is not running, has no token, or is on the host")
        run.is_handed_over = True
        published = {resource.key: resource.publish(run.rid) for resource in self._resources}
        return HandedOver(run.prompt_ids, tuple(run.generated), run.walk_index, run.request.options, published)

    def take_over(self, handed: HandedOver) -> RequestHandle:
        """Go on with a request that another engine began; the tokens it has are the first of its reply.

        Raises:
            InputError: as ``submit``.
        """
        return self._handle(self._submit(list(handed.prompt_ids), handed.options, handed))

    def pin(self, prompt: Prompt, *, name: str, salt: str = "", fields: Mapping[str, Any] | None = None) -> int:
        """Keep the whole pages of ``prompt`` cached under ``name`` until ``unpin``; what is not cached yet is computed.

        Pins survive requests and end with a reset. A chat pins its template's ending too, so pin the ids or the text that
        others begin with.

        Returns:
            How many pages they are.

        Raises:
            InputError: as ``submit``; the name is taken, the prompt fills no page, the pool's ``max_pinned_pages`` would be
                exceeded, or requests under way were promised the room. Then nothing is pinned.
        """
        options: dict[str, Any] = {"max_tokens": 0, "salt": salt, "fields": dict(fields or {})}
        self.submit(prompt, **options).result()
        prepared = self.preprocess.prepare(prompt, options["fields"])
        return self.kv.pins.pin(name, RequestConfig(prepared.configs.get(self.kv.key, {}), salt=salt))

    def unpin(self, name: str) -> int:
        """Let the pages pinned as ``name`` go when room is needed; returns how many they are."""
        return self.kv.pins.unpin(name)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page. Pages of running requests stay readable and are not offered again."""
        dropped = [resource.reset_prefix_cache("asked") for resource in self._resources]
        return all(dropped)

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            IntegrityError: names the page and its keys.
        """
        for resource in self._resources:
            resource.check()
        self._gate.check()

    def close(self) -> None:
        """Cancel what is in flight and let go of workers and files."""
        self._refuse_in_step("close")
        for run in [*self._running, *self._waiting]:
            self._cancel(run)
        self.preprocess.close()
        if self.recorder is not None:
            self.recorder.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        pool = f"{self.kv.usable_pages} usable pages of {self.kv.page_size}"
        return f"Engine({self.model.name}, {pool}, {len(self._running)} running, {len(self._waiting)} waiting)"

    # -- from submission to start

    def _notice_changed_weights(self) -> None:
        version = self.model.weights_version()
        if version != self._weights_version:
            self._weights_version = version
            self._weights_epoch += 1
            logger.info("the weights of %s changed in place: its prefix cache is dropped", self.model.name)
            self._roots = moved_root(self.model, self._resources, self._weights_epoch)

    def _prepare(self, run: Run) -> None:
        self._intake.prepare(run, run.future.result())
        if run.handed is not None:
            run.walk_index = run.handed.walk_index
            for token in run.handed.generated:
                run.take(Sampled(token), self._clock())
        if self.recorder is not None:
            options = run.request.options
            self.recorder(RequestSubmitted(run.rid, len(run.prompt_ids), options.max_tokens, options.name))

    def _collect_prepared(self) -> None:
        for run in [r for r in self._waiting if not r.prepared and r.future.done()]:
            try:
                self._prepare(run)
            except Exception as error:
                self._end(run, "error", error)

    def _start_waiting(self) -> None:
        if self._is_short and self._running and self._gate.options.preempts:
            return  # what was just given back is for those that were held
        if self._offloads.parked:
            return  # those that made room come first
        while self._waiting:
            if not self._waiting[0].prepared:
                if self._running:
                    return
                self._waiting[0].future.exception()  # nothing else to do: wait for the worker
                self._collect_prepared()
                continue
            ready = itertools.takewhile(lambda run: run.prepared, self._waiting)
            looked_at = itertools.islice(ready, self._gate.most_looked_at)
            place = self._gate.choose([self._intake.claim(run) for run in looked_at], len(self._waiting))
            if place is None and not self._running:
                self._end(self._waiting[0], "error", self._never_fits(self._waiting[0]))
                continue
            if place is None:
                return
            run = self._waiting.pop(place)
            self._running.append(run)
            if self.recorder is not None:
                self.recorder(RequestStarted(run.rid))

    def _never_fits(self, run: Run) -> InputError:
        need, supply = self._intake.claim(run).total_pages, self.kv.supply_pages()
        return InputError(
            f"request {run.rid} needs up to {need} pages; nothing else runs, {len(self.kv.pins)} pages are pinned, and only "
            f"{supply} can be had; unpin something or give the pool more pages (num_pages)"
        )

    def _rounds_left(self, rid: RequestId) -> int:
        run = self._in_flight.get(rid)
        if run is None:
            return 0
        return run.tokens_left + (not self._walks[run.walk].loops)

    # -- a round

    def _groups(self) -> Iterator[tuple[Walk, list[Run]]]:
        groups: dict[str, list[Run]] = {}
        for run in self._running:
            if run.rests:
                continue
            groups.setdefault(run.walk, []).append(run)
        # prefills first: a first token is waited for, and a decode step does not depend on its neighbours
        for name in sorted(groups, key=lambda name: self._walks[name].loops):
            yield self._walks[name], groups[name]

    def _take_outcome(self, outcome: Outcome) -> None:
        for run, refusal in outcome.held:
            if isinstance(refusal, ReadPending):
                continue
            run.held_steps += 1
            short = refusal.pages_short if isinstance(refusal, AllocationFailed) else 0
            self._hold_log.held(self._walks[run.walk].node, run.rid, short)
            if self.recorder is not None and run.held_steps == 1:
                self.recorder(RequestHeld(run.rid, getattr(refusal, "label", "main"), short))
        for run, error in outcome.failed:
            self._end(run, "error", error)

    def _await_reads(self, outcomes: Sequence[Outcome]) -> int:
        """Nobody could run: wait for what is read from peers. Returns how many were waited for."""
        reading = [run.rid for outcome in outcomes for run, why in outcome.held if isinstance(why, ReadPending)]
        for rid in reading:
            self.kv.await_reads(rid)
        return len(reading)

    def _settle(self, run: Run, walk: Walk, sampled: Sampled | Exception | None, walk_done: bool) -> None:
        """A row's step is committed: take its token, check for the end, extend its chain, move on in the schedule."""
        if isinstance(sampled, Exception):
            self._end(run, "error", sampled)
            return
        if sampled is not None:
            if self._take_token(run, sampled):
                return
            outputs = {tensor: [[sampled.token]] for tensor in self._decode_tensors()}
            for resource in self._resources:
                resource.extend_prefix_chain(run.rid, walk.node, walk.name, outputs)
        if run.request.options.window is not None:
            self._gate.amend(self._intake.claim(run))
        if walk_done and not walk.loops:
            run.walk_index += 1
        if run.cancel_requested:
            self._end(run, "cancelled", None)
        elif run.walk_index == len(run.schedule):
            self._end(run, "length", None)

    def _take_token(self, run: Run, sampled: Sampled) -> bool:
        """Append a token; True when the request ended with it."""
        chunk, reason = run.take(sampled, self._clock())
        if self.recorder is not None:
            self.recorder(TokenSampled(run.rid, sampled.token))
        error: Exception | None = None
        if run.request.options.on_token is not None:
            try:
                run.request.options.on_token(chunk)
            except Exception as raised:  # the client's own fault ends its own request
                reason, error = "error", raised
        if reason is not None:
            self._end(run, reason, error)
        return reason is not None

    def _decode_tensors(self) -> set[str]:
        streams = self.model.prefix_key_streams().values()
        return {s.tensor for by_label in streams for s in by_label.values() if s.decode_walk is not None}

    # -- how requests end

    def _end_overdue(self) -> None:
        now_s = self._clock()
        for run in [*self._running, *self._waiting]:
            if run.cancel_requested:
                self._end(run, "cancelled", None)
            elif run.past_deadline(now_s, self._round):
                message = (
                    f"request {run.rid} passed its deadline after {self._round - run.submitted_step} steps and "
                    f"{now_s - run.submitted_s:.1f} s: {len(run.generated)} tokens generated, {run.held_steps} steps held"
                )
                self._end(run, "deadline", DeadlineError(message))

    def _preempt_for(self, held: Sequence[Run], num_ran: int) -> bool:
        """Send the newest request back to the queue when a decode lacks a page, or when nobody could run."""
        needy = next((run for run in held if num_ran == 0 or self._walks[run.walk].loops), None)
        at_work = [run for run in self._running if not run.rests]
        victims = [run for run in at_work if run.can_start_over]
        if needy is None or not self._gate.options.preempts or len(at_work) < 2 or not victims:
            return False
        self._preempt(victims[-1], needy)
        return True

    def _preempt(self, victim: Run, needy: Run) -> None:
        taken = sum(self.kv.pages_taken(victim.rid))
        prepared = self.preprocess.prepare([*victim.prompt_ids, *victim.generated])
        self._intake.send_back(victim, prepared)
        self._gate.release(victim.rid)
        self._running.remove(victim)
        self._waiting.insert(0, victim)
        if self.recorder is not None:
            self.recorder(RequestPreempted(victim.rid, needy.rid, len(victim.generated), taken))

    def _stop_if_stalled(self, held: Sequence[Run]) -> None:
        if any(run.has_deadline for run in held):
            return
        live = self.kv.usable_pages - self.kv.arena.num_free
        settings = ", ".join(f"{name} is {value}" for name, value in self._gate.facts().items())
        pinned, unpin = (f", {len(self.kv.pins)} of them pinned", "unpin something, ") if len(self.kv.pins) else ("", "")
        error = StallError(
            f"all {len(held)} running requests wait for pages and nothing can free one: {live} of {self.kv.usable_pages} "
            f"usable pages are in use{pinned} (page size {self.kv.page_size}); {settings}; {unpin}give the pool more pages "
            "(num_pages), give host pages (cpu_offload_pages), set max_concurrent_requests so that all of them fit at their "
            "final length, or admit with admission='reserve'"
        )
        if self.recorder is not None:
            self.recorder(Stalled([run.rid for run in held], self.kv.usable_pages, live, settings))
        for run in held:
            self._end(run, "error", error)
        raise error

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
            reason, now_s=self._clock(), page_size=self.kv.page_size, model=self.model.identity, misses=misses, error=error
        )
        if self.recorder is not None:
            for m in run.result.misses:
                self.recorder(TokensMissed(run.rid, m.label, m.start, m.stop, m.cause, m.evidence))
            message = "" if error is None else str(error)
            cached, ttft_ms = run.result.cached_tokens, run.result.ttft_ms
            self.recorder(RequestFinished(run.rid, reason, cached, len(run.generated), ttft_ms, message))

    def _remember_keys(self, run: Run) -> None:
        """Leave the key list with the worker, so that a follow-up hashes only what it adds."""
        keys = self.kv.page_keys(run.rid, "main")
        if keys:
            ids = [*run.prompt_ids, *run.generated][: len(keys) * self.kv.page_size]
            self.preprocess.remember(self.kv.key, ids, keys)
