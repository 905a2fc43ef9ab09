"""Workloads: what the generators draw, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlab.errors import InputError
from kvlab.lab.workloads import WORKLOADS, WorkItem, WorkloadShape, make_workload, read_workload, write_workload

SHAPE = WorkloadShape(requests=24, prefix_pages=8, page_size=4, tail=5, max_tokens=6)


def drawn(name: str, **shape: Any) -> list[WorkItem]:
    return list(make_workload(name, WorkloadShape(**(vars(SHAPE) | shape))))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_a_function_of_its_shape(name: str) -> None:
    assert drawn(name) == drawn(name)
    assert drawn(name) != drawn(name, seed=1)
    assert len({item.id for item in drawn(name)}) == 24


@pytest.mark.parametrize("name", WORKLOADS)
def test_arrivals_are_in_order_and_nothing_follows_what_comes_later(name: str) -> None:
    items = drawn(name)
    assert [item.at_step for item in items] == sorted(item.at_step for item in items)
    places = {item.id: place for place, item in enumerate(items)}
    assert all(item.follows is None or places[item.follows] < places[item.id] for item in items)


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_special_token_is_drawn(name: str) -> None:
    assert all(64 <= token < 1024 for item in drawn(name, vocab_size=1024) for token in item.ids)


def test_an_edit_chain_takes_its_second_request_back() -> None:
    chain = drawn("edit-chains")[:8]
    assert [item.follows for item in chain] == [None, "r0", "r0", "r2", None, "r4", "r4", "r6"]
    assert chain[0].ids[:16] == chain[4].ids[:16]


def test_four_voices_have_long_prefixes_of_their_own_and_texts_that_differ() -> None:
    items = drawn("voices", requests=100, tail=40)
    assert len({item.ids[:8] for item in items}) == 4
    assert len({item.ids[8:] for item in items}) == 100


def test_faults_are_requests_to_cancel() -> None:
    assert sum(item.cancel_after is not None for item in drawn("churn", requests=1000, faults=0.5)) > 400
    assert not any(item.cancel_after is not None for item in drawn("churn", requests=1000))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"requests": 0}, "requests is 0"),
        ({"tail": True}, "tail is True"),
        ({"faults": 1}, "faults is 1"),
        ({"faults": -0.1}, "faults"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(shape: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        WorkloadShape(**shape)


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="no workload 'chat'; known are shared-prefix, chats, edit-chains, voices, churn"):
        make_workload("chat", SHAPE)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_written_workload_reads_back_equal(tmp_path: Path, name: str) -> None:
    write_workload(tmp_path / "work.jsonl", drawn(name))
    assert list(make_workload(str(tmp_path / "work.jsonl"), SHAPE)) == drawn(name)


LINE = json.dumps({"id": "a", "at_step": 0, "ids": [1], "max_tokens": 2})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no request"),
        (b"\n \n", "holds no request"),
        (LINE.encode() + b"\n\xff\xfe\n", "line 2: not UTF-8"),
        (LINE.encode() + b"\n{\n", "line 2: not a request"),
        (b"[1]\n", "line 1: not a request"),
        (b'{"id": "a"}\n', "line 1: not a request"),
        (LINE.replace("[1]", "[]").encode(), "line 1: .*0 ids"),
        (LINE.replace("at_step", "at_steps").encode(), "line 1: .*unknown fields at_steps"),
        ((LINE + "\n\n" + LINE).encode(), "line 3: there is a request a above already"),
        (LINE.replace('"a"', '"a", "follows": "b"').encode(), "line 1: a follows b"),
        (LINE.replace('"a"', "[1]").encode(), r"line 1: .*id of a request is \[1\]; give a str"),
        (LINE.replace('"a"', '"a", "follows": 3').encode(), "line 1: .*follows of request a is 3; give the id of another"),
        (LINE.replace('"a"', '"a", "cancel_after": "x"').encode(), "line 1: .*cancel_after of request a is 'x'; it must be a"),
        (LINE.replace('"a"', '"a", "seed": 1.5').encode(), "line 1: .*seed of request a is 1.5; give a whole number"),
        (LINE.replace('"a"', '"a", "temperature": "hot"').encode(), "line 1: .*temperature of request a is 'hot'; give a"),
        (LINE.replace('"a"', '"a", "temperature": -1').encode(), "line 1: .*temperature of request a is -1; give a"),
        (LINE.replace("0", '"0"').encode(), "line 1: .*at_step of request a is '0'; it must be a whole number"),
        (LINE.replace("2", "true").encode(), "line 1: .*max_tokens of request a is True; it must be a whole number"),
        (LINE.replace("2", "-1").encode(), "line 1: .*max_tokens of request a is -1; .* at least 0"),
        (LINE.replace("[1]", '"12"').encode(), "line 1: .*ids of request a are '12'; give a list of token ids"),
        (LINE.replace("[1]", "null").encode(), "line 1: .*ids of request a are None; give a list of token ids"),
        (LINE.replace("[1]", "[1, 2.5]").encode(), "line 1: .*id 1 of request a is 2.5; give a whole number"),
    ],
)
def test_a_file_that_is_no_workload_is_refused_and_the_line_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "work.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_workload(path)
