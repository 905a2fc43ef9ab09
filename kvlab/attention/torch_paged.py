"""TorchPagedAttention: the reference backend, plain torch on paged tensors, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlab.attention.base import AttentionBackend
from kvlab.attention.store import KVStore, torch_dtype
from kvlab.spec import StepRow, StepTables


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a step: its tokens [start, stop) of the packed queries, and what they see."""

    start: int
    stop: int
    pages: slice | Tensor
    length: int
    mask: Tensor | None  # [tokens, length], added to the scores
    is_causal: bool


class TorchPagedAttention(AttentionBackend):
    """Attends row by row: the arithmetic of a row is the same whatever else is in the batch."""

    name: ClassVar[str] = "torch"

    def __init__(self, store: KVStore, *, num_heads: int, scale: float | None = None) -> None:
        super().__init__(store, num_heads=num_heads, scale=scale)
        self._rows: list[_Row] = []

    def _plan(self, tables: StepTables) -> None:
        self._rows = []
        start = 0
        for row in tables.rows:
            self._rows.append(self._plan_row(row, start, tables.causal))
            start += row.to_compute

    def _plan_row(self, row: StepRow, start: int, causal: bool) -> _Row:
        prefix = row.length - row.to_compute
        # A row of one token sees everything it has; without a prefix the kernel's own causal path skips half the scores.
        masked = causal and row.to_compute > 1 and prefix > 0
        mask = self._mask(row.to_compute, row.length) if masked else None
        is_causal = causal and row.to_compute > 1 and prefix == 0
        return _Row(start, start + row.to_compute, self.store.selector(row.pages), row.length, mask, is_causal)

    def _mask(self, tokens: int, length: int) -> Tensor:
        """Return the lower-right causal mask: the last token sees all of ``length``."""
        dtype = torch_dtype(self.store.layout.compute_dtype)
        hidden = torch.full((tokens, length), float("-inf"), dtype=dtype, device=self.store.device)
        return hidden.triu_(length - tokens + 1)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        self._begun()
        out = [self._attend_row(row, layer, q[row.start : row.stop]) for row in self._rows]
        return out[0] if len(out) == 1 else torch.cat(out)  # [tokens, num_heads, head_dim]

    def _attend_row(self, row: _Row, layer: int, q: Tensor) -> Tensor:
        kv = self.store.read(layer, row.pages, row.length).transpose(1, 2)  # [2, kv_heads, length, head_dim]
        if kv.dtype != q.dtype:
            kv = kv.to(q.dtype)
        k, v = kv[:1], kv[1:]  # [1, kv_heads, length, head_dim]
        if len(q) == 1:
            # The query heads of one KV head stand where queries of one head would, so K and V are read once, not once a head.
            grouped = q.view(1, k.shape[1], -1, q.shape[2])  # [1, kv_heads, group, head_dim]
            return scaled_dot_product_attention(grouped, k, v, scale=self.scale).reshape(q.shape)
        queries = q.transpose(0, 1)[None]  # [1, num_heads, tokens, head_dim]
        out = scaled_dot_product_attention(
            queries, k, v, attn_mask=row.mask, is_causal=row.is_causal, scale=self.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)  # [tokens, num_heads, head_dim]
