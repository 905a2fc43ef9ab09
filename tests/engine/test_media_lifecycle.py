"""Pictures in flight: whatever happens to a request at whatever point of its life, nothing is wrong and nothing leaks."""

from __future__ import annotations

import re
import signal
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.errors import DeadlineError, InputError
from kvlab.events import RequestPreempted
from kvlab.spec import ask, draw

RED, BLUE = (np.random.default_rng(number).integers(0, 256, (3, 5, 3), dtype=np.uint8) for number in (1, 2))
TEXT, LONG = "10 11 12 13", " ".join(str(10 + i % 50) for i in range(21))

PROMPTS = {
    "question": ask(LONG, RED, TEXT),
    "picture last": ask(LONG, RED),
    "drawn": draw(LONG),
    "planned": draw(TEXT, think=True),
    "edited": draw(LONG, RED),
    "edited, then told": draw(RED, BLUE, LONG),
}
MAX_TOKENS, SEED = 5, 7


def engine_of(tracer: Any, **settings: Any) -> Any:
    return tracer(media=True, **({"page_size": 4, "num_pages": 257} | settings))


def is_right(engine: Any, prompt: Any, result: Any) -> bool:
    assert result.error is None
    if prompt.output == "text":
        return list(result.ids) == engine.model.reply(prompt, MAX_TOKENS, SEED)
    return torch.equal(result.pixels, engine.model.picture(prompt, SEED, MAX_TOKENS))


def all_pages_are_back(engine: Any) -> bool:
    cached = set() if engine.kv.index is None else set(engine.kv.index.pages())
    engine.check()
    return engine.kv.arena.num_free == engine.kv.usable_pages - len(cached)


def submit(engine: Any, prompt: Any, **options: Any) -> Any:
    return engine.submit(prompt, **({"max_tokens": MAX_TOKENS, "seed": SEED} | options))


def every_moment(tracer: Any, prompt: Any, warm: bool, **settings: Any) -> Any:
    """Yield (engine, handle of a request that has had n steps) for each n until the request is done."""
    for steps in range(40):
        engine = engine_of(tracer, **settings)
        if warm:
            submit(engine, prompt).result()
        handle = submit(engine, prompt)
        for _ in range(steps):
            engine.step()
        if handle.done:
            assert steps > 3
            return
        yield engine, handle
    raise AssertionError("the request never ended")


EACH = [(kind, True) for kind in PROMPTS] + [("question", False), ("planned", False)]


@pytest.mark.parametrize(("kind", "warm"), EACH)
def test_cancelled_at_any_moment_it_leaves_nothing(tracer, kind, warm):
    for engine, handle in every_moment(tracer, PROMPTS[kind], warm):
        handle.cancel()
        assert (handle.outcome.finish_reason, handle.outcome.pixels) == ("cancelled", None)
        assert all_pages_are_back(engine)
        assert is_right(engine, PROMPTS[kind], submit(engine, PROMPTS[kind]).result())


@pytest.mark.parametrize(("kind", "warm"), EACH)
def test_sent_back_at_any_moment_it_resumes_to_the_same_end(tracer, kind, warm):
    for engine, handle in every_moment(tracer, PROMPTS[kind], warm):
        if handle._run in engine._running:
            engine._preempt(handle._run, handle._run)
            engine.check()
        assert is_right(engine, PROMPTS[kind], handle.result())
        assert warm or handle.outcome.cached_tokens == 0  # what it finds of its own is no hit
        assert [c.token for c in handle._run.chunks] == list(handle.outcome.ids)
        assert all_pages_are_back(engine)


@pytest.mark.parametrize("kind", PROMPTS)
def test_the_cache_may_be_reset_at_any_moment(tracer, kind):
    for engine, handle in every_moment(tracer, PROMPTS[kind], True):
        assert engine.reset_prefix_cache()
        engine.check()
        assert is_right(engine, PROMPTS[kind], handle.result())
        assert all_pages_are_back(engine)


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_request_may_make_room_on_the_host_at_any_moment(tracer, kind):
    parked = 0
    for engine, handle in every_moment(tracer, PROMPTS[kind], True, cpu_offload_pages=64):
        engine.kv.offload(handle.rid)
        if engine.kv.is_offloaded(handle.rid):
            handle._run.is_parked = True
            engine._gate.release(handle.rid)
            parked += 1
        engine.check()
        assert is_right(engine, PROMPTS[kind], handle.result())
        assert all_pages_are_back(engine)
    assert parked


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_deadline_may_pass_at_any_moment(tracer, kind):
    for steps in range(1, 30):
        engine = engine_of(tracer)
        submit(engine, PROMPTS[kind]).result()
        handle = submit(engine, PROMPTS[kind], deadline_steps=steps)
        try:
            assert is_right(engine, PROMPTS[kind], handle.result())
            break
        except DeadlineError:
            assert handle.outcome.pixels is None
            assert all_pages_are_back(engine)
    assert steps > 3


@pytest.mark.parametrize("where", ["forward", "encode", "finish_pass", "prepare_inputs"])
@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_anywhere_leaves_a_usable_engine(tracer, monkeypatch, where):
    engine = engine_of(tracer)
    original, calls = getattr(engine.model, where), []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(engine.model, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS["edited"], seed=SEED, max_tokens=MAX_TOKENS)
    assert all_pages_are_back(engine)
    assert is_right(engine, PROMPTS["edited"], submit(engine, PROMPTS["edited"]).result())


@pytest.mark.parametrize("where", ["begin", "prepare_inputs", "encode", "forward", "finish_pass", "outputs"])
def test_a_model_that_raises_ends_the_request_at_fault_and_leaves_nothing(tracer, monkeypatch, where):
    engine = engine_of(tracer)
    original, calls = getattr(engine.model, where), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        raise ValueError("broken")

    monkeypatch.setattr(engine.model, where, failing)
    handle = submit(engine, PROMPTS["edited"])
    with pytest.raises(ValueError, match="broken"):
        handle.result()
    assert calls
    assert all_pages_are_back(engine)
    monkeypatch.setattr(engine.model, where, original)
    assert is_right(engine, PROMPTS["edited"], submit(engine, PROMPTS["edited"]).result())


@pytest.mark.parametrize(
    "settings",
    [
        {"admission": "reserve"},
        {"admission": "peak"},
        {"admission": "reserve", "admission_order": "backfill"},
        {"admission": "none", "preemption": True},
        {"admission": "none", "cpu_offload_pages": 64, "preemption": True},
        {"admission": "reserve", "host_tier_pages": 32},
        {"max_step_tokens": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_pages", [40, 64])
def test_a_crowd_in_a_small_pool_all_ends_right(tracer, settings, num_pages):
    engine = engine_of(tracer, num_pages=num_pages, **settings)
    prompts = [*PROMPTS.values()] * 2
    handles = [submit(engine, prompt) for prompt in prompts]
    while not all(handle.done for handle in handles):
        engine.step()
        engine.check()
    for prompt, handle in zip(prompts, handles, strict=True):
        assert is_right(engine, prompt, handle.result())
    assert all_pages_are_back(engine)
    if settings == {"admission": "none", "preemption": True} and num_pages == 40:
        assert engine.events.filter(RequestPreempted)


def test_a_prompt_with_a_picture_can_be_pinned(tracer):
    engine = engine_of(tracer)
    pinned = engine.pin(PROMPTS["question"], name="album")
    assert pinned == len(engine.kv.pins) > 8
    engine.kv.evict(1000)
    result = submit(engine, PROMPTS["question"]).result()
    assert result.cached_tokens >= pinned * 4 - 4
    assert is_right(engine, PROMPTS["question"], result)


def test_nobody_passes_the_head_because_a_picture_may_take_long(tracer):
    engine = engine_of(tracer, num_pages=20, admission_order="backfill")
    drawing = submit(engine, draw(TEXT, num_timesteps=9))  # 4 pages, and nobody knows for how long
    engine.step()
    head = submit(engine, ask(" ".join(["9"] * 60)))  # 17 pages and more
    behind = submit(engine, ask(TEXT), max_tokens=20)  # would still run when the picture is done
    while not drawing.done:
        engine.step()
    assert behind._run.walk_index == 0 or behind.done
    head.result()
    assert not behind.done


@pytest.mark.parametrize("preprocess", ["thread", "process"])
def test_pictures_may_be_prepared_elsewhere(tracer, preprocess):
    engine = engine_of(tracer, preprocess=preprocess)
    assert is_right(engine, PROMPTS["edited"], submit(engine, PROMPTS["edited"]).result())


def test_a_drawing_that_cannot_fit_names_the_pages_of_each_label(tracer):
    engine = engine_of(tracer, num_pages=9)
    with pytest.raises(InputError, match=r"needs up to (\d+) pages .*page size 4; main (\d+), cfg_img (\d+)\)") as refused:
        engine.submit(PROMPTS["edited"], max_tokens=MAX_TOKENS)
    total, *parts = [
        int(number) for number in re.search(r"up to (\d+).*main (\d+), cfg_img (\d+)", str(refused.value)).groups()
    ]
    assert total == sum(parts)
    assert all_pages_are_back(engine)
