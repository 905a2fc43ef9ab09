"""Encoder outputs by digest: who shares them, how many are kept, and when they are forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.engine.encoders import EncoderMemo, num_bytes
from kvlab.errors import InputError
from kvlab.events import MediaEncoded
from kvlab.spec import Block, Walk, ask

RED, BLUE = (np.full((3, 5, 3), shade, dtype=np.uint8) for shade in (200, 40))
TEXT, LONG = "10 11 12 13", " ".join(str(10 + i) for i in range(21))
LOOK = Walk("look", causal=False, encodes=True)


@dataclass
class Counting:
    """An encoder whose outputs have 8 bytes."""

    calls: int = 0

    def encode(self, walk: str, content: Any) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([content])


def a_run(**options: Any) -> Any:
    wishes = SimpleNamespace(**({"prefix_cache": True, "salt": ""} | options))
    return SimpleNamespace(rid=1, encoder_calls=0, request=SimpleNamespace(options=wishes))


def block(number: int, digest: bytes | None = b"") -> Block:
    return Block(4, 1, number, bytes([number]) if digest == b"" else digest)


def calls_of(memo: EncoderMemo, numbers: list[int]) -> list[int]:
    """Return, for each block asked for, how many encoder calls it took."""
    run, counts = a_run(), []
    for number in numbers:
        before = run.encoder_calls
        assert int(memo.content(LOOK, run, block(number))) == number
        counts.append(run.encoder_calls - before)
    return counts


def test_the_least_recently_used_output_goes_first():
    memo = EncoderMemo(Counting(), max_bytes=16)
    assert calls_of(memo, [1, 2, 1, 3, 1, 2]) == [1, 1, 0, 1, 0, 1]
    assert (len(memo), memo.num_bytes) == (2, 16)


@pytest.mark.parametrize("max_bytes", [0, 7])
def test_an_output_larger_than_the_memory_is_not_kept(max_bytes):
    memo = EncoderMemo(Counting(), max_bytes)
    assert calls_of(memo, [1, 1]) == [1, 1]
    assert (len(memo), memo.num_bytes) == (0, 0)


def test_a_picture_without_identity_is_encoded_each_time_and_never_kept():
    memo, run = EncoderMemo(Counting(), 100), a_run()
    for _ in range(2):
        memo.content(LOOK, run, block(1, None))
    assert (run.encoder_calls, len(memo)) == (2, 0)


def test_two_walks_make_two_things_of_one_picture():
    memo, run = EncoderMemo(Counting(), 100), a_run()
    memo.content(LOOK, run, block(1))
    memo.content(Walk("draw", encodes=True), run, block(1))
    assert run.encoder_calls == 2


def test_bytes_are_counted_wherever_tensors_are():
    @dataclass
    class Grid:
        pixels: torch.Tensor
        size: tuple[int, int]

    assert num_bytes([Grid(torch.zeros(3, dtype=torch.float64), (1, 3)), {"more": b"ab"}]) == 26


@pytest.mark.parametrize("size", [-1, 2.5, True])
def test_an_illegal_size_is_named(size):
    with pytest.raises(InputError, match="encoder_cache_bytes"):
        EncoderMemo(Counting(), size)


# -- in an engine ------------------------------------------------------------------------------------------------------


def test_a_picture_is_encoded_once_and_counted(tracer):
    engine = tracer(media=True, page_size=4, prefix_cache=False)
    results = engine.generate([ask(RED, TEXT), ask(RED, LONG), ask(BLUE, TEXT)], max_tokens=2)
    assert sum(r.encoder_calls for r in results) == len(engine.model.encoded) == 2
    assert [e.event.walk for e in engine.events.filter(MediaEncoded)] == ["prefill_vit"] * 2


def test_what_encoders_made_is_forgotten_with_the_cache(tracer):
    engine = tracer(media=True, page_size=4)
    engine.generate(ask(RED, TEXT), max_tokens=2)
    engine.reset_prefix_cache()
    assert engine.generate(ask(RED, TEXT), max_tokens=2).encoder_calls == 1


def test_what_encoders_made_is_forgotten_with_the_weights(tracer):
    engine = tracer(media=True, page_size=4)
    engine.generate(ask(RED, TEXT), max_tokens=2)
    engine.model.seed = 5
    again = engine.generate(ask(RED, TEXT), max_tokens=2)
    assert (again.encoder_calls, list(again.ids)) == (1, engine.model.reply(ask(RED, TEXT), 2))


@pytest.mark.parametrize(("options", "calls"), [({}, 0), ({"salt": "other"}, 1), ({"prefix_cache": False}, 1)], ids=str)
def test_encoder_outputs_are_shared_as_pages_are(tracer, options, calls):
    engine = tracer(media=True, page_size=64, num_pages=32)  # no prompt fills a page, so that only the memo can serve
    engine.generate(ask(RED, TEXT), max_tokens=2)
    assert engine.generate(ask(RED, LONG), max_tokens=2, **options).encoder_calls == calls


def test_an_encoder_that_raises_ends_its_own_request(tracer, monkeypatch):
    engine = tracer(media=True, page_size=4)
    encode, bad = engine.model.encode, ask(BLUE, TEXT)

    def fail(walk: str, content: bytes) -> Any:
        if content == engine.model.processor.process_prompt(bad, {}).metadata["plan"].writes[0].block.content:
            raise ValueError("no such picture")
        return encode(walk, content)

    monkeypatch.setattr(engine.model, "encode", fail)
    good, failed = engine.generate([ask(RED, TEXT), bad], max_tokens=3)
    assert list(good.ids) == engine.model.reply(ask(RED, TEXT), 3)
    assert (failed.finish_reason, str(failed.error)) == ("error", "no such picture")
