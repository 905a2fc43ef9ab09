"""Who may import whom, read from the sources with ast."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvlab

PACKAGE = Path(kvlab.__file__).parent

GROUND = {
    "errors", "events", "options", "pool_state", "progress", "recorder", "seams", "shipped", "spec", "step", "streams",
}  # fmt: skip
#: room -> what it may import of kvlab beside itself. What is not named here joins everything and may import everything.
ARROWS: dict[str, set[str]] = {
    **dict.fromkeys(GROUND, GROUND),
    "cache": GROUND,
    "attention": GROUND,
    "models": GROUND | {"attention"},
    "engine": GROUND | {"cache", "attention.base"},
    "lab": GROUND | {"cache", "engine"},
    "viz": GROUND | {"lab.results", "lab.picture_results"},
}
#: Rooms that work without anything but the standard library.
PURE = GROUND | {"cache"}
#: Inside a function, in these rooms only.
ALLOWED_IN_FUNCTIONS = {"progress": {"tqdm"}}
TORCH_ROOMS = {"attention", "models", "engine", "lab", "assemble", "bench", "train"}
#: Belong to an extra: never imported at module level.
OPTIONAL = {
    "diffusers", "flashinfer", "IPython", "ipywidgets", "jupytext", "nbclient", "nbformat", "pandas", "PIL", "plotly",
    "pocketsphinx", "scipy", "snac", "soundfile",
}  # fmt: skip
#: Import strings that may cross the table: results find their figures by it when they are shown.
BY_NAME = {"kvlab.viz.display"}


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield (module, is inside a function) of every import, import strings given to import_module included."""
    inner = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, id(node) in inner) for alias in names)
            case ast.ImportFrom(module="kvlab", names=names):
                yield from ((f"kvlab.{alias.name}", id(node) in inner) for alias in names)
            case ast.ImportFrom(module=module, level=level):
                yield ("." * level + (module or ""), id(node) in inner)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"), args=[ast.Constant(value=str(m))]
            ):
                if m not in BY_NAME:
                    yield (m, id(node) in inner)


def is_within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def violations(room: str, source: str) -> list[str]:
    """Return what a module of ``room`` imports and may not."""
    found = []
    for module, in_function in imports(ast.parse(source)):
        top = module.partition(".")[0]
        if module.startswith("."):
            found.append(f"{module}: imports name the whole path")
        elif top == "kvlab":
            target = module.removeprefix("kvlab").removeprefix(".")
            if room in ARROWS and not any(is_within(target, allowed) for allowed in {room, *ARROWS[room]}):
                found.append(f"{module}: {room} may not import it")
        elif top not in sys.stdlib_module_names:
            found.extend(_foreign(room, top, in_function))
    return found


def _foreign(room: str, top: str, in_function: bool) -> Iterator[str]:
    if room in PURE and not (in_function and top in ALLOWED_IN_FUNCTIONS.get(room, ())):
        yield f"{top}: {room} uses the standard library only"
    elif top == "torch" and not in_function and room not in TORCH_ROOMS:
        yield f"torch: {room} loads it on first use only"
    if top in OPTIONAL and not in_function:
        yield f"{top}: belongs to an extra, import it in the function that needs it"


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_keep_to_the_table(path: Path) -> None:
    assert violations(room_of(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("cache", "import torch"),
        ("cache", "def f():\n    import torch"),
        ("cache", "from kvlab.engine.request import Request"),
        ("cache", "def f():\n    from kvlab import engine"),
        ("models", "import kvlab.cache.keys"),
        ("models", "def f():\n    from kvlab.engine import engine"),
        ("engine", "from kvlab.attention.torch_paged import TorchPagedAttention"),
        ("engine", "from kvlab.models.text import TextModel"),
        ("engine", "import importlib\nimportlib.import_module('kvlab.models.text')"),
        ("viz", "from kvlab.lab.drift import drift"),
        ("viz", "import plotly.graph_objects as go"),
        ("viz", "import torch"),
        ("lab", "from kvlab.viz import pages"),
        ("lab", "import kvlab"),
        ("spec", "import numpy"),
        ("progress", "from tqdm.auto import tqdm"),
        ("cli", "import torch"),
        ("engine", "from .request import Request"),
    ],
)
def test_an_arrow_outside_the_table_is_found(room: str, source: str) -> None:
    assert len(violations(room, source)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("cache", "from kvlab.cache.arena import PageArena\nfrom kvlab.errors import InputError\nimport hashlib"),
        ("models", "import torch\nfrom kvlab.attention.base import AttentionBackend\nfrom kvlab import spec"),
        ("engine", "from kvlab.attention.base import AttentionBackend\nfrom kvlab.cache import kv"),
        ("engine", "import importlib\ndef f():\n    importlib.import_module('kvlab.viz.display')"),
        ("viz", "from kvlab.lab.results import Table\ndef f():\n    import plotly"),
        ("progress", "def f():\n    from tqdm.auto import tqdm"),
        ("assemble", "from kvlab.models import text\nfrom kvlab.engine import engine"),
    ],
)
def test_an_arrow_of_the_table_passes(room: str, source: str) -> None:
    assert violations(room, source) == []
