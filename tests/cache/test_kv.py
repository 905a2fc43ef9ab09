"""The lifecycle of a KV resource, one property a test."""

from __future__ import annotations

import json
import logging
import threading

import pytest
from kv_driver import NODE, TEXT, Driver, keyed, step_of

from kvlab.cache.kv import KVResource
from kvlab.errors import InputError, IntegrityError
from kvlab.recorder import Recorder
from kvlab.spec import Fork, KVLayout, Match, PrefixStream, RequestConfig, WalkInputs

ROOT = b"r" * 32


class Bytes:
    """A page store of one value a page, written by hand."""

    def __init__(self) -> None:
        self.pages: dict[int, object] = {}

    def copy_pages(self, src, dst) -> None:
        self.pages |= {d: self.pages[s] for s, d in zip(src, dst, strict=True)}

    def to_host(self, pages, host_pages) -> None: ...

    def from_host(self, host_pages, pages) -> None: ...


def make(page_size: int = 4, num_pages: int = 24, walks=TEXT, **options) -> Driver:
    kv = KVResource(KVLayout(1, 1, 8, page_size), num_pages, **options)
    kv.enable_prefix_cache(ROOT, walks)
    return Driver(kv, page_size, store=options.get("store"))


# -- made of what


@pytest.mark.parametrize(
    ("layout", "num_pages", "message"),
    [
        (KVLayout(1, 1, 8, 0), 8, "page_size is 0"),
        (KVLayout(1, 1, 8, 4), 1, "num_pages is 1"),
        (KVLayout(1, 1, 8, 4, "int4"), 8, "KV dtype is 'int4'"),
    ],
)
def test_what_cannot_be_is_refused(layout, num_pages, message):
    with pytest.raises(InputError, match=message):
        KVResource(layout, num_pages)


def test_an_unknown_policy_is_refused_when_the_pool_is_made():
    with pytest.raises(InputError, match="lru"):
        KVResource(KVLayout(1, 1, 8, 4), 8, policy="newest")


def test_repr_is_one_line():
    assert repr(make().kv) == "KVResource('kv', 23 usable pages of 4 slots, 23 free, 0 indexed)"


# -- the index is open or shut


def test_a_shut_cache_never_hits_and_keeps_no_chain():
    d = make(prefix_cache=False)
    assert d.kv.index is None
    assert [d.serve(rid, range(10)) for rid in range(2)] == [0, 0]
    assert d.kv.arena.num_free == d.kv.usable_pages


def test_world_size_above_one_keeps_the_index_shut_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="kvlab.cache"):
        d = make(world_size=2)
    assert d.kv.index is None
    assert "world size 2" in caplog.text


def test_a_shut_cache_logs_nothing(caplog):
    with caplog.at_level(logging.DEBUG, logger="kvlab"):
        d = make(prefix_cache=False)
        d.serve(1, range(10))
    assert not caplog.records


def test_one_line_an_admitted_request(caplog):
    d = make()
    with caplog.at_level(logging.INFO, logger="kvlab.cache"):
        d.serve(1, range(10), range(5))
        d.serve(2, range(10))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "kv: request 1, stream 'main': matched 0 of its 2 keyed pages",
        "kv: request 2, stream 'main': matched 2 of its 2 keyed pages, the whole prompt but its last page",
    ]


def test_enabling_again_drops_what_was_cached():
    d = make()
    d.serve(1, range(10))
    d.kv.enable_prefix_cache(ROOT, TEXT)
    assert d.serve(2, range(10)) == 0


def test_a_request_from_before_the_index_opened_is_seeded_then():
    kv = KVResource(KVLayout(1, 1, 8, 4), 24)
    d = Driver(kv, 4)
    d.ingest(1, range(10))
    kv.enable_prefix_cache(ROOT, TEXT)
    d.prefill(1)
    assert len(kv.index) == 2


# -- keys, salts, labels


def test_salts_do_not_meet():
    d = make()
    d.serve(1, range(10), salt="a")
    assert d.serve(2, range(10), salt="b") == 0
    assert d.serve(3, range(10)) == 0
    assert d.serve(4, range(10), salt="a") == 8


def test_page_keys_cover_generated_pages():
    d = make()
    d.ingest(1, range(6))
    d.prefill(1)
    d.generate(1, range(6, 12))
    assert d.kv.page_keys(1) == keyed(range(12), 4).keys


def test_an_undeclared_label_has_no_chain():
    d = make()
    d.kv.ingest_request(1, RequestConfig({"other": keyed(range(10), 4)}))
    assert d.kv.resolve_cached_prefix(1, NODE, "prefill", WalkInputs({"other": range(10)})) is None
    assert d.kv.stream(1, "other").chain is None


def test_keys_for_another_page_size_are_refused_and_nothing_is_kept():
    d = make(page_size=4)
    with pytest.raises(InputError, match="page size"):
        d.kv.ingest_request(1, RequestConfig({"main": keyed(range(40), 16)}))
    assert d.kv.streams_of(1) == {}


def test_only_the_declared_walk_is_probed():
    d = make()
    d.serve(1, range(10))
    d.ingest(2, range(10))
    assert d.kv.resolve_cached_prefix(2, NODE, "decode", WalkInputs({"main": range(10)})) is None
    assert d.probe(2) == 8


def test_prompt_logprobs_skip_the_hit_and_count_no_probe():
    d = make()
    d.serve(1, range(12))
    probes, lookups = d.kv.counters.probes, d.kv.index.counters.lookups
    assert d.serve(2, range(12), prompt_logprobs=True) == 0
    assert (d.kv.counters.probes, d.kv.index.counters.lookups) == (probes, lookups)


def test_a_probe_of_fewer_tokens_than_the_prompt_leaves_one_of_them_to_compute():
    d = make()
    d.serve(1, range(20))
    d.ingest(2, range(20))
    assert d.kv.resolve_cached_prefix(2, NODE, "prefill", WalkInputs({"main": range(8)})) == {"main": Match(4, 4)}


def test_unknown_requests_are_no_business_of_the_cache():
    d = make()
    assert d.kv.resolve_cached_prefix(9, NODE, "prefill", WalkInputs({"main": range(8)})) is None
    d.kv.remove_request(9)
    d.kv.reset_request(9)
    with pytest.raises(InputError, match="request 9 has no stream 'main'"):
        d.kv.stream(9)
    with pytest.raises(InputError, match="request 9 is not known"):
        d.kv.admit(*step_of("prefill", {9: 1}))


# -- leases


def test_a_second_probe_takes_no_second_lease():
    d = make()
    d.serve(1, range(10))
    d.ingest(2, range(10))
    assert [d.probe(2), d.probe(2)] == [8, 8]
    assert [d.kv.arena.owners(p) for p in d.kv.stream(2).lease] == [2, 2]


def test_a_smaller_agreement_cuts_the_lease():
    d = make()
    d.serve(1, range(13))
    d.ingest(2, range(13))
    inputs = WalkInputs({"main": range(13)})
    assert d.kv.resolve_cached_prefix(2, NODE, "prefill", inputs) == {"main": Match(12, 12)}
    d.kv.apply_cached_prefix(2, NODE, "prefill", inputs, {"main": Match(4, 4)})
    (row,) = d.run("prefill", {2: 9}).rows
    assert (row.length, d.kv.stream(2).hits) == (13, 1)


def test_a_lease_nobody_agreed_to_is_given_back():
    d = make()
    d.serve(1, range(10))
    d.ingest(2, range(10))
    d.kv.resolve_cached_prefix(2, NODE, "prefill", WalkInputs({"main": range(10)}))
    (row,) = d.run("prefill", {2: 10}).rows  # another resource answered 0, so the step was not cut
    assert row.to_compute == 10
    assert d.kv.stream(2).hits == 0


def test_what_was_lent_to_a_refused_request_stays_its_own_through_a_reset():
    d = make(num_pages=8)
    d.serve(1, range(10))
    d.ingest(2, range(10))
    d.ingest(3, range(100, 124))
    assert d.probe(2) == 8
    step, ctx = step_of("prefill", {2: 2, 3: 24})
    assert d.kv.admit(step, ctx) is not None  # there is no room for both
    d.kv.reset_prefix_cache("asked")
    assert d.probe(2) == 8
    (row,) = d.run("prefill", {2: 2}).rows
    assert (row.length, row.to_compute) == (10, 2)


def test_an_agreement_holds_for_one_try():
    d = make()
    d.serve(1, range(10))
    d.ingest(2, range(10))
    assert d.probe(2) == 8
    d.kv.resolve_cached_prefix(2, NODE, "prefill", WalkInputs({"main": range(10)}))
    (row,) = d.run("prefill", {2: 10}).rows
    assert row.to_compute == 10


def test_lookup_and_retain_are_one_hold():
    d = make(num_pages=40)
    prompts = [[number, *range(12)] for number in range(3)]
    for rid, prompt in enumerate(prompts):
        d.serve(f"first {rid}", prompt)
    failures = []

    def probe_and_drop(rid: int) -> None:
        try:
            for turn in range(60):
                d.serve((rid, turn), prompts[rid])
        except Exception as error:
            failures.append(error)

    def evict() -> None:
        for _ in range(200):
            d.kv.evict(2)

    threads = [threading.Thread(target=probe_and_drop, args=(rid,)) for rid in range(3)] + [threading.Thread(target=evict)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    d.kv.check()


# -- steps


def test_a_refusal_names_who_lacks_how_many_pages_and_evicts_nothing():
    d = make(num_pages=6)
    d.serve(1, range(8))
    d.ingest(2, range(100, 140))
    refusal = d.run("prefill", {2: 40})
    assert (refusal.pages_short, refusal.rid, refusal.label) == (5, 2, "main")
    assert len(d.kv.index) == 2
    assert d.kv.counters.refused_admits == 1


def test_cached_pages_make_room_for_a_live_request():
    d = make(num_pages=6)
    d.serve(1, range(20))
    assert d.kv.arena.num_free == 0
    d.ingest(2, range(100, 120))
    d.prefill(2)
    assert d.kv.index.counters.evictions == 5


def test_a_step_in_flight_is_admitted_once():
    d = make()
    d.ingest(1, range(10))
    step, ctx = step_of("prefill", {1: 10})
    d.kv.admit(step, ctx)
    with pytest.raises(IntegrityError, match="commit or abort"):
        d.kv.admit(step, ctx)


def test_a_plan_without_pages_is_refused():
    d = make()
    d.ingest(1, range(10))
    with pytest.raises(IntegrityError, match="0 pages for 10 slots"):
        d.kv.plan(*step_of("prefill", {1: 10}))


def test_a_negative_span_is_refused():
    d = make()
    d.ingest(1, range(10))
    with pytest.raises(InputError, match="-1 tokens"):
        d.kv.admit(*step_of("prefill", {1: -1}))


@pytest.mark.parametrize("end", ["remove_request", "reset_request"])
def test_what_a_step_wrote_for_a_request_that_went_meanwhile_is_dropped(end):
    d = make()
    d.ingest(1, range(10))
    step, ctx = step_of("prefill", {1: 10})
    d.kv.admit(step, ctx)
    d.kv.plan(step, ctx)
    getattr(d.kv, end)(1)
    d.kv.commit(step, ctx)
    assert len(d.kv.index) == 0
    assert all(stream.stored_len == 0 for stream in d.kv.streams_of(1).values())


def test_padding_rows_go_to_the_sink_and_own_nothing():
    d = make()
    d.ingest(1, range(10))
    step, ctx = step_of("prefill", {1: 10, -1: 10})
    ctx = type(ctx)(frozenset({1}))
    assert d.kv.admit(step, ctx) is None
    real, padding = d.kv.plan(step, ctx).rows
    assert list(padding.pages) == [0, 0, 0]
    d.kv.commit(step, ctx)
    assert d.kv.streams_of(-1) == {}
    assert 0 not in real.pages


def test_a_captured_step_files_nothing():
    d = make()
    d.ingest(1, range(10))
    step, ctx = step_of("prefill", {1: 10})
    ctx = type(ctx)(ctx.request_ids, capture=True)
    d.kv.admit(step, ctx)
    d.kv.commit(step, ctx)
    assert len(d.kv.index) == 0


def test_a_step_that_commits_nothing_only_clears_its_marks():
    d = make()
    d.ingest(1, range(10))
    d.run("prefill", {1: 10}, commit=False)
    assert d.kv.stored_tokens(1) == 0
    d.run("prefill", {1: 10})
    assert d.kv.stored_tokens(1) == 10


def test_pages_are_filed_as_they_fill_so_that_an_arrival_hits_mid_prefill():
    d = make()
    d.ingest(1, range(20))
    d.probe(1)
    d.run("prefill", {1: 10})
    d.ingest(2, range(20))
    assert d.probe(2) == 8


def test_generated_pages_are_hit_by_the_next_turn():
    d = make()
    d.serve(1, range(6), range(6, 16))  # the last id is never written
    assert d.serve(2, range(20)) == 12


def test_a_rewind_drops_sealed_pages_and_keeps_private_ones():
    d = make()
    d.ingest(1, range(10))
    d.prefill(1)
    d.kv.reset_request(1)
    assert d.kv.stream(1).page_indices == []
    d.ingest(2, range(3))
    d.prefill(2)
    pages = list(d.kv.stream(2).page_indices)
    d.kv.reset_request(2)
    assert d.kv.stream(2).page_indices == pages
    d.kv.reset_request(2, free=True)
    assert d.kv.stream(2).page_indices == []


def test_a_rewound_request_hits_what_it_filed_itself():
    d = make()
    d.ingest(1, range(10))
    d.prefill(1)
    d.kv.reset_request(1)
    assert d.prefill(1)[1] == 8


def test_cleanup_lets_go_of_everything():
    d = make()
    d.serve(1, range(10))
    d.ingest(2, range(10))
    d.probe(2)
    d.kv.cleanup()
    assert d.kv.arena.num_free == d.kv.usable_pages


# -- forks


def forked(d: Driver, when: str, span: int) -> None:
    step, ctx = step_of("prefill", {1: span}, forks=[Fork(1, "main", "cfg_text", when)])
    assert d.kv.admit(step, ctx) is None
    d.kv.plan(step, ctx)
    d.store.pages |= {page: ("main", page) for page in d.kv.stream(1).page_indices}
    d.kv.commit(step, ctx)


@pytest.mark.parametrize(("when", "length"), [("pre", 0), ("post", 10)])
def test_a_fork_copies_the_source_before_or_after_the_write(when, length):
    d = make(store=Bytes())
    d.ingest(1, range(10))
    d.probe(1)
    forked(d, when, 10)
    target = d.kv.stream(1, "cfg_text")
    assert target.stored_len == length
    assert target.chain is None
    assert not target.step_in_flight
    copied = [d.store.pages[p] for p in target.page_indices]
    assert copied == [("main", p) for p in d.kv.stream(1).page_indices][: len(copied)]


def test_a_pre_fork_never_copies_what_a_hit_just_lent():
    d = make(store=Bytes())
    d.serve("first", range(10))
    d.ingest(1, range(10))
    assert d.probe(1) == 8
    forked(d, "pre", 2)
    assert d.kv.stored_tokens(1) == 10
    assert d.kv.stored_tokens(1, "cfg_text") == 0


def test_a_target_grows_behind_its_fork_in_the_same_step():
    d = make(store=Bytes())
    d.ingest(1, range(6))
    d.prefill(1)
    d.store.pages = {page: ("main", page) for page in d.kv.stream(1).page_indices}
    step, ctx = step_of("decode", {1: 3}, label="cfg_text", forks=[Fork(1, "main", "cfg_text")])
    assert d.kv.admit(step, ctx) is None
    (row,) = d.kv.plan(step, ctx).rows
    assert (row.length, len(row.pages)) == (9, 3)
    d.kv.commit(step, ctx)
    assert d.kv.stored_tokens(1, "cfg_text") == 9


def test_a_fork_without_a_store_is_refused():
    d = make()
    d.ingest(1, range(6))
    with pytest.raises(InputError, match="PageStore"):
        d.kv.admit(*step_of("prefill", {1: 6}, forks=[Fork(1, "main", "cfg_text")]))


def test_a_fork_target_loses_its_keyed_history():
    walks = {label: PrefixStream("tokens", walk="prefill") for label in ("main", "cfg_text")}
    d = make(walks=walks, store=Bytes())
    d.kv.ingest_request(1, RequestConfig({label: keyed(range(6), 4) for label in walks}))
    d.kv.resolve_cached_prefix(1, NODE, "prefill", WalkInputs({"cfg_text": range(6)}))
    assert d.kv.stream(1, "cfg_text").chain is not None
    forked(d, "post", 6)
    assert d.kv.stream(1, "cfg_text").chain is None
    assert len(d.kv.index) == 1


def test_a_target_that_finds_no_pages_is_refused():
    d = make(num_pages=5, store=Bytes())
    d.ingest(1, range(10))
    refusal = d.kv.admit(*step_of("prefill", {1: 10}, forks=[Fork(1, "main", "cfg_text", "post")]))
    assert (refusal.label, refusal.pages_short) == ("main", 2)


# -- the invariants speak


def test_i3_lists_every_page_that_disagrees():
    d = make()
    d.ingest(1, range(10))
    d.prefill(1)
    first, second, _ = d.kv.stream(1).page_indices
    d.kv.arena.num_owners[first] += 1
    d.kv.arena.num_owners[second] += 2
    with pytest.raises(IntegrityError, match=f"I3: page {first} owned 3, named 2; page {second} owned 4, named 2"):
        d.kv.check()


def test_i1_a_page_free_and_owned():
    d = make()
    d.kv.arena.num_owners[5] = 1
    with pytest.raises(IntegrityError, match=r"I1: pages \[5\]"):
        d.kv.check()


def test_i2_a_page_that_got_lost():
    d = make()
    d.kv.arena.acquire(1)
    d.kv.arena.num_owners[1] = 0
    with pytest.raises(IntegrityError, match="I2: 22 free"):
        d.kv.check()


def test_i4_a_shared_page_that_may_still_be_written():
    d = make()
    d.ingest(1, range(10))
    d.prefill(1)
    d.kv.arena._sealed[d.kv.stream(1).page_indices[0]] = 0
    with pytest.raises(IntegrityError, match="I4"):
        d.kv.check()


def test_i5_a_page_to_be_written_that_others_own():
    d = make()
    d.ingest(1, range(10))
    d.prefill(1)
    d.kv.stream(1).stored_len = 3
    with pytest.raises(IntegrityError, match="I5.*which others own"):
        d.kv.check()


def test_an_environment_that_says_neither_is_refused_by_a_pool_of_its_own_too(monkeypatch):
    monkeypatch.setenv("KVLAB_CHECK", "yes")
    with pytest.raises(InputError, match="KVLAB_CHECK is 'yes'; it must be 1"):
        make(check_invariants=None)


def test_invariants_are_checked_when_asked_for(monkeypatch):
    monkeypatch.delenv("KVLAB_CHECK")
    is_raised = {}
    for checks in (True, False, None):
        d = make(check_invariants=checks)
        d.ingest(1, range(10))
        d.kv.arena.num_owners[9] += 1
        try:
            d.prefill(1)
            is_raised[checks] = False
        except IntegrityError:
            is_raised[checks] = True
    assert is_raised == {True: True, False: False, None: False}


# -- the event log


def test_without_a_recorder_no_event_is_built(monkeypatch):
    from kvlab import events

    for name in events.EVENT_TYPES:
        monkeypatch.setattr(events, name, None)
    d = make(num_pages=8, store=Bytes())
    d.serve(1, range(10), range(6))
    d.serve(2, range(10))
    d.serve(3, range(100, 120))
    d.kv.reset_prefix_cache()
    assert d.kv.counters.hits == 1


def test_a_fork_replays_to_its_length(tmp_path):
    recorder = Recorder(clock=lambda: 0.0)
    d = make(store=Bytes(), record=recorder)
    d.ingest(1, range(10))
    d.probe(1)
    forked(d, "post", 10)
    state = recorder.replay()
    assert state.stored_tokens == {(1, "main"): 10, (1, "cfg_text"): 10}
    assert state.streams == {(1, label): d.kv.stream(1, label).page_indices for label in ("main", "cfg_text")}
    recorder.to_jsonl(tmp_path / "log.jsonl")
    assert Recorder.from_jsonl(tmp_path / "log.jsonl").replay() == state


def test_keys_and_roots_in_events_are_their_first_16_hex_digits(tmp_path):
    recorder = Recorder(clock=lambda: 0.0)
    d = make(record=recorder)
    d.ingest(1, range(10))
    d.prefill(1)
    recorder.to_jsonl(tmp_path / "log.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    (opened,) = [line for line in lines if line.get("kind") == "RootOpened"]
    filed = [line for line in lines if line.get("kind") == "PageIndexed"]
    assert opened["root"] == ROOT.hex()[:16]
    assert opened["labels"] == ["main"]
    assert [line["key"] for line in filed] == [key.hex()[:16] for key in d.kv.page_keys(1)]
    assert {line["root"] for line in filed} == {d.kv.stream(1).root.hex()[:16]}
    assert [(line["position"], line["parent"]) for line in filed] == [(0, None), (1, filed[0]["page"])]
