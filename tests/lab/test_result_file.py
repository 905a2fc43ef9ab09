"""Result files: who may go on with one, and what becomes of lines that were cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlab.errors import InputError, KvlabError
from kvlab.lab.result_file import ResultFile

RUN: dict[str, Any] = {"workload": "churn", "shape": {"seed": 0, "tail": 8}, "engine": {"policy": "lru"}}
ROWS = [{"id": f"r{n}", "reason": "length", "prompt_ids": [1, 2], "ids": [3]} for n in range(3)]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with ResultFile(tmp_path / "results.jsonl", RUN) as results:
        for row in ROWS:
            results.append(row)
    return tmp_path / "results.jsonl"


def test_a_second_run_finds_the_rows_and_appends(written: Path) -> None:
    with ResultFile(written, RUN) as results:
        assert results.rows == ROWS
        results.append(ROWS[0] | {"id": "r3"})
    with ResultFile(written, RUN) as results:
        assert [row["id"] for row in results.rows] == ["r0", "r1", "r2", "r3"]


def test_a_row_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "results.jsonl", RUN) as results:
        results.append(ROWS[0])
        assert json.loads(results.path.read_text(encoding="utf-8").splitlines()[-1]) == ROWS[0]


@pytest.mark.parametrize("cut", [1, 20])
def test_a_line_that_was_cut_off_is_taken_away(written: Path, cut: int) -> None:
    content = written.read_bytes()
    written.write_bytes(content[:-cut])
    with ResultFile(written, RUN) as results:
        assert results.rows == ROWS[:2]
        results.append(ROWS[2])
    assert written.read_bytes() == content


@pytest.mark.parametrize("length", [0, 9])
def test_a_file_whose_head_was_cut_off_begins_anew(written: Path, length: int) -> None:
    content = written.read_bytes()
    written.write_bytes(content[:length])
    with ResultFile(written, RUN) as results:
        assert results.rows == []
    assert written.read_bytes() == content[: content.index(b"\n") + 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": {"seed": 1, "tail": 8}}, "there shape.seed is 0, here 1;"),
        ({"engine": {"policy": "arc"}}, "there engine.policy is 'lru', here 'arc';"),
        ({"workload": "chats", "engine": {}}, "there workload is 'churn', here 'chats', and 1 more differ;"),
        ({"faults": 0.5}, "there faults is None, here 0.5;"),
    ],
)
def test_the_file_of_another_run_is_refused_by_the_field_that_differs(written: Path, change: Any, message: str) -> None:
    content = written.read_bytes()
    with pytest.raises(InputError, match=message):
        ResultFile(written, RUN | change)
    assert written.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("dear diary", "line 1: .*does not end"),
        ("dear diary\n", "line 1: .*no JSON"),
        ("[1]\n", "line 1: .*no JSON object"),
        ('{"kvlab_events": 2}\n', "line 1: .*which run"),
        ("\0\0\n", "line 1: .*no JSON"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "diary.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        ResultFile(path, RUN)
    assert path.read_text(encoding="utf-8") == content


@pytest.mark.parametrize(
    ("line", "message"), [("{", "line 3: .*no JSON"), ('{"id": "r9"}', "line 3: .*lacks reason, prompt_ids, ids")]
)
def test_a_damaged_line_is_named(written: Path, line: str, message: str) -> None:
    lines = written.read_text(encoding="utf-8").splitlines()
    lines[2] = line
    written.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        ResultFile(written, RUN)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written to .*nowhere"):
        ResultFile(tmp_path / "nowhere" / "results.jsonl", RUN)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_told_with_what_to_do() -> None:
    with pytest.raises(KvlabError, match="cannot be written to /dev/full .*make room and run again"):
        ResultFile(Path("/dev/full"), RUN)
