"""One request in flight: where it is in its schedule and what it has so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from kvlab.engine.handover import HandedOver
from kvlab.engine.preprocess import Prepared
from kvlab.engine.request import GenerationResult, MissTable, Request, StreamChunk
from kvlab.engine.sampler import Sampled
from kvlab.engine.text import TextStream
from kvlab.spec import KeyedPrompt, Match, Miss, PromptRecord, RequestId, WalkInputs


@dataclass(eq=False, repr=False)
class Run:
    """Mutable state of one request from submission to its result; the engine alone changes it.

    ``prepared`` turns true once the worker has delivered the prompt. ``rest`` holds what later chunks of the current walk run;
    None means the walk starts over from untrimmed inputs. ``matched`` has, for each life (a preemption ends one) and walk, the
    slots of each label that were served from pages.
    """

    request: Request
    future: Future[Prepared]
    submitted_s: float
    submitted_step: int
    prepared: bool = False
    record: PromptRecord = field(default_factory=lambda: PromptRecord({}))
    configs: Mapping[str, Mapping[str, KeyedPrompt]] = field(default_factory=dict)
    schedule: tuple[str, ...] = ()
    state: Any = None  # the model's own, from the start of each life
    prompt_ids: tuple[int, ...] = ()
    prompt_slots: int = 0  # pictures included
    input_tokens: int = 0  # slots of the prompt, and after a preemption of those generated before it that it now includes
    stop_ids: frozenset[int] = frozenset()
    text: TextStream = field(default_factory=lambda: TextStream(lambda ids: ""))
    walk_index: int = 0
    rest: WalkInputs | None = None
    generated: list[int] = field(default_factory=list)
    chunks: list[StreamChunk] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    probed: Mapping[str, Match] | None = None  # what was found of the current walk, which waits to run
    matched: dict[tuple[int, int], Mapping[str, int]] = field(default_factory=dict)
    reply_reason: str | None = None  # why no more tokens are generated, once that is so
    replays: bool = False  # it was sent back, and writes what it has generated again
    encoder_calls: int = 0
    outputs: Mapping[str, Any] = field(default_factory=dict)  # what the model hands out at the end
    first_token_s: float | None = None
    last_token_s: float | None = None
    first_pass_s: float | None = None
    held_steps: int = 0
    preemptions: int = 0
    is_parked: bool = False  # on host pages
    offloads: int = 0
    handed: HandedOver | None = None  # begun elsewhere, and not read yet
    is_handed_over: bool = False  # to go on elsewhere
    last_ran_round: int = 0
    earlier_misses: tuple[Miss, ...] = ()  # of lives before this one
    cancel_requested: bool = False
    result: GenerationResult | None = None

    def __repr__(self) -> str:
        return f"Run({self.rid}, walk {self.walk_index} of {len(self.schedule)}, {len(self.generated)} generated)"

    @property
    def rid(self) -> RequestId:
        return self.request.rid

    @property
    def walk(self) -> str:
        """Name of the walk that runs next."""
        return self.schedule[self.walk_index]

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.options.sampling.prompt_logprobs

    @property
    def tokens_left(self) -> int:
        """Tokens it may still generate."""
        return max(self.request.options.max_tokens - len(self.generated), 0)

    @property
    def has_deadline(self) -> bool:
        return self.request.options.deadline_s is not None or self.request.options.deadline_steps is not None

    @property
    def has_begun(self) -> bool:
        """True once something of it ran, or was served, in this life."""
        return self.walk_index > 0 or self.rest is not None or (self.preemptions, 0) in self.matched

    @property
    def rests(self) -> bool:
        """True while no step may run it."""
        return self.is_parked or self.is_handed_over

    @property
    def can_start_over(self) -> bool:
        """False when recomputing gives other values (a window released some), or a peer holds what is needed for it."""
        return self.request.options.window is None and self.handed is None

    def past_deadline(self, now_s: float, step: int) -> bool:
        """True once either deadline has passed."""
        options = self.request.options
        too_late = options.deadline_s is not None and now_s - self.submitted_s >= options.deadline_s
        too_long = options.deadline_steps is not None and step - self.submitted_step > options.deadline_steps
        return too_late or too_long

    @property
    def is_laid_out(self) -> bool:
        """True when its prompt is more than one text."""
        layouts = (spans for by_label in self.record.layouts.values() for spans in by_label.values())
        return any(len(spans) > 1 or any(span.kind != "ids" for span in spans) for spans in layouts)

    def note_match(self) -> None:
        """The current walk goes ahead with what was found of it. What is looked up and then has to wait is asked again."""
        if self.probed is not None:
            slots = {label: match.slots for label, match in self.probed.items()}
            self.matched[self.preemptions, self.walk_index] = slots
            self.probed = None

    def cached(self) -> dict[str, int]:
        """Slots served from pages by label. What a walk finds that has run in an earlier life are its own pages: no hit."""
        found: dict[str, int] = {}
        for key, slots in self.matched.items():
            for label, count in slots.items() if self._is_first(*key) else ():
                found[label] = found.get(label, 0) + count
        return found

    def resumed_tokens(self) -> int:
        """Slots that were found cached after preemptions."""
        return sum(sum(slots.values()) for key, slots in self.matched.items() if not self._is_first(*key))

    def _is_first(self, life: int, walk_index: int) -> bool:
        return all((earlier, walk_index) not in self.matched for earlier in range(life))

    def replay(self, starts_with: int | None) -> list[int]:
        """Ids that a sampling loop had written or was to write next when the request was sent back."""
        opening = [] if starts_with is None else [starts_with]
        return [*opening, *(self.generated if self.reply_reason is None else self.generated[:-1])]

    def take(self, sampled: Sampled, now_s: float) -> tuple[StreamChunk, str | None]:
        """Append a sampled token; returns the chunk to stream and why generation is over with it (None: it goes on)."""
        self.generated.append(sampled.token)
        self.first_token_s = now_s if self.first_token_s is None else self.first_token_s
        self.last_token_s = now_s
        if sampled.logprob is not None:
            self.logprobs.append({"token": sampled.token, "logprob": sampled.logprob, "top": dict(sampled.top)})
        ends = sampled.token in self.stop_ids
        text = "" if ends else self.text.push(sampled.token)
        reason = self._reason(ends)
        if reason is not None:
            text += self.text.finish()
        chunk = StreamChunk(sampled.token, text, len(self.generated) - 1, sampled.logprob)
        self.chunks.append(chunk)
        return chunk, reason

    def _reason(self, ended_by_id: bool) -> str | None:
        if ended_by_id or self.text.stopped:
            return "stop"
        return "length" if len(self.generated) >= self.request.options.max_tokens else None

    def send_back(self, misses: Sequence[Miss]) -> None:
        """Preempted: the request starts over, and is to write what it has generated again."""
        self.earlier_misses = self._all_misses(misses)
        self.preemptions += 1
        self.walk_index, self.rest, self.state, self.probed = 0, None, None, None
        self.replays = bool(self.generated)
        if len(self.prompt_logprobs) < len(self.prompt_ids):
            self.prompt_logprobs.clear()

    def _all_misses(self, misses: Sequence[Miss]) -> tuple[Miss, ...]:
        """Those of earlier lives, and of this one's those of prompt slots that no earlier life has served or computed."""
        if not self.preemptions:
            return tuple(misses)
        begins = self.cached()
        for m in self.earlier_misses:
            begins[m.label] = max(begins.get(m.label, 0), m.stop)
        cut = (
            replace(
                m,
                start=max(m.start, begins.get(m.label, 0)),
                stop=min(m.stop, self.prompt_slots) if m.label == "main" else m.stop,  # what it generated is no prompt
            )
            for m in misses
        )
        return (*self.earlier_misses, *(m for m in cut if m.start < m.stop))

    def extend_prompt(self, record: PromptRecord) -> None:
        """What was generated is part of the prompt from now on."""
        self.record, self.replays = record, False
        self.input_tokens = len(self.prompt_ids) + len(self.generated)

    def to_result(
        self,
        reason: str,
        *,
        now_s: float,
        page_size: int,
        model: str,
        misses: Sequence[Miss],
        error: Exception | None,
        starts_with: int | None,
        keying: str,
    ) -> GenerationResult:
        """Freeze what the client gets; ``starts_with`` is the id that opens its replies."""
        self.text.finish()
        cached_by_label = self.cached()
        cached = cached_by_label.get("main", 0)
        first_s = self.first_pass_s if self.first_token_s is None else self.first_token_s
        return GenerationResult(
            rid=self.rid,
            name=self.request.options.name,
            text=self.text.text,
            ids=tuple(self.generated),
            prompt_ids=self.prompt_ids,
            prompt_tokens=self.prompt_slots,
            cached_tokens=cached,
            cached_by_label=cached_by_label,
            pages_matched=cached // page_size,
            page_size=page_size,
            finish_reason=reason,
            ttft_ms=self._ms_until(first_s),
            total_ms=(now_s - self.submitted_s) * 1e3,
            tokens_per_s=self._rate(),
            misses=MissTable(self._all_misses(misses)),
            model=model,
            request=self.request,
            fork=self.record.fork,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            held_steps=self.held_steps,
            preemptions=self.preemptions,
            resumed_tokens=self.resumed_tokens(),
            offloads=self.offloads,
            error=error,
            stop_ids=self.stop_ids,
            encoder_calls=self.encoder_calls,
            first_pass_ms=self._ms_until(self.first_pass_s),
            opening_ids=(starts_with,) if starts_with is not None and self.generated else (),
            keying=keying,
            **self.outputs,
        )

    def _ms_until(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else (moment_s - self.submitted_s) * 1e3

    def _rate(self) -> float | None:
        if self.first_token_s is None or self.last_token_s is None or len(self.generated) < 2:
            return None
        seconds = self.last_token_s - self.first_token_s
        return (len(self.generated) - 1) / seconds if seconds > 0 else None
