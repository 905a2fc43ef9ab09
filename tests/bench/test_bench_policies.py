"""The bench of eviction policies: every policy has a row, over the same chats, and evicts."""

from __future__ import annotations

from kvlab.bench import policies
from kvlab.cache.policies import POLICIES, make_policy
from kvlab.cache.policies.belady import Belady


def test_every_policy_but_lru_has_a_row_against_lru(monkeypatch) -> None:
    monkeypatch.setattr(policies, "chats", lambda num_requests, seed: [[n % 7] * 40 + [n] * 60 for n in range(30)])
    rows = {row.name: row for row in policies.policy_rows(quick=True)}
    assert rows.keys() == {f"policy_{name}" for name in POLICIES.keys() - {"lru"}}
    assert len({row.reference for row in rows.values()}) == 1
    assert {name: row.target for name, row in rows.items() if row.target != 1.5} == {
        "policy_arc": 2.0,
        "policy_s3fifo": 2.0,
        "policy_belady": None,
    }


def test_the_replay_counts_what_was_matched_inserted_and_evicted() -> None:
    keys_of = [[b"a", b"b"], [b"c"], [b"d"], [b"a", b"b"]]
    # ab is inserted, and c; b goes for d, and c for b that comes back
    assert policies.replay(make_policy("lru"), keys_of, usable_pages=3) == 2 + 1 + (1 + 1) + (1 + 1 + 1)
    # c goes for d, and ab is matched
    assert policies.replay(Belady(keys_of), keys_of, usable_pages=3) == 2 + 1 + (1 + 1) + 2
