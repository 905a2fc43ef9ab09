"""Every prompt token that is computed has exactly one cause, and the cause is the right one."""

from __future__ import annotations

import pytest
from kv_driver import NODE, TEXT, Driver, keyed, step_of

from kvlab.cache.kv import KVResource
from kvlab.cache.misses import MissLog
from kvlab.cache.stream import RootName
from kvlab.events import TokensMissed
from kvlab.recorder import Recorder
from kvlab.spec import KVLayout, PrefixStream, RequestConfig, WalkInputs

ROOT = b"r" * 32


def make(page_size: int = 4, num_pages: int = 24, log: bool = True, walks=TEXT, **options) -> Driver:
    kv = KVResource(KVLayout(1, 1, 8, page_size), num_pages, miss_log=MissLog(num_pages) if log else None, **options)
    kv.enable_prefix_cache(ROOT, walks)
    return Driver(kv, page_size)


def misses(d: Driver, rid, ids, **config) -> list[tuple[int, int, str]]:
    d.ingest(rid, ids, **config)
    d.prefill(rid)
    return ranges(d, rid)


def ranges(d: Driver, rid) -> list[tuple[int, int, str]]:
    return [(m.start, m.stop, m.cause) for m in d.kv.cached_misses(rid)]


def evidence(d: Driver, rid) -> list[str]:
    return [m.evidence for m in d.kv.cached_misses(rid)]


# -- one cause after another


def test_a_first_prompt_was_never_seen():
    d = make()
    assert misses(d, 1, range(10)) == [(0, 10, "never_seen")]
    assert evidence(d, 1) == ["no cached chain begins like this"]


def test_a_repeat_recomputes_its_last_page():
    d = make()
    d.serve(1, range(12))
    assert misses(d, 2, range(12)) == [(8, 12, "last_page_cap")]
    assert misses(d, 3, range(9)) == [(8, 9, "last_page_cap")]


def test_a_prompt_of_one_page_is_nothing_but_a_last_page():
    assert misses(make(), 1, range(3)) == [(0, 3, "last_page_cap")]


def test_a_longer_prompt_goes_on_where_nothing_is_cached():
    d = make()
    d.serve(1, range(8))
    assert misses(d, 2, range(17)) == [(8, 17, "never_seen")]
    assert evidence(d, 2) == ["no cached chain goes on from token 8"]


def test_a_diverged_prompt_names_the_token_and_both_ids():
    d = make()
    d.serve(1, range(16))
    key = keyed(range(16), 4).keys[1].hex()[:16]
    assert misses(d, 2, [0, 1, 2, 3, 4, 5, 90, 91, 92]) == [(4, 9, "diverged")]
    assert evidence(d, 2) == [f"token 6 is 90 here and 6 in the nearest cached chain {key}"]


def test_diverging_on_a_page_boundary_counts_as_diverged():
    d = make()
    d.serve(1, range(16))
    assert misses(d, 2, [0, 1, 2, 3, 90, 91, 92, 93, 94]) == [(4, 9, "diverged")]
    assert evidence(d, 2)[0].startswith("token 4 is 90 here and 4 in")


def test_less_than_a_page_shared_is_a_short_prefix():
    d = make()
    d.serve(1, range(16))
    assert misses(d, 2, [0, 1, 2, 90, 91, 92]) == [(0, 6, "short_prefix")]
    assert evidence(d, 2)[0].startswith("shares 3 tokens, less than a page of 4: token 3 is 90 here and 3 in")


def test_the_nearest_of_many_cached_chains_is_named():
    d = make(num_pages=64)
    for last in (1, 3, 5, 7, 9):
        d.serve(last, [0, 1, 2, 3, 4, last, 6, 7])
    d.serve(20, [0, 1, 2, 3, 4, 5, 6, 50])
    assert misses(d, 99, [0, 1, 2, 3, 4, 5, 6, 49, 50]) == [(4, 9, "diverged")]
    assert evidence(d, 99)[0].startswith("token 7 is 49 here and")


def test_an_evicted_page_names_step_and_request():
    d = make(num_pages=8)
    d.serve(1, range(20))
    d.ingest("big", range(100, 116))
    d.run("prefill", {"big": 16}, index=7)
    d.kv.remove_request("big")
    assert misses(d, 2, range(20)) == [(12, 16, "evicted"), (16, 20, "last_page_cap")]
    assert evidence(d, 2)[0] == "evicted at step 7 for request 'big'"


def test_evicted_and_new_tokens_are_told_apart():
    d = make()
    d.serve(1, range(12))
    d.kv.evict(1)
    assert misses(d, 2, range(30)) == [(8, 12, "evicted"), (12, 30, "never_seen")]


def test_a_page_filed_again_is_not_evicted_any_more():
    d = make()
    d.serve(1, range(12))
    d.kv.evict(3)
    assert misses(d, 2, range(12))[0] == (0, 8, "evicted")
    d.kv.remove_request(2)
    assert misses(d, 3, range(12)) == [(8, 12, "last_page_cap")]


def test_what_fell_out_of_the_ring_was_never_seen():
    d = make(num_pages=6)
    d.serve("old", range(8))
    for number in range(20):
        d.serve(number, range(100 * number + 100, 100 * number + 108))
    d.kv.evict(5)
    assert misses(d, "again", range(8)) == [(0, 8, "never_seen")]


def test_another_salt_is_another_root():
    d = make()
    d.serve(1, range(12), salt="tenant a")
    assert misses(d, 2, range(12), salt="tenant b") == [(0, 8, "other_root"), (8, 12, "last_page_cap")]
    assert evidence(d, 2)[0] == "cached under another root: salt"  # and tells nobody which


def test_another_label_is_another_root():
    d = make(walks=dict.fromkeys(("main", "side"), TEXT["main"]))
    d.serve(1, range(12))
    d.kv.ingest_request(2, RequestConfig({"side": keyed(range(12), 4)}))
    d.run("prefill", {2: 12}, label="side")
    assert ranges(d, 2) == [(0, 8, "other_root"), (8, 12, "last_page_cap")]
    assert evidence(d, 2)[0] == "cached under another root: label 'main', not 'side'"


def test_changed_weights_are_named():
    d = make()
    new = b"n" * 32
    d.kv.name_root(ROOT, {"dtype": "float32", "weights": 0})
    d.kv.name_root(new, {"dtype": "float32", "weights": 1})
    d.serve(1, range(12))
    d.kv.reset_prefix_cache("weights", new)
    assert misses(d, 2, range(12)) == [(0, 8, "other_root"), (8, 12, "last_page_cap")]
    assert evidence(d, 2)[0] == "cached under another root: weights 0, not 1"


def test_a_reset_under_the_same_root_is_an_eviction_that_says_so():
    d = make()
    d.serve(1, range(12))
    d.kv.reset_prefix_cache()
    assert misses(d, 2, range(12))[0] == (0, 8, "evicted")
    assert evidence(d, 2)[0] == "dropped by a reset (asked)"


def test_an_opted_out_request_says_so():
    assert misses(make(), 1, range(10), prefix_cache=False) == [(0, 10, "opted_out")]


def test_prompt_logprobs_are_an_opt_out():
    d = make()
    d.serve(1, range(10))
    assert misses(d, 2, range(10), prompt_logprobs=True) == [(0, 10, "opted_out")]
    assert evidence(d, 2) == ["prompt logprobs need every row"]


@pytest.mark.parametrize(
    ("options", "why"),
    [({"prefix_cache": False}, "prefix_cache is off for this resource"), ({"world_size": 2}, "world size is 2")],
)
def test_a_shut_cache_is_an_opt_out_of_all(options, why):
    d = make(**options)
    assert misses(d, 1, range(10)) == [(0, 10, "opted_out")]
    assert evidence(d, 1) == [why]


def test_a_prompt_without_keys():
    d = make()
    d.kv.ingest_request(1, RequestConfig())
    d.kv.resolve_cached_prefix(1, NODE, "prefill", WalkInputs({"main": range(10)}))
    d.run("prefill", {1: 10})
    assert ranges(d, 1) == [(0, 10, "no_keys")]


@pytest.mark.parametrize("cause", ["walk_not_keyed", "opaque_inputs"])
def test_an_unprobed_walk_has_the_cause_the_engine_says(cause):
    d = make()
    d.ingest(1, range(10))
    for _ in range(2):  # a refused step is prepared again
        d.kv.note_unprobed(1, NODE, "prefill", WalkInputs({"main": range(10)}), cause)
    d.run("prefill", {1: 10})
    assert ranges(d, 1) == [(0, 10, cause)]


def test_text_behind_a_picture_nobody_foresaw():
    d = make()
    d.ingest(1, range(10))
    d.kv.note_unprobed(1, NODE, "prefill_vae", WalkInputs({"main": range(6)}), "walk_not_keyed")
    d.run("prefill_vae", {1: 6})
    d.probe(1)
    d.run("prefill", {1: 10})
    assert ranges(d, 1) == [(0, 6, "walk_not_keyed"), (6, 16, "chain_ended")]
    assert evidence(d, 1)[1].startswith("by walk 'prefill_vae' at slot 0:")


def test_a_stream_that_began_before_it_was_probed_is_not_fresh():
    d = make(walks={"main": PrefixStream("tokens", walk="prefill", layout_walks=("more",))})
    d.ingest(1, range(10))
    d.run("prefill", {1: 5})
    d.prompts[1] = list(range(5, 10))
    d.probe(1)
    assert ranges(d, 1)[-1] == (5, 10, "not_fresh")


def test_a_smaller_agreement_leaves_cached_pages_unused():
    d = make()
    d.serve(1, range(13))
    d.ingest(2, range(13))
    d.kv.resolve_cached_prefix(2, NODE, "prefill", WalkInputs({"main": range(13)}))
    d.run("prefill", {2: 13})  # another resource holds nothing
    assert ranges(d, 2) == [(0, 12, "not_fresh"), (12, 13, "last_page_cap")]


def test_without_a_log_the_index_alone_is_asked():
    d = make(log=False)
    d.serve(1, range(16))
    assert misses(d, 2, [0, 1, 2, 3, 90, 91, 92, 93, 94]) == [(4, 9, "never_seen")]
    assert misses(d, 3, range(16)) == [(12, 16, "last_page_cap")]


# -- when they are said


def test_misses_are_settled_when_the_step_is_admitted_and_stand():
    d = make()
    d.serve(1, range(12))
    d.ingest(2, range(12))
    d.probe(2)
    assert ranges(d, 2) == []
    d.run("prefill", {2: 4})
    d.kv.evict(9)
    d.sample(2, 50)
    d.run("decode", {2: 1})
    assert ranges(d, 2) == [(8, 12, "last_page_cap")]


def test_each_range_is_one_event_a_request():
    recorder = Recorder(clock=lambda: 0.0)
    d = make(record=recorder)
    d.serve(1, range(12))
    d.kv.evict(1)
    d.ingest(2, range(30))
    d.probe(2)
    for _ in range(2):
        step, ctx = step_of("prefill", {2: 22})
        d.kv.admit(step, ctx)
        d.kv.abort(step, ctx)
    d.run("prefill", {2: 22})
    d.sample(2, 1)
    d.run("decode", {2: 1})
    told = [(e.event.start, e.event.stop, e.event.cause) for e in recorder.filter(TokensMissed, rid=2)]
    assert told == ranges(d, 2) == [(8, 12, "evicted"), (12, 30, "never_seen")]


def test_a_rewound_request_is_explained_anew():
    d = make()
    assert misses(d, 1, range(12)) == [(0, 12, "never_seen")]
    d.kv.reset_request(1)
    d.prefill(1)
    assert ranges(d, 1) == [(8, 12, "last_page_cap")]


def test_an_unknown_request_has_no_misses():
    assert make().kv.cached_misses(9) == ()


# -- the log itself


def test_the_log_keeps_as_much_as_the_pool_and_four_times_what_left_it():
    d = make(num_pages=6)
    log = d.kv._pool.miss_log
    for number in range(200):
        d.serve(number, range(100 * number, 100 * number + 8), salt=str(number))
    d.kv.evict(5)
    assert repr(log) == "MissLog(0 pages, 24 gone of at most 24)"
    sizes = {name: len(value) for name, value in vars(log).items() if hasattr(value, "__len__")}
    assert max(sizes.values()) <= 24


def test_roots_are_forgotten_with_their_last_page():
    log = MissLog(num_pages=1)
    name = RootName(ROOT, "main", "")
    log.filed(b"one", name, b"", b"k" * 32, (1, 2))
    log.gone(b"one", b"k" * 32, "evicted")
    assert log.other_root(name, b"two", b"k" * 32) is not None
    for number in range(4):
        log.filed(b"two", name, b"", bytes([number]) * 32, (1, number))
        log.gone(b"two", bytes([number]) * 32, "evicted")
    assert log.other_root(name, b"two", b"k" * 32) is None
