"""When the pool is too small: who waits, who is sent back, and that nothing is ever wrong, stuck or lost."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.assemble import build_engine
from kvlab.engine.footprint import Footprint, can_finish, peak_pages
from kvlab.engine.gate import AdmissionOptions, Claim, Gate
from kvlab.errors import InputError, StallError
from kvlab.events import (
    GateOpened,
    GrantRefused,
    PagesLeased,
    PrefixMatched,
    RequestPreempted,
    RequestReserved,
    RequestWaits,
    ReservationReleased,
    Stalled,
)
from kvlab.lab.sizing import size_pool
from kvlab.models.tracer import ToyProcessor, TracerAttention, TracerModel
from kvlab.spec import ask, draw

PREFIX = [1 + i % 60 for i in range(59 * 16)]
SHARERS = [[*PREFIX, *[1 + (i + j) % 60 for j in range(8)]] for i in range(32)]


def all_right(engine: Any, results: list[Any], max_tokens: int) -> bool:
    return all(list(r.ids) == engine.model.continuation(list(r.prompt_ids), max_tokens) for r in results)


# -- the published stall -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"admission": "reserve"},
        {"admission": "peak"},
        {"admission": "reserve", "admission_order": "backfill"},
        {"admission": "none", "preemption": True},
        {"admission": "none", "max_concurrent_requests": 4},
    ],
    ids=str,
)
def test_b11_32_requests_on_96_pages_all_complete(tracer, options):
    engine = tracer(page_size=16, num_pages=97, check_invariants=False, **options)
    results = engine.generate(SHARERS, max_tokens=16)
    assert all(r.finish_reason == "length" for r in results)
    assert all_right(engine, results[:3] + results[-3:], 16)
    assert engine.kv.arena.num_free == engine.kv.usable_pages - len(engine.kv.index)


def test_31_sharers_of_one_request_before_them_all_complete(tracer):
    engine = tracer(page_size=16, num_pages=257)
    shared = [1 + i % 60 for i in range(320)]
    prompts = [[*shared, *(1 + (n * 3 + i) % 60 for i in range(8))] for n in range(32)]
    first = engine.generate(prompts[0], max_tokens=8)
    results = engine.generate(prompts[1:], max_tokens=8)
    assert all_right(engine, [first, *results], 8)
    assert [result.cached_tokens for result in results] == [320] * 31


def test_b11_with_no_gate_the_stall_is_named_within_50_steps(tracer):
    engine = tracer(page_size=16, num_pages=97, check_invariants=False, admission="none")
    with pytest.raises(StallError, match="96 of 96 usable pages"):
        engine.generate(SHARERS, max_tokens=64)
    (stalled,) = engine.events.filter(Stalled)
    assert stalled.step <= 50
    assert (stalled.event.live_pages, stalled.event.usable_pages) == (96, 96)


def test_b12_waiting_at_the_gate_is_told_once_a_request(tracer, caplog):
    engine = tracer(page_size=16, num_pages=97, check_invariants=False)
    with caplog.at_level("WARNING", logger="kvlab"):
        engine.generate(SHARERS, max_tokens=8)
    assert caplog.records == []
    assert len(engine.events.filter(RequestWaits)) <= 2 * len(SHARERS)


@pytest.mark.parametrize("options", [{}, {"admission": "peak"}, {"admission": "none", "preemption": True}], ids=str)
def test_k8_1_two_half_fed_requests_both_finish(tracer, options):
    engine = tracer(page_size=4, num_pages=8, **options)  # 7 pages; A needs 4 + 1, B 3 + 1
    results = engine.generate([[1] * 16, [2] * 12], max_tokens=2)
    assert all_right(engine, results, 2)


def test_k8_1_with_no_gate_the_stall_names_pool_and_settings(tracer):
    engine = tracer(page_size=4, num_pages=8, admission="none")
    with pytest.raises(StallError, match=r"7 of 7 usable pages.*admission is none.*max_concurrent_requests is None"):
        engine.generate([[1] * 16, [2] * 12], max_tokens=3)


# -- the gate ----------------------------------------------------------------------------------------------------------


def test_b32_the_hit_is_leased_as_the_request_is_let_in(tracer):
    engine = tracer(page_size=4, num_pages=12)
    engine.generate([1] * 12, max_tokens=1)
    result = engine.generate([*[1] * 12, 5, 6], max_tokens=4)
    kinds = [type(e.event) for e in engine.events if getattr(e.event, "rid", None) == result.rid]
    assert kinds.index(PagesLeased) < kinds.index(RequestReserved)
    assert result.cached_tokens == 12


def test_b33_lent_pages_leave_the_reservation(tracer):
    engine = tracer(page_size=4, num_pages=9)
    engine.generate([1] * 17, max_tokens=1)  # 4 pages cached
    handles = [engine.submit([*[1] * 16, 3 + i], max_tokens=8) for i in range(2)]  # 6 pages each, 4 of them lent
    engine.step()
    assert len(engine.events.filter(RequestReserved)) == 3
    assert [r.event.hit_pages for r in engine.events.filter(RequestReserved)] == [0, 4, 4]
    assert all_right(engine, [handle.result() for handle in handles], 8)


@pytest.mark.parametrize("admission", ["reserve", "peak", "none"])
def test_the_log_has_the_numbers_of_every_decision(tracer, admission):
    engine = tracer(page_size=4, num_pages=9, admission=admission, preemption=True)  # 8 pages, 5 a request
    engine.generate([[1] * 12, [2] * 12, [3] * 12], max_tokens=8)
    (opened,) = (entry.event for entry in engine.events.filter(GateOpened))
    assert opened == GateOpened(admission, "fifo", 128, None, True)
    reserved = [entry.event for entry in engine.events.filter(RequestReserved)]
    for event in reserved:
        assert event.num_admitted + event.num_waiting <= 3
        assert (event.planned_peak_pages is not None) == (admission == "peak")
        if admission == "reserve":
            assert event.outstanding_pages <= event.supply_pages
        if admission == "peak":
            assert 5 <= event.planned_peak_pages <= 8
    waits = [entry.event for entry in engine.events.filter(RequestWaits)]
    if admission == "none":
        assert waits == []
    else:
        assert [(e.need_pages, e.num_admitted, e.num_waiting) for e in waits] == [(5, 1, 2), (5, 1, 1)]
        assert all(e.outstanding_pages + e.need_pages > e.supply_pages for e in waits)
    released = [entry.event for entry in engine.events.filter(ReservationReleased)]
    assert {event.claim_pages for event in released} == {5}
    assert released[-1].num_admitted == released[-1].outstanding_pages == 0


def test_nobody_starts_before_the_head_in_fifo_order(tracer):
    engine = tracer(page_size=4, num_pages=11)
    results = engine.generate([[1] * 20, [2] * 20, [3] * 3], max_tokens=4)
    started = [e.event.rid for e in engine.events if e.event.kind == "RequestStarted"]
    assert started == [r.rid for r in results]


def test_backfill_lets_a_small_request_pass_where_it_cannot_delay_the_head(tracer):
    engine = tracer(page_size=4, num_pages=11, admission_order="backfill")
    results = engine.generate([[1] * 20, [2] * 20, [3] * 3], max_tokens=4)
    started = [e.event.rid for e in engine.events if e.event.kind == "RequestStarted"]
    assert started == [results[0].rid, results[2].rid, results[1].rid]
    assert all_right(engine, results, 4)


def test_a_refused_queue_is_not_looked_at_again_while_nothing_changed():
    pool = FakePool(free=3)
    gate = Gate(pool, AdmissionOptions(), rounds_left=lambda rid: 8)
    waiting = [Claim(1, total_pages=5, prompt_pages=2)]
    assert [gate.choose(waiting) for _ in range(5)] == [None] * 5
    assert pool.asked == 1
    pool.free = 5
    assert gate.choose(waiting) == 0


def test_b34_slots_that_are_no_positions_are_reserved_in_full():
    pool = FakePool(free=13)
    gate = Gate(pool, AdmissionOptions(), rounds_left=lambda rid: 16)
    need = -(-(200 + 16) // 16)  # 200 slots of a picture and 16 tokens, whatever max_seq_len says
    assert gate.choose([Claim(1, need, 13)]) is None
    pool.free = 14
    assert gate.choose([Claim(1, need, 13)]) == 0


def test_b34_the_slots_of_a_picture_are_claimed_in_full_however_short_the_context(tracer):
    engine = tracer(media=True, max_seq_len=64)
    run = engine.submit(ask("10 11", np.zeros((2, 97, 3), dtype=np.uint8)), max_tokens=16)._run
    assert run.prompt_slots == 200
    assert engine._intake.claim(run).total_pages == -(-(200 + 16) // 16)


class FakePool:
    """A pool of free pages and nothing else."""

    page_size = 16

    def __init__(self, free: int) -> None:
        self.free, self.asked = free, 0

    @property
    def usable_pages(self) -> int:
        return self.free

    def supply_pages(self, excluding: Any = ()) -> int:
        self.asked += 1
        return self.free

    def supply_mark(self) -> tuple[int, ...]:
        return (self.free,)

    def peek_prefix(self, rid: Any) -> list[int]:
        return []

    def lease_prefix(self, rid: Any) -> int:
        return 0

    def pages_taken(self, rid: Any) -> tuple[int, int]:
        return 0, 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admission": "open"}, "reserve, peak, none"),
        ({"admission_order": "lifo"}, "fifo, backfill"),
        ({"backfill_protect": "hard"}, "easy"),
        ({"backfill_window": 0}, "backfill_window is 0"),
        ({"max_concurrent_requests": -1}, "max_concurrent_requests is -1"),
        ({"preemption": "maybe"}, "preemption"),
    ],
)
def test_unknown_names_and_windows_of_nothing_are_errors(tracer, options, message):
    with pytest.raises(InputError, match=message):
        tracer(**options)


def test_the_published_profile_has_no_gate_and_no_preemption(tracer):
    engine = tracer(page_size=4, num_pages=8, profile="published")
    assert tracer(page_size=4, profile="published", admission="reserve")._gate.options.preempts is False
    with pytest.raises(StallError, match="admission is none.*preemption is False"):
        engine.generate([[1] * 16, [2] * 12], max_tokens=3)


# -- peak --------------------------------------------------------------------------------------------------------------


def slow_peak(footprints: list[Footprint], page_size: int) -> int:
    last = max((f.rounds for f in footprints), default=0)
    return max(sum(usage(f, t, page_size) for f in footprints) for t in range(last + 1)) if footprints else 0


def usage(f: Footprint, t: int, page_size: int) -> int:
    if f.rounds and t >= f.rounds:
        return 0
    growth = f.growth if f.rounds else 0  # one that has ended holds its pages in every round, and takes no more
    return min(max(f.claim_pages, f.held_pages), f.held_pages + f.now_pages + growth * -(-t // page_size))


FOOTPRINTS = st.builds(
    Footprint,
    held_pages=st.integers(0, 9),
    claim_pages=st.integers(0, 12),
    now_pages=st.integers(0, 4),
    growth=st.integers(0, 2),
    rounds=st.integers(0, 40),
)


@settings(deadline=None)
@given(st.lists(FOOTPRINTS, max_size=6), st.sampled_from([1, 4, 16]))
def test_the_peak_is_that_of_looking_at_every_round(footprints, page_size):
    assert peak_pages(footprints, page_size) == slow_peak(footprints, page_size)


@settings(deadline=None)
@given(st.lists(FOOTPRINTS, max_size=5), st.integers(0, 12))
def test_a_safe_set_can_finish_in_some_order_and_an_unsafe_one_in_none(footprints, free):
    def in_some_order(left: list[Footprint], free: int) -> bool:
        return not left or any(
            f.owed_pages <= free and in_some_order(left[:i] + left[i + 1 :], free + f.held_pages) for i, f in enumerate(left)
        )

    assert can_finish(footprints, free) == in_some_order(footprints, free)


def test_peak_admits_more_than_reserve_where_lives_do_not_overlap(tracer):
    def rounds(admission: str) -> int:
        engine = tracer(page_size=4, num_pages=17, admission=admission)
        results = engine.generate([[1 + i] * (4 + 4 * i) for i in range(4)], max_tokens=20)
        assert all_right(engine, results, 20)
        assert sum(r.held_steps for r in results) == 0 or admission == "peak"
        return engine.events.step

    assert rounds("peak") <= rounds("reserve")


def test_a_grant_that_would_leave_nobody_able_to_finish_is_refused():
    pool = FakePool(free=1)
    gate = Gate(pool, AdmissionOptions(admission="peak"), rounds_left=lambda rid: 9)
    pool.pages_taken = lambda rid: (3, 0)  # type: ignore[method-assign]
    gate._claims = {1: Claim(1, 5, 3), 2: Claim(2, 4, 3)}
    assert gate.may_grant(2, 1)  # it can finish on what is free
    assert not gate.may_grant(1, 1)  # then 2 could not finish, nor 1
    assert gate.may_grant(3, 1)  # not admitted by the gate: not its business


# -- preemption --------------------------------------------------------------------------------------------------------


def test_k5_7_a_preempted_request_resumes_where_it_was(tracer):
    engine = tracer(page_size=4, num_pages=9, admission="none", preemption=True)
    old, new = engine.generate([[1] * 8, [2] * 8], max_tokens=16)
    assert (old.preemptions, new.preemptions > 0) == (0, True)
    assert all_right(engine, [old, new], 16)
    assert (new.prompt_tokens, new.cached_tokens) == (8, 0)


def test_k5_7_13_tokens_are_looked_up_and_12_found(tracer):
    engine = tracer(page_size=4, num_pages=40)
    handle = engine.submit([1] * 8, max_tokens=16)
    run = handle._run
    for generated, found in ((5, 12), (9, 28)):  # the second time 17 are looked up, and 16 more are found
        while len(run.generated) < generated:
            engine.step()
        assert engine.kv.stored_tokens(run.rid) == 8 + generated - 1
        engine._preempt(run, run)
        engine.step()
        assert run.resumed_tokens() == found
    result = handle.result()
    assert all_right(engine, [result], 16)
    assert (result.prompt_tokens, result.cached_tokens, result.preemptions) == (8, 0, 2)
    assert (engine.kv.counters.prompts_admitted, engine.kv.counters.hits, engine.kv.counters.resumed_tokens) == (1, 0, 28)


@pytest.mark.parametrize("seed", range(6))
def test_preempted_output_equals_the_run_alone_sampled_and_penalised(tracer, seed):
    ask = {"max_tokens": 24, "temperature": 1.0, "seed": seed, "repetition_penalty": 1.3}
    prompts = [[1 + i + seed] * 9 for i in range(4)]
    alone = [tracer(page_size=4, num_pages=20).generate(p, **ask).ids for p in prompts]
    engine = tracer(page_size=4, num_pages=20, admission="none", preemption=True)
    results = engine.generate(prompts, **ask)
    assert sum(r.preemptions for r in results) > 0
    assert [r.ids for r in results] == alone


def test_k13_1_resumed_pages_are_no_hits(tracer):
    engine = tracer(page_size=4, num_pages=72, admission="none", preemption=True)
    prompts = [[1 + (7 * i + 3 * j * (i + 1)) % 60 for j in range(64)] for i in range(10)]
    results = engine.generate(prompts, max_tokens=24)
    assert len(engine.events.filter(RequestPreempted)) >= 3
    assert sum(r.cached_tokens for r in results) == 0
    assert sum(r.resumed_tokens for r in results) > 0
    assert all_right(engine, results, 24)
    counters = engine.kv.counters
    assert (counters.prompts_admitted, counters.hits, counters.matched_tokens) == (10, 0, 0)
    assert counters.resumed_tokens == sum(r.resumed_tokens for r in results)
    assert [entry.event.rid for entry in engine.events.filter(PrefixMatched)] == [r.rid for r in results]


def each_token_once(result):
    spans = [(result.cached_tokens, result.cached_tokens), *((m.start, m.stop) for m in result.misses)]
    return spans[-1][1] == result.prompt_tokens and all(a[1] == b[0] for a, b in pairwise(spans))


def test_every_prompt_token_keeps_one_cause_through_preemptions(tracer):
    engine = tracer(page_size=4, num_pages=9, admission="none", preemption=True)
    assert all(each_token_once(result) for result in engine.generate([[1] * 8, [2] * 8], max_tokens=16))


@pytest.mark.parametrize("seed", range(12))
def test_it_does_so_too_for_requests_sent_back_before_anything_of_them_ran(tracer, seed):
    rng = random.Random(seed)
    shared = rng.choices(range(1, 4), k=12)
    engine = tracer(
        page_size=rng.choice([1, 2, 4]), num_pages=rng.choice([16, 20]), admission="none", preemption=True,
        max_step_tokens=rng.choice([3, 8, 2048]),
    )  # fmt: skip
    handles = []
    for _ in range(rng.randint(4, 9)):
        prompt = [*shared[: rng.randint(1, 10)], *rng.choices(range(1, 5), k=rng.randint(1, 3))]
        handles.append(engine.submit(prompt, max_tokens=rng.randint(0, 2 if len(prompt) > 11 else 4)))
        for _ in range(rng.randint(0, 3)):
            engine.step()
    results = [handle.result() for handle in handles]
    assert all(each_token_once(result) for result in results)
    assert sum(r.cached_tokens for r in results) == engine.kv.counters.matched_tokens
    assert sum(r.resumed_tokens for r in results) == engine.kv.counters.resumed_tokens


def sharers_of_a_trunk(engine):
    """Two requests that fit together by the trunk both are lent; the second is let in and does not run yet."""
    trunk = [1 + i % 60 for i in range(32)]
    engine.generate([*trunk, 9], max_tokens=0)
    handles = [engine.submit([*trunk, *[5] * 30, i], max_tokens=40) for i in (1, 2)]
    engine.step()
    assert [run.has_begun for run in engine._running] == [True, False]
    return handles


def change_weights(engine):
    engine.model.seed = 1
    engine.submit([1], max_tokens=0)


@pytest.mark.parametrize("drop", [lambda engine: engine.reset_prefix_cache(), change_weights])
def test_emptying_the_cache_keeps_the_promise_to_those_let_in_and_not_begun(tracer, drop):
    engine = tracer(page_size=4, num_pages=45, max_step_tokens=4, preemption=False)
    handles = sharers_of_a_trunk(engine)
    drop(engine)
    engine.check()
    assert [handle.result().finish_reason for handle in handles] == ["length", "length"]
    assert [handle.outcome.cached_tokens for handle in handles] == [32, 0]
    assert handles[1].outcome.held_steps == 0


def test_a_callback_may_empty_the_cache_while_others_are_let_in_and_not_begun(tracer):
    engine = tracer(page_size=4, num_pages=45, max_step_tokens=4, preemption=False)
    trunk = [1 + i % 60 for i in range(32)]
    engine.generate([*trunk, 9], max_tokens=0)
    resets = []
    first = engine.submit([3], max_tokens=6, on_token=lambda chunk: resets.append(engine.reset_prefix_cache()))
    others = [engine.submit([*trunk, *[5] * 20, i], max_tokens=30) for i in (1, 2)]
    for handle in (first, *others):
        assert all_right(engine, [handle.result()], handle.outcome.request.options.max_tokens)
        engine.check()
    assert len(resets) == 6


def test_the_published_profile_may_reserve_and_counts_no_hit_that_it_will_not_look_up(tracer):
    engine = tracer(media=True, page_size=4, num_pages=66, profile="published", admission="reserve")
    long, short = " ".join(str(10 + i % 50) for i in range(62)), "10 11 12 13 14 15 16 17 18 19 20 21 22 23"
    engine.generate(ask(long), max_tokens=0)
    handles = [engine.submit(draw(long, short), max_tokens=1, seed=1) for _ in range(2)]
    while not all(handle.done for handle in handles):
        engine.step()
        engine.check()
    assert [handle.outcome.finish_reason for handle in handles] == ["stop", "stop"]


# -- the sizing rule ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 6),
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8),
    st.sampled_from([1, 4, 8]),
)
def test_a_pool_sized_by_the_rule_never_holds(concurrency, shared, shapes, page_size):
    final = max(shared + tail + tokens for tail, tokens in shapes)
    model = TracerModel(ToyProcessor(64), max_seq_len=4096)
    layout = model.kv_layout(page_size)
    size = size_pool(layout, bytes_per_value=8, concurrency=concurrency, context_tokens=final, shared_tokens=shared)
    engine = build_engine(
        model,
        num_pages=size.num_pages,
        page_size=page_size,
        attention=TracerAttention,
        prefix_cache_salt="t",
        admission="none",
        max_concurrent_requests=size.max_concurrent_requests,
    )
    prefix = [1 + i % 50 for i in range(shared)]
    engine.generate([*prefix, 63], max_tokens=0)
    handles = [
        engine.submit([*prefix, *[1 + (i + j) % 60 for j in range(tail)]], max_tokens=n) for i, (tail, n) in enumerate(shapes)
    ]
    results = [handle.result() for handle in handles]
    assert all(r.held_steps == 0 for r in results)
    engine.check()


def test_grants_are_refused_by_name(tracer):
    engine = tracer(page_size=4, num_pages=13, admission="peak")
    results = engine.generate([[1 + i] * 6 for i in range(6)], max_tokens=18)
    assert all_right(engine, results, 18)
    assert all(e.event.owed_pages > e.event.free_pages for e in engine.events.filter(GrantRefused))
