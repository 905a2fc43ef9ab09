"""One lease over the walks of a prompt, and walks that are not what the layout says."""

from __future__ import annotations

import logging

import pytest
from kv_driver import (
    NODE,
    UNDERSTANDING,
    MediaDriver,
    media_driver,
    miss_ranges,
    picture,
    step_of,
    text,
)

from kvlab.errors import InputError
from kvlab.recorder import Recorder
from kvlab.spec import (
    AllocationFailed,
    Block,
    Match,
    RequestConfig,
    WalkInputs,
)

# -- walks that are not what the layout says


def disagree(d: MediaDriver, served: int, walk: str = "prefill_vit", slots: int = 31):
    """Serve ``served`` slots of text, then write a picture of another size."""
    prompt = [text(served), picture(30), text(10)]
    d.serve(1, prompt)
    d.ingest(2, prompt)
    d.walk(2, 0)
    return d.kv.resolve_cached_prefix(2, NODE, walk, WalkInputs({}, blocks={"main": Block(slots, 1)}))


def test_b29_served_text_that_ends_with_a_page_is_kept(caplog):
    d = media_driver()
    with caplog.at_level(logging.WARNING, "kvlab.cache"):
        assert disagree(d, 32) is None
    assert "'prefill_vit' writes 31 slots" in caplog.text
    assert "span 1 of its layout has 30" in caplog.text
    assert d.kv.stream(2).chain is None
    tables = d.run(2, "prefill_vit", 0)
    assert tables.rows[0].length == 32
    assert miss_ranges(d, 2) == [(32, 63, "chain_ended")]


def test_b29_served_text_that_ends_inside_a_page_fails_the_request():
    d = media_driver()
    with pytest.raises(InputError, match="end inside a page"):
        disagree(d, 20)
    d.kv.remove_request(2)
    assert d.serve(3, [text(20), picture(30), text(10)]) == [20, 30, 0]


@pytest.mark.parametrize(("served", "fails"), [(32, False), (20, True)])
def test_b29_a_walk_that_is_not_probed_is_the_same(served, fails, caplog):
    d = media_driver()
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
    assert miss_ranges(d, 2) == [(32, 62, "opaque_inputs")]
    assert d.run(2, "prefill_vit", 30).rows[0].length == 62
    assert d.kv.stream(2).chain is None


def test_b29_a_picture_of_another_size_that_was_not_served_files_nothing():
    d = media_driver()
    d.ingest(1, [text(20), picture(30), text(10)])
    d.walk(1, 0)
    d.kv.resolve_cached_prefix(1, NODE, "prefill_vit", WalkInputs({}, blocks={"main": Block(29, 1)}))
    d.run(1, "prefill_vit", 0)
    assert d.kv.stream(1).chain is None
    assert len(d.kv.index) == 1


def test_b16_a_laid_out_picture_that_is_never_probed_files_the_text_alone():
    d = media_driver()
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
    d = media_driver()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    assert [d.walk(2, 0), d.walk(2, 1)] == [20, 30]
    assert d.kv.stored_tokens(2) == 0
    assert len(d.kv.stream(2).lease) == 4
    assert d.walk(2, 2) == 14
    assert d.kv.stored_tokens(2) == 75


def test_a_walk_asked_again_before_it_ran_gets_the_same_answer():
    d = media_driver()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    d.walk(2, 0)
    d.walk(2, 1)
    assert [d.probe(2, 2) for _ in range(3)] == [Match(14, 35)] * 3


def test_b2_a_refused_admit_after_served_walks_answers_the_same():
    d = media_driver(num_pages=7)
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
    d = media_driver()
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
    d = media_driver()
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
    d = media_driver()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    d.walk(2, 0)
    d.kv.reset_prefix_cache()
    assert d.walk(2, 1) == 30
    assert d.walk(2, 2) == 14
    assert d.kv.stored_tokens(2) == 75
    assert len(d.kv.index) == 0


def test_a_lease_taken_at_the_gate_is_that_of_the_first_probe():
    d = media_driver()
    d.serve(1, [text(20), picture(30)])
    d.ingest(2, [text(20), picture(30), text(10)])
    assert len(d.kv.peek_prefix(2)) == d.kv.lease_prefix(2) == 3
    assert d.kv.pages_taken(2) == (1, 3)  # the copy is a page of its own
    assert d.prefill(2) == [20, 30, 0]
    assert d.kv.pages_taken(2) == (1, 3)


def test_the_gate_is_told_of_whole_pages_before_a_cut():
    d = media_driver(num_pages=8)
    d.ingest(1, UNDERSTANDING)
    d.walk(1, 0)
    d.walk(1, 1)
    d.kv.evict(1)
    d.ingest(2, UNDERSTANDING, [*range(20), *range(100, 125)])
    assert len(d.kv.peek_prefix(2)) == d.kv.lease_prefix(2) == 1


def test_a_smaller_agreement_inside_a_page_fails_the_request():
    d = media_driver()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    d.walk(2, 0)
    inputs = d.inputs(2, 1)
    d.kv.resolve_cached_prefix(2, NODE, "prefill_vit", inputs)
    with pytest.raises(InputError, match="end inside a page"):
        d.kv.apply_cached_prefix(2, NODE, "prefill_vit", inputs, {"main": Match(0, 0)})


def test_the_log_of_served_walks_replays_to_the_state():
    recorder = Recorder(clock=lambda: 0.0)
    d = media_driver(record=recorder)
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


def test_a_request_that_wants_every_row_opts_out_of_every_walk():
    d = media_driver()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING, prompt_logprobs=True)
    assert d.prefill(2) == [0, 0, 0]
    assert miss_ranges(d, 2) == [(0, 20, "opted_out"), (20, 50, "opted_out"), (50, 75, "opted_out")]


def test_an_offloaded_request_comes_back_between_walks():
    d = media_driver(cpu_offload_pages=8)
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING, [*range(20), *range(100, 125)])
    d.walk(2, 0)
    d.walk(2, 1)
    d.probe(2, 2)
    step, ctx = step_of("prefill_text", {2: 25})
    assert d.kv.admit(step, ctx) is None
    d.kv.abort(step, ctx)
    assert d.kv.offload(2) > 0
    assert d.kv.reload(2)
    assert d.walk(2, 2) == 0
    assert d.kv.stored_tokens(2) == 75
