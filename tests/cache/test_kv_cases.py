"""Faults others met, at the level of pages: the right outcome of each, named after its case."""

from __future__ import annotations

import logging
import random

import pytest
from kv_driver import NODE, TEXT, Driver, keyed, laid_out, step_of

from kvlab.cache.chain import CACHE_RESET, FOREIGN_WALK
from kvlab.cache.kv import KVResource
from kvlab.errors import IntegrityError
from kvlab.spec import AllocationFailed, Fork, KVLayout, Match, PrefixStream, RequestConfig, Span, WalkInputs

ROOT = b"r" * 32
MEDIA = {"main": PrefixStream("tokens", walk="prefill_text", decode_walk="decode", layout_walks=("prefill_vit",))}


class Bytes:
    """A page store of one value a page, written by hand."""

    def __init__(self) -> None:
        self.pages: dict[int, object] = {}

    def copy_pages(self, src, dst) -> None:
        self.pages |= {d: self.pages[s] for s, d in zip(src, dst, strict=True)}

    def to_host(self, pages, host_pages) -> None: ...

    def from_host(self, host_pages, pages) -> None: ...


def make(page_size: int = 4, usable_pages: int = 23, walks=TEXT, **options) -> Driver:
    kv = KVResource(KVLayout(1, 1, 8, page_size), usable_pages + 1, **options)
    kv.enable_prefix_cache(ROOT, walks)
    return Driver(kv, page_size)


def assert_all_accounted(kv: KVResource) -> None:
    """Every usable page is free or cached, once nobody lives."""
    free = kv.arena.free_pages()
    assert len(set(free)) == len(free)
    assert len(free) + len(kv.index) == kv.usable_pages


# -- how long is the hit


@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)])
def test_k3_1_hit_ladder_by_prompt_length(length, hit):
    d = make(page_size=16)
    assert [d.serve(rid, range(length)) for rid in range(3)] == [0, hit, hit]


@pytest.mark.parametrize(("shared", "hit"), [(127, 0), (128, 128), (255, 128), (256, 256)])
def test_k3_5_a_shared_prefix_counts_in_whole_pages(shared, hit):
    d = make(page_size=128)
    system = list(range(shared))
    d.serve(1, [*system, *range(1000, 1010)])
    assert d.serve(2, [*system, *range(2000, 2010)]) == hit


def test_k15_6_a_turn_that_does_not_extend_still_hits_what_it_shares():
    d = make()
    cached = list(range(22))
    d.serve(1, cached)
    assert d.serve(2, [*cached[:19], 90, 91, 92]) == 16


# -- what is stored, and when


def test_k5_1_nothing_is_indexed_before_it_is_written():
    d = make(page_size=16)
    for rid in (1, 2):
        d.ingest(rid, range(32))
    step, ctx = step_of("prefill", {1: 32, 2: 32})
    assert [d.probe(1), d.probe(2)] == [0, 0]
    assert d.kv.admit(step, ctx) is None
    assert d.probe(2) == 0
    d.kv.plan(step, ctx)
    d.kv.abort(step, ctx)  # the forward raised
    assert len(d.kv.index) == 0
    for rid in (1, 2):
        d.kv.remove_request(rid)
    assert d.kv.arena.num_free == d.kv.usable_pages


@pytest.mark.parametrize(("prompt", "generated", "stored", "indexed"), [(5, 3, 7, 1), (5, 4, 8, 2), (8, 0, 8, 2), (5, 1, 5, 1)])
def test_k5_3_the_last_sampled_token_has_no_kv(prompt, generated, stored, indexed):
    d = make()
    d.ingest(1, range(prompt))
    d.prefill(1)
    d.generate(1, range(100, 100 + generated))
    assert d.kv.stored_tokens(1) == stored
    assert len(d.kv.index) == indexed


def test_k5_9_rows_cover_exactly_the_length():
    d = make(usable_pages=4)
    d.ingest(1, range(12))
    d.prefill(1)
    old_pages = d.kv.stream(1).page_indices
    d.kv.remove_request(1)
    d.kv.reset_prefix_cache()
    d.ingest(2, range(50, 55))  # 1.25 pages
    d.probe(2)
    (row,) = d.run("prefill", {2: 5}).rows
    assert len(row.pages) == 2
    assert row.length == row.to_compute == 5
    assert d.kv.arena.num_free == 2
    assert len(set(row.pages) | set(old_pages)) <= 4


def test_k5_9_a_high_water_list_is_cut_to_the_length():
    d = make()
    d.ingest(1, range(12), prefix_cache=False)
    d.prefill(1)
    d.kv.reset_request(1)  # nothing sealed: the three pages stay
    assert len(d.kv.stream(1).page_indices) == 3
    (row,) = d.run("prefill", {1: 5}).rows
    assert len(row.pages) == 2


# -- ownership, counts, duplicates, leaks


def test_k6_1_a_live_hit_keeps_the_whole_chain():
    d = make()
    d.serve(1, range(12))
    d.ingest(2, range(13))
    assert d.prefill(2)[2] == 12
    assert d.kv.evict(3) == 0


def test_k6_1_a_lease_keeps_the_whole_chain_too():
    d = make()
    d.serve(1, range(12))
    d.ingest(2, range(13))
    assert d.probe(2) == 12
    assert d.kv.evict(3) == 0


def test_k6_3_two_writers_of_one_prefix():
    d = make(page_size=16)
    for rid in (1, 2):
        d.ingest(rid, range(32))
    d.prefill(1, 2)
    assert sorted(d.kv.index.pages()) == d.kv.stream(1).page_indices
    assert [d.kv.arena.owners(p) for p in d.kv.stream(2).page_indices] == [1, 1]
    assert d.kv.index.counters.race_losses == 2
    for rid in (1, 2):
        d.kv.remove_request(rid)
    assert len(d.kv.index) == 2
    assert_all_accounted(d.kv)
    assert d.kv.evict(2) == 2
    assert d.kv.arena.num_free == d.kv.usable_pages


def test_k6_3_the_loser_files_again_when_the_winner_is_gone():
    d = make(usable_pages=8)
    for rid in (1, 2):
        d.ingest(rid, range(9))
    d.prefill(1, 2)
    d.kv.remove_request(1)
    assert d.kv.evict(8) == 2  # the winner's pages; the loser never owned them
    for token in (50, 51, 52, 53):
        d.sample(2, token)
        d.run("decode", {2: 1})
    assert sorted(d.kv.index.pages()) == d.kv.stream(2).page_indices[:3]
    assert d.serve(3, [*range(9), 50, 51, 52, 53]) == 12


@pytest.mark.parametrize("seed", range(4))
def test_k6_5_the_sum_holds_after_every_operation(seed):
    rng = random.Random(seed)
    d = make(usable_pages=23)
    kv = d.kv
    for number in range(500):
        live = list(d.prompts)
        verb = rng.choice(["start", "start", "decode", "decode", "decode", "finish", "reset", "evict", "drop"])
        rid = rng.choice(live) if live else None
        if verb == "start" and len(live) < 5:
            d.ingest(number, [*range(rng.choice([0, 4, 8, 12])), *rng.choices(range(50, 53), k=rng.randint(1, 6))])
            d.run("prefill", {number: len(d.prompts[number]) - d.probe(number)})
        elif verb == "decode" and rid is not None and kv.stored_tokens(rid) >= len(d.prompts[rid]):
            d.sample(rid, rng.randint(50, 52))
            d.run("decode", {rid: 1})
        elif verb in ("finish", "drop") and rid is not None:
            kv.remove_request(rid)
            del d.prompts[rid]
        elif verb == "reset" and rid is not None:
            kv.reset_request(rid, free=rng.random() < 0.5)
        elif verb == "evict":
            kv.evict(rng.randint(1, 4))
        states = count_states(d)
        assert sum(states.values()) == kv.usable_pages, states
    assert kv.index.counters.evictions > 0
    assert kv.counters.hits > 0


def count_states(d: Driver) -> dict[str, int]:
    kv = d.kv
    indexed, listed = set(kv.index.pages()), {p for rid in d.prompts for p in kv.stream(rid).page_indices}
    listed |= {p for rid in d.prompts for p in kv.stream(rid).lease or ()}
    free = kv.arena.free_pages()
    assert not set(free) & (indexed | listed)
    return {
        "free": len(free),
        "private": len(listed - indexed),
        "indexed idle": len(indexed - listed),
        "indexed in use": len(indexed & listed),
    }


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("ends", [("remove",), ("remove", "remove"), ("reset", "remove"), ("remove", "reset", "remove")])
def test_k6_9_no_page_is_freed_twice(page_size, ends):
    d = make(page_size=page_size, usable_pages=220)
    d.ingest(1, range(5))
    d.prefill(1)
    d.generate(1, range(1000, 1200))
    for end in ends:
        d.kv.remove_request(1) if end == "remove" else d.kv.reset_request(1, free=True)
    assert_all_accounted(d.kv)
    assert len(d.kv.index) == 204 // page_size


# -- retries


def test_k8_4_a_hit_is_never_longer_than_what_is_still_there():
    d = make(usable_pages=8)
    d.serve(1, range(17))  # 4 pages cached, 4 free
    d.ingest(2, range(100, 116), prefix_cache=False)
    d.run("prefill", {2: 16})  # takes the free ones
    d.ingest(3, range(17))
    assert d.probe(3) == 16
    assert d.run("prefill", {3: 1}) == AllocationFailed(1, 3, "main")
    assert d.kv.evict(2) == 0
    assert d.probe(3) == 16
    d.kv.reset_request(3)
    assert d.kv.evict(2) == 2
    assert d.probe(3) == 8
    (row,) = d.run("prefill", {3: 1}).rows
    assert row.length == 9


def test_b2_hit_after_refused_admit():
    d = make(usable_pages=9)
    d.ingest(1, range(10))
    d.ingest(2, range(200, 216))
    d.ingest(3, range(10))
    step, ctx = step_of("prefill", {1: 10, 2: 16 + 12})  # 1 gets three pages, 2 does not get seven
    assert d.kv.admit(step, ctx) == AllocationFailed(1, 2, "main")
    empty = list(d.kv.stream(1).page_indices)
    assert (len(empty), d.kv.stored_tokens(1)) == (3, 0)
    d.prefill(3)  # files the prefix meanwhile
    assert d.probe(1) == 8
    step, ctx = step_of("prefill", {1: 2})
    assert d.kv.admit(step, ctx) is None
    stream = d.kv.stream(1)
    assert stream.page_indices[:2] == d.kv.stream(3).page_indices[:2]
    assert stream.stored_len == 8
    assert d.probe(1) == 8  # asked again, the answer stands
    (row,) = d.kv.plan(step, ctx).rows
    assert (row.length, row.to_compute, len(row.pages)) == (10, 2, 3)
    d.kv.commit(step, ctx)
    assert sorted(d.kv.index.pages()) == d.kv.stream(3).page_indices[:2]


def test_b7_a_lease_over_empty_pages_leaks_none():
    d = make(usable_pages=9)
    d.ingest(1, range(10))
    step, ctx = step_of("prefill", {1: 10})
    assert d.kv.admit(step, ctx) is None
    d.kv.abort(step, ctx)  # three empty pages stay
    assert d.serve(2, range(10)) == 0
    d.prefill(1)
    assert d.kv.stream(1).hits == 2
    d.kv.check()
    assert d.kv.arena.num_free == 9 - 3
    d.kv.remove_request(1)
    assert_all_accounted(d.kv)


# -- many sharers


def test_b3_a_page_is_listed_once_by_each_of_its_sharers():
    d = make(page_size=16, usable_pages=255)
    shared = list(range(19 * 16))
    prompts = {rid: [*shared, *range(1000 + 100 * rid, 1008 + 100 * rid)] for rid in range(32)}
    d.ingest(0, prompts[0])
    assert d.prefill(0)[0] == 0
    for rid in range(1, 32):
        d.ingest(rid, prompts[rid])
    assert set(d.prefill(*range(1, 32)).values()) == {19 * 16}
    for token in range(8):
        for rid in range(32):
            d.sample(rid, token)
        tables = d.run("decode", dict.fromkeys(range(32), 1))
    listed = [page for row in tables.rows for page in row.pages]
    assert len(listed) == 640
    assert len(set(listed)) == 51
    assert d.kv.usable_pages - d.kv.arena.num_free == 51


# -- what the keys do not describe


def test_b1_an_image_first_stream_files_nothing():
    d = make(page_size=16)
    d.ingest(1, range(40))
    d.run("prefill_vae", {1: 50})
    assert len(d.kv.index) == 0
    assert d.kv.stream(1).chain is None
    assert d.kv.stream(1).chain_end.why == FOREIGN_WALK
    assert d.serve(2, range(40)) == 0


def test_b1_a_text_walk_of_the_same_length_files_the_whole_pages_of_its_keys():
    d = make(page_size=16)
    d.ingest(1, range(40))
    d.run("prefill", {1: 50})
    assert sorted(d.kv.index.pages()) == d.kv.stream(1).page_indices[:2]


def test_b1_hidden_by_a_text_first_run():
    d = make(page_size=16)
    d.serve(1, range(40))
    filed = sorted(d.kv.index.pages())
    d.ingest(2, range(40))
    d.run("prefill_vae", {2: 50})  # first writer wins would hide that this one files wrongly
    d.run("prefill", {2: 40})
    assert sorted(d.kv.index.pages()) == filed
    assert d.kv.stream(2).chain is None
    d.kv.evict(2)  # without the first writer's pages it shows
    d.run("prefill", {2: 4})
    assert len(d.kv.index) == 0


def run_picture_prompt(prompt) -> KVResource:
    d = make(page_size=16, walks=MEDIA)
    d.kv.ingest_request(1, RequestConfig({"main": prompt}))
    d.generated[1] = []
    d.run("prefill_text", {1: 36})
    d.run("prefill_vit", {1: 12})
    for token in range(30):
        d.sample(1, token)
        d.run("decode", {1: 1})
    return d.kv


def test_b16_a_picture_without_a_layout_ends_the_chain():
    kv = run_picture_prompt(keyed(range(36), 16))
    assert len(kv.index) == 2
    assert kv.stream(1).chain is None


def test_b16_a_laid_out_picture_keeps_the_chain():
    spans = [Span("ids", "prefill_text", 36, 36), Span("digest", "prefill_vit", 12, 1, b"red")]
    kv = run_picture_prompt(laid_out(spans, range(36), 16))
    assert kv.stored_tokens(1) == 78
    assert len(kv.index) == 4
    assert kv.stream(1).chain is not None


def test_b14_a_token_read_back_one_step_late_is_no_gap():
    d = make(page_size=16)
    d.ingest(1, range(36))
    d.prefill(1)
    for token in range(30):
        d.run("decode", {1: 1})  # writes the token that is read back after it
        d.sample(1, token)
        assert d.kv.stream(1).chain is not None
    assert len(d.kv.index) == 4
    assert d.kv.stored_tokens(1) == 66


def test_b14_two_steps_late_is_one():
    d = make(page_size=16)
    d.ingest(1, range(36))
    d.prefill(1)
    d.run("decode", {1: 1})
    d.run("decode", {1: 1})
    assert d.kv.stream(1).chain is None


def test_b15_pages_that_a_window_moved_are_not_filed():
    d = make(page_size=16)
    d.ingest(1, range(36))
    d.prefill(1)
    d.kv.stream(1).released = 16
    d.sample(1, 7)
    assert d.kv.stream(1).chain is None
    assert len(d.kv.index) == 2


def test_b17_a_stop_on_a_page_boundary_leaves_the_page_unfiled():
    d = make(page_size=128)
    d.ingest(1, range(100))
    d.prefill(1)
    d.generate(1, range(28))
    assert d.kv.stream(1).chain.keyed_pages == 1
    assert d.kv.stored_tokens(1) == 127
    assert len(d.kv.index) == 0


# -- the rest


def test_b9_a_page_has_one_key():
    d = make()
    d.ingest(1, range(4))
    d.prefill(1)
    (page,) = d.kv.index.pages()
    old, new = d.kv.index.key_of(page), b"n" * 32
    with pytest.raises(IntegrityError, match=f"page {page} .*{old.hex()[:16]}.*{new.hex()[:16]}"):
        d.kv.index.insert(d.kv.stream(1).root, new, page, None)


def test_b13_unkeyed_traffic_is_said_once_a_node(caplog):
    d = make()
    inputs = WalkInputs({"main": range(10)})
    d.kv.ingest_request("quiet", RequestConfig(prefix_cache=False))
    with caplog.at_level(logging.WARNING, logger="kvlab.cache"):
        assert d.kv.resolve_cached_prefix("quiet", NODE, "prefill", inputs) is None
        assert not caplog.records
        for rid in range(20):
            d.kv.ingest_request(rid, RequestConfig())
            assert d.kv.resolve_cached_prefix(rid, NODE, "prefill", inputs) is None
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        d.kv.resolve_cached_prefix(0, "another node", "prefill", inputs)
    assert len(caplog.records) == 2


def test_b19_another_label_starts_at_zero_and_reset_forgets():
    walks = {"main": TEXT["main"], "cfg_img": TEXT["main"]}
    d = make(page_size=32, walks=walks)
    d.serve(1, range(100))
    prompts = {label: keyed(range(100), 32) for label in walks}
    d.kv.ingest_request(2, RequestConfig(prompts))
    inputs = WalkInputs({label: range(100) for label in walks})
    answer = d.kv.resolve_cached_prefix(2, NODE, "prefill", inputs)
    assert answer == {"main": Match(96, 96), "cfg_img": Match(0, 0)}
    d.kv.apply_cached_prefix(2, NODE, "prefill", inputs, answer)
    d.run("prefill", {2: 4})
    assert d.kv.stored_tokens(2) == 100
    d.kv.reset_request(2)
    assert d.kv.stored_tokens(2) == 0
    assert d.kv.stream(2).hits == 0


def test_b21_a_second_ingest_keeps_lengths_pages_and_settings():
    d = make()
    d.ingest(1, range(10))
    d.prefill(1)
    before = d.kv.stream(1)
    pages = list(before.page_indices)
    d.kv.ingest_request(1, RequestConfig(prefix_cache=False, salt="other"))
    assert d.kv.stream(1) is before
    assert (before.stored_len, before.page_indices) == (10, pages)
    assert before.chain is not None


def test_b21_a_second_ingest_revives_no_ended_chain():
    d = make()
    d.ingest(1, range(10))
    d.run("prefill_vae", {1: 12})
    d.kv.ingest_request(1, RequestConfig({"main": keyed(range(10), 4)}))
    assert d.kv.stream(1).chain is None


def test_b24_an_opted_out_request_files_nothing():
    d = make()
    d.serve(1, range(10), range(100, 120), prefix_cache=False)
    assert len(d.kv.index) == 0


def test_b24_an_opted_out_request_hits_nothing():
    d = make()
    d.serve(1, range(10))
    assert d.serve(2, range(10), prefix_cache=False) == 0


def test_b26_a_fork_target_that_shares_pages_is_refused():
    walks = {label: PrefixStream("tokens", walk="prefill") for label in ("main", "cfg_text")}
    d = make(walks=walks, store=Bytes())
    d.kv.ingest_request(1, RequestConfig({label: keyed(range(8), 4) for label in walks}))
    for label in walks:
        d.run("prefill", {1: 8}, label=label)
    with pytest.raises(IntegrityError, match="cfg_text.*others may read"):
        d.kv.admit(*step_of("prefill", {1: 4}, forks=[Fork(1, "main", "cfg_text")]))
    assert d.kv.stored_tokens(1) == 8


def test_b26_a_fork_target_gets_pages_of_its_own():
    store = Bytes()
    d = make(store=store)
    d.serve(1, range(9))
    d.ingest(2, range(9))
    d.prefill(2)
    store.pages = {page: f"bytes of {page}" for page in d.kv.stream(2).page_indices}
    d.run("prefill", {2: 1}, forks=[Fork(2, "main", "cfg_text")])
    source, target = d.kv.stream(2).page_indices, d.kv.stream(2, "cfg_text").page_indices
    assert not set(source) & set(target)
    assert [d.kv.arena.owners(p) for p in target] == [1, 1, 1]
    assert [store.pages[p] for p in target] == [store.pages[p] for p in source[:3]]


def test_k11_1_reset_says_yes_and_does_it():
    d = make()
    d.serve(1, range(12))
    d.ingest(2, [*range(8), 90])  # holds two of the three
    assert d.prefill(2)[2] == 8
    live, epoch = list(d.kv.stream(2).page_indices), d.kv.epoch
    assert d.kv.reset_prefix_cache("asked", b"n" * 32) is True
    assert len(d.kv.index) == 0
    assert d.kv.epoch == epoch + 1
    assert d.kv.stream(2).page_indices == live
    assert all(d.kv.arena.owners(p) == 1 for p in live)
    d.generate(2, range(100, 110))  # goes on, and is not offered again
    assert len(d.kv.index) == 0
    assert d.kv.stream(2).chain_end.why == CACHE_RESET
    d.kv.remove_request(2)
    assert d.kv.arena.num_free == d.kv.usable_pages
    assert d.serve(3, range(12)) == 0
    assert d.serve(4, range(12)) == 8


def test_k11_1_reset_gives_leases_back_and_waiting_requests_begin_anew():
    d = make()
    d.serve(1, range(12))
    d.ingest(2, range(13))
    assert d.probe(2) == 12
    assert d.kv.reset_prefix_cache("weights", b"n" * 32)
    assert d.kv.arena.num_free == d.kv.usable_pages
    with pytest.raises(IntegrityError, match="probe again"):
        d.run("prefill", {2: 1})
    assert d.prefill(2)[2] == 0
    assert len(d.kv.index) == 3
    assert d.serve(3, range(13)) == 12
