"""Requests of a small BAGEL through pages: what is shared, what never is, and what seeds, chunks and bad input do."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from watched_bagel import Watched, copied, load_watched_model, picture, vae_noise

import kvlab
from kvlab.errors import InputError, KvlabError
from kvlab.models.bagel.noise import START, normal
from kvlab.models.bagel.spec import BagelModel

pytest.importorskip("diffusers")
pytest.importorskip("PIL")

SHOWN = picture()
OTHER = np.ascontiguousarray(SHOWN[::-1])
TEXT, QUESTION = "210 45 399 120 260 71 9 14", "61 295 140 7 333 18"
UNGUIDED = {"cfg_text_scale": 1.0, "cfg_img_scale": 1.0, "num_timesteps": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> BagelModel:
    return load_watched_model(tmp_path_factory.mktemp("bagel") / "model")


@pytest.fixture
def watched(model):
    with Watched(model) as watched:
        yield watched


def cold(model, prompt, **options):
    with Watched(model) as fresh:
        return fresh.generate(prompt, **options)


# -- what a picture's pages may stand for ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["b1", "b27"])
def test_b1_b27_pages_of_a_picture_are_never_taken_for_the_text_after_it(watched, model, case):
    scales = UNGUIDED if case == "b1" else {"num_timesteps": 4}
    prompt = kvlab.draw(TEXT, **scales)
    watched.generate(kvlab.draw(SHOWN, TEXT, **UNGUIDED), seed=1)  # writes its picture first
    result = watched.generate(prompt, seed=2)
    assert (result.cached_tokens, result.cached_by_label.get("main", 0)) == (0, 0)
    assert torch.equal(result.pixels, cold(model, prompt, seed=2, prefix_cache=False).pixels)


def test_the_historical_fault_comes_back_when_asked_for_by_name_and_every_result_says_so(model):
    prompt = kvlab.draw(TEXT, **UNGUIDED)
    right = cold(model, prompt, seed=2)
    with Watched(model, keying="ignore-walk") as watched:
        edit = watched.generate(kvlab.draw(SHOWN, TEXT, **UNGUIDED), seed=1)
        wrong = watched.generate(prompt, seed=2)
        assert wrong.cached_tokens == 8  # all of its whole pages, and they hold a picture
        assert (wrong.pixels.int() - right.pixels.int()).abs().float().mean() > 2
        assert {edit.keying, wrong.keying} == {"ignore-walk"}
        assert repr(wrong).endswith("keying ignore-walk)")
    assert right.keying == "walk"


def test_the_same_picture_with_another_question_runs_no_encoder_and_no_picture_walk(watched, model):
    first = watched.generate(kvlab.ask(SHOWN, TEXT), max_tokens=6)
    assert first.encoder_calls == 1
    second = watched.generate(kvlab.ask(SHOWN, QUESTION), max_tokens=6)
    assert (second.encoder_calls, second.cached_tokens, watched.walks()) == (0, 17, ["prefill_text", "decode"])
    assert second.ids == cold(model, kvlab.ask(SHOWN, QUESTION), max_tokens=6).ids


def test_another_picture_is_served_the_text_before_it_alone(watched, model):
    watched.generate(kvlab.ask(TEXT, SHOWN, QUESTION), max_tokens=4)
    result = watched.generate(kvlab.ask(TEXT, OTHER, QUESTION), max_tokens=4)
    assert result.cached_tokens == 8  # whole pages of the text of 10
    assert result.ids == cold(model, kvlab.ask(TEXT, OTHER, QUESTION), max_tokens=4).ids


def test_swapped_pictures_share_nothing(watched):
    watched.generate(kvlab.ask(SHOWN, OTHER, TEXT), max_tokens=1)
    assert watched.generate(kvlab.ask(OTHER, SHOWN, TEXT), max_tokens=1).cached_tokens == 0


def test_a_second_picture_leaves_the_first_turn_cached(watched):
    turn = watched.generate(kvlab.ask(SHOWN, TEXT), max_tokens=4)
    longer = watched.generate(kvlab.ask(SHOWN, TEXT, OTHER, QUESTION), max_tokens=1)
    assert turn.prompt_tokens == 27
    assert longer.cached_tokens >= 24
    assert longer.encoder_calls == 1


def test_an_edit_after_a_question_about_its_picture_starts_with_other_pages(watched):
    watched.generate(kvlab.ask(SHOWN, TEXT), max_tokens=1)
    result = watched.generate(kvlab.draw(SHOWN, TEXT, num_timesteps=3), seed=1)
    assert result.cached_tokens == 0  # its autoencoder's block comes first
    assert result.encoder_calls == 1  # and the vision tower need not look again


def test_what_an_encoder_made_is_used_again_when_the_pages_are_gone(model):
    with Watched(model, num_pages=20) as watched:
        watched.generate(kvlab.ask(SHOWN, TEXT), max_tokens=4)
        for first in range(3):
            watched.generate([first + 10 + i for i in range(60)], max_tokens=4)  # takes every page
        again = watched.generate(kvlab.ask(SHOWN, TEXT), max_tokens=4)
        assert (again.cached_tokens, again.encoder_calls) == (0, 0)
        assert "prefill_vit" in watched.walks()


def test_k18_7_sampled_encodings_of_two_seeds_share_no_page_and_means_do(watched):
    def cached(seed, **settings):
        return watched.generate(kvlab.draw(SHOWN, TEXT, num_timesteps=3, **settings), seed=seed).cached_tokens

    assert [cached(1), cached(2), cached(1), cached(2)] == [0, 0, 40, 40]
    assert [cached(seed, vae_sample="mean") for seed in (1, 2, 3)] == [0, 40, 40]
    assert [cached(seed, vae_noise=[vae_noise("06_edit_nocfg")[0]]) for seed in (1, 2)] == [0, 40]


def test_without_a_seed_a_sampled_picture_is_never_found_again(watched):
    prompt = kvlab.draw(TEXT, SHOWN, num_timesteps=3)
    first, second = watched.generate(prompt), watched.generate(prompt)
    assert second.cached_tokens == 8  # the text before it
    assert not torch.equal(first.pixels, second.pixels)


def test_the_published_profile_reuses_nothing_past_a_picture_and_nothing_guided(model):
    with Watched(model, profile="published") as watched:
        for prompt, hit in (
            (kvlab.draw(TEXT, num_timesteps=3), 0),
            (kvlab.ask(SHOWN, TEXT), 0),
            (kvlab.draw(TEXT, **UNGUIDED), 8),
        ):
            watched.generate(prompt, seed=1, max_tokens=1)
            assert watched.generate(prompt, seed=1, max_tokens=1).cached_tokens == hit


# -- conversations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [TEXT, kvlab.chat(TEXT, system="5 6 7"), kvlab.ask(SHOWN, TEXT)], ids=["str", "chat", "ask"])
def test_turn_two_extends_turn_one_token_for_token(watched, model, prompt):
    first = watched.generate(prompt, max_tokens=9, ignore_eos=True)
    second = watched.generate(first.follow_up(QUESTION), max_tokens=4)
    written = first.prompt_tokens + 9  # its begin token and all but the last id
    assert second.cached_tokens == written // 4 * 4
    assert second.prompt_tokens == written + 2 + 8  # the last id, its end, and the question
    assert second.ids == cold(model, first.follow_up(QUESTION), max_tokens=4).ids


# -- drawing -----------------------------------------------------------------------------------------------------------


def test_k18_3_five_points_are_four_evaluations(watched):
    watched.generate(kvlab.draw(TEXT, num_timesteps=5, cfg_text_scale=1.0), seed=1)
    assert len(watched.rows("image_gen")) == 4


def test_the_size_asked_for_is_the_size_that_comes_out(watched):
    result = watched.generate(kvlab.draw(TEXT, size=(32, 80), num_timesteps=2), seed=1)
    assert (result.pixels.shape, result.pixels.dtype) == ((32, 80, 3), torch.uint8)
    assert result.image.size == (80, 32)
    assert not result.pixels.fill_(0).any()  # they are the client's own
    assert watched.generate(kvlab.draw(SHOWN, TEXT, num_timesteps=2), seed=1).pixels.shape == (48, 64, 3)


def test_k18_5_a_seed_is_one_start_noise_alone_in_a_batch_and_after_other_work(model, monkeypatch):
    begun = []
    begin = model.begin
    monkeypatch.setattr(model, "begin", lambda record: begun.append(begin(record)) or begun[-1])
    prompt = kvlab.draw(TEXT, size=(48, 64), num_timesteps=3)
    with Watched(model) as watched:
        alone = watched.generate(prompt, seed=7)
        watched.generate(TEXT, max_tokens=5, temperature=1.0)
        handles = [watched.engine.submit(prompt, seed=seed) for seed in (7, 1, 7, 2)]
        batch = [handle.result().pixels.int() for handle in handles]
    starts = [normal(seed, START, 0, (12, 64)) for seed in (7, 1, 7, 2)]
    drawn = [canvas for canvas in begun if canvas is not None]
    assert len(drawn) == 5
    assert torch.equal(batch[0], batch[2])
    assert (batch[0] - alone.pixels.int()).abs().max() <= 1
    assert not torch.equal(batch[0], batch[1])
    fresh = [begin(model.processor.process_prompt(prompt, {"seed": seed})).latents for seed in (7, 1, 7, 2)]
    assert all(torch.equal(one, other) for one, other in zip(fresh, starts, strict=True))


def test_thoughts_that_end_by_themselves_are_closed_once(watched):
    thought = watched.generate(kvlab.draw(TEXT, think=True, num_timesteps=2), seed=1, max_tokens=5, logit_bias={501: 100.0})
    assert thought.ids == (501,)
    assert thought.finish_reason == "stop"
    prompt = 35 + 10
    assert {s.row.length for s in watched.rows("image_gen")} == {prompt + 2}  # begin and end
    assert watched.rows("image_gen")[0].positions == [prompt + 2] * 18


def test_thoughts_cut_by_the_limit_are_written_whole(watched):
    thought = watched.generate(kvlab.draw(TEXT, think=True, num_timesteps=2), seed=1, max_tokens=5, logit_bias={501: -100.0})
    assert len(thought.ids) == 5
    assert {s.row.length for s in watched.rows("image_gen")} == {35 + 10 + 1 + 5 + 1}


def test_no_tokens_write_the_prompt_alone(watched):
    result = watched.generate(kvlab.draw(SHOWN, TEXT), seed=1, max_tokens=0)
    assert result.pixels is None
    assert watched.walks() == ["prefill_vae", "prefill_vit", "prefill_text"]
    assert watched.generate(kvlab.draw(SHOWN, TEXT, num_timesteps=2), seed=1).cached_tokens == 40


def test_an_image_scale_alone_is_warned_about_and_changes_nothing(watched, caplog):
    with caplog.at_level(logging.WARNING, logger="kvlab"):
        alone = watched.generate(kvlab.draw(TEXT, **UNGUIDED | {"cfg_img_scale": 1.5}), seed=1)
    assert "cfg_img_scale 1.5 does nothing" in caplog.text
    assert torch.equal(alone.pixels, watched.generate(kvlab.draw(TEXT, **UNGUIDED), seed=1, prefix_cache=False).pixels)


# -- positions after chunks and hits -----------------------------------------------------------------------------------


def positions_of(watched, walk):
    return [s.positions for s in watched.rows(walk)]


def test_k19_1_chunks_and_hits_start_where_the_last_stopped(model):
    prompt = list(range(1, 41))
    with Watched(model, 16, max_step_tokens=32) as watched:
        watched.generate(prompt, max_tokens=1)
        assert positions_of(watched, "prefill_text") == [list(range(32)), list(range(32, 40))]
    with Watched(model, 16, max_step_tokens=16) as watched:
        watched.generate(prompt[:17], max_tokens=1)
        watched.generate(prompt, max_tokens=1)
        assert positions_of(watched, "prefill_text") == [list(range(16, 32)), list(range(32, 40))]


@pytest.mark.parametrize("max_step_tokens", [8, 16, 2048])
@pytest.mark.parametrize("prompt", [list(range(1, 41)), kvlab.ask(SHOWN, TEXT)], ids=["text", "picture"])
def test_k19_4_decode_stands_at_the_same_positions_however_the_prompt_ran(model, prompt, max_step_tokens):
    first = 40 if isinstance(prompt, list) else 11
    with Watched(model, max_step_tokens=max_step_tokens) as watched:
        for _ in range(2):  # cold, then a hit
            watched.generate(prompt, max_tokens=3, ignore_eos=True)
            assert positions_of(watched, "decode") == [[first], [first + 1], [first + 2]]


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_a_picture_drawn_again_after_a_preemption_is_the_same(model):
    prompts = [
        kvlab.draw(TEXT, think=True, num_timesteps=4, cfg_text_scale=4.0),
        kvlab.draw(QUESTION, think=True, num_timesteps=4),
    ]
    options = {"max_tokens": 24, "ignore_eos": True}
    expected = [cold(model, prompt, seed=i, **options) for i, prompt in enumerate(prompts)]
    with Watched(model, num_pages=40, admission="none", preemption=True) as watched:
        handles = [watched.engine.submit(prompt, seed=i, **options) for i, prompt in enumerate(prompts)]
        results = [handle.result() for handle in handles]
    assert sum(result.preemptions for result in results) > 0
    for result, alone in zip(results, expected, strict=True):
        assert result.ids == alone.ids
        assert (result.pixels.int() - alone.pixels.int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (kvlab.draw(TEXT, num_timesteps=1), {}),
        (kvlab.draw(TEXT, cfg_renorm="local"), {}),
        (kvlab.draw(SHOWN, cfg_text_scale=3.0), {}),
        (kvlab.draw(TEXT, size=(50, 64)), {}),
        (kvlab.draw(TEXT), {"seed": 1.5}),
        (kvlab.ask(np.zeros((0, 4, 3), dtype=np.uint8)), {}),
        (kvlab.ask(*[SHOWN] * 120), {}),
    ],
    ids=["one point", "unknown renorm", "no text to follow", "no legal size", "no seed", "no pixels", "more than the pool"],
)
def test_bad_input_is_refused_and_takes_nothing(watched, prompt, options):
    free = watched.engine.kv.arena.num_free
    with pytest.raises(InputError):
        watched.generate(prompt, **options)
    assert watched.engine.kv.arena.num_free == free
    assert watched.generate(TEXT, max_tokens=2).finish_reason == "length"


def test_a_picture_that_cannot_be_encoded_ends_its_request_alone(model, monkeypatch):
    spoiled = copied(model)
    monkeypatch.setattr(spoiled.net, "embed_picture", lambda pixels: 1 / 0)
    with Watched(spoiled) as watched:
        failed, other = (watched.engine.submit(prompt, max_tokens=2) for prompt in (kvlab.ask(SHOWN, TEXT), TEXT))
        with pytest.raises(ZeroDivisionError):
            failed.result()
        assert other.result().finish_reason == "length"
        watched.engine.check()


def test_latents_that_overflow_end_their_request_and_show_no_picture(watched):
    overflowing = kvlab.draw(TEXT, num_timesteps=3, cfg_text_scale=1e300)
    failed, other = watched.engine.generate([overflowing, kvlab.draw(TEXT, **UNGUIDED)], seed=1)
    assert (failed.finish_reason, failed.pixels) == ("error", None)
    assert isinstance(failed.error, KvlabError)
    assert "cfg_text_scale" in str(failed.error)
    assert other.pixels is not None
    watched.engine.check()


def test_weights_changed_in_place_forget_pages_and_what_encoders_made(model):
    changed = copied(model)
    with Watched(changed) as watched:
        watched.generate(kvlab.ask(SHOWN, TEXT), max_tokens=2)
        with torch.no_grad():
            changed.net.connector.fc2.weight.mul_(1.5)
        again = watched.generate(kvlab.ask(SHOWN, TEXT), max_tokens=2)
        assert (again.cached_tokens, again.encoder_calls) == (0, 1)
        with torch.no_grad():
            changed.autoencoder.net.encoder.conv_in.weight.mul_(1.5)
        assert watched.generate(kvlab.ask(SHOWN, TEXT), max_tokens=2).cached_tokens == 0
