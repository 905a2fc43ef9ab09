"""Pictures and guidance through the engine, over the tracer of pictures: what comes out, what is not run again, what is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvlab.errors import InputError
from kvlab.events import MediaEncoded, StepRan, WalkServed
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
