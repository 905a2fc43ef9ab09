"""The index benchmark: its rows, its form, and that it compares equals."""

from __future__ import annotations

import json

import pytest

from kvlab.bench import Row, interleave, machine_facts
from kvlab.bench import index as bench
from kvlab.errors import IntegrityError


def test_the_document_has_every_row_in_the_common_form() -> None:
    document = json.loads(json.dumps(bench.run(quick=True)))
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == [
        "replay_pool_2x",
        "replay_pool_0.5x",
        "replay_pool_0.25x",
        "lookup_us_per_page",
        "rss_bytes_per_page",
        "key_memo_bytes",
    ]
    assert all({"name", "ours", "reference", "ratio", "target", "ok"} <= row.keys() for row in rows.values())
    assert all(row["ratio"] > 0 for name, row in rows.items() if name.startswith("replay"))
    assert rows["lookup_us_per_page"]["ratio"] is None
    assert {"platform", "python", "cpu", "cpus", "hit_shares"} <= document["machine"].keys()


def test_both_sides_hit_the_same_pages_in_every_pool() -> None:
    prompts = bench.chats(num_requests=200, seed=3)
    _, distinct = bench.count_pages(prompts)
    hits = []
    for share in bench.POOL_SHARES:
        usable_pages = int(distinct * share)
        hits.append(bench.replay(prompts, usable_pages))
        assert hits[-1] == bench.replay_reference(prompts, usable_pages)
    assert hits[0] > hits[1] > hits[2] > 0


def test_a_side_that_hits_other_pages_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_hits(prompts: object, usable_pages: int) -> int:
        return 0

    monkeypatch.setattr(bench, "replay_reference", never_hits)
    with pytest.raises(IntegrityError, match="hit different pages"):
        bench.replay_row(bench.chats(num_requests=30, seed=3), 1000, 1000, "row", rounds=1)


def test_a_row_is_judged_by_its_ratio_or_by_itself() -> None:
    assert Row.of("r", [3.0], [2.0], target=1.5, unit="us").ok
    assert not Row.of("r", [3.1], [2.0], target=1.5, unit="us").ok
    assert not Row.of("r", [3.0], target=2.0, unit="us").ok
    assert Row.of("r", [3.0], [2.0], target=1.15, unit="tok/s", higher_is_better=True).ok
    assert Row.of("r", [3.0], target=None, unit="us").ok is None


def test_the_sides_take_turns_in_going_first() -> None:
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    ours, reference = interleave(lambda: side("a"), lambda: side("b"), rounds=2)
    assert (len(ours), len(reference), "".join(calls)) == (2, 2, "abbaab")


def test_machine_facts_are_plain_values() -> None:
    assert json.loads(json.dumps(machine_facts())) == machine_facts()
