"""What a real decoder writes must not depend on how small the pool is: a tiny Llama in float64, so rounding hides nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import write_folder

from kvlab.assemble import build_engine
from kvlab.models.loading import load_text_model

MAX_TOKENS = 24
SHARED = [3 + (7 * i) % 90 for i in range(96)]  # six pages of 16
PROMPTS = [[*SHARED, *(3 + (11 * i + 5 * n) % 90 for i in range(8))] for n in range(8)]
OPTIONS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = Path(tmp_path_factory.mktemp("llama"))
    write_folder(folder, "llama")
    return load_text_model(folder, device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def unpressured(model: Any) -> list[tuple[int, ...]]:
    with build_engine(model, num_pages=256, page_size=16, prefix_cache=False) as engine:
        return [engine.generate(prompt, **OPTIONS).ids for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("cure", "trace"),
    [
        ({"admission": "reserve"}, None),
        ({"admission": "peak"}, None),
        ({"admission": "none", "cpu_offload_pages": 128}, "offloads"),
        ({"admission": "none", "max_concurrent_requests": 2}, None),
        ({"admission": "none", "preemption": True}, "preemptions"),
    ],
    ids=["reserve", "peak", "host pages", "few at once", "preemption"],
)
def test_text_under_pressure_equals_that_of_a_run_with_room(
    model: Any, unpressured: Any, checked: list[Any], cure: dict[str, Any], trace: str | None
) -> None:
    with build_engine(model, num_pages=13, page_size=16, **cure) as engine:  # side by side they would need 22
        checked.append(engine)
        results = engine.generate(PROMPTS, **OPTIONS)
        assert [result.ids for result in results] == unpressured
        assert any(result.cached_tokens for result in results)
        assert trace is None or any(getattr(result, trace) for result in results)
