"""Notebooks as pairs: `notebooks/src/NN_topic.py` is edited, `notebooks/NN_topic.ipynb` is built from it, executed and kept.

A build is a function of the source: cell ids are numbered, metadata is an allow-list, no times are kept. So two builds
differ only in the outputs of cells tagged ``timing``; ``check`` compares those of cells tagged ``check``, and those tagged
``check-cpu``, whose last digits are a matter of the processor, where it is of the kind that they were built on.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvlab import shipped
from kvlab.errors import InputError, KvlabError, missing_extra
from kvlab.progress import progress

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
MAX_BYTES = 250 * 1024
CELL_TIMEOUT_S = 600

PICTURES = ("image/svg+xml", "image/png")
FIGURES = ("application/vnd.plotly.v1+json",)
WIDGETS = ("application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json")
# A folder of somebody's machine: /home/ada/..., C:\Users\ada\...; not a URL, not a fraction.
ABSOLUTE_PATH = re.compile(
    r"(?<![\w/.:+<])/(?:home|Users|root|tmp|usr|opt|var|private|mnt)/[\w.-]+|\b[A-Za-z]:\\+(?:Users|Temp|Program|Windows)"
)


def names() -> list[str]:
    """Return the names of the notebooks that come with kvlab."""
    return sorted(path.stem for path in shipped.notebooks_dir().glob("*.ipynb"))


def copy(folder: Path) -> list[Path]:
    """Copy all notebooks into ``folder`` (made if absent) and return their new paths.

    Raises:
        InputError: it cannot be such a folder, or a file there is not the same notebook; nothing is copied.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder, which is made where it is absent")
    sources = sorted(shipped.notebooks_dir().glob("*.ipynb"))
    targets = [folder / source.name for source in sources]
    for source, target in zip(sources, targets, strict=True):
        if target.exists() and target.read_bytes() != source.read_bytes():
            raise InputError(f"{target} exists and was changed; give another folder, or move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copyfile(source, target)) for source, target in zip(sources, targets, strict=True)]
    except OSError as error:
        raise InputError(f"the notebooks cannot be copied to {folder} ({error.strerror}); give another folder") from error


def build(names: Sequence[str] | None = None, *, root: Path | None = None) -> list[Path]:
    """Build and execute notebooks from their sources and return the paths written.

    Args:
        names: which ones; None = all of ``root/src``.
        root: the folder of the notebooks; None = that of the checkout.
    """
    root = _root(root)
    return [
        _write(root / f"{name}.ipynb", execute(root, name)) for name in progress(_chosen(root, names), "building notebooks")
    ]


def check(names: Sequence[str] | None = None, *, root: Path | None = None) -> list[str]:
    """Rebuild notebooks beside the committed ones and return what is wrong, one line a problem."""
    root = _root(root)
    return [problem for name in progress(_chosen(root, names), "checking notebooks") for problem in _check_one(root, name)]


def read_source(root: Path, name: str) -> Any:
    """Return the notebook that ``src/name.py`` describes: no outputs, numbered cell ids, tags the only cell metadata."""
    jupytext = _library("jupytext")
    notebook = jupytext.read(root / "src" / f"{name}.py", fmt="py:percent")
    notebook.metadata = _library("nbformat").from_dict({"kernelspec": KERNELSPEC})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for index, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{index}"
        cell.metadata = _library("nbformat").from_dict({"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {})
    return notebook


def execute(root: Path, name: str) -> Any:
    """Return the notebook of ``src/name.py`` with its outputs, run by this interpreter in a static build.

    Raises:
        KvlabError: a cell failed; the message carries its traceback.
    """
    notebook = read_source(root, name)
    nbclient = _library("nbclient")
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_TIMEOUT_S,
        record_timing=False,
        coalesce_streams=True,  # how a stream is cut into messages depends on the clock
        resources={"metadata": {"path": str(root)}},
    )
    client.create_kernel_manager().kernel_spec.argv[0] = sys.executable
    try:
        # one thread: no sum depends on the number of cores, and notebooks built side by side do not wait for each other
        client.execute(env=os.environ | {"KVLAB_STATIC": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"})
    except nbclient.exceptions.CellExecutionError as error:
        raise KvlabError(f"notebook {name} failed: {error}") from error
    notebook.metadata.pop("language_info", None)
    if any("check-cpu" in cell.metadata.get("tags", ()) for cell in notebook.cells):
        notebook.metadata["built_on"] = kind_of_cpu()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    return notebook


def kind_of_cpu() -> str:
    """Return what decides in which order and how exactly a CPU adds up: its architecture, vectors, and bfloat16."""
    import torch

    from kvlab.models.loading import cpu_has_bfloat16

    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{' bfloat16' if cpu_has_bfloat16() else ''}"


def hygiene(notebook: Any, num_bytes: int) -> Iterator[str]:
    """Yield what a notebook must not be committed with."""
    if num_bytes > MAX_BYTES:
        yield f"has {num_bytes / 1024:.0f} KiB, more than {MAX_BYTES // 1024}"
    if "widgets" in notebook.metadata:
        yield "carries widget state"
    for cell in notebook.cells:
        if found := ABSOLUTE_PATH.search(cell.source):
            yield f"{cell.id}: names the absolute path {found.group()}"
        for output in cell.get("outputs", ()):
            yield from (f"{cell.id}: {problem}" for problem in _output_problems(output))


def _output_problems(output: Any) -> Iterator[str]:
    if output.output_type == "error":
        yield f"ends in {output.ename}"
    if output.get("name") == "stderr":
        yield f"writes to stderr: {output.text[:80]!r}"
    data = output.get("data", {})
    if any(kind in data for kind in WIDGETS):
        yield "shows a widget, which is blank without a kernel"
    if any(kind in data for kind in FIGURES) and not any(kind in data for kind in PICTURES):
        yield "shows a figure without an SVG or PNG part"
    texts = [output.get("text", ""), *(str(value) for kind, value in data.items() if kind != "image/png")]
    if found := ABSOLUTE_PATH.search("\n".join(texts)):
        yield f"shows the absolute path {found.group()}"


def _check_one(root: Path, name: str) -> Iterator[str]:
    path = root / f"{name}.ipynb"
    if not path.is_file():
        yield f"{name}: not built; run: kvlab notebooks build {name}"
        return
    text = path.read_text(encoding="utf-8")
    committed = _library("nbformat").reads(text, as_version=4)
    yield from (f"{name}: {problem}" for problem in hygiene(committed, len(text.encode())))
    if str(root.resolve().parent) in text:
        yield f"{name}: names {root.resolve().parent}"
    if _inputs(committed) != _inputs(read_source(root, name)):
        yield f"{name}: differs from src/{name}.py; run: kvlab notebooks build {name}"
        return
    rebuilt = execute(root, name)
    is_same_cpu = committed.metadata.get("built_on") == rebuilt.metadata.get("built_on")
    compared = {"check", "check-cpu"} if is_same_cpu else {"check"}
    for old, new in zip(committed.cells, rebuilt.cells, strict=True):
        if compared & set(old.metadata.get("tags", ())) and old.outputs != new.outputs:
            yield f"{name}, {old.id}: a rebuild shows something else: {_first_difference(old.outputs, new.outputs)}"


def _inputs(notebook: Any) -> list[tuple[str, str, str, list[str]]]:
    return [(cell.id, cell.cell_type, cell.source, list(cell.metadata.get("tags", ()))) for cell in notebook.cells]


def _first_difference(old: Any, new: Any) -> str:
    pairs = zip(str(old), str(new), strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(str(old)), len(str(new))))
    around = slice(max(at - 30, 0), at + 50)
    return f"{str(old)[around]!r} became {str(new)[around]!r}"


def _root(root: Path | None) -> Path:
    if root is not None:
        return root
    if not shipped.is_checkout():
        raise InputError("notebooks are built in a checkout of kvlab; an installed kvlab has no sources to build from")
    return shipped.notebooks_dir()


def _chosen(root: Path, names: Sequence[str] | None) -> list[str]:
    known = sorted(path.stem for path in (root / "src").glob("*.py"))
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise InputError(f"there is no notebook source {unknown[0]!r}; there are: {', '.join(known) or 'none'}")
    return list(names or known)


def _write(path: Path, notebook: Any) -> Path:
    text = _library("nbformat").writes(notebook)
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8", newline="\n")
    return path


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing_extra(name, "lab", "to build notebooks") from error
