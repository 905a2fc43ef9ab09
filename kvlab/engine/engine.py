"""The engine: requests join and leave between steps, share pages where they may, and stream their tokens."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any, overload

from kvlab.attention.base import AttentionBackend
from kvlab.cache.kv import KVResource
from kvlab.cache.pins import check_name
from kvlab.engine.chunks import ChunkRule
from kvlab.engine.declare import check_declaration, moved_root, open_caches
from kvlab.engine.encoders import EncoderMemo
from kvlab.engine.gate import AdmissionOptions, Claim, Gate, admission_of
from kvlab.engine.handle import RequestHandle, finished
from kvlab.engine.handover import HandedOver
from kvlab.engine.holds import HoldLog
from kvlab.engine.intake import Intake
from kvlab.engine.interrupts import deferred_interrupts
from kvlab.engine.offloads import Offloads
from kvlab.engine.ownership import Ownership, for_one_thread
from kvlab.engine.positions import Positions
from kvlab.engine.preprocess import PreprocessWorker
from kvlab.engine.request import GenerationResult, Request, RequestOptions, StreamChunk, read_options
from kvlab.engine.rounds import Rounds
from kvlab.engine.run import Run
from kvlab.engine.sampler import Sampler
from kvlab.engine.skip import SkipStage
from kvlab.engine.stepper import Stepper
from kvlab.errors import InputError
from kvlab.events import ModelLoaded
from kvlab.recorder import Recorder
from kvlab.spec import Chat, Continued, Mixed, ModelSpec, Prompt, ReadPending, RequestConfig, RequestId, Resource

logger = logging.getLogger("kvlab.engine")


class Engine(Rounds):
    """Continuous batching over a paged KV cache with cross-request prefix reuse.

    An engine belongs to one thread at a time: a call from a second one, while the first is inside, is refused.

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
        encoder_cache_bytes: most memory for what encoders made of pictures.

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
        encoder_cache_bytes: int = 256 << 20,
    ) -> None:
        self.ownership = Ownership()
        self.model, self.kv, self.attention = model, kv, attention
        self.positions = Positions() if positions is None else positions
        self.sampler = Sampler(model.vocab_size, seed=seed) if sampler is None else sampler
        self.preprocess = preprocess or PreprocessWorker(
            model.processor, model.prefix_key_streams(), {kv.key: kv.page_size}, profile=profile
        )
        self.encoders = EncoderMemo(model, encoder_cache_bytes, recorder)
        self.recorder = recorder
        self._resources: tuple[Resource, ...] = (kv, attention, self.positions, self.sampler)
        self._clock, self._hold_log = clock, HoldLog(clock)
        self._intake = Intake(model, kv, self._resources, profile=profile)
        self._walks = dict(model.walks())
        self._waiting: list[Run] = []
        self._running: list[Run] = []
        self._in_flight: dict[RequestId, Run] = {}
        self._rids = itertools.count(1)
        self._gate = Gate(kv, admission or admission_of(profile), rounds_left=self._rounds_left, record=recorder)
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
            encoders=self.encoders,
            count=self._count,
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

    @for_one_thread
    def submit(self, prompt: Prompt, **options: Any) -> RequestHandle:
        """Queue a request; nothing runs until the engine steps.

        Args:
            prompt: text, token ids, a chat, texts and pictures (``spec.ask``, ``spec.draw``), or a result's ``follow_up``.
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
        read = prompt if handed is None else list(handed.prompt_ids)  # tokenised anew they might differ from what was computed
        future = self.preprocess.submit(read, _fields(read, options))
        run = Run(request, future, self._clock(), self._round, handed=handed)
        if run.future.done():
            self._prepare(run)
        self._waiting.append(run)
        self._in_flight[run.rid] = run
        return run

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[StreamChunk]:
        """Yield the tokens of one request as they come; leaving the loop early cancels it.

        A drawn picture is no token: take it from the result of ``submit`` or ``generate``.
        """
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
    @for_one_thread
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
                handles.append(self._submit_nth(len(handles), one, options) if several else self.submit(one, **options))
            while not all(handle.done for handle in handles):
                self.step()
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return finished(handles) if several else handles[0].result()

    def _submit_nth(self, n: int, prompt: Prompt, options: Mapping[str, Any]) -> RequestHandle:
        try:
            return self.submit(prompt, **options)
        except InputError as error:
            error.add_note(f"this was prompt {n} of the list, counted from 0; none of the list has run")
            raise

    @for_one_thread
    def step(self) -> int:
        """Advance every request that can by one chunk or one token; returns the number of rows that ran.

        Raises:
            StallError: every running request waits for pages, nothing can free one, and none has a deadline; or only requests
                that were handed over are left, and those that wait cannot start beside them. Those that wait end with this
                error, their pages return, and the engine goes on.
        """
        self._refuse_in_step("step")
        self._round += 1
        if self.recorder is not None:
            self.recorder.step = self._round
        with deferred_interrupts():
            if self._waiting:
                self._notice_changed_weights()
            self._collect_prepared()
            self._end_overdue()
            self._offloads.bring_back()
            self._start_waiting()
        self._in_step = True
        try:
            outcomes = self._run_steps()
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
            if self.kv.checks:
                self._gate.check()
        return num_ran

    def _refuse_in_step(self, verb: str) -> None:
        if self._in_step:
            raise InputError(f"on_token cannot {verb} the engine that is calling it; it may submit and cancel requests")

    @for_one_thread
    def hand_over(self, handle: RequestHandle) -> HandedOver:
        """Let a request that has begun to generate rest here, so that another engine can go on with it.

        Its pages stay until ``handle.cancel()``. That is due once the other engine has read them: when what ``take_over``
        returned has a token more than it came with, or has ended. Cancelled earlier, the request ends there with an error.
        Until it is cancelled others may lack its pages: they end with StallError when only what rests is in their way.

        Raises:
            InputError: the request has no token yet, or has ended, or is more than one text answered in words; it computes its
                prompt again after a preemption, its window has released some of it, or ``on_token`` called.
        """
        self._refuse_in_step("hand over a request of")
        run = next((r for r in self._running if r.rid == handle.rid), None)
        why_not = self._why_it_stays(run)
        if run is None or why_not:
            raise InputError(f"request {handle.rid} cannot be handed over: {why_not}")
        run.is_handed_over = True
        self._gate.amend(Claim(run.rid, sum(self.kv.pages_taken(run.rid)), 0, growth=0))  # it grows no more
        published = {resource.key: resource.publish(run.rid) for resource in self._resources}
        return HandedOver(
            _portable(run),
            run.prompt_ids,
            tuple(run.generated),
            run.walk_index,
            run.request.options,
            published,
            logprobs=tuple(run.logprobs),
            prompt_logprobs=tuple(run.prompt_logprobs),
        )

    def _why_it_stays(self, run: Run | None) -> str:
        """Why a request cannot go on in another engine, in words; "" when it can."""
        if run is None or not run.generated or run.is_parked or self.kv.is_offloaded(run.rid):
            return "it is not running, has no token, or is on the host"
        if not self._intake.extends_prompt(run):
            return (
                "only a prompt of one text goes from engine to engine, and this one has pictures or walks of its own; let this "
                "engine finish it"
            )
        if run.handed is not None:
            return "it was taken over here and its pages are not read yet; step this engine until it has a token more"
        walk = self._walks[run.walk]
        if run.replays or not (walk.loops and walk.samples):
            return (
                "it was sent back for want of pages and computes its prompt again; step this engine until it has a token more"
            )
        released = self.kv.stream(run.rid).released
        if released:
            return (
                f"its window has released {released} tokens, and no engine can read a stream with a gap; let this engine "
                "finish it, or hand over before anything is released"
            )
        return ""

    @for_one_thread
    def take_over(self, handed: HandedOver) -> RequestHandle:
        """Go on with a request that another engine began; the tokens it has are the first of its reply.

        Raises:
            InputError: as ``submit``.
        """
        return self._handle(self._submit(handed.prompt, handed.options, handed))

    @for_one_thread
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
        self._refuse_in_step("pin")
        check_name(name)
        options = {"max_tokens": 0, "salt": salt, "fields": {} if fields is None else fields}
        run = self._submit(prompt, read_options({**self.model.default_options, **options}))
        self._handle(run).result()
        return self.kv.pins.pin(name, RequestConfig(run.configs.get(self.kv.key, {}), salt=salt))

    @for_one_thread
    def unpin(self, name: str) -> int:
        """Let the pages pinned as ``name`` go when room is needed; returns how many they are."""
        return self.kv.pins.unpin(name)

    @for_one_thread
    def reset_prefix_cache(self) -> bool:
        """Forget every cached page and encoded picture. Pages of running requests stay readable and are not offered again."""
        self.encoders.clear()
        dropped = [resource.reset_prefix_cache("asked") for resource in self._resources]
        self._requeue_unbegun()
        return all(dropped)

    @for_one_thread
    def check(self) -> None:
        """Verify every invariant.

        Raises:
            IntegrityError: names the page and its keys.
        """
        for resource in self._resources:
            resource.check()
        self._gate.check()

    @for_one_thread
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

    def _notice_changed_weights(self) -> None:
        version = self.model.weights_version()
        if version != self._weights_version:
            self._weights_version = version
            self._weights_epoch += 1
            logger.info("the weights of %s changed in place: its prefix cache is dropped", self.model.name)
            self.encoders.clear()
            self._roots = moved_root(self.model, self._resources, self._weights_epoch)
            self._requeue_unbegun()


def _portable(run: Run) -> Prompt:
    """The prompt of a request as it travels: ids may come in anything that has them, an iterator even, and go as a list."""
    prompt = run.request.prompt
    return prompt if isinstance(prompt, str | Chat | Continued | Mixed) else list(run.prompt_ids)


def _fields(prompt: Prompt, options: RequestOptions) -> Mapping[str, Any]:
    """What the processor is told beside the prompt. Noise drawn from the seed is part of what a picture is."""
    return {**options.fields, "seed": options.sampling.seed} if isinstance(prompt, Mixed) else options.fields
