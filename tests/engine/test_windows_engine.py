"""Requests with a window: they see what the window leaves them, at the positions it was written at."""

from __future__ import annotations

import hashlib

import pytest
import torch

from kvlab.errors import InputError
from kvlab.models.tracer import _int64, _slot_bytes

PROMPT = [1 + i % 60 for i in range(23)]


def windowed_continuation(model, ids, num_tokens: int, page: int, budget: int, protected: int):
    """Greedy tokens of a tracer whose KV is cut by the window after each step, done with plain lists."""
    slots = list(zip(model.digests(ids), ids, strict=True))
    out, last, position = [], slots[-1][0], len(ids)
    while True:
        seen = _slot_bytes(*zip(*slots, strict=True))
        digest = torch.tensor([_int64(hashlib.blake2b(seen, digest_size=8))])
        out.append(int(model.logits(digest).argmax()))
        if len(out) == num_tokens:
            return out
        first = -(-protected // page)
        count = min((len(slots) - protected - budget) // page, len(slots) // page - first)
        if count > 0:
            del slots[first * page : (first + count) * page]
        (last,) = model.digests(out[-1:], [position], last)
        slots.append((last, out[-1]))
        position += 1


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [(6, 0), (6, 4), (5, 7), (1, 0), (100, 8)])
def test_a_windowed_request_sees_what_the_window_leaves(tracer, page_size, window):
    engine = tracer(page_size=page_size)
    result = engine.generate(PROMPT, max_tokens=30, window=window)
    assert list(result.ids) == windowed_continuation(engine.model, PROMPT, 30, page_size, *window)
    engine.check()


def test_windows_change_the_text_only_of_those_who_ask(tracer):
    engine = tracer(page_size=4)
    handles = [engine.submit(PROMPT, max_tokens=30, window=w) for w in (None, (6, 4), None)]
    plain, cut, other = (list(h.result().ids) for h in handles)
    right = engine.model.continuation(PROMPT, 30)
    assert plain == other == right
    assert cut == windowed_continuation(engine.model, PROMPT, 30, 4, 6, 4) != right


def test_a_windowed_request_may_outgrow_the_pool(tracer):
    engine = tracer(page_size=4, num_pages=12)  # 11 usable pages, 44 slots
    result = engine.generate(PROMPT, max_tokens=200, window=(8, 4))
    assert list(result.ids) == windowed_continuation(engine.model, PROMPT, 200, 4, 8, 4)
    with pytest.raises(InputError, match="11 usable"):
        engine.generate(PROMPT, max_tokens=200)


@pytest.mark.parametrize("admission", ["reserve", "peak", "none"])
def test_windowed_requests_under_pressure_keep_their_text(tracer, admission):
    engine = tracer(page_size=4, num_pages=24, admission=admission, preemption=admission != "none", cpu_offload_pages=100)
    results = engine.generate([[*PROMPT, i] for i in range(8)], max_tokens=40, window=(8, 4))
    assert [list(r.ids) for r in results] == [windowed_continuation(engine.model, [*PROMPT, i], 40, 4, 8, 4) for i in range(8)]


def test_a_windowed_prompt_in_chunks_is_whole_before_anything_goes(tracer):
    engine = tracer(page_size=4, max_step_tokens=5)
    result = engine.generate(PROMPT, max_tokens=12, window=(6, 8))
    assert list(result.ids) == windowed_continuation(engine.model, PROMPT, 12, 4, 6, 8)
    assert len(engine.kv.index) == 2  # the protected pages


@pytest.mark.parametrize("window", [(0, 0), (-4, 0), (4, -1), (4,), 4, (4, 8, 9), ("4", 0), (2.5, 0)])
def test_illegal_windows_are_refused(tracer, window):
    with pytest.raises(InputError, match="window"):
        tracer().generate(PROMPT, window=window)


def test_a_window_cannot_protect_more_than_the_prompt(tracer):
    with pytest.raises(InputError, match="protects 24 tokens and the prompt has 23"):
        tracer().generate(PROMPT, window=(4, 24))


@pytest.mark.parametrize("host_tier_pages", [0, 20])
def test_pages_lent_to_a_window_are_reserved_anew(tracer, host_tier_pages):
    engine = tracer(page_size=4, num_pages=25, host_tier_pages=host_tier_pages)
    engine.generate(PROMPT, max_tokens=2)
    others = [engine.submit([*PROMPT, n], max_tokens=20) for n in range(2)]
    windowed = [engine.submit([*PROMPT[:20], n, n], max_tokens=30, window=(6, 4)) for n in range(3)]
    while not all(handle.done for handle in [*others, *windowed]):
        engine.step()
        engine.check()  # what is owed can be had
    assert all(handle.outcome.held_steps == 0 and handle.outcome.cached_tokens for handle in [*others, *windowed])


def test_a_window_owes_no_more_than_it_will_hold(tracer):
    engine = tracer(page_size=4, num_pages=12)
    handle = engine.submit(PROMPT, max_tokens=100, window=(1, 0))
    engine.step()
    held = sum(engine.kv.pages_taken(handle.rid))
    assert held + engine._gate.outstanding_pages() == 3  # nine tokens: the budget of one, and a page on either side
    handle.cancel()
