"""The surface a user sees: names, signatures, and what importing kvlab costs. A change here is a line in CHANGELOG.md."""

from __future__ import annotations

import inspect
import json
import statistics
import subprocess
import sys
import time

import pytest

import kvlab

NAMES = [
    "Chat",
    "Engine",
    "GenerationResult",
    "InputError",
    "IntegrityError",
    "KvlabError",
    "Recorder",
    "StallError",
    "__version__",
    "ask",
    "cache",
    "chat",
    "draw",
    "fetch",
    "lab",
    "load",
    "viz",
]

SIGNATURES = {
    "Chat": "(messages, kept_ids=(), kept_messages=0)",
    "Engine": "(model, *, kv, attention, positions=None, sampler=None, preprocess=None, admission=None, chunks=None, "
    "recorder=None, clock=monotonic, seed=0, offload_policy='lru', profile='kvlab', encoder_cache_bytes=268435456)",
    "GenerationResult": "(rid, name, text, ids, prompt_ids, prompt_tokens, cached_tokens, cached_by_label, pages_matched, "
    "page_size, finish_reason, ttft_ms, total_ms, tokens_per_s, misses, model, request, fork=None, logprobs=(), "
    "prompt_logprobs=(), held_steps=0, preemptions=0, resumed_tokens=0, offloads=0, error=None, stop_ids=frozenset(), "
    "encoder_calls=0, first_pass_ms=None, pixels=None, opening_ids=(), keying='walk')",
    "Recorder": "(*, clock, max_events=500000, log_path=None)",
    "ask": "(*parts, think=False)",
    "chat": "(user, *, system=None)",
    "draw": "(*parts, think=False, size=None, num_timesteps=None, timestep_shift=None, cfg_text_scale=None, "
    "cfg_img_scale=None, cfg_interval=None, cfg_renorm=None, cfg_renorm_min=None, vae_sample=None, noise=None, "
    "vae_noise=None)",
    "fetch": "(name, *, say=announce)",
    "load": "(name_or_path, *, num_pages=None, pool_bytes=None, page_size=16, dtype=None, kv_dtype=None, device=None, seed=0, "
    "record=True, event_log=None, max_seq_len=None, max_concurrent_requests=None, admission=None, "
    "admission_order='fifo', backfill_protect='easy', backfill_window=128, preemption=None, cpu_offload_pages=0, "
    "host_tier_pages=0, offload_policy='lru', max_step_tokens=2048, prefix_cache=True, prefix_cache_salt='', "
    "policy='lru', max_pinned_pages=None, attention='torch', preprocess='inline', encoder_cache_bytes=268435456, "
    "profile='kvlab', keying='walk', check_invariants=None, resources=None)",
}

#: What an engine and a result can do, beside the fields above.
MEMBERS = {
    "Engine": [
        "check",
        "close",
        "events",
        "generate",
        "hand_over",
        "pin",
        "reset_prefix_cache",
        "step",
        "stream",
        "submit",
        "take_over",
        "unpin",
    ],
    "GenerationResult": ["follow_up", "image"],
}


class Named:
    """Stands for a function that is a default: its name, not its address."""

    def __init__(self, function: object) -> None:
        self.name = function.__name__  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return self.name


def signature(function: object) -> str:
    """Names, kinds and defaults; types are mypy's business."""
    found = inspect.signature(function)  # type: ignore[arg-type]
    plain = [
        parameter.replace(annotation=parameter.empty, default=Named(d) if inspect.isroutine(d := parameter.default) else d)
        for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=plain, return_annotation=found.empty))


def members(cls: type) -> list[str]:
    return sorted(
        name for name, value in vars(cls).items() if name[0] != "_" and (callable(value) or isinstance(value, property))
    )


def test_names() -> None:
    assert dir(kvlab) == sorted(kvlab.__all__) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves(name: str) -> None:
    assert getattr(kvlab, name) is getattr(kvlab, name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert signature(getattr(kvlab, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", MEMBERS)
def test_members(name: str) -> None:
    assert members(getattr(kvlab, name)) == MEMBERS[name]


def test_every_function_and_class_but_the_errors_has_its_signature_here() -> None:
    offered = {name: getattr(kvlab, name) for name in NAMES}
    errors = {name for name, value in offered.items() if isinstance(value, type) and issubclass(value, Exception)}
    assert {name for name, value in offered.items() if callable(value)} - errors == set(SIGNATURES)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'lode'; it offers load, chat"):
        kvlab.lode  # noqa: B018


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, encoding="utf-8").stdout


@pytest.mark.parametrize("module", ["kvlab", "kvlab.cli", "kvlab.errors", "kvlab.events", "kvlab.cache"])
def test_importing_loads_no_heavy_library(module: str) -> None:
    loaded = json.loads(run(f"import {module}, sys, json; print(json.dumps(list(sys.modules)))"))
    heavy = {"torch", "numpy", "transformers", "huggingface_hub", "plotly", "ipywidgets", "pandas", "IPython"}
    assert heavy.isdisjoint(loaded)


def test_import_costs_at_most_six_empty_interpreters() -> None:
    def seconds(code: str) -> float:
        begin = time.perf_counter()
        run(code)
        return time.perf_counter() - begin

    pairs = [(seconds("pass"), seconds("import kvlab")) for _ in range(9)]  # interleaved: load hits both alike
    empty, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
    assert ours <= 6 * empty, f"import kvlab {ours * 1e3:.0f} ms, an empty interpreter {empty * 1e3:.0f} ms"
