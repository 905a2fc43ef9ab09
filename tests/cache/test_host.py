"""Whole requests on host pages and back, one property a test."""

from __future__ import annotations

import logging

import pytest
import torch
from kv_driver import NODE, TEXT, Driver, step_of

from kvlab.attention.store import KVStore
from kvlab.cache.kv import KVResource
from kvlab.errors import InputError
from kvlab.recorder import Recorder
from kvlab.spec import AllocationFailed, Fork, KVLayout, RequestOffloading, WalkInputs

PAGE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, page_size=PAGE)


class Bench:
    """A KV resource over a real store, whose every written slot holds a number of its own."""

    def __init__(self, num_pages: int = 16, host_pages: int = 16, **options) -> None:
        self.recorder = Recorder(clock=lambda: 0.0)
        self.store = options.pop("store", None) or KVStore(LAYOUT, num_pages, host_pages=host_pages)
        self.kv = KVResource(
            LAYOUT,
            num_pages,
            store=self.store,
            cpu_offload_pages=host_pages,
            record=self.recorder,
            check_invariants=True,
            **options,
        )
        self.kv.enable_prefix_cache(b"root", TEXT)
        self.driver = Driver(self.kv, PAGE)
        self.serve, self.ingest = self.driver.serve, self.driver.ingest
        self.run, self.generate = self.driver.run, self.driver.generate
        self._written = 0

    def prefill(self, rid, ids) -> int:
        self.ingest(rid, ids)
        return self.driver.prefill(rid)[rid]

    def write(self, pages) -> None:
        for page in pages:
            for slot in range(PAGE):
                self._written += 1
                self.store.pages[:, :, page, slot] = float(self._written)

    def read(self, rid, label: str = "main") -> torch.Tensor:
        """What the stream's stored slots hold, in row order."""
        stream = self.kv.stream(rid, label)
        return self.store.pages[:, :, stream.page_indices].flatten(2, 3)[:, :, : stream.stored_len].clone()

    def fill_free_pages(self) -> None:
        self.store.pages[:, :, self.kv.arena.free_pages()] = -1.0

    def replays(self) -> bool:
        """The log replays to the pool as it is."""
        state = self.recorder.replay()
        streams = self.kv._table.all_streams()
        return (
            state.streams == {s.key: s.page_indices for s in streams if s.page_indices}
            and state.host == {page: s.key for s in streams for page in s.host_pages}
            and all(state.stored_tokens.get(s.key, 0) == s.stored_len for s in streams)
        )


def shared_request(bench: Bench) -> None:
    """Request "r" of 3 shared and 2 private pages, the last one half full."""
    bench.serve("first", range(13))
    bench.prefill("r", range(18))
    assert bench.kv.stream("r").hits == 3
    bench.write(bench.kv.stream("r").page_indices)


def test_k10_1_bytes_come_back_equal_on_other_pages():
    bench = Bench()
    shared_request(bench)
    before, pages = bench.read("r"), list(bench.kv.stream("r").page_indices)
    assert bench.kv.offload("r") == 1  # the whole ones stay for the index
    assert bench.kv.is_offloaded("r")
    bench.kv.reset_prefix_cache()
    bench.prefill("taker", [9] * 5)  # so that other pages are next
    bench.fill_free_pages()
    assert bench.kv.reload("r")
    assert not bench.kv.is_offloaded("r")
    assert set(bench.kv.stream("r").page_indices) != set(pages)
    assert torch.equal(bench.read("r"), before)
    assert bench.replays()


def test_shared_pages_lose_one_owner_and_stay_with_the_others():
    bench = Bench()
    shared_request(bench)
    bench.prefill("other", range(18))
    pages = bench.kv.stream("other").page_indices
    held = bench.read("other")
    owners = [bench.kv.arena.owners(page) for page in pages]
    bench.kv.offload("r")
    assert [bench.kv.arena.owners(page) for page in pages] == [n - 1 if n > 1 else n for n in owners]
    assert torch.equal(bench.read("other"), held)


def test_reloaded_pages_are_the_streams_own_and_it_goes_on_being_filed():
    bench = Bench()
    shared_request(bench)
    bench.driver.sample("r", 50)
    bench.kv.offload("r")
    assert bench.kv.reload("r")
    stream = bench.kv.stream("r")
    assert [bench.kv.arena.owners(page) for page in stream.page_indices] == [1] * 5
    assert (stream.hits, bench.kv.pages_taken("r")) == (0, (5, 0))
    bench.generate("r", [50, 51, 52])  # one was read back above
    assert len(bench.kv.index) == 5  # parents were found by key
    assert bench.kv.index.position_of(bench.kv.stream("r").page_indices[4]) == 4


def test_pages_filed_before_are_offered_again_once_the_index_lost_them():
    bench = Bench()
    bench.prefill("r", range(9))
    bench.kv.offload("r")
    assert bench.kv.evict(10) == 2
    bench.kv.reload("r")
    bench.generate("r", range(5))
    assert len(bench.kv.index) == 3
    assert bench.serve("next", range(9)) == 8


def test_a_step_in_flight_refuses_the_claim():
    """B25."""
    bench = Bench()
    bench.ingest("r", range(9))
    step, ctx = step_of("prefill", {"r": 9})
    assert bench.kv.admit(step, ctx) is None
    assert (bench.kv.offload("r"), bench.kv.is_offloaded("r"), bench.kv.get_offload_priority("r")) == (0, False, 0)
    bench.kv.commit(step, ctx)
    assert bench.kv.get_offload_priority("r") == 3
    assert bench.kv.offload("r") == 1


def test_b25_tokens_of_a_stream_offloaded_under_its_step_are_dropped_with_a_warning(caplog):
    bench = Bench()
    bench.prefill("r", range(9))
    bench.kv.offload("r")
    bench.kv.stream("r").step_in_flight = True  # what a claim that did not look at the mark would have left
    step, ctx = step_of("decode", {"r": 1})
    with caplog.at_level(logging.WARNING, logger="kvlab.cache"):
        bench.kv.commit(step, ctx)
    assert "1 tokens are dropped" in caplog.text
    assert bench.kv.counters.dropped_commits == 1
    assert bench.kv.reload("r")
    assert bench.kv.stored_tokens("r") == 9


@pytest.mark.parametrize("verb", ["remove_request", "reset_request"])
def test_a_request_that_changed_while_it_was_copied_frees_nothing(verb):
    bench = Bench()
    bench.prefill("r", range(9))
    copy = bench.store.to_host

    def interrupted(pages, host_pages):
        copy(pages, host_pages)
        getattr(bench.kv, verb)("r")

    bench.store.to_host = interrupted
    assert bench.kv.offload("r") == 0
    assert bench.kv._pool.host.num_free == 16
    assert not bench.kv.is_offloaded("r")
    bench.kv.check()
    assert bench.replays()


def test_a_copy_that_fails_leaves_everything_where_it_was():
    bench = Bench()
    bench.prefill("r", range(9))
    pages = list(bench.kv.stream("r").page_indices)

    def broken(*_):
        raise OSError("the bus is gone")

    working, bench.store.to_host = bench.store.to_host, broken
    with pytest.raises(OSError, match="bus"):
        bench.kv.offload("r")
    assert (bench.kv.stream("r").page_indices, bench.kv.is_offloaded("r")) == (pages, False)
    assert bench.kv._pool.host.num_free == 16
    bench.store.to_host, bench.store.from_host = working, broken
    bench.kv.offload("r")
    free = bench.kv.arena.num_free
    with pytest.raises(OSError, match="bus"):
        bench.kv.reload("r")
    assert (bench.kv.arena.num_free, bench.kv.is_offloaded("r")) == (free, True)
    bench.kv.check()


def test_a_host_pool_smaller_than_the_victim_moves_nothing_and_says_so_once(caplog):
    bench = Bench(host_pages=2)
    bench.prefill("r", range(9))
    before = bench.read("r")
    with caplog.at_level(logging.WARNING, logger="kvlab.cache"):
        assert [bench.kv.offload("r") for _ in range(3)] == [0, 0, 0]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "needs 3 host pages, and 2 of 2 are free (cpu_offload_pages)" in line
    assert torch.equal(bench.read("r"), before)
    assert not bench.kv.is_offloaded("r")


def test_without_host_pages_nothing_is_offloaded():
    bench = Bench(host_pages=0)
    bench.prefill("r", range(9))
    assert (bench.kv.supports_eviction(), bench.kv.offload("r"), bench.kv.get_offload_priority("r")) == (False, 0, 0)


def test_a_reload_that_does_not_fit_moves_nothing():
    bench = Bench(num_pages=8)
    bench.prefill("r", range(17))
    bench.kv.offload("r")
    bench.prefill("other", [7] * 17)
    cached = len(bench.kv.index)
    assert not bench.kv.reload("r")
    assert bench.kv.is_offloaded("r")
    assert len(bench.kv.index) == cached
    bench.kv.remove_request("other")
    assert bench.kv.reload("r")  # the index gives up what is short


def test_an_offloaded_stream_is_not_probed_leased_or_admitted():
    bench = Bench()
    bench.serve("first", range(13))
    bench.prefill("r", range(13))
    bench.kv.offload("r")
    assert bench.kv.resolve_cached_prefix("r", NODE, "prefill", WalkInputs({"main": range(13)})) is None
    assert (bench.kv.peek_prefix("r"), bench.kv.lease_prefix("r")) == ([], 0)
    assert bench.run("decode", {"r": 1}) == RequestOffloading("r")
    assert bench.kv.stream("r").lease is None
    assert bench.kv.reload("r")
    assert bench.kv.stored_tokens("r") == 13


def test_a_lease_taken_before_is_converted_only_after_the_reload():
    bench = Bench()
    bench.serve("first", range(13))
    bench.ingest("r", range(13))
    assert bench.driver.probe("r") == 12
    assert bench.kv._pool.grow(bench.kv.stream("r"), 1, 0) is None  # an empty page, as a refused admit leaves it
    assert bench.kv.offload("r") == 1
    assert bench.run("prefill", {"r": 1}) == RequestOffloading("r")
    assert len(bench.kv.stream("r").lease) == 3
    assert bench.kv.reload("r")
    assert bench.driver.prefill("r") == {"r": 12}


def test_a_fork_from_or_onto_an_offloaded_stream_is_refused():
    bench = Bench()
    bench.prefill("r", range(9))
    bench.kv.offload("r")
    step, ctx = step_of("decode", {"r": 1}, forks=[Fork("r", "main", "copy")])
    assert bench.kv.admit(step, ctx) == RequestOffloading("r")


def test_a_reset_of_the_cache_ends_what_is_on_the_host():
    bench = Bench()
    bench.prefill("r", range(9))
    bench.kv.offload("r")
    bench.kv.reset_prefix_cache("weights", b"another root")
    bench.kv.reload("r")
    bench.generate("r", range(6))
    assert len(bench.kv.index) == 0  # computed with the weights of before


@pytest.mark.parametrize(("verb", "tokens"), [("remove_request", None), ("reset_request", 0)])
def test_host_copies_go_with_the_request(verb, tokens):
    bench = Bench()
    bench.prefill("r", range(9))
    bench.kv.offload("r")
    getattr(bench.kv, verb)("r")
    assert bench.kv._pool.host.num_free == 16
    assert not bench.kv.is_offloaded("r")
    assert bench.replays()
    if tokens is not None:
        assert bench.driver.prefill("r") == {"r": 8}


def test_every_label_of_a_request_goes_and_comes_back():
    bench = Bench()
    bench.prefill("r", range(6))
    bench.run("prefill", {"r": 5}, label="cfg")
    for label in ("main", "cfg"):
        bench.write(bench.kv.stream("r", label).page_indices)
    before = [bench.read("r", label) for label in ("main", "cfg")]
    assert bench.kv.offload("r") == 3  # one of the four is cached
    bench.fill_free_pages()
    assert bench.kv.reload("r")
    assert all(torch.equal(bench.read("r", label), old) for label, old in zip(("main", "cfg"), before, strict=True))
    assert bench.replays()


def test_offload_makes_room_for_another():
    bench = Bench(num_pages=8)
    bench.prefill("r", range(17))
    bench.ingest("s", [7] * 17)
    assert bench.run("prefill", {"s": 17}) == AllocationFailed(3, "s", "main")
    bench.kv.offload("r")
    assert bench.run("prefill", {"s": 17}).rows[0].length == 17


def test_host_pages_need_a_store_and_a_whole_number():
    with pytest.raises(InputError, match="PageStore"):
        KVResource(LAYOUT, 8, cpu_offload_pages=4)
    for wrong in (-1, 2.5, "8", True):
        with pytest.raises(InputError, match="cpu_offload_pages"):
            KVResource(LAYOUT, 8, cpu_offload_pages=wrong)
