"""Prompts of texts and pictures: what is served of each walk, and what is never served."""

from __future__ import annotations

import logging

import pytest
from kv_driver import MEDIA, NODE, MediaDriver, SlotStore, keyed, laid_out, picture, step_of, text

from kvlab.cache.kv import KVResource
from kvlab.cache.misses import MissLog
from kvlab.errors import InputError, IntegrityError
from kvlab.recorder import Recorder
from kvlab.spec import (
    AllocationFailed,
    Block,
    Fork,
    KVLayout,
    Match,
    Prefix,
    PrefixStream,
    RequestConfig,
    Segment,
    Step,
    StepContext,
    WalkInputs,
)

ROOT = b"r" * 32
UNDERSTANDING = [text(20), picture(30), text(25)]


def make(page_size: int = 16, num_pages: int = 24, walks=MEDIA, store: SlotStore | None = None, **options) -> MediaDriver:
    store = SlotStore() if store is None else store
    kv = KVResource(
        KVLayout(1, 1, 8, page_size), num_pages, store=store, miss_log=MissLog(num_pages), check_invariants=True, **options
    )
    kv.enable_prefix_cache(ROOT, walks)
    return MediaDriver(kv, store)


def ranges(d: MediaDriver, rid) -> list[tuple[int, int, str]]:
    return [(m.start, m.stop, m.cause) for m in d.kv.cached_misses(rid)]


# -- what is served


def test_a_repeat_computes_its_last_text_alone():
    d = make()
    assert d.serve(1, UNDERSTANDING) == [0, 0, 0]
    assert d.serve(2, UNDERSTANDING) == [20, 30, 14]


def test_the_same_picture_before_another_question_is_served_whole():
    d = make()
    d.serve(1, UNDERSTANDING)
    assert d.serve(2, UNDERSTANDING, [*range(20), *range(100, 125)]) == [20, 30, 0]


def test_the_copy_at_a_pictures_end_is_bit_identical_and_private():
    d = make()
    d.serve(1, UNDERSTANDING)
    d.store.copied.clear()
    d.ingest(2, UNDERSTANDING, [*range(20), *range(100, 125)])
    d.walk(2, 0)
    ((kept,), (own,)) = d.store.copied[0]
    assert [d.store.slots[kept, slot] for slot in range(2)] == [d.store.slots[own, slot] for slot in range(2)]
    assert d.kv.stream(2).lease[3] == own
    assert (d.kv.index.key_of(own), d.kv.arena.owners(own)) == (None, 1)
    d.walk(2, 1)
    d.walk(2, 2)
    assert d.serve(3, UNDERSTANDING, [*range(20), *range(200, 225)]) == [20, 30, 0]


def test_b30_another_picture_wholly_on_the_last_page_answers_nothing():
    d = make()
    d.serve(1, [text(3), picture(6, b"red"), text(4)])
    assert d.serve(2, [text(3), picture(6, b"blue"), text(4)]) == [0, 0, 0]
    assert d.serve(3, [text(3), picture(6, b"red"), text(4)], [0, 1, 2, 9, 9, 9, 9]) == [3, 6, 0]


def test_another_picture_shares_the_whole_pages_before_it():
    d = make()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, [text(20), picture(30, b"blue"), text(25)])
    assert d.prefill(2) == [16, 0, 0]
    assert ranges(d, 2) == [(16, 75, "diverged")]


def test_positions_grow_by_one_over_a_served_picture():
    d = make()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    assert [d.probe(2, index) for index in range(3)] == [Match(20, 20), Match(30, 21), Match(14, 35)]


def test_k1_1_the_same_text_with_another_picture():
    def prompt(colour):
        return [text(4), picture(6, colour), text(7)]

    d = make(page_size=4)
    d.serve("red", prompt(b"red"))
    assert sum(d.serve("blue", prompt(b"blue"))) == 4
    assert sum(d.serve("red again", prompt(b"red"))) == 16


@pytest.mark.parametrize(
    ("spans", "hit"),
    [
        pytest.param([text(2), picture(5, b"a"), text(2), picture(3, b"x")], 9, id="only b is another"),
        pytest.param([text(2), picture(5, b"b"), text(2), picture(3, b"a")], 0, id="a and b change places"),
        pytest.param([text(3), picture(5, b"a"), text(1), picture(3, b"b")], 0, id="a is shifted by one"),
    ],
)
def test_k1_3_which_picture_and_which_part_of_it(spans, hit):
    d = make(page_size=4)
    d.serve(1, [text(2), picture(5, b"a"), text(2), picture(3, b"b")])
    d.ingest(2, spans)
    d.prefill(2)
    assert len(d.kv.stream(2).page_indices[: d.kv.stream(2).hits]) * 4 == hit // 4 * 4


def test_k1_3_one_picture_of_six_slots_is_not_two_of_three():
    d = make(page_size=4)
    d.serve(1, [text(2), picture(6, b"a"), text(4)])
    assert d.serve(2, [text(2), picture(3, b"a"), picture(3, b"b"), text(4)]) == [0, 0, 0, 0]


def test_k1_8_a_later_picture_spoils_no_earlier_turn():
    d = make(page_size=4)
    first = [text(12), picture(8, b"a")]
    d.serve(1, first)
    assert sum(d.serve(2, [*first, text(6), picture(8, b"b"), text(5)])) >= 20


@pytest.mark.parametrize("noise", [b"(1, 0)", b"(2, 0)"])
def test_k18_7_another_draw_of_noise_is_another_picture(noise):
    d = make()
    d.serve(1, [picture(30, b"red" + b"(7, 0)", "prefill_vae"), text(10)])
    assert d.serve(2, [picture(30, b"red" + noise, "prefill_vae"), text(10)]) == [0, 0]


def test_k18_7_without_noise_the_picture_is_shared():
    d = make()
    d.serve(1, [picture(30, b"red mean", "prefill_vae"), text(10)])
    assert d.serve(2, [picture(30, b"red mean", "prefill_vae"), text(10)]) == [30, 2]


def test_a_prompt_that_ends_with_a_picture_is_served_whole():
    d = make()
    prompt = [text(20), picture(30, b"red", "prefill_vae"), picture(18)]
    d.serve(1, prompt)
    d.ingest(2, prompt)
    assert d.prefill(2) == [20, 30, 18]
    assert d.kv.stored_tokens(2) == 0
    tables = d.run(2, "decode", 1)
    assert (tables.rows[0].length, tables.rows[0].to_compute) == (69, 1)
    assert ranges(d, 2) == []


def test_a_prompt_served_whole_to_a_page_boundary_goes_on_behind_it():
    d = make()
    prompt = [text(20), picture(28)]
    d.serve(1, prompt)
    d.ingest(2, prompt)
    assert d.prefill(2) == [20, 28]
    d.run(2, "decode", 1)
    assert (d.kv.stored_tokens(2), d.kv.stream(2).hits) == (49, 3)


def test_generation_after_a_served_picture_extends_the_chain():
    d = make()
    prompt = [text(20), picture(30)]
    for rid in (1, 2):
        d.ingest(rid, prompt)
        d.prefill(rid)
        for token in range(30):
            d.kv.extend_prefix_chain(rid, NODE, "decode", {"tokens": [[token]]})
            d.run(rid, "decode", 1)
        assert d.kv.stored_tokens(rid) == 80
        assert d.kv.stream(rid).chain is not None
    assert len(d.kv.index) == 6  # five whole pages, and the page that the picture ends on
    assert d.kv.page_keys(1) == d.kv.page_keys(2)


def test_close_text_ends_the_chain_and_what_is_indexed_stays():
    d = make()
    d.ingest(1, [text(20), picture(30)])
    d.prefill(1)
    indexed = len(d.kv.index)
    d.run(1, "close_text", 2)
    assert d.kv.stream(1).chain is None
    assert len(d.kv.index) == indexed == 4


# -- a match that ends inside a picture


def test_a_match_inside_a_picture_is_cut_back_to_whole_pages_before_it():
    d = make(store=SlotStore(), num_pages=8)
    d.ingest(1, UNDERSTANDING)
    d.walk(1, 0)
    d.walk(1, 1)
    assert d.kv.evict(1) == 1  # the copy at the picture's end
    d.ingest(2, UNDERSTANDING, [*range(20), *range(100, 125)])
    assert d.prefill(2) == [16, 0, 0]
    assert ranges(d, 2)[0] == (16, 48, "image_cut")
    assert "ends inside the picture in slots [20, 50)" in d.kv.cached_misses(2)[0].evidence


@pytest.mark.parametrize(("evicted", "served"), [(0, [5, 6, 10, 0]), (1, [5, 6, 0, 0]), (2, [4, 0, 0, 0])])
def test_a_cut_that_ends_inside_an_earlier_picture_ends_with_that_one_or_before_it(evicted, served):
    d = make(page_size=4, num_pages=40)
    d.ingest(1, [text(5), picture(6, b"a"), picture(10, b"b"), text(4)])
    for walk in range(3):
        d.walk(1, walk)
    stream = d.kv.stream(1)
    assert d.kv.index.lookup(stream.root, [stream.chain.ends[11].key])  # so that the copy at b's end goes first
    assert d.kv.evict(evicted) == evicted
    assert d.serve(2, d.prompts[1][0], [0, 1, 2, 3, 4, 9, 9, 9, 9]) == served


def test_without_a_page_store_no_copy_is_kept():
    kv = KVResource(KVLayout(1, 1, 8, 16), 24, check_invariants=True)
    kv.enable_prefix_cache(ROOT, MEDIA)
    d = MediaDriver(kv, SlotStore())
    d.serve(1, UNDERSTANDING)
    assert kv.counters.ends_kept == 0
    assert d.serve(2, UNDERSTANDING, [*range(20), *range(100, 125)]) == [16, 0, 0]


def test_no_copy_is_kept_where_no_page_is_free():
    d = make(num_pages=6)
    d.ingest(1, [*UNDERSTANDING])
    d.walk(1, 0)
    d.kv.ingest_request(2, RequestConfig())
    d.prompts[2] = [text(16)], list(range(500, 516))
    d.run(2, "prefill_text", 16)
    d.walk(1, 1)
    assert d.kv.arena.num_free == 0
    assert d.kv.counters.ends_kept == 0


def test_where_no_other_page_is_left_the_kept_copy_itself_goes_on():
    d = make(num_pages=6)
    d.serve(1, [text(20), picture(30)])
    d.kv.ingest_request(9, RequestConfig())
    d.prompts[9] = [text(16)], list(range(500, 516))
    d.run(9, "prefill_text", 16)
    (kept,) = [page for page in d.kv.index.pages() if d.kv.index.position_of(page) == 3]
    d.ingest(2, [text(20), picture(30), text(10)])
    assert d.kv.arena.num_free == 0
    assert d.prefill(2) == [20, 30, 0]
    assert d.kv.stream(2).page_indices[3] == kept


def test_a_kept_copy_is_evicted_like_any_leaf():
    d = make()
    d.serve(1, [text(20), picture(30)])
    index = d.kv.index
    (kept,) = [page for page in index.pages() if index.position_of(page) == 3]
    assert index.is_leaf(kept)
    assert index.parent_of(kept) is not None
    assert d.kv.evict(1) == 1
    assert index.key_of(kept) is None


def test_a_kept_copy_that_went_to_the_host_is_copied_from_there():
    d = make(host_tier_pages=8)
    d.serve(1, [text(20), picture(30)])
    assert d.kv.evict(8) == 4
    assert d.serve(2, [text(20), picture(30), text(10)]) == [20, 30, 0]


# -- walks that are not what the layout says


def disagree(d: MediaDriver, served: int, walk: str = "prefill_vit", slots: int = 31):
    """Serve ``served`` slots of text, then write a picture of another size."""
    prompt = [text(served), picture(30), text(10)]
    d.serve(1, prompt)
    d.ingest(2, prompt)
    d.walk(2, 0)
    return d.kv.resolve_cached_prefix(2, NODE, walk, WalkInputs({}, blocks={"main": Block(slots, 1)}))


def test_b29_served_text_that_ends_with_a_page_is_kept(caplog):
    d = make()
    with caplog.at_level(logging.WARNING, "kvlab.cache"):
        assert disagree(d, 32) is None
    assert "'prefill_vit' writes 31 slots" in caplog.text
    assert "span 1 of its layout has 30" in caplog.text
    assert d.kv.stream(2).chain is None
    tables = d.run(2, "prefill_vit", 0)
    assert tables.rows[0].length == 32
    assert ranges(d, 2) == [(32, 63, "chain_ended")]


def test_b29_served_text_that_ends_inside_a_page_fails_the_request():
    d = make()
    with pytest.raises(InputError, match="end inside a page"):
        disagree(d, 20)
    d.kv.remove_request(2)
    assert d.serve(3, [text(20), picture(30), text(10)]) == [20, 30, 0]


@pytest.mark.parametrize(("served", "fails"), [(32, False), (20, True)])
def test_b29_a_walk_that_is_not_probed_is_the_same(served, fails, caplog):
    d = make()
    prompt = [text(served), picture(30), text(10)]
    d.serve(1, prompt)
    d.ingest(2, prompt)
    d.walk(2, 0)
    inputs = d.inputs(2, 1)
    if fails:
        with pytest.raises(InputError, match="end inside a page"):
            d.kv.note_unprobed(2, NODE, "prefill_vit", inputs, "opaque_inputs")
        return
    d.kv.note_unprobed(2, NODE, "prefill_vit", inputs, "opaque_inputs")
    assert "was not probed (opaque_inputs" in caplog.text
    assert ranges(d, 2) == [(32, 62, "opaque_inputs")]
    assert d.run(2, "prefill_vit", 30).rows[0].length == 62
    assert d.kv.stream(2).chain is None


def test_b29_a_picture_of_another_size_that_was_not_served_files_nothing():
    d = make()
    d.ingest(1, [text(20), picture(30), text(10)])
    d.walk(1, 0)
    d.kv.resolve_cached_prefix(1, NODE, "prefill_vit", WalkInputs({}, blocks={"main": Block(29, 1)}))
    d.run(1, "prefill_vit", 0)
    assert d.kv.stream(1).chain is None
    assert len(d.kv.index) == 1


def test_b16_a_laid_out_picture_that_is_never_probed_files_the_text_alone():
    d = make()
    d.ingest(1, [text(36), picture(12)])
    d.walk(1, 0)
    d.kv.note_unprobed(1, NODE, "prefill_vit", d.inputs(1, 1), "walk_not_keyed")
    d.run(1, "prefill_vit", 12)
    for token in range(30):
        d.kv.extend_prefix_chain(1, NODE, "decode", {"tokens": [[token]]})
        d.run(1, "decode", 1)
    assert len(d.kv.index) == 2
    assert d.kv.stream(1).chain is None


# -- leases over several walks


def test_b31_a_served_walk_needs_no_step_and_the_next_one_goes_on():
    d = make()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    assert [d.walk(2, 0), d.walk(2, 1)] == [20, 30]
    assert d.kv.stored_tokens(2) == 0
    assert len(d.kv.stream(2).lease) == 4
    assert d.walk(2, 2) == 14
    assert d.kv.stored_tokens(2) == 75


def test_a_walk_asked_again_before_it_ran_gets_the_same_answer():
    d = make()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    d.walk(2, 0)
    d.walk(2, 1)
    assert [d.probe(2, 2) for _ in range(3)] == [Match(14, 35)] * 3


def test_b2_a_refused_admit_after_served_walks_answers_the_same():
    d = make(num_pages=7)
    d.serve(1, [text(20), picture(30)])
    d.ingest(2, [text(20), picture(30), text(40)])
    d.walk(2, 0)
    d.walk(2, 1)
    assert d.probe(2, 2) == Match(0, 21)
    d.kv.ingest_request(3, RequestConfig())
    d.prompts[3] = [text(16)], list(range(500, 516))
    d.run(3, "prefill_text", 16)
    assert isinstance(d.run(2, "prefill_text", 40), AllocationFailed)
    assert d.kv.stream(2).converted
    assert d.probe(2, 2) == Match(0, 21)
    d.kv.remove_request(3)
    assert d.run(2, "prefill_text", 40).rows[0].length == 90


def test_an_aborted_step_after_served_walks_answers_the_same():
    d = make()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    d.walk(2, 0)
    d.walk(2, 1)
    match = d.probe(2, 2)
    step, ctx = step_of("prefill_text", {2: 11})
    d.kv.admit(step, ctx)
    d.kv.plan(step, ctx)
    d.kv.abort(step, ctx)
    assert d.probe(2, 2) == match
    assert d.run(2, "prefill_text", 11).rows[0].length == 75


@pytest.mark.parametrize("end", ["remove_request", "reset_request"])
def test_served_walks_let_go_of_all_they_hold(end):
    d = make()
    d.serve(1, [text(20), picture(30)])
    free = d.kv.arena.num_free
    d.ingest(2, [text(20), picture(30), text(10)])
    d.walk(2, 0)
    d.walk(2, 1)
    getattr(d.kv, end)(2)
    assert d.kv.arena.num_free == free
    assert d.kv.supply_pages() == d.kv.usable_pages
    if end == "reset_request":
        assert d.prefill(2) == [20, 30, 0]


def test_a_reset_of_the_cache_between_walks_keeps_what_was_served():
    d = make()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    d.walk(2, 0)
    d.kv.reset_prefix_cache()
    assert d.walk(2, 1) == 30
    assert d.walk(2, 2) == 14
    assert d.kv.stored_tokens(2) == 75
    assert len(d.kv.index) == 0


def test_a_lease_taken_at_the_gate_is_that_of_the_first_probe():
    d = make()
    d.serve(1, [text(20), picture(30)])
    d.ingest(2, [text(20), picture(30), text(10)])
    assert len(d.kv.peek_prefix(2)) == d.kv.lease_prefix(2) == 3
    assert d.kv.pages_taken(2) == (1, 3)  # the copy is a page of its own
    assert d.prefill(2) == [20, 30, 0]
    assert d.kv.pages_taken(2) == (1, 3)


def test_the_gate_is_told_of_whole_pages_before_a_cut():
    d = make(num_pages=8)
    d.ingest(1, UNDERSTANDING)
    d.walk(1, 0)
    d.walk(1, 1)
    d.kv.evict(1)
    d.ingest(2, UNDERSTANDING, [*range(20), *range(100, 125)])
    assert len(d.kv.peek_prefix(2)) == d.kv.lease_prefix(2) == 1


def test_a_smaller_agreement_inside_a_page_fails_the_request():
    d = make()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    d.walk(2, 0)
    inputs = d.inputs(2, 1)
    d.kv.resolve_cached_prefix(2, NODE, "prefill_vit", inputs)
    with pytest.raises(InputError, match="end inside a page"):
        d.kv.apply_cached_prefix(2, NODE, "prefill_vit", inputs, {"main": Match(0, 0)})


def test_the_log_of_served_walks_replays_to_the_state():
    recorder = Recorder(clock=lambda: 0.0)
    d = make(record=recorder)
    d.serve(1, [text(20), picture(30)])
    d.ingest(2, [text(20), picture(30), text(10)])
    d.walk(2, 0)
    d.walk(2, 1)
    assert recorder.replay().leases == {(2, "main"): d.kv.stream(2).lease}
    d.walk(2, 2)
    state = recorder.replay()
    assert state.streams == {(2, "main"): d.kv.stream(2).page_indices}
    assert state.stored_tokens[2, "main"] == 60
    assert set(state.indexed()) == set(d.kv.index.pages())


# -- steps that store nothing


def reading_step(*segments: Segment) -> tuple[Step, StepContext]:
    return Step(0, NODE, "image_gen", segments, commit=False), StepContext(frozenset(s.rid for s in segments))


def test_a_step_without_commit_reads_what_is_stored_and_grows_nothing():
    d = make()
    d.ingest(1, [text(20), picture(30)])
    d.prefill(1)
    pages = list(d.kv.stream(1).page_indices)
    segments = [Segment(1, "main", 18, 0), Segment(1, "cfg_text", 18, 0, Prefix("main", 20, 20)), Segment(1, "cfg_img", 18, 0)]
    step, ctx = reading_step(*segments)
    for _ in range(3):
        assert d.kv.admit(step, ctx) is None
        tables = d.kv.plan(step, ctx)
        d.kv.commit(step, ctx)
    assert not tables.commit
    assert [(row.label, list(row.pages), row.length, row.to_compute) for row in tables.rows] == [
        ("main", pages, 50, 18),
        ("cfg_text", pages[:2], 20, 18),
        ("cfg_img", [], 0, 18),
    ]
    assert (d.kv.stream(1).page_indices, d.kv.stored_tokens(1)) == (pages, 50)
    assert d.kv.stream(1).chain is not None


def test_b27_a_step_without_commit_files_nothing():
    d = make()
    d.ingest(1, [text(20)])
    d.prefill(1)
    indexed = set(d.kv.index.pages())
    step, ctx = reading_step(Segment(1, "main", 100, 0))
    d.kv.admit(step, ctx)
    d.kv.plan(step, ctx)
    d.kv.commit(step, ctx)
    assert set(d.kv.index.pages()) == indexed


def test_a_prompt_served_whole_is_read_by_a_step_without_commit():
    d = make()
    prompt = [text(20), picture(30)]
    d.serve(1, prompt)
    d.ingest(2, prompt)
    d.prefill(2)
    step, ctx = reading_step(Segment(2, "main", 18, 0), Segment(2, "cfg_text", 18, 0, Prefix("main", 50, 21)))
    assert d.kv.admit(step, ctx) is None
    assert [row.length for row in d.kv.plan(step, ctx).rows] == [50, 50]
    d.kv.commit(step, ctx)
    assert not d.kv.stream(2).converted
    d.kv.remove_request(2)
    d.kv.check()


def test_a_prefix_longer_than_what_is_stored_is_refused():
    d = make()
    d.ingest(1, [text(20)])
    d.prefill(1)
    step, ctx = reading_step(Segment(1, "cfg_text", 18, 0, Prefix("main", 21, 21)))
    d.kv.admit(step, ctx)
    with pytest.raises(InputError, match="first 21 slots"):
        d.kv.plan(step, ctx)


def test_a_step_that_commits_reads_no_other_stream():
    d = make()
    d.ingest(1, [text(20)])
    step = Step(0, NODE, "prefill_text", (Segment(1, "cfg_text", 4, None, Prefix("main", 0, 0)),))
    with pytest.raises(InputError, match="commits"):
        d.kv.admit(step, StepContext(frozenset({1})))


def test_padding_of_a_step_without_commit_reads_nothing():
    d = make()
    step, _ = reading_step(Segment(9, "main", 18, 0))
    (row,) = d.kv.plan(step, StepContext(frozenset())).rows
    assert (list(row.pages), row.length, row.to_compute) == ([], 0, 18)


# -- guided prefill: two labels, each with its own chain

GUIDED = MEDIA | {"cfg_img": PrefixStream("cfg_img", walk="prefill_text", trims_guided=True)}


def guided(d: MediaDriver, rid, count: int = 40) -> tuple[dict[str, int], int]:
    """A text for main and cfg_img, then a picture for main; returns the text's hits, and what was served of the picture."""
    spans, ids = [text(count), picture(30)], list(range(count))
    d.prompts[rid] = spans, ids
    prompts = {"main": laid_out(spans, ids, 16), "cfg_img": keyed(ids, 16, grows=False)}
    d.kv.ingest_request(rid, RequestConfig(prompts))
    inputs = WalkInputs({"main": ids, "cfg_img": ids})
    matches = d.kv.resolve_cached_prefix(rid, NODE, "prefill_text", inputs)
    d.kv.apply_cached_prefix(rid, NODE, "prefill_text", inputs, matches)
    hits = {label: match.slots for label, match in matches.items()}
    rows = tuple(Segment(rid, label, count - hit) for label, hit in hits.items() if hit < count)
    step, ctx = Step(0, NODE, "prefill_text", rows), StepContext(frozenset({rid}))
    assert d.kv.admit(step, ctx) is None
    assert [row.length for row in d.kv.plan(step, ctx).rows] == [count] * len(rows)
    d.kv.commit(step, ctx)
    block = WalkInputs({}, blocks={"main": Block(30, 1)})
    match = d.kv.resolve_cached_prefix(rid, NODE, "prefill_vit", block)
    if match:
        d.kv.apply_cached_prefix(rid, NODE, "prefill_vit", block, match)
    served = match["main"].slots if match else 0
    if not served:
        step, ctx = step_of("prefill_vit", {rid: 30})
        d.kv.admit(step, ctx)
        d.kv.plan(step, ctx)
        d.kv.commit(step, ctx)
    return hits, served


def test_each_label_of_a_guided_prefill_is_trimmed_by_its_own_match():
    d = make(walks=GUIDED)
    assert guided(d, 1) == ({"main": 0, "cfg_img": 0}, 0)
    assert guided(d, 2) == ({"main": 40, "cfg_img": 32}, 30)
    assert d.kv.stored_tokens(2, "cfg_img") == 40
    assert d.kv.stored_tokens(2) == 0  # still a lease


def test_a_label_served_whole_is_asked_again_when_the_others_step_was_refused():
    d = make(walks=GUIDED)
    guided(d, 1)
    ids = list(range(40))
    spans = [text(40), picture(30)]
    d.kv.ingest_request(2, RequestConfig({"main": laid_out(spans, ids, 16), "cfg_img": keyed(ids, 16, grows=False)}))
    inputs = WalkInputs({"main": ids, "cfg_img": ids})
    for _ in range(3):
        matches = d.kv.resolve_cached_prefix(2, NODE, "prefill_text", inputs)
        assert {label: match.slots for label, match in matches.items()} == {"main": 40, "cfg_img": 32}
        d.kv.apply_cached_prefix(2, NODE, "prefill_text", inputs, matches)


def test_a_pre_fork_copies_what_was_there_before_the_walk_and_never_the_match():
    d = make()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    d.walk(2, 0)
    d.walk(2, 1)
    hit = d.probe(2, 2).slots
    step, ctx = step_of("prefill_text", {2: 25 - hit}, forks=[Fork(2, "main", "cfg_text")])
    assert d.kv.admit(step, ctx) is None
    d.kv.plan(step, ctx)
    assert d.kv.stored_tokens(2, "cfg_text") == 50
    d.kv.commit(step, ctx)


# -- the historical fault, on request


def test_b1_ignoring_walks_files_pictures_under_the_keys_of_texts():
    found = {}
    for keying in ("walk", "ignore-walk"):
        d = make(keying=keying)
        d.kv.ingest_request(1, RequestConfig({"main": keyed(range(40), 16)}))
        d.prompts[1] = [picture(50)], []
        d.run(1, "prefill_vae", 50)
        d.kv.remove_request(1)
        d.kv.ingest_request(2, RequestConfig({"main": keyed(range(40), 16)}))
        answer = d.kv.resolve_cached_prefix(2, NODE, "prefill_text", WalkInputs({"main": range(40)}))
        found[keying] = answer["main"].slots
    assert found == {"walk": 0, "ignore-walk": 32}


def test_b27_a_guided_edit_hits_no_pictures_pages():
    d = make()
    edit = [picture(30, b"red", "prefill_vae"), picture(20), text(40)]
    d.serve(1, edit)
    assert d.serve(2, [text(40)]) == [0]


def test_b27_ignoring_walks_a_laid_out_edit_is_keyed_by_its_ids_alone():
    d = make(keying="ignore-walk")
    d.ingest(1, [picture(30, b"red", "prefill_vae"), picture(20), text(40)])
    d.run(1, "prefill_vae", 30)
    d.kv.ingest_request(2, RequestConfig({"main": keyed(range(40), 16)}))
    answer = d.kv.resolve_cached_prefix(2, NODE, "prefill_text", WalkInputs({"main": range(40)}))
    assert answer["main"].slots == 16


def test_an_unknown_keying_is_refused():
    with pytest.raises(InputError, match="keying is 'walks'"):
        make(keying="walks")


def test_the_fault_is_named_wherever_the_resource_is():
    plain, faulty = make().kv, make(keying="ignore-walk").kv
    assert "ignore-walk" in repr(faulty)
    assert "keying" not in repr(plain)
    assert faulty.root_fields()["keying"] == "ignore-walk"
    assert not plain.root_fields()["keying"]


def test_an_unagreed_lease_that_served_part_of_a_page_is_an_error():
    d = make()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    d.walk(2, 0)
    d.kv.resolve_cached_prefix(2, NODE, "prefill_vit", d.inputs(2, 1))
    with pytest.raises(IntegrityError, match="not cut to its lease"):
        d.run(2, "prefill_vit", 30)
