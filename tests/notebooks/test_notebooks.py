"""The committed notebooks: pairs that agree, in the shape a reader expects, with outputs that show without a kernel.

Executing them afresh is `.ci/run`'s part (`pytest --nbmake notebooks/*.ipynb`, `kvlab notebooks check`).
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvlab import notebooks, shipped

nbformat = pytest.importorskip("nbformat", reason="needs the extra lab")
pytest.importorskip("jupytext", reason="needs the extra lab")

ROOT = shipped.notebooks_dir()
NAMES = sorted(path.stem for path in ROOT.glob("*.ipynb"))
MAX_LINES, MAX_COLUMNS, MAX_FUNCTION_LINES = 12, 104, 5
#: What a clock measured, as figures and tables write it.
CLOCK = re.compile(r"\d (?:ms|µs|tokens/s)\b|first token, ms|tokens/s")
#: Sounds and long series, written as letters that mean nothing.
PACKED = re.compile(r"base64,[^\"']+|'bdata': '[^']+'")
each = pytest.mark.parametrize("name", NAMES)


def path_of(name: str) -> Path:
    return ROOT / f"{name}.ipynb"


@cache
def read(name: str) -> Any:
    return nbformat.reads(path_of(name).read_text(encoding="utf-8"), as_version=4)


def code_cells(name: str) -> list[Any]:
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", ()))


def shown_text(cell: Any) -> str:
    """Everything a cell shows, as text."""
    data = [value for output in cell.outputs for value in output.get("data", {}).values()]
    return PACKED.sub("", "\n".join([*(output.get("text", "") for output in cell.outputs), *map(str, data)]))


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_every_notebook_has_its_source_and_every_source_its_notebook() -> None:
    assert [path.stem for path in sorted((ROOT / "src").glob("*.py"))] == NAMES
    assert {"01_page_sharing", "02_cache_hits"} <= set(NAMES)


@each
def test_a_notebook_has_the_inputs_of_its_source(name: str) -> None:
    both = [
        [(c.id, c.cell_type, c.source, tags(c)) for c in notebook.cells]
        for notebook in (read(name), notebooks.read_source(ROOT, name))
    ]
    assert both[0] == both[1]


@each
def test_a_notebook_is_clean(name: str) -> None:
    assert list(notebooks.hygiene(read(name), path_of(name).stat().st_size)) == []


@each
def test_a_notebook_was_executed_once_from_top_to_bottom(name: str) -> None:
    assert [cell.execution_count for cell in code_cells(name)] == list(range(1, len(code_cells(name)) + 1))


# -- shape -------------------------------------------------------------------------------------------------------------


@each
def test_the_title_asks_and_the_first_paragraph_answers(name: str) -> None:
    title, answer = read(name).cells[0].source.split("\n\n")[:2]
    assert title.startswith("# ")
    assert title.endswith("?")
    assert answer.startswith("**")


@each
def test_the_last_cell_asserts_the_answer(name: str) -> None:
    last = read(name).cells[-1]
    assert last.cell_type == "code"
    assert sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(last.source))) >= 5


@each
def test_cells_are_short(name: str) -> None:
    lines = [cell.source.splitlines() for cell in code_cells(name)]
    assert max(map(len, lines)) <= MAX_LINES
    assert max(len(line) for cell in lines for line in cell) <= MAX_COLUMNS


@each
def test_functions_are_short(name: str) -> None:
    trees = [ast.parse(cell.source) for cell in code_cells(name)]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert all(f.end_lineno - f.lineno < MAX_FUNCTION_LINES for f in functions if f.end_lineno)


@each
def test_there_is_more_prose_than_code(name: str) -> None:
    prose = sum(len(cell.source) for cell in read(name).cells if cell.cell_type == "markdown")
    assert prose > sum(len(cell.source) for cell in code_cells(name))
    assert 15 <= len(code_cells(name)) <= 25


@each
def test_one_cell_holds_the_parameters_and_nothing_else(name: str) -> None:
    (parameters,) = (cell for cell in code_cells(name) if "parameters" in tags(cell))
    assert parameters is code_cells(name)[0]
    body = ast.parse(parameters.source).body
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign)}
    assert len(values) == len(body)
    assert "MODEL" in values
    assert any("SEED" in name for name in values)


# -- outputs -----------------------------------------------------------------------------------------------------------


@each
def test_times_stand_in_timing_cells_only(name: str) -> None:
    for cell in code_cells(name):
        if "timing" not in tags(cell):
            assert CLOCK.search(shown_text(cell)) is None, cell.id


def test_the_pattern_of_times_finds_what_figures_and_tables_write() -> None:
    (figure, table, *_) = (cell for cell in code_cells("02_cache_hits") if "timing" in tags(cell))
    assert CLOCK.search(shown_text(figure))
    assert CLOCK.search(shown_text(table))


@each
def test_no_cell_is_both_compared_and_timed(name: str) -> None:
    assert not [cell.id for cell in code_cells(name) if {"check", "timing"} <= set(tags(cell))]


@each
def test_no_output_shows_an_address(name: str) -> None:
    assert not [cell.id for cell in code_cells(name) if re.search(r"\bat 0x[0-9a-f]+", shown_text(cell))]


@each
def test_k20_3_every_interactive_view_leaves_a_static_figure(name: str) -> None:
    views = [cell for cell in code_cells(name) if re.search(r"\b(explore|step_player)\(", cell.source)]
    assert views
    for cell in views:
        assert "image/svg+xml" in cell.outputs[-1].data, cell.id


@each
def test_k20_3_exported_to_html_every_figure_is_there(name: str) -> None:
    exporter = pytest.importorskip("nbconvert", reason="needs the extra lab").HTMLExporter()
    page, _ = exporter.from_notebook_node(read(name))
    figures = [o for cell in code_cells(name) for o in cell.outputs if "image/svg+xml" in o.get("data", {})]
    assert len(figures) >= 5
    assert page.count('<img alt="') == len(figures)


def test_k13_4_the_ladder_shows_tokens_matched_pages_and_the_recomputed_last_page() -> None:
    (cell,) = (cell for cell in code_cells("02_cache_hits") if "ladder_table(" in cell.source)
    rows = [
        [int(value) for value in re.findall(r"<td[^>]*>(\d+)</td>", row)]
        for row in cell.outputs[-1].data["text/html"].split("<tr>")
    ]
    found = [(row[0], row[3], row[4], row[6]) for row in rows if row and row[2] == 2]
    assert found == [(15, 0, 0, 15), (16, 0, 0, 16), (17, 16, 1, 1), (32, 16, 1, 16), (33, 32, 2, 1), (48, 32, 2, 16)]
