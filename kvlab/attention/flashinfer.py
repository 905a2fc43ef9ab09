"""FlashInferAttention: the same seam over FlashInfer's paged kernels, on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlab.attention.base import AttentionBackend
from kvlab.attention.store import KVStore, torch_dtype
from kvlab.errors import InputError, missing_extra
from kvlab.spec import StepTables, last_page_length

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
WORKSPACE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class PackedTables:
    """A step's tables in the form paged kernels read: row r owns page_ids[page_starts[r] : page_starts[r + 1]]."""

    token_starts: list[int]
    page_starts: list[int]
    page_ids: list[int]
    last_page_lengths: list[int]


def pack_tables(tables: StepTables) -> PackedTables:
    """Return the rows of a step end to end.

    >>> from kvlab.spec import StepRow
    >>> rows = (StepRow(1, "main", [3, 5], 6, 2), StepRow(2, "main", [3], 4, 1))
    >>> pack_tables(StepTables(4, rows))
    PackedTables(token_starts=[0, 2, 3], page_starts=[0, 2, 3], page_ids=[3, 5, 3], last_page_lengths=[2, 4])
    """
    packed = PackedTables([0], [0], [], [])
    for row in tables.rows:
        packed.token_starts.append(packed.token_starts[-1] + row.to_compute)
        packed.page_ids.extend(row.pages)
        packed.page_starts.append(len(packed.page_ids))
        packed.last_page_lengths.append(last_page_length(row.length, tables.page_size))
    return packed


def index_buffer_pages(num_rows: int, num_pages: int) -> int:
    """Return the page ids a captured batch must have room for.

    Sharing lists a page once for every sharer, so the size of the pool is no bound; and a stream may hold more slots than the
    model has positions, so its context length is none either.

    >>> index_buffer_pages(32, 256)
    8160
    """
    return num_rows * (num_pages - 1)


class FlashInferAttention(AttentionBackend):
    """FlashInfer's batch wrappers: one kernel for steps of single tokens, one for the rest.

    Args:
        store: Pages of float16 or bfloat16 on a CUDA device.
        num_heads: Query heads.
        scale: What scores are multiplied by; None = head_dim ** -0.5.
        captured_rows: Rows of a decode step that is to be captured in a CUDA graph; its wrapper then owns buffers of a fixed
            address. None = nothing is captured.

    Raises:
        MissingExtraError: flashinfer-python is not installed.
        InputError: The pages are not on a CUDA device, or of a dtype the kernels do not read.
    """

    name: ClassVar[str] = "flashinfer"

    def __init__(self, store: KVStore, *, num_heads: int, scale: float | None = None, captured_rows: int | None = None) -> None:
        super().__init__(store, num_heads=num_heads, scale=scale)
        library = _flashinfer()
        if store.device.type != "cuda" or not torch.cuda.is_available():
            raise InputError(f"FlashInfer runs on CUDA and the pages are on {store.device}; use the torch backend there")
        self._compute_dtype = torch_dtype(store.layout.compute_dtype)
        for dtype in (store.dtype, self._compute_dtype):
            if dtype not in KERNEL_DTYPES:
                raise InputError(f"FlashInfer's kernels read float16 and bfloat16, not {dtype}; use the torch backend")
        # Both kernels of a step that keeps nothing are planned before either runs, so they share no workspace.
        workspace, own_workspace = torch.zeros(2, WORKSPACE_BYTES, dtype=torch.uint8, device=store.device)
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, store.layout.layout)
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, store.layout.layout)
        self._captured_rows = captured_rows
        self._captured = None if captured_rows is None else self._captured_wrapper(library, workspace, captured_rows)
        self._ragged = library.BatchPrefillWithRaggedKVCacheWrapper(own_workspace, store.layout.layout)
        self._merge = library.merge_state
        self._wrapper: Any = None

    def _captured_wrapper(self, library: Any, workspace: Tensor, num_rows: int) -> Any:
        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self.store.device)

        return library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            self.store.layout.layout,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffer(num_rows + 1),
            paged_kv_indices_buffer=buffer(index_buffer_pages(num_rows, self.store.num_pages)),
            paged_kv_last_page_len_buffer=buffer(num_rows),
        )

    def _plan(self, tables: StepTables) -> None:
        packed = pack_tables(tables)
        if not tables.commit:
            self._wrapper = self._prefill
            self._wrapper.plan(**self._prefill_arguments(packed, causal=False))  # all in the pages is before every own token
            self._ragged.plan(**self._own_arguments(packed, tables.causal))
        elif all(row.to_compute == 1 for row in tables.rows):
            self._wrapper = self._captured if len(tables.rows) == self._captured_rows else self._decode
            self._wrapper.plan(**self._decode_arguments(packed))
        else:
            self._wrapper = self._prefill
            self._wrapper.plan(**self._prefill_arguments(packed, tables.causal))

    def _decode_arguments(self, packed: PackedTables) -> dict[str, Any]:
        return {
            "indptr": _int32(packed.page_starts),
            "indices": _int32(packed.page_ids).to(self.store.device),
            "last_page_len": _int32(packed.last_page_lengths),
            "head_dim": self.store.layout.head_dim,
            **self._shared_arguments(),
        }

    def _prefill_arguments(self, packed: PackedTables, causal: bool) -> dict[str, Any]:
        return {
            "qo_indptr": _int32(packed.token_starts),
            "paged_kv_indptr": _int32(packed.page_starts),
            "paged_kv_indices": _int32(packed.page_ids).to(self.store.device),
            "paged_kv_last_page_len": _int32(packed.last_page_lengths),
            "head_dim_qk": self.store.layout.head_dim,
            "causal": causal,
            **self._shared_arguments(),
        }

    def _own_arguments(self, packed: PackedTables, causal: bool) -> dict[str, Any]:
        shared = self._shared_arguments() | {"kv_data_type": self._compute_dtype}
        del shared["page_size"]
        starts = _int32(packed.token_starts)
        head_dim = self.store.layout.head_dim
        return {"qo_indptr": starts, "kv_indptr": starts, "head_dim_qk": head_dim, "causal": causal, **shared}

    def _shared_arguments(self) -> dict[str, Any]:
        return {
            "num_qo_heads": self.num_heads,
            "num_kv_heads": self.store.layout.num_kv_heads,
            "page_size": self.store.layout.page_size,
            "sm_scale": self.scale,
            "q_data_type": self._compute_dtype,
            "kv_data_type": self.store.dtype,
        }

    def attend(self, layer: int, q: Tensor) -> Tensor:
        self._begun()
        q, pages = q.contiguous(), (self.store.keys(layer), self.store.values(layer))
        if self._commits:
            out: Tensor = self._wrapper.run(q, pages)
            return out  # [tokens, num_heads, head_dim]
        own = (x.contiguous() for x in self._own_kv(layer))
        # Each part comes with the logarithm of the sum of its weights; a row without pages has none there.
        merged: Tensor = self._merge(
            *self._wrapper.run(q, pages, return_lse=True), *self._ragged.run(q, *own, return_lse=True)
        )[0]
        return merged


def _flashinfer() -> Any:
    try:
        import flashinfer
    except ImportError as error:
        raise missing_extra("flashinfer-python", "cuda", "for the FlashInfer attention backend") from error
    return flashinfer


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
