"""The studies, over the tracer: what they count is exact, and the same in every run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from kvlab.errors import InputError
from kvlab.lab import studies
from kvlab.spec import MISS_CAUSES

SYSTEM = " ".join(str(id) for id in studies.random_ids(40, 64, seed=1))
QUESTIONS = ("11 12 13", "21 22 23 24", "31 32")


def ticking() -> Any:
    """A clock that moves on by a millisecond whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) / 1e3


def causes(rows: list[Any]) -> dict[str, list[str]]:
    return {row.name: [miss.cause for miss in row.misses] for row in rows}


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 15, 16, 31])
def test_a_parted_prompt_parts_exactly_there(at: int) -> None:
    for seed in range(200):  # among so many, a random id of 60 would often repeat the one it should part from
        prompt = studies.random_ids(32, 64, seed)
        parted = studies.parted_at(prompt, at, 64, seed)
        assert studies.first_difference(prompt, parted) == at
        assert len(parted) == len(prompt)


def test_random_ids_leave_special_tokens_alone() -> None:
    assert set(studies.random_ids(2000, 64, seed=0)) == set(range(4, 64))


# -- what is found -----------------------------------------------------------------------------------------------------


def test_every_rung_of_the_ladder_is_served_its_whole_pages(tracer: Any) -> None:
    rows = studies.hit_ladder(tracer(), [1, 15, 16, 17, 32, 33, 100])
    assert [(row.send, row.cached_tokens) for row in rows] == [(row.send, row.expected_tokens) for row in rows]
    assert {row.prompt_tokens: row.cached_tokens for row in rows if row.send == 3} == {
        1: 0, 15: 0, 16: 0, 17: 16, 32: 16, 33: 32, 100: 96,
    }  # fmt: skip


def test_the_ladder_is_the_same_on_an_engine_that_was_used_before(tracer: Any) -> None:
    engine = tracer()
    assert studies.hit_ladder(engine, [40, 50]) == studies.hit_ladder(engine, [40, 50])


def test_times_are_taken_at_every_share_and_the_ideal_is_in_proportion(tracer: Any) -> None:
    rows = studies.ttft_against_cached(tracer(clock=ticking()), prompt_tokens=100, shares=(0.25, 0.5, 0.9), rounds=3)
    assert [(row.cached_tokens, row.tail_tokens) for row in rows] == [(0, 100), (16, 84), (48, 52), (80, 20)]
    cold_ms, step_ms = rows[0].ttft_ms, rows[0].ideal_ms - rows[0].ttft_ms
    assert step_ms > 0
    # step_ms is a difference of rounded sums, so the last bits differ
    assert [row.ideal_ms for row in rows] == pytest.approx([cold_ms * row.tail_tokens / 100 + step_ms for row in rows])


def test_times_are_equal_in_two_runs_where_the_clock_is(tracer: Any) -> None:
    one, other = (studies.ttft_against_cached(tracer(clock=ticking()), prompt_tokens=64, rounds=2) for _ in range(2))
    assert one == other


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"rounds": 0}, "rounds is 0"), ({"shares": (0.5, 1.0)}, "shares in"), ({"shares": (-0.1,)}, "shares in")],
)
def test_impossible_shares_and_rounds_are_refused(tracer: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        studies.ttft_against_cached(tracer(), **wrong)


@pytest.mark.parametrize("settings", [{"num_pages": 10}, {"prefix_cache": False}])
def test_times_are_not_given_for_hits_that_were_none(tracer: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="found cached where .* num_pages of at least 20 "):
        studies.ttft_against_cached(tracer(**settings), prompt_tokens=100, shares=(0.25, 0.5, 0.9), rounds=1)
    studies.ttft_against_cached(tracer(num_pages=20), prompt_tokens=100, shares=(0.25, 0.5, 0.9), rounds=1)


def test_a_page_size_reuses_its_whole_pages_of_what_is_shared(tracer: Any) -> None:
    rows = studies.page_size_study(tracer, page_sizes=(1, 8, 16, 64, 256), shared_tokens=200)
    assert [(row.page_size, row.cached_tokens) for row in rows] == [(1, 200), (8, 200), (16, 192), (64, 192), (256, 0)]
    assert {row.prompt_tokens for row in rows} == {220}


# -- prompts that share a beginning ------------------------------------------------------------------------------------


def test_every_question_after_the_first_finds_the_system_prompt(tracer: Any) -> None:
    results = studies.shared_system_prompt(tracer(), SYSTEM, QUESTIONS, max_tokens=4)
    assert [result.cached_tokens for result in results] == [0, 32, 32]
    assert [result.name for result in results] == ["question 1", "question 2", "question 3"]


def test_options_reach_every_request(tracer: Any) -> None:
    results = studies.shared_system_prompt(tracer(), SYSTEM, QUESTIONS, max_tokens=3, prefix_cache=False, ignore_eos=True)
    assert [(result.cached_tokens, len(result.ids)) for result in results] == [(0, 3)] * 3


def test_sharers_side_by_side_list_more_pages_than_they_hold(tracer: Any) -> None:
    engine = tracer()
    prompts = [f"{SYSTEM} {question}" for question in QUESTIONS]  # 43, 44 and 42 ids: three pages each, two of them shared
    engine.generate(prompts[0], max_tokens=0)
    studies.side_by_side(engine, SYSTEM, QUESTIONS, max_tokens=2)
    assert studies.most_listed(engine.events) == (9, 5)


def test_requests_without_anything_in_common_hold_what_they_list(tracer: Any) -> None:
    engine = tracer()
    engine.generate([studies.random_ids(20, 64, seed) for seed in range(3)], max_tokens=1)
    assert studies.most_listed(engine.events) == (6, 6)


def test_an_interrupt_side_by_side_leaves_nothing_in_flight(tracer: Any) -> None:
    def interrupt(chunk: Any) -> None:
        raise KeyboardInterrupt

    engine = tracer()
    with pytest.raises(KeyboardInterrupt):
        studies.side_by_side(engine, SYSTEM, QUESTIONS, max_tokens=2, on_token=interrupt)
    assert "0 running, 0 waiting" in repr(engine)


def test_turn_two_begins_with_turn_one_and_finds_it(tracer: Any) -> None:
    first, second = studies.two_turn_chat(tracer(page_size=8), SYSTEM, ["5 6 7", "8 9"], max_tokens=20)
    known = (*first.prompt_ids, *first.ids)
    assert second.prompt_ids[: len(known)] == known
    assert second.cached_tokens == (len(known) - 1) // 8 * 8 >= 0.8 * len(known)


# -- the same again ----------------------------------------------------------------------------------------------------


def test_a_replay_asks_the_same_with_the_same_options(tracer: Any) -> None:
    results = studies.two_turn_chat(tracer(), SYSTEM, ["5 6 7", "8 9"], max_tokens=6, temperature=1.0, seed=3)
    again = studies.replay(tracer(prefix_cache=False), results)
    assert [r.request.options for r in again] == [r.request.options for r in results]
    assert [(r.prompt_ids, r.ids, r.name) for r in again] == [(r.prompt_ids, r.ids, r.name) for r in results]
    assert [r.cached_tokens for r in again] == [0, 0]


def test_a_cold_run_has_the_bits_of_a_run_without_a_cache(tracer: Any) -> None:
    prompt = studies.random_ids(50, 64, seed=0)
    on, off = (tracer(prefix_cache=cache).generate(prompt, max_tokens=5, logprobs=1) for cache in (True, False))
    assert studies.same_bits(on, off)


def test_one_bit_of_one_logprob_is_a_difference(tracer: Any) -> None:
    result = tracer().generate([5, 6, 7], max_tokens=3, logprobs=1)
    last = result.logprobs[-1]
    moved = replace(result, logprobs=(*result.logprobs[:-1], {**last, "logprob": last["logprob"] * (1 + 2**-52)}))
    assert studies.same_bits(result, result)
    assert not studies.same_bits(result, moved)


def test_bits_are_not_compared_without_logprobs(tracer: Any) -> None:
    result = tracer().generate([5, 6, 7], max_tokens=3, name="plain")
    with pytest.raises(InputError, match="request plain has no log-probabilities"):
        studies.same_bits(result, result)


# -- why tokens are computed -------------------------------------------------------------------------------------------

EXAMPLES = {
    "new to the cache": ["never_seen"],
    "the same again": ["last_page_cap"],
    "parts in the first page": ["short_prefix"],
    "parts in the second page": ["diverged"],
    "the same, another salt": ["other_root", "last_page_cap"],
    "the same, opted out": ["opted_out"],
    "the same, prompt logprobs": ["opted_out"],
    "the same, after eviction": ["evicted", "last_page_cap"],
}


@pytest.mark.parametrize("settings", [{"num_pages": 16}, {"num_pages": 64, "page_size": 2}, {"num_pages": 20, "page_size": 64}])
def test_each_example_shows_its_cause_on_any_pool(tracer: Any, settings: dict[str, Any]) -> None:
    rows = studies.miss_examples(tracer(**settings))
    assert causes(rows) == EXAMPLES
    assert {miss.cause for row in rows for miss in row.misses} <= set(MISS_CAUSES)


def test_every_computed_token_of_an_example_has_one_cause(tracer: Any) -> None:
    for row in studies.miss_examples(tracer(num_pages=24)):
        computed = [token for miss in row.misses for token in range(miss.start, miss.stop)]
        assert computed == list(range(row.cached_tokens, row.prompt_tokens))


def test_the_examples_are_the_same_on_another_engine_and_with_another_seed_on_this_one(tracer: Any) -> None:
    engine = tracer(num_pages=24)
    rows = studies.miss_examples(engine)
    assert [row.misses for row in rows] == [row.misses for row in studies.miss_examples(tracer(num_pages=24))]
    assert causes(studies.miss_examples(engine, seed=10)) == EXAMPLES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_pages": 15}, "num_pages is 15 and page_size 16; .* 16 to 257 of them"),
        ({"num_pages": 300}, "num_pages is 300 .* context is 4096 tokens"),
        ({"num_pages": 64, "page_size": 1}, "pages of 2 tokens or more"),
        ({"prefix_cache": False}, "the prefix cache of this engine is off"),
    ],
)
def test_a_pool_that_cannot_show_the_examples_is_refused(tracer: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        studies.miss_examples(tracer(**settings))
