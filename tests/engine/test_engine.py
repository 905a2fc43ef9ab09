"""The engine over the tracer model: what it returns, whom it lets go on, and what it leaves behind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvlab.errors import DeadlineError, InputError, StallError
from kvlab.events import PrefixMatched
from kvlab.spec import chat

PROMPT = list(range(1, 20))  # 19 tokens: four whole pages of 4 and three tokens more


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_greedy_tokens_equal_a_run_without_pages(tracer):
    engine = tracer(page_size=4)
    assert list(engine.generate(PROMPT, max_tokens=9).ids) == engine.model.continuation(PROMPT, 9)


def test_a_hit_gives_the_same_tokens(tracer):
    engine = tracer(page_size=4)
    cold, hit = engine.generate(PROMPT, max_tokens=9), engine.generate(PROMPT, max_tokens=9)
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 16)
    assert hit.ids == cold.ids


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 48])
def test_k3_1_length_an_exact_multiple_of_the_page(tracer, length):
    engine = tracer(page_size=16)
    prompt = [1 + i % 60 for i in range(length)]
    results = [engine.generate(prompt, max_tokens=1) for _ in range(3)]
    right = {15: 0, 16: 0, 17: 16, 32: 16, 33: 32, 48: 32}[length]
    assert [r.cached_tokens for r in results] == [0, right, right]
    assert len({r.ids for r in results}) == 1


@pytest.mark.parametrize(("shared", "right"), [(127, 0), (128, 128), (255, 128), (256, 256)])
def test_k3_5_shared_prefix_shorter_than_one_page(tracer, shared, right):
    engine = tracer(page_size=128, num_pages=16, max_seq_len=1024)
    prefix = [1 + i % 50 for i in range(shared)]
    engine.generate([*prefix, *[51] * 10], max_tokens=1)
    assert engine.generate([*prefix, *[52] * 10], max_tokens=1).cached_tokens == right


@pytest.mark.parametrize("max_step_tokens", [8, 16, 2048])
def test_k19_4_decode_positions_do_not_depend_on_chunks_or_hits(tracer, max_step_tokens):
    engine = tracer(page_size=4, max_step_tokens=max_step_tokens)
    prompt = [1 + i % 60 for i in range(40)]
    want = engine.model.continuation(prompt, 5)  # the tracer's digests hold each token's rope id
    assert list(engine.generate(prompt, max_tokens=5).ids) == want
    hit = engine.generate(prompt, max_tokens=5)
    assert hit.cached_tokens == 36
    assert list(hit.ids) == want


def test_a_long_prefill_is_cut_into_chunks_that_others_join(tracer):
    engine = tracer(page_size=4, max_step_tokens=8)
    results = engine.generate([list(range(1, 31)), list(range(31, 40))], max_tokens=3)
    spans = [e.event.spans for e in engine.events if e.event.kind == "StepRan" and e.event.walk == "prefill"]
    assert all(sum(span for _, _, span in step) <= 8 for step in spans)
    assert [list(r.ids) for r in results] == [engine.model.continuation(list(r.prompt_ids), 3) for r in results]


def test_max_tokens_0_prefills_only_and_leaves_its_pages_cached(tracer):
    engine = tracer(page_size=4)
    result = engine.generate(PROMPT, max_tokens=0)
    assert (result.ids, result.text, result.finish_reason, result.ttft_ms) == ((), "", "length", None)
    assert engine.generate(PROMPT, max_tokens=1).cached_tokens == 16


def test_a_follow_up_extends_the_first_turn_token_for_token(tracer):
    engine = tracer(page_size=4)
    first = engine.generate(PROMPT, max_tokens=6)
    second = engine.generate(first.follow_up("5 6 7"), max_tokens=6)
    assert second.prompt_ids == (*first.prompt_ids, *first.ids, 5, 6, 7)
    assert second.cached_tokens == (len(PROMPT) + 5) // 4 * 4  # the last sampled token was never written


def test_k15_1_tokenised_again_a_turn_hits_up_to_the_fork_and_with_kept_ids_all_that_was_written(tracer):
    engine = tracer(page_size=4)
    prompt = list(range(1, 17))
    reply = list(engine.generate(prompt, max_tokens=12, ignore_eos=True).ids)
    forked = [*reply[:5], reply[5] % 60 + 1, *reply[6:]]
    assert engine.generate([*prompt, *forked, 7, 8], max_tokens=1).cached_tokens == 20
    assert engine.generate([*prompt, *reply, 7, 8], max_tokens=1).cached_tokens == 24  # of 27 written


def test_a_follow_up_leaves_out_the_id_that_ended_the_reply(tracer):
    engine = tracer(page_size=4)
    end = engine.model.continuation(PROMPT, 3)[-1]
    first = engine.generate(chat("1 2 3 4 5"), max_tokens=8, stop_ids=[engine.model.continuation([1, 2, 3, 4, 5], 3)[-1]])
    assert first.finish_reason == "stop"
    assert first.follow_up("7").kept_ids == (1, 2, 3, 4, 5, *first.ids[:-1])
    assert end in engine.generate(PROMPT, max_tokens=8, stop_ids=[end]).ids


def test_a_stop_string_ends_the_reply_and_is_not_part_of_it(tracer):
    engine = tracer(page_size=4)
    reply = [str(t) for t in engine.model.continuation(PROMPT, 6)]
    result = engine.generate(PROMPT, max_tokens=6, stop=[f"{reply[2]} {reply[3]}"])
    assert result.finish_reason == "stop"
    assert result.text == " ".join(reply[:2]) + " "
    assert len(result.ids) == 4


def test_streamed_pieces_make_up_the_text(tracer):
    engine = tracer(page_size=4)
    seen: list[Any] = []
    chunks = list(engine.stream(PROMPT, max_tokens=6, on_token=seen.append))
    result = engine.generate(PROMPT, max_tokens=6)
    assert "".join(c.text for c in chunks) == result.text
    assert [c.token for c in chunks] == list(result.ids) == [c.token for c in seen]


def test_the_prompt_of_a_list_that_is_refused_is_numbered(tracer):
    engine = tracer(num_pages=16)
    with pytest.raises(InputError) as refused:
        engine.generate([[1, 2], [3, 4], []], max_tokens=1)
    assert refused.value.__notes__ == ["this was prompt 2 of the list, counted from 0; none of the list has run"]
    assert engine.kv.arena.num_free == engine.kv.usable_pages


def test_a_request_joins_and_leaves_between_steps(tracer):
    engine = tracer(page_size=4)
    early = engine.submit(PROMPT, max_tokens=8)
    for _ in range(3):
        engine.step()
    late = engine.submit([40, 41, 42], max_tokens=2)
    results = late.result(), early.result()
    assert [list(r.ids) for r in results] == [
        engine.model.continuation([40, 41, 42], 2),
        engine.model.continuation(PROMPT, 8),
    ]


def test_sampled_tokens_do_not_depend_on_the_batch(tracer):
    engine = tracer(page_size=4)
    alone = engine.generate(PROMPT, max_tokens=8, temperature=1.0, seed=7)
    together = [engine.submit([9 + i] * 9, max_tokens=8, temperature=1.0, seed=i) for i in range(3)]
    beside = engine.submit(PROMPT, max_tokens=8, temperature=1.0, seed=7)
    assert beside.result().ids == alone.ids
    assert all(handle.result().ids for handle in together)


def test_k4_3_prompt_logprobs_need_the_skipped_rows(tracer):
    engine, uncached = tracer(page_size=4), tracer(page_size=4, prefix_cache=False)
    prompt = list(range(1, 13))
    engine.generate(prompt, max_tokens=1)
    before = engine.kv.counters.as_dict()
    result = engine.generate(prompt, max_tokens=1, prompt_logprobs=True)
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == 12
    assert result.prompt_logprobs == uncached.generate(prompt, max_tokens=1, prompt_logprobs=True).prompt_logprobs
    assert result.cached_tokens == 0
    assert engine.kv.counters.as_dict() == before | {"committed_tokens": before["committed_tokens"] + 12}  # no miss is booked
    assert len(engine.events.filter(PrefixMatched)) == 1


def test_prompt_logprobs_are_whole_when_the_prompt_is_on_the_host(tracer):
    engine = tracer(page_size=4, num_pages=14, host_tier_pages=8)
    prompt = list(range(1, 24))
    engine.generate(prompt, max_tokens=0)
    engine.kv.evict(20)
    result = engine.generate(prompt, max_tokens=1, prompt_logprobs=True)
    assert result.cached_tokens == 0
    assert result.prompt_logprobs == tracer(page_size=4).generate(prompt, max_tokens=1, prompt_logprobs=True).prompt_logprobs
    assert engine.generate(prompt, max_tokens=1).cached_tokens == 20


def test_prompt_logprobs_do_not_depend_on_chunks(tracer):
    whole, cut = tracer(page_size=4), tracer(page_size=4, max_step_tokens=5)
    ask = {"max_tokens": 1, "prompt_logprobs": True}
    assert whole.generate(PROMPT, **ask).prompt_logprobs == cut.generate(PROMPT, **ask).prompt_logprobs


def test_logprobs_come_with_each_token(tracer):
    result = tracer(page_size=4).generate(PROMPT, max_tokens=3, logprobs=2)
    assert [row["token"] for row in result.logprobs] == list(result.ids)
    assert all(len(row["top"]) == 2 and row["logprob"] == max(row["top"].values()) for row in result.logprobs)


def test_preprocessing_gives_the_same_hits_and_tokens_in_all_modes(tracer):
    outcomes = []
    for mode in ("inline", "thread", "process"):
        with tracer(page_size=4, preprocess=mode) as engine:
            results = [engine.generate(PROMPT, max_tokens=4) for _ in range(2)]
            outcomes.append([(r.ids, r.cached_tokens) for r in results])
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][1][1] == 16


# -- what is shared and what is not ------------------------------------------------------------------------------------


def test_requests_of_other_salts_share_nothing(tracer):
    engine = tracer(page_size=4)
    engine.generate(PROMPT, max_tokens=1, salt="a")
    results = [engine.generate(PROMPT, max_tokens=1, salt=salt) for salt in ("b", "a")]
    assert [r.cached_tokens for r in results] == [0, 16]


@pytest.mark.parametrize("record", [True, False])
def test_an_evicted_prompt_is_told_from_one_never_seen_with_and_without_events(tracer, record):
    engine = tracer(page_size=4, num_pages=8, record=record)
    for prompt in ([1] * 12, [2] * 27):
        engine.generate(prompt, max_tokens=1)
    assert [m.cause for m in engine.generate([1] * 12, max_tokens=1).misses] == ["evicted", "last_page_cap"]
    assert [m.cause for m in engine.generate([3] * 12, max_tokens=1).misses] == ["never_seen"]


def test_b24_opted_out_requests_neither_hit_nor_file(tracer):
    engine = tracer(page_size=4)
    engine.generate(PROMPT, max_tokens=9, prefix_cache=False)
    assert len(engine.kv.index) == 0
    engine.generate(PROMPT, max_tokens=1)
    result = engine.generate(PROMPT, max_tokens=1, prefix_cache=False)
    assert result.cached_tokens == 0
    assert {m.cause for m in result.misses} == {"opted_out"}


@pytest.mark.parametrize("preprocess", ["inline", "thread"])
def test_weights_changed_before_a_waiting_request_starts_serve_it_nothing_old(tracer, preprocess):
    engine = tracer(page_size=4, preprocess=preprocess)
    engine.generate(PROMPT, max_tokens=3)
    handle = engine.submit(PROMPT, max_tokens=3)
    engine.model.seed = 1
    result = handle.result()
    assert (result.cached_tokens, list(result.ids)) == (0, engine.model.continuation(PROMPT, 3))
    assert engine.generate(PROMPT, max_tokens=1).cached_tokens > 0  # and what it filed is of the new weights


def test_weights_changed_in_place_drop_what_is_cached_and_say_so(tracer):
    engine = tracer(page_size=4)
    engine.generate(PROMPT, max_tokens=1)
    engine.model.seed = 1
    result = engine.generate(PROMPT, max_tokens=5)
    assert (result.cached_tokens, list(result.ids)) == (0, engine.model.continuation(PROMPT, 5))
    assert (result.misses[0].cause, "weights" in result.misses[0].evidence) == ("other_root", True)


def test_k11_1_reset_drops_everything_and_live_pages_stay_readable(tracer):
    engine = tracer(page_size=4)
    handle = engine.submit(PROMPT, max_tokens=12)
    for _ in range(4):
        engine.step()
    assert engine.reset_prefix_cache() is True
    assert len(engine.kv.index) == 0
    assert list(handle.result().ids) == engine.model.continuation(PROMPT, 12)
    assert len(engine.kv.index) == 0
    assert engine.kv.arena.num_free == engine.kv.usable_pages


def test_a_model_that_declares_nothing_runs_and_caches_nothing(tracer, caplog):
    engine = tracer(page_size=4, declares=False)
    with caplog.at_level("INFO", logger="kvlab"):
        results = [engine.generate(PROMPT, max_tokens=4) for _ in range(2)]
    assert results[0].ids == results[1].ids == tuple(engine.model.continuation(PROMPT, 4))
    assert results[1].cached_tokens == 0
    assert caplog.records == []


def test_b3_32_sharers_on_a_small_pool_all_complete(tracer):
    engine = tracer(page_size=16, num_pages=257, max_seq_len=1024)
    prefix = [1 + i % 60 for i in range(320)]  # 20 pages
    prompts = [[*prefix, *[1 + (i + j) % 60 for j in range(8)]] for i in range(32)]
    first = engine.generate(prompts[0], max_tokens=8)
    results = engine.generate(prompts[1:], max_tokens=8)
    assert first.cached_tokens == 0
    assert all(r.cached_tokens == 320 and r.error is None for r in results)
    assert [list(r.ids) for r in results] == [engine.model.continuation(p, 8) for p in prompts[1:]]


def test_k5_1_siblings_of_one_step_do_not_share_and_a_failed_forward_files_nothing(tracer):
    engine = tracer(page_size=16)
    prompt = [1 + i % 60 for i in range(32)]
    results = engine.generate([prompt, prompt], max_tokens=1)
    assert [r.cached_tokens for r in results] == [0, 0]
    broken = tracer(page_size=16)
    broken.model.forward = _raise(RuntimeError("no forward today"))
    results = broken.generate([prompt, prompt], max_tokens=1)
    assert [str(r.error) for r in results] == ["no forward today"] * 2
    assert len(broken.kv.index) == 0
    assert broken.kv.arena.num_free == broken.kv.usable_pages


@pytest.mark.parametrize(("max_tokens", "pages"), [(3, 1), (4, 2)])
def test_k5_3_the_last_sampled_token_has_no_kv(tracer, max_tokens, pages):
    engine = tracer(page_size=4)
    engine.generate([1, 2, 3, 4, 5], max_tokens=max_tokens)
    assert len(engine.kv.index) == pages


def test_k5_3_an_abort_before_sampling_keeps_the_prompt_pages(tracer):
    engine = tracer(page_size=4)
    engine.generate(list(range(1, 9)), max_tokens=0)
    assert len(engine.kv.index) == 2


def test_b17_a_stop_on_a_page_boundary_files_no_page(tracer):
    engine = tracer(page_size=128, num_pages=8, max_seq_len=512)
    prompt = [1 + i % 60 for i in range(100)]
    reply = engine.model.continuation(prompt, 28)
    result = engine.generate(prompt, max_tokens=64, stop_ids=[reply[-1]])
    if len(result.ids) == 28:  # the stop id did not come earlier
        assert len(engine.kv.index) == 0
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_k6_9_every_way_out_returns_each_page_once(tracer, page_size):
    engine = tracer(page_size=page_size, num_pages=300)
    finished = engine.submit([1, 2, 3, 4, 5], max_tokens=200)
    finished.result()
    finished.cancel()  # after its end: nothing more to return
    cut = engine.submit([6, 7, 8, 9, 10], max_tokens=200)
    for _ in range(50):
        engine.step()
    cut.cancel()
    cut.cancel()
    free = engine.kv.arena.free_pages()
    assert len(free) == len(set(free)) == engine.kv.usable_pages - len(engine.kv.index)


# -- bad luck and bad input --------------------------------------------------------------------------------------------


def _raise(error: BaseException):
    def forward(*args: Any, **kwargs: Any) -> None:
        raise error

    return forward


def test_a_forward_that_raises_for_one_row_ends_that_request_alone(tracer):
    engine = tracer(page_size=4)
    real = engine.model.forward

    def fussy(walk, rows, attention):
        if any(13 in row.ids for row in rows):
            raise RuntimeError("thirteen")
        return real(walk, rows, attention)

    engine.model.forward = fussy
    good, bad = engine.generate([[1, 2, 3, 4, 5], [13] * 5], max_tokens=1)
    assert list(good.ids) == engine.model.continuation([1, 2, 3, 4, 5], 1)
    assert (bad.finish_reason, str(bad.error)) == ("error", "thirteen")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_an_interrupt_leaves_a_usable_engine(tracer, error):
    engine = tracer(page_size=4)
    engine.model.forward = _raise(error)
    with pytest.raises(type(error)):
        engine.generate(PROMPT, max_tokens=4)
    del engine.model.forward
    assert engine.kv.arena.num_free == engine.kv.usable_pages
    assert list(engine.generate(PROMPT, max_tokens=4).ids) == engine.model.continuation(PROMPT, 4)


def test_the_gate_is_checked_with_the_pool(tracer, monkeypatch):
    engine, checks = tracer(), []
    monkeypatch.setattr(engine._gate, "check", lambda: checks.append("checked"))
    engine.generate(PROMPT, max_tokens=3)
    assert len(checks) == engine._round
    quiet = tracer(check_invariants=False)
    monkeypatch.setattr(quiet._gate, "check", lambda: checks.append("unasked"))
    quiet.generate(PROMPT, max_tokens=1)
    assert "unasked" not in checks


def test_a_callback_that_raises_ends_its_own_request(tracer):
    engine = tracer(page_size=4)

    def complain(chunk: Any) -> None:
        raise ValueError("enough")

    other = engine.submit([7, 8, 9], max_tokens=4)
    with pytest.raises(ValueError, match="enough"):
        engine.generate(PROMPT, max_tokens=4, on_token=complain)
    assert list(other.result().ids) == engine.model.continuation([7, 8, 9], 4)


def test_a_request_may_cancel_itself_from_its_callback(tracer):
    engine = tracer(page_size=4)
    handles: list[Any] = []
    handles.append(engine.submit(PROMPT, max_tokens=50, on_token=lambda chunk: chunk.index == 2 and handles[0].cancel()))
    result = handles[0].result()
    assert (result.finish_reason, len(result.ids)) == ("cancelled", 3)


@pytest.mark.parametrize("steps", range(5))
def test_cancelling_at_any_point_gives_back_every_page(tracer, steps):
    engine = tracer(page_size=4, max_step_tokens=8)
    handle = engine.submit(PROMPT, max_tokens=50)
    for _ in range(steps):
        engine.step()
    handle.cancel()
    assert handle.outcome.finish_reason == "cancelled"
    assert engine.kv.arena.num_free == engine.kv.usable_pages - len(engine.kv.index)


def test_leaving_a_stream_early_cancels_it(tracer):
    engine = tracer(page_size=4)
    first = list(itertools.islice(engine.stream(PROMPT, max_tokens=50), 2))
    assert len(first) == 2
    assert "0 running" in repr(engine)


def test_a_pool_too_small_for_all_ends_in_a_named_stall_and_goes_on(tracer):
    engine = tracer(page_size=4, num_pages=8, admission="none")  # 7 usable pages
    with pytest.raises(StallError, match=r"7 of 7 usable pages.*max_concurrent_requests"):
        engine.generate([[1] * 11, [2] * 11], max_tokens=9)
    assert engine.kv.arena.num_free == engine.kv.usable_pages - len(engine.kv.index)
    assert list(engine.generate([1] * 11, max_tokens=9).ids) == engine.model.continuation([1] * 11, 9)


def test_held_requests_go_on_when_others_end(tracer):
    engine = tracer(page_size=4, num_pages=8, admission="none")
    results = engine.generate([[1] * 8, [2] * 15], max_tokens=4)
    assert sum(r.held_steps for r in results) > 0
    assert [list(r.ids) for r in results] == [engine.model.continuation(list(r.prompt_ids), 4) for r in results]


def test_max_concurrent_requests_bounds_who_runs(tracer):
    engine = tracer(page_size=4, num_pages=8, max_concurrent_requests=1, admission="none")
    results = engine.generate([[1] * 11, [2] * 11], max_tokens=9)
    assert all(r.finish_reason == "length" for r in results)


def test_a_deadline_in_steps_ends_a_held_request_with_its_own_error(tracer):
    engine = tracer(page_size=4, num_pages=8, admission="none")
    results = engine.generate([[1] * 11, [2] * 11], max_tokens=9, deadline_steps=40)
    assert any(isinstance(r.error, DeadlineError) and r.finish_reason == "deadline" for r in results)
    assert engine.kv.arena.num_free == engine.kv.usable_pages - len(engine.kv.index)


def test_a_deadline_in_seconds_reads_the_engine_clock(tracer):
    ticks = itertools.count()
    engine = tracer(page_size=4, clock=lambda: float(next(ticks)))
    with pytest.raises(DeadlineError, match=r"passed its deadline \(deadline_s is 30\)"):
        engine.generate(PROMPT, max_tokens=50, deadline_s=30)


def test_b12_waiting_for_pages_is_told_a_handful_of_times(tracer, caplog):
    engine = tracer(page_size=4, num_pages=8, clock=lambda: 0.0, admission="none")
    with caplog.at_level("WARNING", logger="kvlab"):
        engine.generate([[1] * 11, [2] * 11], max_tokens=9, deadline_steps=1000)
    assert sum("waits for" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty"),
        ([1, -1], {}, "-1"),
        ([1, 2, 640], {}, "640"),
        ([1, 2.5], {}, "2.5"),
        (PROMPT, {"max_tokens": 5000}, "5019 together"),
        (PROMPT, {"max_tokens": -1}, "max_tokens is -1"),
        (PROMPT, {"max_token": 1}, "did you mean max_tokens"),
        (PROMPT, {"temperature": -0.1}, "temperature"),
        (PROMPT, {"stop": ["\ud800"]}, "UTF-8"),
        (PROMPT, {"stop": [""]}, "at least one character"),
        (PROMPT, {"stop_ids": [64]}, "0..63"),
        (PROMPT, {"logprobs": 65}, "64"),
        (PROMPT, {"deadline_s": 0}, "deadline_s"),
        ([1 + i % 60 for i in range(200)], {}, "64 usable|66 pages"),
    ],
)
def test_bad_input_is_named_and_leaves_a_usable_engine(tracer, prompt, options, message):
    engine = tracer(page_size=4, num_pages=65)
    with pytest.raises(InputError, match=message):
        engine.generate(prompt, **options)
    engine.check()
    assert engine.kv.arena.num_free == engine.kv.usable_pages
    assert list(engine.generate(PROMPT, max_tokens=2).ids) == engine.model.continuation(PROMPT, 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_pages": 1},
        {"page_size": 0},
        {"page_size": True},
        {"num_pages": 8, "pool_bytes": 4096},
        {"pool_bytes": 10},
        {"profile": "other"},
        {"policy": "mru"},
        {"attention": "magic"},
        {"preprocess": "elsewhere"},
        {"max_concurrent_requests": 0},
        {"max_step_tokens": 0},
        {"resources": {"kv": {"pages": 3}}},
        {"resources": {"lm": {}}},
    ],
)
def test_illegal_settings_are_refused(tracer, settings):
    with pytest.raises(InputError):
        tracer(**settings)


def test_b22_a_page_size_override_reaches_the_worker(tracer):
    engine = tracer(page_size=16, resources={"kv": {"page_size": 4}})
    engine.generate(PROMPT, max_tokens=1)
    assert engine.generate(PROMPT, max_tokens=1).cached_tokens == 16


# -- the log -----------------------------------------------------------------------------------------------------------


def test_replay_equals_the_pool_after_every_step(tracer):
    engine = tracer(page_size=4, num_pages=17)
    handles = [engine.submit([1 + i % 3] * 9, max_tokens=5) for i in range(5)]
    while not all(handle.done for handle in handles):
        engine.step()
        state = engine.events.replay()
        arena = engine.kv.arena
        owners = {p: len(state.page(p).owners) + (state.page(p).key is not None) for p in range(1, arena.num_pages)}
        assert owners == {p: arena.owners(p) for p in range(1, arena.num_pages)}
        assert sorted(state.indexed()) == sorted(engine.kv.index.pages())


def test_every_request_tells_its_story(tracer):
    engine = tracer(page_size=4)
    engine.generate(PROMPT, max_tokens=3)
    kinds = [entry.event.kind for entry in engine.events]
    assert kinds[:3] == ["ModelLoaded", "PoolCreated", "RootOpened"] or "ModelLoaded" in kinds[:3]
    for kind in (
        "RequestSubmitted",
        "RequestStarted",
        "PrefixMatched",
        "StepRan",
        "TokenSampled",
        "TokensMissed",
        "RequestFinished",
    ):
        assert kind in kinds


def test_a_bare_engine_records_nothing_and_says_how_to(tracer):
    engine = tracer(page_size=4, record=False)
    engine.generate(PROMPT, max_tokens=2)
    assert engine.recorder is None
    with pytest.raises(InputError, match="record=True"):
        _ = engine.events


def test_a_models_default_options_hold_where_the_client_says_nothing(tracer):
    engine = tracer(page_size=4)
    engine.model.default_options = {"max_tokens": 3, "temperature": 0.5}
    silent, explicit = engine.submit(PROMPT), engine.submit(PROMPT, max_tokens=2, temperature=0)
    options = [handle.result().request.options for handle in (silent, explicit)]
    assert [(o.max_tokens, o.sampling.temperature) for o in options] == [(3, 0.5), (2, 0)]


@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_a_prompt_that_cannot_be_prepared_ends_its_own_request_alone(tracer, mode):
    engine = tracer(page_size=4, preprocess=mode)
    good = engine.submit(PROMPT, max_tokens=3)
    with pytest.raises(InputError, match="empty"):
        engine.submit("", max_tokens=3).result()
    assert list(good.result().ids) == engine.model.continuation(PROMPT, 3)


def test_a_request_may_be_cancelled_before_it_is_prepared(tracer):
    engine = tracer(page_size=4, preprocess="thread")
    handle = engine.submit(list(range(1, 60)) * 6, max_tokens=3)
    handle.cancel()
    assert handle.outcome.finish_reason == "cancelled"
    engine.close()


@pytest.mark.parametrize("verb", ["step", "close"])
def test_a_callback_that_drives_its_own_engine_is_told_so(tracer, verb):
    engine = tracer(page_size=4)
    with pytest.raises(InputError, match=f"cannot {verb} the engine"):
        engine.generate(PROMPT, max_tokens=3, on_token=lambda chunk: getattr(engine, verb)())
    with pytest.raises(InputError, match="cannot step the engine"):
        engine.generate(PROMPT, max_tokens=3, on_token=lambda chunk: engine.generate([1], max_tokens=1))
    assert list(engine.generate(PROMPT, max_tokens=3).ids) == engine.model.continuation(PROMPT, 3)


@pytest.mark.parametrize(
    "settings", [{"prefix_cache": "no"}, {"prefix_cache_salt": 3}, {"prefix_cache_salt": "\ud800"}, {"kv_dtype": "int8"}]
)
def test_settings_of_the_wrong_kind_are_refused(tracer, settings):
    with pytest.raises(InputError, match=next(iter(settings)) if "kv_dtype" not in settings else "int8"):
        tracer(**settings)


@pytest.mark.parametrize("options", [{"salt": "\ud800"}, {"fields": 3}])
def test_options_of_the_wrong_kind_are_refused(tracer, options):
    with pytest.raises(InputError, match=next(iter(options))):
        tracer().generate(PROMPT, **options)
