"""KVStore: bytes go where the page numbers say, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvlab.attention.store import DTYPES, KVStore
from kvlab.errors import InputError
from kvlab.spec import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, page_size=5)


def filled(num_pages: int = 6, **options: int) -> KVStore:
    """A store in which every value is different."""
    store = KVStore(LAYOUT, num_pages, **options)
    store.pages.copy_(torch.arange(store.pages.numel()).view_as(store.pages))
    return store


@pytest.mark.parametrize("dtype", DTYPES)
def test_pool_takes_the_bytes_its_layout_says(dtype: str) -> None:
    store = KVStore(replace(LAYOUT, dtype=dtype), 6)
    assert store.num_bytes == 6 * LAYOUT.bytes_per_page(store.pages.element_size())
    assert store.pages.shape == (2, 2, 6, 5, 3, 4)


def test_keys_and_values_are_views_of_the_pages() -> None:
    store = filled()
    store.keys(1)[2, 3, 0, 0] = -1
    store.values(0)[4, 0, 2, 1] = -2
    assert (store.pages[1, 0, 2, 3, 0, 0], store.pages[0, 1, 4, 0, 2, 1]) == (-1, -2)


def test_write_changes_exactly_the_named_slots_of_one_layer() -> None:
    store, before = filled(), filled().pages
    k, v = torch.rand(3, 3, 4), torch.rand(3, 3, 4)
    store.write(1, torch.tensor([7, 29, 0]), k, v)
    for token, (page, offset) in enumerate([(1, 2), (5, 4), (0, 0)]):
        assert torch.equal(store.keys(1)[page, offset], k[token])
        assert torch.equal(store.values(1)[page, offset], v[token])
        before[1, :, page, offset] = store.pages[1, :, page, offset]
    assert torch.equal(store.pages, before)


def test_write_keeps_no_graph_of_what_it_stored() -> None:
    store = filled()
    store.write(0, torch.tensor([5]), torch.rand(1, 3, 4, requires_grad=True), torch.rand(1, 3, 4))
    assert not store.pages.requires_grad


@pytest.mark.parametrize("pages", [[2, 3, 4], [4, 1, 3], [5], [3, 3]])
def test_read_returns_the_slots_in_page_order(pages: list[int]) -> None:
    store = filled()
    length = 5 * len(pages) - 2
    expected = torch.cat([store.pages[1, :, page] for page in pages], dim=1)[:, :length]
    assert torch.equal(store.read(1, store.selector(pages), length), expected)


def test_neighbouring_pages_are_read_in_place() -> None:
    store = filled()
    read = store.read(0, store.selector([2, 3]), 10)
    assert read.data_ptr() == store.keys(0)[2].data_ptr()


def test_copy_pages_copies_all_layers_even_where_source_and_target_overlap() -> None:
    store, before = filled(), filled().pages
    store.copy_pages([1, 2], [2, 3])
    assert torch.equal(store.pages[:, :, [2, 3]], before[:, :, [1, 2]])
    assert torch.equal(store.pages[:, :, [0, 1, 4, 5]], before[:, :, [0, 1, 4, 5]])


def test_pages_come_back_from_the_host_unchanged() -> None:
    store, before = filled(host_pages=4), filled().pages
    store.to_host([2, 5], [3, 0])
    store.pages.zero_()
    store.from_host([0, 3], [1, 4])
    assert torch.equal(store.pages[:, :, [1, 4]], before[:, :, [5, 2]])
    assert not store.pages[:, :, [0, 2, 3, 5]].any()


def test_no_host_memory_is_taken_before_a_page_moves_there() -> None:
    assert filled(host_pages=1_000_000_000).host_pages == 1_000_000_000


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [([1], [6], "page 6 is outside a pool of 6"), ([-1], [1], "page -1"), ([1, 2], [3], "2 pages cannot be copied onto 1")],
)
def test_a_move_outside_the_pool_is_refused_and_changes_nothing(src: list[int], dst: list[int], message: str) -> None:
    store = filled()
    with pytest.raises(InputError, match=message):
        store.copy_pages(src, dst)
    assert torch.equal(store.pages, filled().pages)


def test_moving_to_a_host_pool_of_no_pages_is_refused() -> None:
    with pytest.raises(InputError, match="outside a pool of 0 pages"):
        filled().to_host([1], [0])


@pytest.mark.parametrize(
    ("layout", "num_pages", "message"),
    [
        (replace(LAYOUT, dtype="float8"), 6, "float8.*float16, bfloat16, float32"),
        (replace(LAYOUT, layout="HND"), 6, "HND"),
        (LAYOUT, 1, "page 0 is the sink"),
    ],
)
def test_a_store_that_cannot_be_is_refused(layout: KVLayout, num_pages: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        KVStore(layout, num_pages)
