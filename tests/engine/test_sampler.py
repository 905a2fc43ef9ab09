import math
import random
from itertools import accumulate

import pytest
import torch

from kvlab.engine.sampler import Sampled, Sampler, SamplingParams, draw, largest, prompt_logprobs
from kvlab.errors import InputError, IntegrityError, KvlabError
from kvlab.spec import Match, RequestConfig, WalkInputs

VOCAB = 40


def config(**knobs):
    return RequestConfig(sampling=SamplingParams(**knobs))


def sampler(*, seed=0, vocab=VOCAB, **requests):
    s = Sampler(vocab, seed=seed)
    for rid, knobs in requests.items():
        s.ingest_request(rid, config(**knobs))
    return s


def run_prompt(s, rid, ids, *, hit=0, chunk=None):
    """Feed a prompt the way an engine does: skip ``hit`` leading ids, run the rest in chunks."""
    if hit:
        s.apply_cached_prefix(rid, "LLM", "prefill", WalkInputs({"main": ids}), {"main": Match(hit, hit)})
    rest = ids[hit:]
    for start in range(0, len(rest), chunk or len(rest)):
        s.observe(rid, rest[start : start + (chunk or len(rest))])


def tokens(s, rid, logits, count):
    return [s.sample([rid], [logits])[0].token for _ in range(count)]


# -- the penalty and the tokens a hit skipped


@pytest.mark.parametrize("hit", [0, 8])
def test_k4_1_penalty_covers_the_whole_prompt_cold_and_after_a_hit(hit):
    s = sampler(a={"repetition_penalty": 2.0})
    run_prompt(s, "a", [7] * 8 + [3], hit=hit)
    expected = [0.5 if token in (3, 7) else 1.0 for token in range(VOCAB)]
    assert s.adjusted("a", torch.ones(VOCAB)).tolist() == expected


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("hit", [0, 4, 8])
def test_b18_mask_after_a_hit_equals_the_uncached_one(hit, chunk):
    prompt = [5, 6, 7, 8, 9, 1, 2, 3, 4, 30, 31, 5]
    cold, warm = (sampler(a={"repetition_penalty": 1.3}) for _ in range(2))
    run_prompt(cold, "a", prompt)
    run_prompt(warm, "a", prompt, hit=hit, chunk=chunk)
    assert warm.seen_ids("a") == cold.seen_ids("a") == sorted(set(prompt))


def test_a_refused_step_that_is_prepared_again_leaves_the_same_mask():
    s = sampler(a={"repetition_penalty": 2.0})
    prompt = list(range(10))
    inputs = WalkInputs({"main": prompt})
    for _ in range(3):
        s.apply_cached_prefix("a", "LLM", "prefill", inputs, {"main": Match(8, 8)})
    s.observe("a", prompt[8:])
    assert s.seen_ids("a") == prompt


def test_sampled_tokens_are_penalised_too():
    s = sampler(a={"repetition_penalty": 4.0})
    s.observe("a", [0])
    logits = torch.linspace(1.0, 2.0, VOCAB)
    assert tokens(s, "a", logits, 3) == [39, 38, 37]


def test_positive_logits_are_divided_and_negative_ones_multiplied():
    s = sampler(a={"repetition_penalty": 2.0}, vocab=4)
    s.observe("a", [0, 1, 2])
    assert s.adjusted("a", torch.tensor([4.0, -4.0, 0.0, 4.0])).tolist() == [2.0, -8.0, 0.0, 4.0]


def test_reset_forgets_the_mask_and_the_skipped_ids():
    s = sampler(a={"repetition_penalty": 2.0})
    run_prompt(s, "a", [1, 2, 3])
    s.apply_cached_prefix("a", "LLM", "prefill", WalkInputs({"main": [4, 5, 6]}), {"main": Match(2, 2)})
    s.reset_request("a")
    s.observe("a", [9])
    assert s.seen_ids("a") == [9]


def test_without_a_penalty_no_mask_is_kept():
    s = sampler(a={})
    run_prompt(s, "a", [1, 2, 3], hit=2)
    assert s.seen_ids("a") == []


def test_observing_an_id_outside_the_vocabulary_names_it():
    s = sampler(a={"repetition_penalty": 2.0})
    with pytest.raises(InputError, match="token id 40 is outside the vocabulary of 40"):
        s.observe("a", [1, 40])


# -- choosing


def test_greedy_takes_the_lowest_id_of_equals_on_both_paths():
    logits = torch.zeros(VOCAB)
    logits[[9, 4, 30]] = 2.0
    s = sampler(plain={}, slow={"logprobs": 0})
    assert s.sample(["plain"], [logits]) == [Sampled(4)]
    assert s.sample(["slow"], [logits])[0].token == 4


def test_bias_is_added_to_the_logits():
    s = sampler(a={"logit_bias": {3: 5.0}})
    assert tokens(s, "a", torch.linspace(0, 1, VOCAB), 1) == [3]


def test_top_k_one_is_greedy_at_any_temperature():
    s = sampler(a={"temperature": 100.0, "top_k": 1})
    assert set(tokens(s, "a", torch.linspace(0, 1, VOCAB), 50)) == {VOCAB - 1}


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    s = sampler(a={"temperature": 1e-300})
    assert set(tokens(s, "a", torch.linspace(-50, 50, VOCAB), 20)) == {VOCAB - 1}


@pytest.mark.parametrize(
    ("knobs", "kept"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.75}, {0, 1}),
        ({"min_p": 0.25}, {0, 1, 2, 3}),
        ({"min_p": 0.26}, {0, 1}),
        ({"top_k": 2, "top_p": 0.66}, {0}),  # 0.5 of the 0.75 that top_k left is more than 0.66 of it
        ({"top_k": 2, "top_p": 0.67}, {0, 1}),
        ({"top_k": 3, "top_p": 0.75, "min_p": 0.6}, {0}),
    ],
)
def test_truncation_keeps_exactly_these_tokens(knobs, kept):
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    params = SamplingParams(temperature=1.0, **knobs)
    assert {draw(probs, params, i / 997) for i in range(997)} == kept


def test_shares_of_drawn_tokens_are_their_probabilities():
    probs = torch.tensor([0.125, 0.5, 0.25, 0.125], dtype=torch.float64)
    drawn = [draw(probs, SamplingParams(temperature=1.0), i / 1024) for i in range(1024)]
    assert [drawn.count(token) for token in range(4)] == [128, 512, 256, 128]


def running_sum(values):
    return list(accumulate(values))[-1]  # not sum(): it rounds otherwise


def naive_draw(probs, params, uniform):
    """The same rules over Python lists, sorting everything."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if params.top_k:
        order = order[: params.top_k]
    mass = running_sum(probs[i] for i in order) if params.top_k else 1.0
    total, short = 0.0, 0
    while short < len(order) - 1 and total + probs[order[short]] < params.top_p * mass:
        total += probs[order[short]]
        short += 1
    if params.top_p < 1:
        order = order[: short + 1]
    order = [i for i in order if probs[i] >= params.min_p * probs[order[0]]]
    goal, total = uniform * running_sum(probs[i] for i in order), 0.0
    for i in order:
        total += probs[i]
        if total > goal:
            return i
    return order[-1]


@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
def test_draw_equals_a_plain_sort_of_everything_also_beyond_the_first_look(spread):
    rng = random.Random(5)
    knobs = [{}, {"top_k": 7}, {"top_k": 1500, "top_p": 0.9}, {"top_p": 0.8}, {"top_p": 0.999}, {"min_p": 0.1}]
    for trial in range(5):
        generator = torch.Generator().manual_seed(trial)
        probs = torch.softmax(torch.randn(3000, generator=generator, dtype=torch.float64) * spread, dim=0)
        for k in knobs:
            params, uniform = SamplingParams(temperature=1.0, **k), rng.random()
            assert draw(probs, params, uniform) == naive_draw(probs.tolist(), params, uniform), (trial, k)


def test_a_draw_at_the_very_end_gives_the_last_kept_token():
    probs = torch.tensor([0.1] * 10, dtype=torch.float64)
    last = math.nextafter(1.0, 0.0)
    assert draw(probs, SamplingParams(temperature=1.0), last) == 9
    assert draw(probs, SamplingParams(temperature=1.0, top_k=3), last) == 2


def test_largest_breaks_ties_by_index_at_the_cut():
    values, ids = largest(torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0]), 2)
    assert (values.tolist(), ids.tolist()) == ([2.0, 2.0], [1, 2])


# -- one random stream per request

HOT = {"temperature": 1.0}


def test_equal_seeds_draw_equal_tokens_whatever_else_runs():
    logits = torch.linspace(0, 1, VOCAB)
    alone = sampler(a={**HOT, "seed": 7})
    crowd = sampler(x=HOT, y={**HOT, "seed": 8}, a={**HOT, "seed": 7}, z={})
    want = tokens(alone, "a", logits, 20)
    got = [crowd.sample(["z", "y", "a", "x"], [logits] * 4)[2].token for _ in range(20)]
    assert got == want


def test_unseeded_requests_have_streams_of_their_own_and_repeat_with_the_engine():
    logits = torch.zeros(VOCAB)
    s, again = sampler(a=HOT, b=HOT), sampler(a=HOT, b=HOT)
    a, b = tokens(s, "a", logits, 20), tokens(s, "b", logits, 20)
    assert a != b
    assert (tokens(again, "a", logits, 20), tokens(again, "b", logits, 20)) == (a, b)


def test_the_engine_seed_and_a_request_seed_equal_to_an_ordinal_move_the_stream():
    logits = torch.zeros(VOCAB)
    first = tokens(sampler(a=HOT), "a", logits, 20)
    assert first != tokens(sampler(a=HOT, seed=1), "a", logits, 20)
    assert first != tokens(sampler(a={**HOT, "seed": 0}), "a", logits, 20)


def test_seeds_that_agree_in_their_low_32_bits_differ():
    s = sampler(a={**HOT, "seed": 5}, b={**HOT, "seed": 5 + 2**32})
    assert tokens(s, "a", torch.zeros(VOCAB), 20) != tokens(s, "b", torch.zeros(VOCAB), 20)


def test_a_reset_does_not_rewind_the_stream():
    logits = torch.zeros(VOCAB)
    whole, resumed = sampler(a=HOT), sampler(a=HOT)
    want = tokens(whole, "a", logits, 10)
    head = tokens(resumed, "a", logits, 4)
    resumed.reset_request("a")
    assert head + tokens(resumed, "a", logits, 6) == want


def test_ingest_twice_keeps_the_stream():
    logits = torch.zeros(VOCAB)
    s = sampler(a=HOT)
    head = tokens(s, "a", logits, 4)
    s.ingest_request("a", config(**HOT))
    assert head + tokens(s, "a", logits, 6) == tokens(sampler(a=HOT), "a", logits, 10)


# -- logprobs


def test_logprobs_are_the_models_own_before_penalty_bias_and_temperature():
    logits = torch.tensor([1.0, 2.0, 4.0, 3.0])
    s = sampler(a={"logprobs": 2, "temperature": 9.0, "logit_bias": {0: 500.0}, "repetition_penalty": 3.0}, vocab=4)
    s.observe("a", [2])
    [out] = s.sample(["a"], [logits])
    own = torch.log_softmax(logits.double(), 0).tolist()
    assert out == Sampled(0, own[0], ((2, own[2]), (3, own[3])))


def test_logprobs_zero_reports_the_sampled_token_alone():
    [out] = sampler(a={"logprobs": 0}, vocab=3).sample(["a"], [torch.tensor([0.0, 0.0, 0.0])])
    assert (out.token, out.top) == (0, ())
    assert out.logprob == pytest.approx(-math.log(3), abs=1e-15)


def test_prompt_logprobs_do_not_depend_on_how_the_prompt_was_cut():
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    targets = [3, 1, 4, 1, 5, 9]
    whole = prompt_logprobs(logits, targets)
    assert whole == prompt_logprobs(logits[:2], targets[:2]) + prompt_logprobs(logits[2:], targets[2:])
    assert whole == [float(torch.log_softmax(row.double(), 0)[t]) for row, t in zip(logits, targets, strict=True)]


def test_prompt_logprobs_want_one_row_a_token():
    with pytest.raises(InputError, match="2 rows of logits for 3"):
        prompt_logprobs(torch.zeros(2, VOCAB), [1, 2, 3])


# -- what goes wrong


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("knobs", [{}, {"temperature": 1.0}])
def test_a_row_with_unsound_logits_fails_alone_and_is_named(value, knobs):
    s = sampler(good={}, bad=knobs)
    broken = torch.linspace(0, 1, VOCAB)
    broken[3] = value
    good, bad = s.sample(["good", "bad"], [torch.linspace(0, 1, VOCAB), broken])
    assert good == Sampled(VOCAB - 1)
    assert isinstance(bad, KvlabError)
    assert "request bad: 1 of 40 logits" in str(bad)


@pytest.mark.parametrize(
    ("knob", "value", "legal"),
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "at least 0"),
        ("temperature", math.inf, "at least 0"),
        ("temperature", "hot", "at least 0"),
        ("top_k", -1, "at least 0"),
        ("top_k", 1.5, "at least 0"),
        ("top_k", True, "at least 0"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.1, "(0, 1]"),
        ("top_p", math.nan, "(0, 1]"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", math.nan, "[0, 1]"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", math.nan, "above 0"),
        ("logprobs", -1, "at least 0"),
        ("logprobs", True, "at least 0"),
        ("prompt_logprobs", 1, "True or False"),
        ("seed", 1.0, "whole number"),
        ("logit_bias", [1, 2], "mapping"),
        ("logit_bias", {-1: 0.0}, "token id"),
        ("logit_bias", {1: math.nan}, "finite"),
    ],
)
def test_an_illegal_knob_is_refused_with_its_name_value_and_range(knob, value, legal):
    with pytest.raises(InputError) as caught:
        SamplingParams(**{knob: value})
    assert knob in str(caught.value)
    assert repr(value) in str(caught.value)
    assert legal in str(caught.value)


@pytest.mark.parametrize("knobs", [{"logprobs": 41}, {"logit_bias": {40: 1.0}}])
def test_knobs_beyond_the_vocabulary_are_refused_at_ingest(knobs):
    with pytest.raises(InputError, match="vocabulary"):
        sampler(a=knobs)


def test_params_keep_their_own_bias():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 9.0
    assert params.logit_bias == {1: 2.0}


def test_a_removed_request_is_unknown():
    s = sampler(a={})
    s.remove_request("a")
    s.remove_request("a")
    with pytest.raises(IntegrityError, match="does not know request a"):
        s.sample(["a"], [torch.zeros(VOCAB)])


def test_no_rows_give_no_tokens():
    assert sampler().sample([], []) == []


# -- only some ids


def test_only_allowed_ids_are_chosen_greedy_and_drawn():
    def allowed(ids):
        return [range(4, 6), range(20, 21)] if len(ids) % 2 else [range(9, 10)]

    s = sampler(greedy={"allowed": allowed}, hot={"allowed": allowed, "temperature": 50.0})
    logits = torch.linspace(1.0, 2.0, VOCAB)
    assert tokens(s, "greedy", logits, 4) == [9, 20, 9, 20]
    drawn = tokens(s, "hot", logits, 60)
    assert set(drawn[::2]) == {9}
    assert set(drawn[1::2]) == {4, 5, 20}


def test_allowed_sees_every_id_generated_so_far():
    seen = []

    def allowed(ids):
        seen.append(list(ids))
        return [range(VOCAB)]

    s = sampler(a={"allowed": allowed})
    chosen = tokens(s, "a", torch.linspace(1.0, 2.0, VOCAB), 3)
    assert seen == [[], chosen[:1], chosen[:2]]


@pytest.mark.parametrize("ranges", [[], [range(0)], [range(-1, 3)], [range(38, 41)], [range(0, 8, 2)]])
def test_a_range_that_is_none_ends_its_own_request(ranges):
    s = sampler(a={"allowed": lambda ids: ranges}, b={})
    logits = torch.linspace(1.0, 2.0, VOCAB)
    failed, fine = s.sample(["a", "b"], [logits, logits])
    assert "allowed() gave no ids to choose from" in str(failed)
    assert fine.token == VOCAB - 1


def test_allowed_must_be_a_function():
    with pytest.raises(InputError, match="allowed is 3; it must be None or a function of ids"):
        SamplingParams(allowed=3)
