"""Building, checking and copying notebooks, on a small pair of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvlab import notebooks
from kvlab.errors import InputError, KvlabError

nbformat = pytest.importorskip("nbformat", reason="needs the extra lab")
pytest.importorskip("jupytext", reason="needs the extra lab")
pytest.importorskip("nbclient", reason="needs the extra lab")

SOURCE = """\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What is three times four?
# Twelve.

# %% tags=["parameters"]
factor = 4

# %% tags=["check"]
import os
print("static:", os.environ["KVLAB_STATIC"], "threads:", os.environ["OMP_NUM_THREADS"])
3 * factor

# %% tags=["timing"]
import time
time.perf_counter_ns()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("a place with blänks")
    (root / "src").mkdir()
    (root / "src" / "01_three.py").write_text(SOURCE, encoding="utf-8")
    notebooks.build(root=root)
    return root


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    """A copy of the built pair that a test may spoil."""
    return Path(shutil.copytree(built, tmp_path / "notebooks"))


def read(root: Path) -> nbformat.NotebookNode:
    return nbformat.read(root / "01_three.ipynb", as_version=4)


def change(root: Path, old: str, new: str) -> None:
    path = root / "01_three.ipynb"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_build_keeps_outputs_and_little_else(built: Path) -> None:
    notebook = read(built)
    assert [cell.id for cell in notebook.cells] == ["cell-1", "cell-2", "cell-3", "cell-4"]
    assert notebook.metadata == {"kernelspec": notebooks.KERNELSPEC}
    assert [cell.metadata for cell in notebook.cells] == [
        {},
        {"tags": ["parameters"]},
        {"tags": ["check"]},
        {"tags": ["timing"]},
    ]
    assert notebook.cells[2].outputs[0].text == "static: 1 threads: 1\n"
    assert notebook.cells[2].outputs[1].data == {"text/plain": "12"}


def test_two_builds_are_byte_identical_but_for_timing(root: Path) -> None:
    first = (root / "01_three.ipynb").read_bytes()
    timed = read(root).cells[3].outputs[0].data["text/plain"]
    (path,) = notebooks.build(["01_three"], root=root)
    again = read(root).cells[3].outputs[0].data["text/plain"]
    assert timed != again
    assert path.read_bytes() == first.replace(timed.encode(), again.encode())


def test_a_fresh_build_passes_the_check(root: Path) -> None:
    assert notebooks.check(root=root) == []


def test_an_output_that_a_rebuild_does_not_show_is_found(root: Path) -> None:
    change(root, '"12"', '"13"')
    (problem,) = notebooks.check(root=root)
    assert problem.startswith("01_three, cell-3: a rebuild shows something else")


def test_what_depends_on_the_cpu_is_compared_on_its_kind_alone(root: Path) -> None:
    source = SOURCE.replace('tags=["check"]', 'tags=["check-cpu"]')
    (root / "src" / "01_three.py").write_text(source, encoding="utf-8")
    notebooks.build(["01_three"], root=root)
    assert read(root).metadata["built_on"] == notebooks.kind_of_cpu()
    change(root, '"12"', '"13"')
    assert len(notebooks.check(root=root)) == 1
    change(root, notebooks.kind_of_cpu(), "another kind")
    assert notebooks.check(root=root) == []


def test_a_changed_source_is_found(root: Path) -> None:
    (root / "src" / "01_three.py").write_text(SOURCE.replace("factor = 4", "factor = 5"), encoding="utf-8")
    assert notebooks.check(root=root) == ["01_three: differs from src/01_three.py; run: kvlab notebooks build 01_three"]


def test_a_notebook_never_built_is_found(root: Path) -> None:
    (root / "01_three.ipynb").unlink()
    assert notebooks.check(root=root) == ["01_three: not built; run: kvlab notebooks build 01_three"]


def test_a_path_of_the_building_machine_is_found(root: Path) -> None:
    change(root, "static: 1", f"static: {root.resolve().as_posix()}")
    assert any("names " in problem or "absolute path" in problem for problem in notebooks.check(root=root))


def test_a_failing_cell_stops_the_build_and_keeps_the_old_notebook(root: Path) -> None:
    before = (root / "01_three.ipynb").read_bytes()
    (root / "src" / "01_three.py").write_text(SOURCE.replace("3 * factor", "3 / 0"), encoding="utf-8")
    with pytest.raises(KvlabError, match=r"notebook 01_three failed: [\s\S]*ZeroDivisionError"):
        notebooks.build(root=root)
    assert (root / "01_three.ipynb").read_bytes() == before


def test_an_unknown_notebook_is_refused_by_name(root: Path) -> None:
    with pytest.raises(InputError, match="no notebook source '02_four'; there are: 01_three"):
        notebooks.build(["02_four"], root=root)


def output(data: dict[str, str]) -> nbformat.NotebookNode:
    return nbformat.v4.new_output("display_data", data=data)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (nbformat.v4.new_output("stream", name="stderr", text="warning"), "writes to stderr"),
        (nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[]), "ends in ValueError"),
        (nbformat.v4.new_output("stream", name="stdout", text="saved in /home/ada/run"), "absolute path /home/ada"),
        (nbformat.v4.new_output("stream", name="stdout", text="saved in C:\\Users\\ada"), "absolute path C:"),
        (output({"application/vnd.jupyter.widget-view+json": "{}"}), "shows a widget"),
        (output({"application/vnd.plotly.v1+json": "{}", "text/plain": "Figure"}), "without an SVG or PNG part"),
    ],
)
def test_hygiene_finds(bad: nbformat.NotebookNode, problem: str) -> None:
    cell = nbformat.v4.new_code_cell("1", id="cell-1", outputs=[bad])
    (found,) = notebooks.hygiene(nbformat.v4.new_notebook(cells=[cell]), num_bytes=1)
    assert found.startswith("cell-1: ")
    assert problem in found


@pytest.mark.parametrize("text", ["2/3 of https://example.org/home/x", "a/opt/b", "ratio: 1/2", "<svg></svg>"])
def test_hygiene_lets_ordinary_text_pass(text: str) -> None:
    figure = output({"application/vnd.plotly.v1+json": "{}", "image/svg+xml": "<svg/>", "text/plain": text})
    cell = nbformat.v4.new_code_cell("1", id="cell-1", outputs=[figure])
    assert list(notebooks.hygiene(nbformat.v4.new_notebook(cells=[cell]), num_bytes=1)) == []


def test_hygiene_finds_size_and_widget_state() -> None:
    notebook = nbformat.v4.new_notebook(metadata={"widgets": {}})
    assert list(notebooks.hygiene(notebook, num_bytes=256_001)) == ["has 250 KiB, more than 250", "carries widget state"]


def test_copies_are_the_shipped_notebooks(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlab.shipped.notebooks_dir", lambda: built)
    (copied,) = notebooks.copy(tmp_path / "new" / "folder")
    assert copied.read_bytes() == (built / "01_three.ipynb").read_bytes()
    assert notebooks.copy(tmp_path / "new" / "folder") == [copied], "an untouched copy may be made again"


def test_a_changed_copy_is_not_overwritten(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlab.shipped.notebooks_dir", lambda: built)
    (tmp_path / "01_three.ipynb").write_text("my notes", encoding="utf-8")
    with pytest.raises(InputError, match="exists and was changed"):
        notebooks.copy(tmp_path)
    assert (tmp_path / "01_three.ipynb").read_text(encoding="utf-8") == "my notes"
