"""Streams that keep their beginning and their end, one property a test."""

from __future__ import annotations

import pytest
import torch
from kv_driver import TEXT, Driver, step_of

from kvlab.attention.store import KVStore
from kvlab.attention.torch_paged import TorchPagedAttention
from kvlab.cache.kv import KVResource
from kvlab.errors import InputError
from kvlab.recorder import Recorder
from kvlab.spec import KVLayout, RetentionPolicy, Segment, Step, StepContext


def make(page_size: int, num_pages: int = 32, **options) -> Driver:
    layout = KVLayout(1, 1, 8, page_size)
    kv = KVResource(layout, num_pages, check_invariants=True, **options)
    kv.enable_prefix_cache(b"root", TEXT)
    return Driver(kv, page_size)


def windowed(d: Driver, walk: str, rid, span: int, budget: int, protected: int = 0):
    """One step of a stream that declares a window."""
    policy = RetentionPolicy(budget, protected)
    step = Step(0, "LLM", walk, (Segment(rid, "main", span),), windows={(rid, "main"): policy})
    ctx = StepContext(frozenset({rid}))
    assert d.kv.admit(step, ctx) is None
    tables = d.kv.plan(step, ctx)
    d.kv.commit(step, ctx)
    return tables


def test_k9_1_only_the_protected_prefix_is_keyed():
    d = make(4)
    d.ingest("r", range(24))
    windowed(d, "prefill", "r", 24, budget=8, protected=4)
    stream = d.kv.stream("r")
    assert (stream.stored_len, stream.released, len(stream.page_indices)) == (12, 12, 3)
    assert list(d.kv.index.pages()) == [stream.page_indices[0]]
    d.sample("r", 50)
    windowed(d, "decode", "r", 1, budget=8, protected=4)
    assert d.kv.stream("r").chain is None
    assert len(d.kv.index) == 1
    assert d.serve("same prefix", range(24)) == 4


def test_k9_3_visible_sets_exactly_at_the_window():
    layout = KVLayout(1, 1, 8, page_size=1)
    store = KVStore(layout, 16)
    attention = TorchPagedAttention(store, num_heads=1)
    d = make(1, num_pages=16, store=store)
    d.ingest("r", range(7))
    seen = []
    for position in range(7):
        step = Step(0, "LLM", "prefill", (Segment("r", "main", 1),), windows={("r", "main"): RetentionPolicy(3)})
        ctx = StepContext(frozenset({"r"}))
        assert d.kv.admit(step, ctx) is None
        attention.begin(d.kv.plan(step, ctx))
        value = torch.eye(8)[position][None, None]  # [1, 1, 8]: a mean of these names who was seen
        attention.write(0, torch.zeros(1, 1, 8), value)
        seen.append(set(attention.attend(0, torch.zeros(1, 1, 8)).flatten().nonzero().flatten().tolist()))
        d.kv.commit(step, ctx)
    assert seen == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {1, 2, 3, 4}, {2, 3, 4, 5}, {3, 4, 5, 6}]


def test_b15_a_windowed_stream_files_its_protected_pages_only():
    d = make(16)
    d.ingest("r", range(36))
    windowed(d, "prefill", "r", 36, budget=100, protected=16)
    assert len(d.kv.index) == 1
    assert d.kv.stream("r").chain is not None


def test_b15_a_release_ends_the_chain_at_the_next_commit_and_leaves_the_index():
    d = make(4)
    d.ingest("r", range(20))
    d.prefill("r")
    assert len(d.kv.index) == 5
    assert d.kv.release_oldest("r", 8) == 8
    named = sorted(d.kv.index.pages())
    d.sample("r", 50)
    d.generate("r", [50, 51])
    assert d.kv.stream("r").chain is None
    assert sorted(d.kv.index.pages()) == named
    d.kv.remove_request("r")
    assert d.serve("again", range(20)) == 16


def test_a_shared_page_is_released_by_count():
    d = make(4)
    d.serve("first", range(16))
    for rid in ("a", "b"):
        d.ingest(rid, range(16))
        d.prefill(rid)
    page = d.kv.stream("a").page_indices[0]
    assert d.kv.arena.owners(page) == 3
    assert d.kv.release_oldest("a", 4) == 4
    assert d.kv.arena.owners(page) == 2
    assert (d.kv.stream("a").hits, d.kv.pages_taken("a")) == (2, (1, 2))
    assert d.kv.stored_tokens("b") == 16


@pytest.mark.parametrize(
    ("stored", "protected", "asked", "released", "kept"),
    [
        (24, 4, 100, 20, [0]),  # all but the protected page
        (24, 5, 100, 16, [0, 1]),  # the page that straddles the protected end stays
        (23, 4, 100, 16, [0, 5]),  # so does a partial tail
        (24, 4, 7, 4, [0, 2, 3, 4, 5]),  # whole pages only
        (24, 4, 3, 0, [0, 1, 2, 3, 4, 5]),
        (24, 24, 9, 0, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_oldest_whole_pages_go(stored, protected, asked, released, kept):
    d = make(4)
    d.ingest("r", range(stored))
    d.prefill("r")
    pages = list(d.kv.stream("r").page_indices)
    d.kv.protect_prefix("r", protected)
    assert d.kv.release_oldest("r", asked) == released
    assert d.kv.stream("r").page_indices == [pages[i] for i in kept]
    assert d.kv.stored_tokens("r") == stored - released


def test_protecting_is_done_once_before_any_release_and_only_what_is_stored():
    d = make(4)
    d.ingest("r", range(20))
    d.prefill("r")
    with pytest.raises(InputError, match="stores 20 tokens; 21"):
        d.kv.protect_prefix("r", 21)
    with pytest.raises(InputError, match="stores 20 tokens; -1"):
        d.kv.protect_prefix("r", -1)
    d.kv.protect_prefix("r", 8)
    d.kv.protect_prefix("r", 8)
    with pytest.raises(InputError, match="protects 8 tokens"):
        d.kv.protect_prefix("r", 4)
    with pytest.raises(InputError, match="it cannot protect 4 now"):
        windowed(d, "decode", "r", 1, budget=4, protected=4)
    d.kv.remove_request("r")
    d.ingest("s", range(20))
    d.prefill("s")
    d.kv.release_oldest("s", 4)
    with pytest.raises(InputError, match="released 4"):
        d.kv.protect_prefix("s", 8)


def test_a_stream_in_a_step_or_on_the_host_is_left_alone():
    layout = KVLayout(1, 1, 8, 4)
    d = make(4, store=KVStore(layout, 32, host_pages=8), cpu_offload_pages=8)
    d.ingest("r", range(20))
    d.prefill("r")
    step, ctx = step_of("decode", {"r": 1})
    d.kv.admit(step, ctx)
    with pytest.raises(InputError, match="in a step"):
        d.kv.release_oldest("r", 4)
    d.kv.abort(step, ctx)
    d.kv.offload("r")
    with pytest.raises(InputError, match="on the host"):
        d.kv.release_oldest("r", 4)
    with pytest.raises(InputError, match="on the host"):
        d.kv.protect_prefix("r", 4)
    d.kv.reload("r")
    with pytest.raises(InputError, match="cannot release 0"):
        d.kv.release_oldest("r", 0)
    assert d.kv.release_oldest("r", 4) == 4


def test_a_prefix_that_is_not_there_yet_cannot_be_protected_by_a_step():
    d = make(4)
    d.ingest("r", range(20))
    with pytest.raises(InputError, match="will store only 6"):
        windowed(d, "prefill", "r", 6, budget=4, protected=8)
    assert d.kv.stored_tokens("r") == 0


def test_the_budget_may_change():
    d = make(4)
    d.ingest("r", range(24))
    windowed(d, "prefill", "r", 24, budget=16, protected=4)
    assert d.kv.stored_tokens("r") == 20
    windowed(d, "decode", "r", 1, budget=4, protected=0)  # 0 keeps the prefix
    assert (d.kv.stored_tokens("r"), d.kv.stream("r").protected_prefix) == (9, 4)


def test_a_rewind_forgets_the_window():
    d = make(4)
    d.ingest("r", range(24))
    windowed(d, "prefill", "r", 24, budget=8, protected=4)
    d.kv.reset_request("r")
    stream = d.kv.stream("r")
    assert (stream.window, stream.protected_prefix, stream.released) == (None, 0, 0)
    d.prefill("r")
    assert len(d.kv.index) == 6


def test_a_windowed_stream_comes_back_from_the_host_as_it_was():
    layout = KVLayout(1, 1, 8, 4)
    store = KVStore(layout, 32, host_pages=8)
    d = make(4, store=store, cpu_offload_pages=8)
    d.ingest("r", range(24))
    windowed(d, "prefill", "r", 24, budget=8, protected=4)
    store.pages[:, :, d.kv.stream("r").page_indices] = torch.arange(3.0)[:, None, None, None]
    d.kv.offload("r")
    store.pages.fill_(-1.0)
    d.kv.reload("r")
    assert store.pages[0, 0, d.kv.stream("r").page_indices, 0, 0, 0].tolist() == [0, 1, 2]
    assert d.kv.stored_tokens("r") == 12


def test_the_log_of_a_windowed_stream_replays():
    recorder = Recorder(clock=lambda: 0.0)
    d = make(4, record=recorder)
    d.ingest("r", range(24))
    windowed(d, "prefill", "r", 24, budget=8, protected=4)
    for token in range(9):
        d.sample("r", token)
        windowed(d, "decode", "r", 1, budget=8, protected=4)
    state, stream = recorder.replay(), d.kv.stream("r")
    assert state.streams["r", "main"] == stream.page_indices
    assert state.stored_tokens["r", "main"] == stream.stored_len


@pytest.mark.parametrize(("budget", "protected"), [(0, 0), (-1, 0), (4, -1), (2.5, 0), (True, 0), (4, "8")])
def test_windows_that_cannot_be_are_refused(budget, protected):
    with pytest.raises(InputError, match="of a window is"):
        RetentionPolicy(budget, protected)
