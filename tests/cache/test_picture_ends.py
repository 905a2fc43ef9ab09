"""A match never ends inside a picture: it goes to the end by a kept copy, or back to whole pages before."""

from __future__ import annotations

import pytest
from kv_driver import (
    MEDIA,
    UNDERSTANDING,
    MediaDriver,
    SlotStore,
    media_driver,
    miss_ranges,
    picture,
    text,
)

from kvlab.cache.kv import KVResource
from kvlab.spec import (
    KVLayout,
    RequestConfig,
)

# -- a match that ends inside a picture


def test_a_match_inside_a_picture_is_cut_back_to_whole_pages_before_it():
    d = media_driver(store=SlotStore(), num_pages=8)
    d.ingest(1, UNDERSTANDING)
    d.walk(1, 0)
    d.walk(1, 1)
    assert d.kv.evict(1) == 1  # the copy at the picture's end
    d.ingest(2, UNDERSTANDING, [*range(20), *range(100, 125)])
    assert d.prefill(2) == [16, 0, 0]
    assert miss_ranges(d, 2)[0] == (16, 48, "image_cut")
    assert "ends inside the picture in slots [20, 50)" in d.kv.cached_misses(2)[0].evidence


@pytest.mark.parametrize(("evicted", "served"), [(0, [5, 6, 10, 0]), (1, [5, 6, 0, 0]), (2, [4, 0, 0, 0])])
def test_a_cut_that_ends_inside_an_earlier_picture_ends_with_that_one_or_before_it(evicted, served):
    d = media_driver(page_size=4, num_pages=40)
    d.ingest(1, [text(5), picture(6, b"a"), picture(10, b"b"), text(4)])
    for walk in range(3):
        d.walk(1, walk)
    stream = d.kv.stream(1)
    assert d.kv.index.lookup(stream.root, [stream.chain.ends[11].key])  # so that the copy at b's end goes first
    assert d.kv.evict(evicted) == evicted
    assert d.serve(2, d.prompts[1][0], [0, 1, 2, 3, 4, 9, 9, 9, 9]) == served


def test_without_a_page_store_no_copy_is_kept():
    kv = KVResource(KVLayout(1, 1, 8, 16), 24, check_invariants=True)
    kv.enable_prefix_cache(b"r" * 32, MEDIA)
    d = MediaDriver(kv, SlotStore())
    d.serve(1, UNDERSTANDING)
    assert kv.counters.ends_kept == 0
    assert d.serve(2, UNDERSTANDING, [*range(20), *range(100, 125)]) == [16, 0, 0]


def test_no_copy_is_kept_where_no_page_is_free():
    d = media_driver(num_pages=6)
    d.ingest(1, [*UNDERSTANDING])
    d.walk(1, 0)
    d.kv.ingest_request(2, RequestConfig())
    d.prompts[2] = [text(16)], list(range(500, 516))
    d.run(2, "prefill_text", 16)
    d.walk(1, 1)
    assert d.kv.arena.num_free == 0
    assert d.kv.counters.ends_kept == 0


def test_where_no_other_page_is_left_the_kept_copy_itself_goes_on():
    d = media_driver(num_pages=6)
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
    d = media_driver()
    d.serve(1, [text(20), picture(30)])
    index = d.kv.index
    (kept,) = [page for page in index.pages() if index.position_of(page) == 3]
    assert index.is_leaf(kept)
    assert index.parent_of(kept) is not None
    assert d.kv.evict(1) == 1
    assert index.key_of(kept) is None


def test_a_kept_copy_that_went_to_the_host_is_copied_from_there():
    d = media_driver(host_tier_pages=8)
    d.serve(1, [text(20), picture(30)])
    assert d.kv.evict(8) == 4
    assert d.serve(2, [text(20), picture(30), text(10)]) == [20, 30, 0]
