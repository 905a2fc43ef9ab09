"""TorchPagedAttention: the reference backend, plain torch on paged tensors, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlab.attention.base import AttentionBackend
from kvlab.attention.store import KVStore, torch_dtype
from kvlab.spec import StepTables

#: Queries of a causal row that are attended at once. Keys behind the last of them are not read at all, and one small mask
#: serves every row and chunk of a step.
CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a step: its tokens [start, stop) of the packed queries, and where its K and V are."""

    start: int
    stop: int
    pages: slice | Tensor
    length: int


class TorchPagedAttention(AttentionBackend):
    """Attends row by row: the arithmetic of a row is the same whatever else is in the batch."""

    name: ClassVar[str] = "torch"

    def __init__(self, store: KVStore, *, num_heads: int, scale: float | None = None) -> None:
        super().__init__(store, num_heads=num_heads, scale=scale)
        self._rows: list[_Row] = []
        self._mask: Tensor | None = None  # [CHUNK_TOKENS, longest row], added to the scores; None = all is seen

    def _plan(self, tables: StepTables) -> None:
        starts = accumulate((row.to_compute for row in tables.rows), initial=0)
        self._rows = [
            _Row(start, start + row.to_compute, self.store.selector(row.pages), row.length)
            for row, start in zip(tables.rows, starts, strict=False)
        ]
        # A row of one token sees everything it has.
        longest = max((row.length for row in tables.rows if row.to_compute > 1), default=0)
        self._mask = self._lower_right_mask(longest) if tables.causal and longest else None

    def _lower_right_mask(self, length: int) -> Tensor:
        """Return the causal mask of a row's last tokens; its last n rows and m columns are the mask of n tokens in m."""
        dtype = torch_dtype(self.store.layout.compute_dtype)
        hidden = torch.full((CHUNK_TOKENS, length), float("-inf"), dtype=dtype, device=self.store.device)
        return hidden.triu_(length - CHUNK_TOKENS + 1)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        self._begun()
        out = [part for row in self._rows for part in self._attend_row(row, layer, q[row.start : row.stop])]
        return out[0] if len(out) == 1 else torch.cat(out)  # [tokens, num_heads, head_dim]

    def _attend_row(self, row: _Row, layer: int, q: Tensor) -> Iterator[Tensor]:
        kv = self.store.read(layer, row.pages, row.length).transpose(1, 2)  # [2, kv_heads, length, head_dim]
        if kv.dtype != q.dtype:
            kv = kv.to(q.dtype)
        k, v = kv[:1], kv[1:]  # [1, kv_heads, length, head_dim]
        if len(q) == 1:
            # The query heads of one KV head stand where queries of one head would, so K and V are read once, not once a head.
            grouped = q.reshape(1, k.shape[1], -1, q.shape[2])  # [1, kv_heads, group, head_dim]
            yield scaled_dot_product_attention(grouped, k, v, scale=self.scale).reshape(q.shape)
            return
        queries = q.transpose(0, 1)[None]  # [1, num_heads, tokens, head_dim]
        if self._mask is None:
            yield self._scored(queries, k, v, None)
            return
        prefix = row.length - len(q)
        for start in range(0, len(q), CHUNK_TOKENS):
            chunk = queries[:, :, start : start + CHUNK_TOKENS]
            tokens = chunk.shape[2]
            seen = prefix + start + tokens
            yield self._scored(chunk, k[:, :, :seen], v[:, :, :seen], self._mask[-tokens:, -seen:])

    def _scored(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
        return out[0].transpose(0, 1)  # [tokens, num_heads, head_dim]
