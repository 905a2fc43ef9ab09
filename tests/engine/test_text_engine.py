"""The engine over real decoders: a tiny random Llama and Qwen2, and SmolLM2 where its weights are at hand."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import write_folder

import kvlab
from kvlab.errors import InputError
from kvlab.events import ModelLoaded
from kvlab.models import registry
from kvlab.models.loading import load_text_model

LONG_SYSTEM = "You answer in rhymes. " * 5


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    write_folder(folder, request.param)
    return load_text_model(folder, device="cpu")


@pytest.fixture
def make(model: Any, engine_over: Any) -> Callable[..., Any]:
    return lambda **settings: engine_over(model, **({"num_pages": 128, "page_size": 8} | settings))


def prompt_of(length: int, first: int = 3) -> list[int]:
    return [first + (7 * i) % 90 for i in range(length)]


def test_a_cold_run_with_the_cache_on_is_bit_equal_to_cache_off(make):
    ask = {"max_tokens": 12, "logprobs": 5, "ignore_eos": True}
    on, off = make().generate(prompt_of(50), **ask), make(prefix_cache=False).generate(prompt_of(50), **ask)
    assert (on.ids, on.logprobs) == (off.ids, off.logprobs)


def test_k14_3_the_first_differs_at_most_in_rounding_and_later_ones_agree_bit_for_bit(make):
    engine = make()
    runs = [engine.generate(prompt_of(50), max_tokens=8, logprobs=0, ignore_eos=True) for _ in range(4)]
    assert [r.cached_tokens for r in runs] == [0, 48, 48, 48]
    assert runs[1].logprobs == runs[2].logprobs == runs[3].logprobs
    assert runs[0].ids == runs[1].ids
    drift = [abs(a["logprob"] - b["logprob"]) for a, b in zip(runs[0].logprobs, runs[1].logprobs, strict=True)]
    assert max(drift) < 1e-4


def test_k14_3_with_the_cache_off_all_runs_are_bit_equal(make):
    engine = make(prefix_cache=False)
    runs = [engine.generate(prompt_of(50), max_tokens=8, logprobs=3, ignore_eos=True) for _ in range(4)]
    assert all(r.logprobs == runs[0].logprobs for r in runs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_that_join_and_leave_get_what_they_get_alone(model, make, dtype, tmp_path):
    engine = make()
    prompts = [prompt_of(n, first) for n, first in ((40, 3), (17, 5), (33, 9))]
    alone = [make().generate(p, max_tokens=6, ignore_eos=True).ids for p in prompts]
    together = [r.ids for r in engine.generate(prompts, max_tokens=6, ignore_eos=True)]
    assert together == alone


def test_chunked_prefill_agrees_with_one_pass(make):
    ask = {"max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    whole, cut = make().generate(prompt_of(60), **ask), make(max_step_tokens=16).generate(prompt_of(60), **ask)
    assert whole.ids == cut.ids
    assert max(abs(a["logprob"] - b["logprob"]) for a, b in zip(whole.logprobs, cut.logprobs, strict=True)) < 1e-4


def test_turn_two_is_served_from_the_pages_of_turn_one_and_its_reply(make):
    engine = make()
    first = engine.generate(kvlab.chat("Tell me of the sea.", system=LONG_SYSTEM), max_tokens=20, ignore_eos=True)
    second = engine.generate(first.follow_up("And the sky?"), max_tokens=4)
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert second.cached_tokens >= 0.8 * (first.prompt_tokens + len(first.ids))
    assert second.cached_tokens == (first.prompt_tokens + len(first.ids) - 1) // 8 * 8


def test_k15_1_a_follow_up_keeps_the_generated_ids_and_reports_where_tokenising_again_forks(make):
    engine = make()
    tokenizer = engine.model.processor
    first = engine.generate(kvlab.chat("Hi", system=LONG_SYSTEM), max_tokens=9, ignore_eos=True)
    second = engine.generate(first.follow_up("More"), max_tokens=1)
    kept = (*first.prompt_ids, *first.ids)
    assert second.prompt_ids[: len(kept)] == kept
    again = tuple(tokenizer.process_prompt(first.text, {}).tensors["tokens"])
    if again[-len(first.ids) :] != first.ids:
        assert second.fork is not None
        assert second.fork.index >= len(first.prompt_ids)


def test_a_hook_on_the_network_drops_the_cache_and_takes_effect(make, model):
    engine = make()
    before = engine.generate(prompt_of(30), max_tokens=3, ignore_eos=True)
    layer = next(m for m in model.net.modules() if isinstance(m, torch.nn.Linear))
    hook = layer.register_forward_hook(lambda module, inputs, output: output * 0)
    try:
        during = engine.generate(prompt_of(30), max_tokens=3, logprobs=0, ignore_eos=True)
    finally:
        hook.remove()
    after = engine.generate(prompt_of(30), max_tokens=3, ignore_eos=True)
    assert (during.cached_tokens, after.cached_tokens) == (0, 0)
    assert after.ids == before.ids


def test_in_place_weight_changes_are_noticed(make, model):
    engine = make()
    engine.generate(prompt_of(30), max_tokens=1)
    with torch.no_grad():
        next(model.net.parameters()).mul_(1.0)
    assert engine.generate(prompt_of(30), max_tokens=1).cached_tokens == 0
    assert engine.generate(prompt_of(30), max_tokens=1).cached_tokens == 24


@pytest.mark.skipif(os.name == "nt", reason="raise_signal(SIGINT) ends the process on Windows")
@pytest.mark.usefixtures("interrupts")
def test_a_real_interrupt_leaves_a_usable_engine(make):
    engine = make()
    want = engine.generate(prompt_of(20), max_tokens=5, ignore_eos=True).ids

    def interrupt(chunk: Any) -> None:
        if chunk.index == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompt_of(20), max_tokens=50, on_token=interrupt, ignore_eos=True)
    assert engine.kv.arena.num_free == engine.kv.usable_pages - len(engine.kv.index)
    assert engine.generate(prompt_of(20), max_tokens=5, ignore_eos=True).ids == want


def test_the_engine_runs_in_another_thread(make):
    engine = make()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(engine.generate(prompt_of(20), max_tokens=3)))
    thread.start()
    thread.join()
    assert len(results[0].ids) == 3 or results[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (kvlab.Chat((("system", "Be brief."),)), "user"),
        (kvlab.Chat(()), "message|user"),
        ([5, 500], "500"),
        ([True, 5], "True"),
        ("", "empty"),
        ("\ud800", "UTF-8|surrogate"),
        (3.5, "float"),
        ({"role": "user"}, "dict|prompt"),
    ],
)
def test_bad_prompts_are_named(make, prompt, message):
    engine = make()
    with pytest.raises(InputError, match=message):
        engine.generate(prompt, max_tokens=1)
    engine.check()
    assert engine.generate(prompt_of(5), max_tokens=1).prompt_tokens == 5


def test_results_and_logs_carry_the_identity_of_the_weights(make, model):
    engine = make()
    assert "sha256:" in model.identity
    assert engine.generate(prompt_of(5), max_tokens=1).model == model.identity
    (loaded,) = engine.events.filter(ModelLoaded)
    assert loaded.event.identity == model.identity


def test_load_takes_a_path_and_refuses_what_it_does_not_know(tmp_path: Path):
    write_folder(tmp_path / "my model ü")
    engine = kvlab.load(tmp_path / "my model ü", num_pages=16, device="cpu")
    assert engine.generate("abc", max_tokens=1).prompt_tokens == 4
    for settings in ({"page_size": 0}, {"num_pages": 1}, {"dtype": "int8"}, {"max_seq_len": 10**9}):
        with pytest.raises(InputError):
            kvlab.load(tmp_path / "my model ü", **({"num_pages": 16} | settings))
    with pytest.raises(TypeError, match="pages"):
        kvlab.load(tmp_path, pages=3)


# -- the real model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Any]:
    if registry.find("smollm2-135m") is None:
        pytest.skip("the weights of smollm2-135m are not here; run: kvlab fetch smollm2-135m")
    with kvlab.load("smollm2-135m", num_pages=128, device="cpu") as engine:
        yield engine


def test_smollm2_answers_and_turn_two_is_served_from_turn_one(smollm2):
    first = smollm2.generate(kvlab.chat("What is the capital of France?", system=LONG_SYSTEM), max_tokens=12)
    assert "Paris" in first.text
    second = smollm2.generate(first.follow_up("And of Italy?"), max_tokens=12)
    assert second.cached_tokens >= 0.8 * (first.prompt_tokens + len(first.ids))
    assert "Rome" in second.text


def test_smollm2_reads_a_rendered_chat_like_the_chat(smollm2):
    asked = kvlab.chat("What is 2 + 2?", system="Be brief.")
    first = smollm2.generate(asked, max_tokens=1)
    text = smollm2.model.processor.process_prompt(asked, {}).text
    second = smollm2.generate(text, max_tokens=1)
    assert second.prompt_ids == first.prompt_ids
    assert second.cached_tokens == (first.prompt_tokens - 1) // 16 * 16
