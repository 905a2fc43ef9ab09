"""Prompts of texts and pictures: what is served of each walk, and what is never served."""

from __future__ import annotations

import pytest
from kv_driver import (
    NODE,
    UNDERSTANDING,
    media_driver,
    miss_ranges,
    picture,
    text,
)

from kvlab.spec import (
    Match,
)

# -- what is served


def test_a_repeat_computes_its_last_text_alone():
    d = media_driver()
    assert d.serve(1, UNDERSTANDING) == [0, 0, 0]
    assert d.serve(2, UNDERSTANDING) == [20, 30, 14]


def test_the_same_picture_before_another_question_is_served_whole():
    d = media_driver()
    d.serve(1, UNDERSTANDING)
    assert d.serve(2, UNDERSTANDING, [*range(20), *range(100, 125)]) == [20, 30, 0]


def test_the_copy_at_a_pictures_end_is_bit_identical_and_private():
    d = media_driver()
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
    d = media_driver()
    d.serve(1, [text(3), picture(6, b"red"), text(4)])
    assert d.serve(2, [text(3), picture(6, b"blue"), text(4)]) == [0, 0, 0]
    assert d.serve(3, [text(3), picture(6, b"red"), text(4)], [0, 1, 2, 9, 9, 9, 9]) == [3, 6, 0]


def test_another_picture_shares_the_whole_pages_before_it():
    d = media_driver()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, [text(20), picture(30, b"blue"), text(25)])
    assert d.prefill(2) == [16, 0, 0]
    assert miss_ranges(d, 2) == [(16, 75, "diverged")]


def test_positions_grow_by_one_over_a_served_picture():
    d = media_driver()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    assert [d.probe(2, index) for index in range(3)] == [Match(20, 20), Match(30, 21), Match(14, 35)]


def test_k1_1_the_same_text_with_another_picture():
    def prompt(colour):
        return [text(4), picture(6, colour), text(7)]

    d = media_driver(page_size=4)
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
    d = media_driver(page_size=4)
    d.serve(1, [text(2), picture(5, b"a"), text(2), picture(3, b"b")])
    d.ingest(2, spans)
    d.prefill(2)
    assert len(d.kv.stream(2).page_indices[: d.kv.stream(2).hits]) * 4 == hit // 4 * 4


def test_k1_3_one_picture_of_six_slots_is_not_two_of_three():
    d = media_driver(page_size=4)
    d.serve(1, [text(2), picture(6, b"a"), text(4)])
    assert d.serve(2, [text(2), picture(3, b"a"), picture(3, b"b"), text(4)]) == [0, 0, 0, 0]


def test_k1_8_a_later_picture_spoils_no_earlier_turn():
    d = media_driver(page_size=4)
    first = [text(12), picture(8, b"a")]
    d.serve(1, first)
    assert sum(d.serve(2, [*first, text(6), picture(8, b"b"), text(5)])) >= 20


@pytest.mark.parametrize("noise", [b"(1, 0)", b"(2, 0)"])
def test_k18_7_another_draw_of_noise_is_another_picture(noise):
    d = media_driver()
    d.serve(1, [picture(30, b"red" + b"(7, 0)", "prefill_vae"), text(10)])
    assert d.serve(2, [picture(30, b"red" + noise, "prefill_vae"), text(10)]) == [0, 0]


def test_k18_7_without_noise_the_picture_is_shared():
    d = media_driver()
    d.serve(1, [picture(30, b"red mean", "prefill_vae"), text(10)])
    assert d.serve(2, [picture(30, b"red mean", "prefill_vae"), text(10)]) == [30, 2]


def test_a_prompt_that_ends_with_a_picture_is_served_whole():
    d = media_driver()
    prompt = [text(20), picture(30, b"red", "prefill_vae"), picture(18)]
    d.serve(1, prompt)
    d.ingest(2, prompt)
    assert d.prefill(2) == [20, 30, 18]
    assert d.kv.stored_tokens(2) == 0
    tables = d.run(2, "decode", 1)
    assert (tables.rows[0].length, tables.rows[0].to_compute) == (69, 1)
    assert miss_ranges(d, 2) == []


def test_a_prompt_served_whole_to_a_page_boundary_goes_on_behind_it():
    d = media_driver()
    prompt = [text(20), picture(28)]
    d.serve(1, prompt)
    d.ingest(2, prompt)
    assert d.prefill(2) == [20, 28]
    d.run(2, "decode", 1)
    assert (d.kv.stored_tokens(2), d.kv.stream(2).hits) == (49, 3)


def test_generation_after_a_served_picture_extends_the_chain():
    d = media_driver()
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
    d = media_driver()
    d.ingest(1, [text(20), picture(30)])
    d.prefill(1)
    indexed = len(d.kv.index)
    d.run(1, "close_text", 2)
    assert d.kv.stream(1).chain is None
    assert len(d.kv.index) == indexed == 4
