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

#: Queries of a causal row that are attended at once. Keys behind the last of them are not read at all, and one small mask
#: serves every row and chunk of a step.
CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is attended in one call: one row, or rows of one token each that are equally long.

    ``tokens`` of the packed queries are theirs; ``pages`` are those of the first row, then of the next, and so on; ``length``
    slots of each are read from them.
    """

    tokens: slice | Tensor
    pages: slice | Tensor
    count: int
    length: int


class TorchPagedAttention(AttentionBackend):
    """The arithmetic of a row is the same whatever else is in the batch: no row is padded to the length of another."""

    name: ClassVar[str] = "torch"

    def __init__(self, store: KVStore, *, num_heads: int, scale: float | None = None) -> None:
        super().__init__(store, num_heads=num_heads, scale=scale)
        self._spans: list[_Rows] = []  # rows of several tokens
        self._singles: list[_Rows] = []
        self._mask: Tensor | None = None  # [CHUNK_TOKENS, longest row], added to the scores; None = all is seen

    def _plan(self, tables: StepTables) -> None:
        self._spans = []
        singles: dict[int, list[tuple[int, StepRow]]] = {}
        start = longest = 0
        for row in tables.rows:
            if row.to_compute == 1 and tables.commit:  # it sees everything it has
                singles.setdefault(row.length, []).append((start, row))
            else:
                tokens = slice(start, start + row.to_compute)
                self._spans.append(_Rows(tokens, self.store.selector(row.pages), 1, row.length))
                longest = max(longest, row.length if tables.commit else row.length + row.to_compute)
            start += row.to_compute
        self._singles = [self._together(length, rows) for length, rows in singles.items()]
        self._mask = self._lower_right_mask(longest) if tables.causal and longest else None

    def _together(self, length: int, rows: list[tuple[int, StepRow]]) -> _Rows:
        starts = [start for start, _ in rows]
        pages = [page for _, row in rows for page in row.pages]
        are_neighbours = starts[-1] - starts[0] == len(rows) - 1
        tokens = slice(starts[0], starts[-1] + 1) if are_neighbours else torch.tensor(starts, device=self.store.device)
        return _Rows(tokens, self.store.selector(pages), len(rows), length)

    def _lower_right_mask(self, length: int) -> Tensor:
        """Return the causal mask of a row's last tokens; its last n rows and m columns are the mask of n tokens in m."""
        dtype = torch_dtype(self.store.layout.compute_dtype)
        hidden = torch.full((CHUNK_TOKENS, length), float("-inf"), dtype=dtype, device=self.store.device)
        return hidden.triu_(length - CHUNK_TOKENS + 1)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        self._begun()
        if len(self._singles) == 1 and not self._spans:
            return self._attend_singles(self._singles[0], layer, q)
        out = torch.empty_like(q)  # [tokens, num_heads, head_dim]
        for rows in self._singles:
            out[rows.tokens] = self._attend_singles(rows, layer, q[rows.tokens])
        for rows in self._spans:
            self._attend_span(rows, layer, q[rows.tokens], out[rows.tokens])
        return out

    def _attend_singles(self, rows: _Rows, layer: int, q: Tensor) -> Tensor:
        k, v = self._read(rows, layer, q.dtype)  # [rows, kv_heads, length, head_dim]
        # The query heads of one KV head stand where queries of one head would, so K and V are read once, not once a head.
        grouped = q.reshape(rows.count, k.shape[1], -1, q.shape[2])  # [rows, kv_heads, group, head_dim]
        return scaled_dot_product_attention(grouped, k, v, scale=self.scale).reshape(q.shape)

    def _attend_span(self, row: _Rows, layer: int, q: Tensor, out: Tensor) -> None:
        k, v = self._seen(row, layer, q.dtype)  # [1, kv_heads, seen, head_dim]
        queries = q.transpose(0, 1)[None]  # [1, num_heads, tokens, head_dim]
        if self._mask is None:
            out.copy_(self._scored(queries, k, v, None))
            return
        prefix = k.shape[2] - q.shape[0]
        for start in range(0, q.shape[0], CHUNK_TOKENS):
            chunk = queries[:, :, start : start + CHUNK_TOKENS]
            tokens = chunk.shape[2]
            seen = prefix + start + tokens
            scored = self._scored(chunk, k[:, :, :seen], v[:, :, :seen], self._mask[-tokens:, -seen:])
            out[start : start + tokens] = scored

    def _scored(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
        return out[0].transpose(0, 1)  # [tokens, num_heads, head_dim]

    def _seen(self, row: _Rows, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return K and V that the last token of a row sees: its pages and, where the step keeps nothing, then its own."""
        if self._commits:
            return self._read(row, layer, dtype)
        own = (x[row.tokens].to(dtype) for x in self._own_kv(layer))  # 2 x [tokens, kv_heads, head_dim]
        stored = self.store.read(layer, row.pages, row.length).to(dtype)  # [2, length, kv_heads, head_dim]
        k, v = (torch.cat(parts).transpose(0, 1)[None] for parts in zip(stored, own, strict=True))
        return k, v

    def _read(self, rows: _Rows, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return K and V of ``rows``, [rows, kv_heads, length, head_dim] each."""
        page_size = self.store.layout.page_size
        slots = -(-rows.length // page_size) * page_size
        kv = self.store.read(layer, rows.pages, rows.count * slots)  # [2, rows * slots, kv_heads, head_dim]
        kv = kv.view(2, rows.count, slots, *kv.shape[2:])[:, :, : rows.length]  # [2, rows, length, kv_heads, head_dim]
        k, v = kv.transpose(2, 3).to(dtype).unbind(0)
        return k, v
