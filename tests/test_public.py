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
    "cache",
    "chat",
    "fetch",
    "lab",
    "load",
    "viz",
]

SIGNATURES = {
    "Chat": "(messages: 'tuple[tuple[str, str], ...]', kept_ids: 'tuple[int, ...]' = (), kept_messages: 'int' = 0) -> None",
    "Recorder": "(*, clock: 'Callable[[], float]', max_events: 'int | None' = 500000, "
    "log_path: 'str | Path | None' = None) -> 'None'",
    "chat": "(user: 'str', *, system: 'str | None' = None) -> 'Chat'",
}


def test_names() -> None:
    assert dir(kvlab) == sorted(kvlab.__all__) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves(name: str) -> None:
    assert getattr(kvlab, name) is getattr(kvlab, name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert str(inspect.signature(getattr(kvlab, name))) == SIGNATURES[name]


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
