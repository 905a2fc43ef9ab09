"""Pictures and guidance through the engine, over the tracer of pictures: what comes out, and what is not run again."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.errors import InputError
from kvlab.events import StepRan, WalkServed
from kvlab.spec import ask, draw


def picture(number: int, height: int = 3, width: int = 5) -> np.ndarray:
    """Return a picture of its own for each number."""
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


RED, BLUE = picture(1), picture(2)
TEXT, LONG = "10 11 12 13", " ".join(str(10 + i % 50) for i in range(21))

ASKS = {
    "words": ask(LONG),
    "picture, question": ask(RED, TEXT),
    "text, picture, question": ask(LONG, RED, TEXT),
    "two pictures": ask(RED, "20 21", BLUE, TEXT),
    "question, picture": ask(LONG, RED),
}
DRAWS = {
    "text": draw(LONG),
    "unguided": draw(LONG, cfg_text_scale=1.0),
    "guided at first": draw(LONG, cfg_interval=(0.5, 1.0)),
    "think": draw(TEXT, think=True),
    "image, text": draw(RED, LONG),
    "text, image": draw(LONG, RED),
    "text, image, text": draw("20 21 22", RED, LONG, size=(2, 7)),
    "picture alone": draw(RED),
}


def walks_run(engine: Any, rid: int) -> list[str]:
    """Return the walks that ran a forward for a request, each once."""
    ran = [e.event.walk for e in engine.events.filter(StepRan) if rid in {span[0] for span in e.event.spans}]
    return list(dict.fromkeys(ran))


# -- what comes out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ASKS)
def test_cold_and_hit_answer_what_a_run_without_pages_answers(tracer, kind, page_size):
    engine = tracer(media=True, page_size=page_size, num_pages=1024)
    want = engine.model.reply(ASKS[kind], 9)
    cold, hit = (engine.generate(ASKS[kind], max_tokens=9) for _ in range(2))
    assert list(cold.ids) == list(hit.ids) == want
    assert cold.cached_tokens == 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", DRAWS)
def test_cold_and_hit_draw_what_a_run_without_pages_draws(tracer, kind, page_size):
    engine = tracer(media=True, page_size=page_size, num_pages=1024)
    want = engine.model.picture(DRAWS[kind], seed=7, max_tokens=9)
    cold, hit = (engine.generate(DRAWS[kind], max_tokens=9, seed=7) for _ in range(2))
    assert torch.equal(cold.pixels, want)
    assert torch.equal(hit.pixels, want)
    assert (cold.cached_tokens, cold.finish_reason == hit.finish_reason) == (0, True)


def test_requests_side_by_side_get_what_they_get_alone(tracer):
    engine = tracer(media=True, page_size=4, num_pages=1024)
    handles = [engine.submit(p, max_tokens=6, seed=7) for p in (*ASKS.values(), *DRAWS.values())]
    results = [handle.result() for handle in handles]
    for prompt, result in zip(ASKS.values(), results, strict=False):
        assert list(result.ids) == engine.model.reply(prompt, 6)
    for prompt, result in zip(DRAWS.values(), results[len(ASKS) :], strict=True):
        assert torch.equal(result.pixels, engine.model.picture(prompt, 7, 6))


def test_streamed_words_come_before_the_picture_they_plan(tracer):
    engine = tracer(media=True, page_size=4)
    handle = engine.submit(DRAWS["think"], max_tokens=5, seed=1)
    chunks = list(handle)
    result = handle.result()
    assert tuple(chunk.token for chunk in chunks) == result.ids
    assert result.pixels is not None
    assert 0 < result.ttft_ms < result.first_pass_ms < result.total_ms


def test_the_first_thing_seen_of_a_picture_is_its_first_pass(tracer):
    result = tracer(media=True).generate(DRAWS["text"], seed=1)
    assert result.ttft_ms == result.first_pass_ms
    assert (result.ids, result.finish_reason) == ((), "stop")


def test_max_tokens_0_writes_the_prompt_alone(tracer):
    engine = tracer(media=True, page_size=4)
    result = engine.generate(DRAWS["text, image"], max_tokens=0, seed=7)
    assert (result.ids, result.pixels, result.finish_reason) == ((), None, "length")
    again = engine.generate(DRAWS["text, image"], max_tokens=0, seed=7)
    assert again.cached_tokens == again.prompt_tokens  # a prompt that ends with a picture may be served whole
    assert torch.equal(engine.generate(DRAWS["text, image"], seed=7).pixels, engine.model.picture(DRAWS["text, image"], 7))


# -- what is not run again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_b31_the_same_picture_with_another_question_runs_no_encoder_and_no_picture_walk(tracer, page_size):
    engine = tracer(media=True, page_size=page_size, num_pages=512, encoder_cache_bytes=0)
    engine.generate(ask(RED, TEXT), max_tokens=3)
    calls = len(engine.model.encoded)
    other = ask(RED, "40 41 42 43 44 45")
    second = engine.generate(other, max_tokens=3)
    assert (second.encoder_calls, len(engine.model.encoded)) == (0, calls)
    assert walks_run(engine, second.rid) == ["prefill_text", "decode"]
    assert [(e.event.walk, e.event.walk_index) for e in engine.events.filter(WalkServed)] == [("prefill_vit", 0)]
    assert list(second.ids) == engine.model.reply(other, 3)


def test_another_picture_of_the_same_size_is_served_nothing_of_the_first(tracer):
    engine = tracer(media=True, page_size=4)
    engine.generate(ask(RED, TEXT), max_tokens=3)
    swapped = engine.generate(ask(BLUE, TEXT), max_tokens=3)
    assert (swapped.cached_tokens, swapped.encoder_calls) == (0, 1)
    assert list(swapped.ids) == engine.model.reply(ask(BLUE, TEXT), 3)


def test_the_text_before_a_swapped_picture_is_served(tracer):
    engine = tracer(media=True, page_size=4)
    engine.generate(ask(LONG, RED, TEXT), max_tokens=3)
    swapped = engine.generate(ask(LONG, BLUE, TEXT), max_tokens=3)
    assert swapped.cached_tokens == 20  # of 23 slots of text
    assert list(swapped.ids) == engine.model.reply(ask(LONG, BLUE, TEXT), 3)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_an_edit_that_ends_with_its_picture_is_served_whole(tracer, page_size):
    engine = tracer(media=True, page_size=page_size, num_pages=512)
    cold, hit = (engine.generate(DRAWS["text, image"], seed=7) for _ in range(2))
    assert (hit.cached_tokens, hit.encoder_calls) == (hit.prompt_tokens, 0)
    assert walks_run(engine, hit.rid) == ["prefill_text", "image_gen"]  # the last slots of cfg_img
    assert torch.equal(hit.pixels, cold.pixels)


def test_a_guided_prompt_is_trimmed_label_by_label(tracer):
    engine = tracer(media=True, page_size=4)
    engine.generate(ask(LONG), max_tokens=1)  # main's pages alone
    half = engine.generate(DRAWS["text"], seed=1)
    whole = engine.generate(DRAWS["text"], seed=2)
    assert half.cached_by_label == {"main": 20}
    assert whole.cached_by_label == {"main": 20, "cfg_img": 20}
    assert torch.equal(whole.pixels, engine.model.picture(DRAWS["text"], 2))


def test_b27_text_after_a_picture_is_not_served_to_the_same_text_alone(tracer):
    engine = tracer(media=True, page_size=4)
    engine.generate(DRAWS["image, text"], seed=7)
    alone = engine.generate(draw(LONG), seed=7)
    assert alone.cached_tokens == 0
    assert torch.equal(alone.pixels, engine.model.picture(draw(LONG), 7))


def test_only_of_plain_text_are_keys_remembered_by_ids(tracer, monkeypatch):
    engine, told = tracer(media=True, page_size=4), []
    monkeypatch.setattr(engine.preprocess, "remember", lambda resource, ids, keys: told.append(list(ids)))
    engine.generate([ask(RED, LONG), ask(LONG), draw(LONG, think=True)], max_tokens=9)  # pictures, and ids nobody sampled
    assert told == []


@pytest.mark.parametrize("sent_back_after", [None, 1, 4])
def test_a_follow_up_about_a_picture_extends_the_first_turn_token_for_token(tracer, sent_back_after):
    engine = tracer(media=True, page_size=4)
    handle = engine.submit(ask(RED, TEXT), max_tokens=9)
    while sent_back_after is not None and len(handle._run.generated) < sent_back_after:
        engine.step()
    if sent_back_after is not None:
        engine._preempt(handle._run, handle._run)
    first = handle.result()
    prompt = first.follow_up("30 31 32")
    second = engine.generate(prompt, max_tokens=4)
    assert list(second.ids) == engine.model.reply(prompt, 4)
    assert first.finish_reason == "length"
    assert second.cached_tokens == (first.prompt_tokens + len(first.ids)) // 4 * 4  # the opening id, and all but the last
    assert second.encoder_calls == 0


def test_b29_a_layout_that_lies_about_a_picture_files_nothing_past_its_text(tracer, monkeypatch, caplog):
    engine = tracer(media=True, page_size=4)
    process = engine.model.processor.process_prompt

    def lying(prompt: Any, fields: Any) -> Any:
        record = process(prompt, fields)
        text, look, *rest = record.layouts["kv"]["main"]
        spans = (text, replace(look, length=look.length - 1), *rest)
        return replace(record, layouts={"kv": {"main": spans}})

    want = engine.model.reply(ask(LONG, RED, TEXT), 6)
    monkeypatch.setattr(engine.model.processor, "process_prompt", lying)
    results = [engine.generate(ask(LONG, RED, TEXT), max_tokens=6) for _ in range(2)]
    assert [list(r.ids) for r in results] == [want, want]
    assert [r.cached_tokens for r in results] == [0, 20]
    assert "writes 17 slots" in caplog.text


def test_k18_7_a_sampled_encoding_is_shared_within_a_seed_alone(tracer):
    engine = tracer(media=True, page_size=4)
    prompt, mean = DRAWS["image, text"], draw(RED, LONG, vae_sample="mean")
    cached = [
        engine.generate(p, seed=s).cached_tokens for p, s in [(prompt, 1), (prompt, 2), (prompt, 1), (mean, 1), (mean, 2)]
    ]
    whole = cached[2]
    assert cached == [0, 0, whole, 0, whole]
    assert whole > 0


def test_without_a_seed_a_sampled_picture_is_never_found_again(tracer):
    engine = tracer(media=True, page_size=4)
    results = [engine.generate(DRAWS["image, text"]) for _ in range(2)]
    assert [r.cached_tokens for r in results] == [0, 0]
    assert not torch.equal(results[0].pixels, results[1].pixels)


def test_the_published_profile_reuses_nothing_past_a_picture_and_nothing_guided(tracer):
    engine = tracer(media=True, page_size=4, profile="published")
    for prompt, cached in [
        (ask(LONG, RED, TEXT), 20),
        (ask(RED, LONG), 0),
        (draw(LONG), 0),
        (draw(LONG, cfg_text_scale=1.0), 20),
        (ask(LONG, LONG), 20),
    ]:
        results = [engine.generate(prompt, max_tokens=4, seed=7) for _ in range(2)]
        assert results[1].cached_tokens == cached, prompt
        if prompt.output == "text":
            assert list(results[1].ids) == engine.model.reply(prompt, 4)
        else:
            assert torch.equal(results[1].pixels, engine.model.picture(prompt, 7))


def test_the_mask_of_a_penalty_covers_texts_that_were_served(tracer):
    engine, uncached = tracer(media=True, page_size=4), tracer(media=True, page_size=4, prefix_cache=False)
    prompt, options = ask(LONG, RED), {"max_tokens": 8, "repetition_penalty": 5.0}
    engine.generate(prompt, **options)
    hit = engine.generate(prompt, **options)
    assert hit.cached_tokens == hit.prompt_tokens
    assert hit.ids == uncached.generate(prompt, **options).ids


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"window": (8, 4)}, {"prompt_logprobs": True}], ids=str)
@pytest.mark.parametrize("prompt", [ask(RED, TEXT), draw(TEXT)], ids=["picture", "guided"])
def test_options_of_plain_text_are_refused_with_pictures_and_guidance(tracer, prompt, options):
    with pytest.raises(InputError, match="one text"):
        tracer(media=True).generate(prompt, **options)


def test_the_context_counts_a_picture_as_one_position_and_the_pool_each_of_its_slots(tracer):
    prompt = ask(picture(3, 10, 10), TEXT)  # 102 slots and 1 position, then 6 of each
    roomy = tracer(media=True, max_seq_len=20, page_size=4)
    assert list(roomy.generate(prompt, max_tokens=4).ids) == roomy.model.reply(prompt, 4)
    with pytest.raises(InputError, match=r"7 positions \(108 slots\) .* 21 together"):
        roomy.generate(prompt, max_tokens=14)
    with pytest.raises(InputError, match="28 pages"):
        tracer(media=True, max_seq_len=20, page_size=4, num_pages=20).generate(prompt, max_tokens=4)


def test_a_request_with_pictures_is_not_handed_over(tracer):
    engine = tracer(media=True, page_size=4)
    handle = engine.submit(ask(RED, TEXT), max_tokens=9)
    while not handle._run.generated:
        engine.step()
    with pytest.raises(InputError, match="pictures"):
        engine.hand_over(handle)
    assert list(handle.result().ids) == engine.model.reply(ask(RED, TEXT), 9)


def test_a_drawn_reply_has_no_follow_up(tracer):
    with pytest.raises(InputError, match=r"draw\(result.image"):
        tracer(media=True).generate(draw(TEXT), seed=1).follow_up("3")


# -- what a client sees ------------------------------------------------------------------------------------------------


def test_a_picture_is_shown_as_a_picture(tracer):
    from PIL import Image

    result = tracer(media=True).generate(draw(TEXT, size=(6, 9)), seed=1, name="cat")
    assert repr(result) == "GenerationResult(cat: picture 6x9, stop, cached 0 of 6)"
    bundle = result._repr_mimebundle_()
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))))
    assert np.array_equal(shown, result.pixels.numpy())
    assert result.image.size == (9, 6)


def test_misses_end_with_the_prompt_though_a_written_plan_is_closed_after_it(tracer):
    engine = tracer(media=True, page_size=4)
    result = engine.generate(draw("10 11 12 13", think=True), max_tokens=5, seed=1)
    assert [(m.start, m.stop) for m in result.misses if m.label == "main"] == [(0, result.prompt_tokens)]
