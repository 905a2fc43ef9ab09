"""Evicted cached pages on the host: found by look-up, brought back, counted apart."""

from __future__ import annotations

import pytest
import torch
from kv_driver import TEXT, Driver

from kvlab.attention.store import KVStore
from kvlab.cache.kv import KVResource
from kvlab.errors import InputError
from kvlab.recorder import Recorder
from kvlab.spec import KVLayout

PAGE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, page_size=PAGE)


class Bench(Driver):
    def __init__(self, num_pages: int = 12, tier_pages: int = 8, **options) -> None:
        self.recorder = Recorder(clock=lambda: 0.0)
        self.kv_store = KVStore(LAYOUT, num_pages, host_pages=tier_pages + options.get("cpu_offload_pages", 0))
        kv = KVResource(
            LAYOUT,
            num_pages,
            store=self.kv_store,
            host_tier_pages=tier_pages,
            record=self.recorder,
            check_invariants=True,
            **options,
        )
        kv.enable_prefix_cache(b"root", TEXT)
        super().__init__(kv, PAGE)

    def stamp(self, rid) -> torch.Tensor:
        """Write a number of its own into each page of a stream, and return all it holds."""
        pages = self.kv.stream(rid).page_indices
        for number, page in enumerate(pages, 1):
            self.kv_store.pages[:, :, page] = float(number)
        return self.held(rid)

    def held(self, rid) -> torch.Tensor:
        return self.kv_store.pages[:, :, self.kv.stream(rid).page_indices].clone()

    def start(self, rid, ids) -> int:
        self.ingest(rid, ids)
        return self.prefill(rid)[rid]

    @property
    def tier(self):
        return self.kv._pool.tier

    def replays(self) -> bool:
        state = self.recorder.replay()
        kept = {page: key.hex()[:16] for (_, key), page in self.tier._pages.items()}
        return state.host_cached == kept and set(state.indexed()) == set(self.kv.index.pages())


def cached_on_host(**options) -> Bench:
    """A prompt of 3 whole pages was served and then evicted."""
    bench = Bench(**options)
    bench.start("first", range(14))
    bench.stamp("first")
    bench.kv.remove_request("first")
    assert bench.kv.evict(3) == 3
    bench.kv_store.pages[:, :, bench.kv.arena.free_pages()] = -1.0
    return bench


@pytest.mark.parametrize("is_full", [False, True])
def test_k10_4_the_host_is_looked_at_however_full_the_pool_is(is_full):
    bench = cached_on_host()
    if is_full:
        bench.serve("filler", [50] * 44)
        assert bench.kv.arena.num_free == 0
    assert bench.start("again", range(14)) == 12
    counters = bench.kv.counters
    assert (counters.hits, counters.host_hits, counters.matched_pages, counters.host_matched_pages) == (1, 1, 3, 3)
    assert bench.held("again")[0, 0, :3, 0, 0, 0].tolist() == [1, 2, 3]
    assert bench.replays()


def test_a_device_hit_is_not_counted_as_a_host_hit():
    bench = Bench()
    bench.serve("first", range(14))
    assert bench.start("again", range(14)) == 12
    assert (bench.kv.counters.hits, bench.kv.counters.host_hits) == (1, 0)


def test_what_follows_a_device_match_is_brought_back_behind_it():
    bench = Bench()
    bench.start("first", range(18))
    bench.stamp("first")
    bench.kv.remove_request("first")
    bench.kv.evict(2)
    assert bench.start("again", range(18)) == 16
    assert bench.kv.counters.host_matched_pages == 2
    assert bench.held("again")[0, 0, :4, 0, 0, 0].tolist() == [1, 2, 3, 4]
    assert [bench.kv.index.position_of(p) for p in bench.kv.stream("again").page_indices[:4]] == [0, 1, 2, 3]


def test_a_page_is_on_the_host_or_on_the_device():
    bench = cached_on_host()
    assert len(bench.tier) == 3
    bench.start("again", range(14))
    assert len(bench.tier) == 0
    bench.kv.remove_request("again")
    bench.kv.evict(9)
    assert len(bench.tier) == 3
    assert bench.replays()


def test_the_budget_is_kept_and_the_least_recently_used_goes():
    bench = Bench(tier_pages=4)
    for number in range(3):
        bench.serve(number, [number] * 9)
        bench.kv.evict(9)
    assert len(bench.tier) == 4
    assert bench.kv.counters.host_dropped_pages == 2
    assert bench.start("newest", [2] * 9) == 8
    assert bench.start("oldest", [0] * 9) == 0
    assert bench.replays()


def test_more_victims_than_budget_keep_those_nearest_the_trunk():
    bench = Bench(tier_pages=2)
    bench.serve("long", range(21))
    bench.kv.evict(5)
    assert bench.start("again", range(21)) == 8


def test_a_full_host_makes_room_for_what_its_own_pages_push_out():
    bench = Bench(num_pages=6, tier_pages=2)  # 5 usable pages
    bench.serve("a", [1] * 9)
    bench.kv.evict(2)
    bench.serve("b", [2] * 17)
    assert len(bench.kv.index) == 4
    assert bench.start("a again", [1] * 9) == 8
    assert bench.replays()


def test_only_as_much_comes_back_as_fits():
    bench = cached_on_host(num_pages=8)  # 7 usable pages
    bench.start("taker", [60] * 17)
    bench.ingest("again", range(14))
    assert bench.probe("again") == 4  # of 2 free pages one is left to write on
    assert len(bench.tier) == 2
    bench.kv.remove_request("taker")
    assert bench.prefill("again") == {"again": 4}
    assert bench.start("later", range(14)) == 12


def test_a_reset_forgets_what_is_on_the_host():
    bench = cached_on_host()
    bench.kv.reset_prefix_cache("weights", b"another root")
    assert (len(bench.tier), bench.tier.host.num_free) == (0, 8)
    assert bench.start("again", range(14)) == 0
    assert bench.replays()


def test_another_salt_does_not_find_it():
    bench = cached_on_host()
    bench.ingest("salted", range(14), salt="s")
    assert bench.prefill("salted") == {"salted": 0}


def test_a_gate_leases_what_is_on_the_host_as_pages_to_be_taken():
    bench = Bench()
    bench.serve("first", range(18))
    bench.kv.evict(2)
    bench.ingest("again", range(18))
    assert len(bench.kv.peek_prefix("again")) == 2
    assert bench.kv.lease_prefix("again") == 2
    assert bench.kv.pages_taken("again") == (0, 4)
    assert bench.prefill("again") == {"again": 16}


@pytest.mark.parametrize("verb", ["to_host", "from_host"])
def test_a_copy_that_fails_loses_no_page(verb):
    bench = Bench()
    bench.serve("first", range(14))

    def broken(*_):
        raise OSError("the bus is gone")

    if verb == "from_host":
        bench.kv.evict(3)
    working = getattr(bench.kv_store, verb)
    setattr(bench.kv_store, verb, broken)
    bench.ingest("again", range(14))
    with pytest.raises(OSError, match="bus"):
        bench.kv.evict(3) if verb == "to_host" else bench.probe("again")
    setattr(bench.kv_store, verb, working)
    bench.kv.check()
    assert bench.kv.arena.num_free == bench.kv.usable_pages
    assert bench.prefill("again") == {"again": 12 if verb == "from_host" else 0}


def test_offloaded_requests_and_cached_pages_have_budgets_of_their_own():
    bench = cached_on_host(cpu_offload_pages=4)
    bench.start("r", [9] * 14)
    before = bench.stamp("r")
    bench.kv.offload("r")
    bench.serve("again", range(14))
    bench.kv.evict(20)
    bench.kv.reload("r")
    assert torch.equal(bench.held("r"), before)
    assert bench.start("once more", range(14)) == 12


def test_a_tier_needs_a_store_and_a_whole_number():
    with pytest.raises(InputError, match="PageStore"):
        KVResource(LAYOUT, 8, host_tier_pages=4)
    for wrong in (-1, 2.5, "8", True):
        with pytest.raises(InputError, match="host_tier_pages"):
            KVResource(LAYOUT, 8, host_tier_pages=wrong)
