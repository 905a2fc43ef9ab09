"""FlashInferAttention: what can be known without CUDA, and equality with the reference backend where there is CUDA."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace

import pytest
import torch

from kvlab.attention.flashinfer import FlashInferAttention, index_buffer_pages, pack_tables
from kvlab.attention.store import KVStore
from kvlab.attention.torch_paged import TorchPagedAttention
from kvlab.errors import InputError, MissingExtraError
from kvlab.spec import KVLayout, StepRow, StepTables

LAYOUT = KVLayout(1, 2, 64, 16, dtype="bfloat16", compute_dtype="bfloat16")
HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
needs_flashinfer = pytest.mark.skipif(not HAS_FLASHINFER, reason="flashinfer-python is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def sharers(num_rows: int) -> StepTables:
    """One 20-page prefix read by every row, a page of its own for each."""
    prefix = list(range(1, 21))
    return StepTables(16, tuple(StepRow(i, "main", [*prefix, 21 + i], 328, 1) for i in range(num_rows)))


def test_b3_index_buffers_hold_every_page_of_every_sharer() -> None:
    tables = sharers(32)
    packed = pack_tables(tables)
    assert len(packed.page_ids) == 672 > 256
    assert len(set(packed.page_ids)) == 52
    assert len(packed.page_ids) <= index_buffer_pages(32, 256)


def test_index_buffers_hold_rows_that_each_list_the_whole_pool() -> None:
    rows = tuple(StepRow(i, "main", list(range(1, 9)), 128, 1) for i in range(4))
    assert len(pack_tables(StepTables(16, rows)).page_ids) == index_buffer_pages(4, 9)


@pytest.mark.skipif(HAS_FLASHINFER, reason="flashinfer-python is installed")
def test_without_the_package_the_error_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r'pip install .*\[cuda\]"'):
        FlashInferAttention(KVStore(LAYOUT, 4), num_heads=4)


@needs_flashinfer
def test_pages_off_cuda_are_refused() -> None:
    with pytest.raises(InputError, match="the pages are on cpu; use the torch backend"):
        FlashInferAttention(KVStore(LAYOUT, 4), num_heads=4)


@needs_flashinfer
@pytest.mark.parametrize(
    ("wrapper", "arguments"),
    [
        ("BatchDecodeWithPagedKVCacheWrapper", "_decode_arguments"),
        ("BatchPrefillWithPagedKVCacheWrapper", "_prefill_arguments"),
    ],
)
def test_plan_arguments_bind_to_the_installed_signature(wrapper: str, arguments: str) -> None:
    import flashinfer

    backend = FlashInferAttention.__new__(FlashInferAttention)  # the constructor needs CUDA; its arguments do not
    super(FlashInferAttention, backend).__init__(KVStore(LAYOUT, 64), num_heads=4)
    backend._compute_dtype = torch.bfloat16
    causal = (True,) if arguments == "_prefill_arguments" else ()
    kwargs = getattr(backend, arguments)(pack_tables(sharers(2)), *causal)
    plan = inspect.signature(getattr(flashinfer, wrapper).plan)
    bound = plan.bind(None, **kwargs)
    assert (bound.arguments["num_qo_heads"], bound.arguments["num_kv_heads"]) == (4, 2)


@needs_flashinfer
def test_what_a_step_that_keeps_nothing_calls_binds_to_the_installed_signatures() -> None:
    import flashinfer

    backend = FlashInferAttention.__new__(FlashInferAttention)
    super(FlashInferAttention, backend).__init__(KVStore(LAYOUT, 64), num_heads=4)
    backend._compute_dtype = torch.bfloat16
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
    bound = inspect.signature(ragged.plan).bind(None, **backend._own_arguments(pack_tables(sharers(2)), False))
    assert bound.arguments["kv_indptr"].tolist() == [0, 1, 2]
    assert {"q", "k", "v", "return_lse"} <= set(inspect.signature(ragged.run).parameters)
    assert list(inspect.signature(flashinfer.merge_state).parameters)[:4] == ["v_a", "s_a", "v_b", "s_b"]


def test_a_row_that_reads_no_page_is_packed_as_an_empty_one() -> None:
    rows = (StepRow(1, "cfg_text", [], 0, 6), StepRow(1, "main", [4, 2], 17, 6))
    packed = pack_tables(StepTables(16, rows, causal=False, commit=False))
    assert (packed.token_starts, packed.page_starts) == ([0, 6, 12], [0, 0, 2])
    assert (packed.page_ids, packed.last_page_lengths) == ([4, 2], [0, 1])


@needs_flashinfer
def test_wrapper_constructors_take_the_captured_buffers_by_these_names() -> None:
    import flashinfer

    names = inspect.signature(flashinfer.BatchDecodeWithPagedKVCacheWrapper.__init__).parameters
    buffers = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    assert {"use_cuda_graph", *buffers} <= set(names)


@pytest.mark.gpu
@needs_cuda
@needs_flashinfer
@pytest.mark.parametrize("captured_rows", [None, 32])
@pytest.mark.parametrize(
    ("tables", "causal"),
    [
        (sharers(32), True),
        (StepTables(16, (StepRow(1, "main", [5, 2, 9], 40, 40), StepRow(2, "main", [7, 4], 20, 3))), True),
        (StepTables(16, (StepRow(1, "main", [5, 2, 9], 40, 30),)), False),
        (StepTables(16, (StepRow(1, "main", [5, 2, 9], 40, 30), StepRow(1, "cfg_text", [], 0, 30)), commit=False), False),
    ],
)
def test_flashinfer_equals_the_reference_backend(tables: StepTables, causal: bool, captured_rows: int | None) -> None:
    tables = replace(tables, causal=causal)
    generator = torch.Generator("cuda").manual_seed(0)
    store = KVStore(LAYOUT, 64, device="cuda")
    store.pages.normal_(generator=generator)
    tokens = sum(row.to_compute for row in tables.rows)
    q, k, v = (torch.randn(tokens, n, 64, device="cuda", generator=generator).bfloat16() for n in (4, 2, 2))
    outs = []
    for backend in (
        TorchPagedAttention(store, num_heads=4),
        FlashInferAttention(store, num_heads=4, captured_rows=captured_rows),
    ):
        backend.begin(tables)
        backend.write(0, k, v)
        outs.append(backend.attend(0, q).float())
    # bfloat16 has 8 bits of mantissa; outputs are means of unit normals.
    assert (outs[0] - outs[1]).abs().max() <= 0.02
