"""Who is in the next step: requests are prepared, let in, grouped by walk, held, sent back, and stopped when all wait."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvlab.engine.endings import Endings
from kvlab.engine.gate import UNKNOWN_ROUNDS
from kvlab.engine.holds import HoldLog
from kvlab.engine.intake import Intake
from kvlab.engine.offloads import Offloads
from kvlab.engine.rows import Outcome
from kvlab.engine.run import Run
from kvlab.engine.stepper import Stepper
from kvlab.errors import InputError, StallError
from kvlab.events import RequestHeld, RequestPreempted, RequestStarted, RequestSubmitted, Stalled
from kvlab.spec import AllocationFailed, ReadPending, RequestId, Walk


class Rounds(Endings):
    """The part of an engine that decides who runs; the engine makes what it uses."""

    _intake: Intake
    _offloads: Offloads
    _stepper: Stepper
    _hold_log: HoldLog
    _is_short: bool

    # -- from submission to start

    def _prepare(self, run: Run) -> None:
        self._intake.prepare(run, run.future.result())
        if run.handed is not None:
            run.walk_index = run.handed.walk_index
            run.prompt_logprobs = list(run.handed.prompt_logprobs)
            for sampled in run.handed.sampled():
                run.take(sampled, self._clock())
        if self.recorder is not None:
            options = run.request.options
            self.recorder(RequestSubmitted(run.rid, run.prompt_slots, options.max_tokens, options.name))

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
        turned_away: StallError | None = None
        while self._waiting:
            head = self._waiting[0]
            if not head.prepared:
                if self._is_at_work:
                    return
                head.future.exception()  # nothing else to do: wait for the worker
                self._collect_prepared()
                continue
            ready = itertools.takewhile(lambda run: run.prepared, self._waiting)
            looked_at = itertools.islice(ready, self._gate.most_looked_at)
            place = self._gate.choose([self._intake.claim(run) for run in looked_at], len(self._waiting))
            if place is not None:
                self._start(self._waiting.pop(place))
            elif not self._running:
                self._end(head, "error", self._never_fits(head))
            elif self._is_at_work or any(run.has_deadline for run in [head, *self._running]):
                return
            else:
                turned_away = self._turn_away(head)
        if turned_away is not None and not self._is_at_work:
            raise turned_away

    @property
    def _is_at_work(self) -> bool:
        """True while a request was let in that this engine is to finish."""
        return len(self._handed_over) < len(self._running)

    @property
    def _handed_over(self) -> list[Run]:
        """What rests here and goes on elsewhere."""
        return [run for run in self._running if run.is_handed_over]

    def _turn_away(self, head: Run) -> StallError:
        """End a request that cannot start: only handed-over ones are left, and they rest until their client cancels them."""
        where, cure = self._resting()
        need = self._intake.claim(head).total_pages
        error = StallError(
            f"request {head.rid} needs up to {need} pages and cannot start: nothing runs that could make way, and "
            f"{self._in_use()}{where} (page size {self.kv.page_size}); {self._settings()}; {cure}give the pool more pages "
            "(num_pages)"
        )
        self._tell_stalled([head])
        self._end(head, "error", error)
        return error

    def _resting(self) -> tuple[str, str]:
        """What handed-over requests hold, and what to do about it: two parts of a message, empty where there are none."""
        resting = self._handed_over
        if not resting:
            return "", ""
        streams = (stream for run in resting for stream in self.kv.streams_of(run.rid).values())
        pages = {page for stream in streams for page in stream.page_indices}
        who = "1 request that was" if len(resting) == 1 else f"{len(resting)} requests that were"
        cure = "cancel() here what the other engine has read, "
        return f", {len(pages)} of them held by {who} handed over", cure

    def _in_use(self) -> str:
        return f"{self.kv.usable_pages - self.kv.arena.num_free} of {self.kv.usable_pages} usable pages are in use"

    def _settings(self) -> str:
        return ", ".join(f"{name} is {value}" for name, value in self._gate.facts().items())

    def _tell_stalled(self, runs: Sequence[Run]) -> None:
        if self.recorder is not None:
            live = self.kv.usable_pages - self.kv.arena.num_free
            self.recorder(Stalled([run.rid for run in runs], self.kv.usable_pages, live, self._settings()))

    def _start(self, run: Run) -> None:
        self._running.append(run)
        if self.recorder is not None:
            self.recorder(RequestStarted(run.rid))
        try:
            run.state = self.model.begin(run.record)
        except Exception as error:  # the others go on
            self._end(run, "error", error)

    def _requeue_unbegun(self) -> None:
        """Let requests in anew that were let in and have not begun: what they were to be lent went with the cache."""
        for run in [run for run in reversed(self._running) if not run.has_begun and not run.rests]:
            self._gate.release(run.rid)
            self._running.remove(run)
            self._waiting.insert(0, run)
            run.state = run.probed = None

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
        if run.is_handed_over:
            return UNKNOWN_ROUNDS  # it ends when its client cancels it
        left = [self._walks[name] for name in run.schedule[run.walk_index :]]
        if any(walk.loops and not walk.samples for walk in left):
            return UNKNOWN_ROUNDS
        replies = run.tokens_left if any(walk.samples for walk in left) else 0
        return replies + sum(not walk.loops for walk in left)

    # -- a round

    def _next_group(self, pending: list[Run]) -> tuple[Walk, list[Run]]:
        """Take from ``pending`` the runs of the walk whose turn it is.

        Prefills first: a first token is waited for, and a decode step does not depend on its neighbours.
        """
        walk = min((self._walks[run.walk] for run in pending), key=lambda walk: walk.loops)
        group = [run for run in pending if run.walk == walk.name]
        pending[:] = [run for run in pending if run.walk != walk.name]
        return walk, group

    def _run_steps(self) -> list[Outcome]:
        """Let each run that can take one step. A run that was served a walk goes on with its next one in the same round."""
        outcomes: list[Outcome] = []
        pending = [run for run in self._running if not run.rests]
        while pending:
            walk, group = self._next_group(pending)
            num_waiting = len(self._waiting)
            outcomes.append(self._stepper.run(self._round, walk, group))
            if len(self._waiting) != num_waiting:  # a callback emptied the cache
                pending = [run for run in pending if run not in self._waiting]
            pending += [run for run in outcomes[-1].served if run.result is None]
        return outcomes

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
        again = [*victim.prompt_ids, *victim.generated] if self._intake.extends_prompt(victim) else None
        self._intake.send_back(victim, None if again is None else self.preprocess.prepare(again))
        self._gate.release(victim.rid)
        self._running.remove(victim)
        self._waiting.insert(0, victim)
        if self.recorder is not None:
            self.recorder(RequestPreempted(victim.rid, needy.rid, len(victim.generated), taken))

    def _stop_if_stalled(self, held: Sequence[Run]) -> None:
        if any(run.has_deadline for run in [*held, *self._handed_over]):
            return
        where, cancel = self._resting()
        pinned, unpin = (f", {len(self.kv.pins)} of them pinned", "unpin something, ") if len(self.kv.pins) else ("", "")
        error = StallError(
            f"all {len(held)} running requests wait for pages and nothing can free one: {self._in_use()}{where}{pinned} "
            f"(page size {self.kv.page_size}); {self._settings()}; {cancel}{unpin}give the pool more pages "
            "(num_pages), give host pages (cpu_offload_pages), set max_concurrent_requests so that all of them fit at their "
            "final length, or admit with admission='reserve'"
        )
        self._tell_stalled(held)
        for run in held:
            self._end(run, "error", error)
        raise error
