"""A chain: how far a stream is keyed, and what ends it."""

from __future__ import annotations

import pytest
from kv_driver import keyed, laid_out

from kvlab.cache.chain import FOREIGN_WALK, OUTSIDE_LAYOUT, PAST_PROMPT, UNSEEN_TOKENS, PrefixChain
from kvlab.cache.keys import chain_ids, cut_layout
from kvlab.errors import InputError
from kvlab.spec import PrefixStream, Span

TEXT = PrefixStream("tokens", walk="prefill", decode_walk="decode")
MEDIA = PrefixStream("tokens", walk="prefill_text", decode_walk="decode", layout_walks=("prefill_vit",))


def picture(length: int, digest: bytes = b"red") -> Span:
    return Span("digest", "prefill_vit", length, 1, digest)


def text(length: int) -> Span:
    return Span("ids", "prefill_text", length, length)


def test_generated_pages_get_the_keys_of_a_longer_prompt():
    chain = PrefixChain(keyed(range(36), 16), 16)
    for token in range(36, 36 + 30):
        chain.extend([token])
    assert chain.keyed_pages == 4
    assert chain.keys == chain_ids(range(64), 16)
    assert chain.unkeyed == [64, 65]


def test_the_provisional_key_is_replaced_not_kept():
    chain = PrefixChain(keyed(range(6), 4), 4)
    provisional = chain.keys[-1]
    chain.extend([6, 7])
    assert len(chain.keys) == 2
    assert chain.keys[-1] != provisional


def test_many_ids_at_once_equal_one_by_one():
    whole, single = PrefixChain(keyed(range(5), 4), 4), PrefixChain(keyed(range(5), 4), 4)
    whole.extend(range(5, 25))
    for token in range(5, 25):
        single.extend([token])
    assert (whole.keys, whole.unkeyed, whole.covered_len) == (single.keys, single.unkeyed, single.covered_len)


def test_the_key_list_of_the_prompt_is_copied():
    prompt = keyed(range(8), 4)
    before = list(prompt.keys)
    PrefixChain(prompt, 4).extend(range(8, 16))
    assert prompt.keys == before


def test_without_a_decode_tensor_only_the_prompt_is_keyed():
    chain = PrefixChain(keyed(range(6), 4, grows=False), 4)
    chain.extend([6, 7, 8, 9])
    assert (chain.keyed_pages, chain.covered_len, chain.unkeyed) == (1, 6, None)


def test_items_on_the_last_page_leave_it_that_many_fewer_ids():
    prompt = laid_out([text(2), picture(3)], [7, 8], 4)  # pages hold [7 8 P P] and [P]: three slots are left
    chain = PrefixChain(prompt, 4)
    chain.extend([1, 2])
    assert chain.keyed_pages == 1
    chain.extend([3])
    assert chain.keys == cut_layout([text(2), picture(3), text(3)], [7, 8, 1, 2, 3], 4).keys()
    chain.extend([4, 5, 6, 7])  # the page after holds ids alone
    assert chain.keys == cut_layout([text(2), picture(3), text(7)], [7, 8, 1, 2, 3, 4, 5, 6, 7], 4).keys()


def test_pages_filled_needs_both_written_and_keyed():
    chain = PrefixChain(keyed(range(36), 16), 16)
    assert [chain.pages_filled(n) for n in (0, 15, 16, 35, 36, 50, 500)] == [0, 0, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(("slots", "pages"), [(1, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2)])
def test_one_token_at_least_is_left_to_compute(slots, pages):
    chain = PrefixChain(keyed(range(slots), 16), 16)
    assert chain.match_limit(chain.prompt_slots) == pages


@pytest.mark.parametrize("page_size", [8, 32])
def test_b22_keys_cut_for_another_page_size_are_refused(page_size):
    with pytest.raises(InputError, match="40 slots has 3 page keys"):
        PrefixChain(keyed(range(40), 16), page_size)


def test_a_tail_that_does_not_fit_is_refused():
    from dataclasses import replace

    with pytest.raises(InputError, match="last page"):
        PrefixChain(replace(keyed(range(40), 16), tail=[1, 2]), 16)


@pytest.mark.parametrize(
    ("walk", "start", "stop", "why"),
    [
        ("prefill", 0, 36, None),
        ("prefill", 16, 36, None),
        ("prefill", 36, 40, PAST_PROMPT),
        ("decode", 36, 37, None),
        ("decode", 37, 38, UNSEEN_TOKENS),
        ("image", 0, 50, FOREIGN_WALK),
    ],
)
def test_what_a_text_stream_foresees(walk, start, stop, why):
    assert PrefixChain(keyed(range(36), 16), 16).why_end(TEXT, walk, start, stop) == why


@pytest.mark.parametrize(
    ("walk", "start", "stop", "why"),
    [
        ("prefill_text", 0, 20, None),
        ("prefill_text", 16, 20, None),
        ("prefill_vit", 20, 50, None),
        ("prefill_vit", 20, 51, OUTSIDE_LAYOUT),
        ("prefill_text", 20, 50, OUTSIDE_LAYOUT),
        ("prefill_vit", 0, 20, OUTSIDE_LAYOUT),
        ("prefill_text", 50, 75, None),
        ("prefill_text", 75, 80, PAST_PROMPT),
        ("decode", 75, 76, None),
        ("prefill_vae", 20, 50, FOREIGN_WALK),
    ],
)
def test_what_a_layout_foresees(walk, start, stop, why):
    prompt = laid_out([text(20), picture(30), text(25)], range(45), 16)
    assert PrefixChain(prompt, 16).why_end(MEDIA, walk, start, stop) == why


def test_a_picture_nobody_laid_out_ends_the_chain_at_once():
    # waiting for the length to disagree is too late: after one slot of picture and one sampled id it would not
    assert PrefixChain(keyed(range(36), 16), 16).why_end(MEDIA, "prefill_vit", 36, 37) == OUTSIDE_LAYOUT


def test_without_declarations_walks_are_not_looked_at():
    chain = PrefixChain(keyed(range(36), 16), 16)
    assert chain.why_end(None, "anything", 0, 50) is None
    assert chain.why_end(None, "anything", 37, 38) == UNSEEN_TOKENS


def test_ids_of_a_page_span_prompt_and_generation():
    chain = PrefixChain(keyed(range(6), 4), 4)
    chain.extend(range(6, 13))
    assert [chain.ids_of_page(i) for i in range(3)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


def test_ids_of_a_page_leave_media_out():
    ids = list(range(45))
    chain = PrefixChain(laid_out([text(20), picture(30), text(25)], ids, 16), 16)
    cut = cut_layout([text(20), picture(30), text(25)], ids, 16)
    assert [list(chain.ids_of_page(i)) for i in range(4)] == cut.ids[:4]
