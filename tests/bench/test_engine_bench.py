"""The rows of ``bench engine`` on a tiny random model: what is in them, never how fast it was."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvlab.bench.engine import EngineBench, Sizes, load_row, run
from kvlab.events import RequestFinished
from tests.tiny_checkpoints import write_folder

TINY = Sizes(
    cold_tokens=(32, 48),
    cold_rounds=2,
    batches=(1, 3),
    decode_prompt_tokens=20,
    decode_tokens=4,
    decode_rounds=(2, 2),
    hit_tokens=128,
    hit_rounds=2,
    no_hit_batch=2,
    no_hit_prompt_tokens=20,
    no_hit_tokens=3,
    no_hit_rounds=2,
    num_pages=40,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_folder(path)
    return path


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    return run(folder, TINY, num_threads=1)


def ticking() -> Any:
    """A clock that moves on by one second at each look."""
    ticks = count()
    return lambda: float(next(ticks))


@pytest.fixture
def bench(folder: Path) -> Iterator[EngineBench]:
    bench = EngineBench(folder, TINY, ticking())
    yield bench
    bench.close()


def cached_tokens(bench: EngineBench) -> set[int]:
    return {entry.event.cached_tokens for entry in bench.engine.events.filter(RequestFinished)}


def test_every_row_is_there_with_its_target(document: dict[str, Any]) -> None:
    assert {row["name"]: row["target"] for row in document["rows"]} == {
        "cold_ttft_32": 0.9,
        "linear_cold_32": None,
        "cold_ttft_48": 0.9,
        "linear_cold_48": None,
        "decode_b1": 1.15,
        "linear_decode_b1": None,
        "decode_b3": 1.15,
        "linear_decode_b3": None,
        "hit_ttft": 1.2,
        "cache_on_no_hits": 1.02,
        "load_peak": 1.25,
    }


def test_a_ratio_is_ours_over_the_reference_and_judged_by_its_target(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        assert row["ratio"] == pytest.approx(row["ours"] / row["reference"], rel=0.02, abs=2e-3)
        higher = row["name"].startswith("decode")
        expected = None if row["target"] is None else (row["ratio"] >= row["target"]) == higher or row["ratio"] == row["target"]
        assert row["ok"] is expected


def test_both_networks_choose_the_same_first_tokens(document: dict[str, Any]) -> None:
    assert document["machine"]["first_tokens_as_reference"] == "6 of 6"  # two lengths, two rounds and a warm-up each


def test_the_machine_says_threads_clock_and_versions(document: dict[str, Any]) -> None:
    facts = document["machine"]
    assert (facts["threads"], facts["clock"], facts["dtype"]) == (1, "perf_counter", "float32")
    assert (facts["torch"], facts["transformers"]) == (torch.__version__, transformers.__version__)


def test_threads_are_as_before_after_a_run(folder: Path) -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):  # a clock that stands still
        run(folder, TINY, num_threads=before + 1, clock=lambda: 0.0)
    assert torch.get_num_threads() == before


def test_a_hit_serves_seven_eighths_and_a_cold_prompt_nothing(bench: EngineBench) -> None:
    bench.hit_row()
    assert cached_tokens(bench) == {0, 112}


def test_cold_prompts_share_nothing(bench: EngineBench) -> None:
    bench.cold_rows(32)
    bench.decode_rows(3, 2)
    bench.no_hit_row()
    assert cached_tokens(bench) == {0}


def test_a_decode_rate_counts_the_tokens_after_the_first_ones(bench: EngineBench) -> None:
    ours, _ = bench.decode_rows(3, 2)
    # Four tokens of three requests: nine after the first three, and one look at the clock for each on our side; the reference
    # looks once a step.
    assert (ours.ours, ours.reference) == (1.0, 3.0)


def test_loading_adds_the_weights_and_every_page_of_the_pool(folder: Path) -> None:
    pages = 4096
    row = load_row(folder, pages)
    pool_mib = pages * 2 * 2 * 16 * 2 * 8 * 4 / 2**20  # layers, K and V, slots, KV heads, head_dim, float32
    assert row.reference is not None
    assert row.reference > pool_mib
    assert row.ours >= 0.95 * pool_mib
