"""What attends for the decoder: pages, plain tensors without pages, or a mask over whole sequences in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlab.attention.base import AttentionBackend
from kvlab.errors import IntegrityError
from kvlab.models.bagel.mot import Attend
from kvlab.models.textlm import TextConfig


def through_pages(attention: AttentionBackend) -> Attend:
    """Return the seam to a backend after its ``begin``."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attention.write(layer, k, v)
        return attention.attend(layer, q)

    return attend


class MaskedAttention:
    """Attention inside a batch of sequences, packed one after the other; records gradients.

    Args:
        mask: True where a query (row) sees a key (column).
        batch: Sequences.

    Shapes:
        mask: [tokens, tokens] for all sequences, or [batch, tokens, tokens].
    """

    def __init__(self, mask: Tensor, *, batch: int = 1) -> None:
        self.batch = batch
        self.mask = mask[:, None] if mask.ndim == 3 else mask  # [batch, 1, tokens, tokens]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))  # [batch, heads, tokens, head_dim]
        out = scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)  # [batch * tokens, heads, head_dim]


@dataclass(frozen=True)
class ContiguousRow:
    """``tokens`` of a step that extend ``stream``, or with ``commit`` off at ``begin`` only read it."""

    stream: str
    tokens: int


class ContiguousAttention:
    """K and V of each stream end to end in memory of its own, no pages: what pages are measured against.

    A step goes ``begin``, the network with this object as its ``attend``, ``finish``.

    Args:
        config: The decoder.
        capacity: Slots each stream has room for.
        dtype: What K and V are stored in.
        device: Where they live.
    """

    def __init__(
        self,
        config: TextConfig,
        *,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        self._shape = (config.num_layers, 2, config.num_kv_heads, capacity, config.head_dim)
        self._dtype, self._device = dtype, device
        self._kv: dict[str, Tensor] = {}
        self._lengths: dict[str, int] = {}
        self._rows: Sequence[ContiguousRow] = ()
        self._causal = self._commits = True

    def length(self, stream: str) -> int:
        """Slots a stream holds."""
        return self._lengths.get(stream, 0)

    def fork(self, source: str, target: str) -> None:
        """Copy a stream as it stands."""
        self._kv[target] = self._stream(source).clone()
        self._lengths[target] = self.length(source)

    def begin(self, rows: Sequence[ContiguousRow], *, causal: bool = True, commit: bool = True) -> None:
        """Take the rows of the next step, in packed order.

        Raises:
            IntegrityError: A stream would outgrow its memory.
        """
        capacity = self._shape[3]
        for row in rows:
            if self.length(row.stream) + row.tokens > capacity:
                raise IntegrityError(
                    f"stream {row.stream!r} holds {self.length(row.stream)} slots and {row.tokens} more pass {capacity}"
                )
        self._rows, self._causal, self._commits = list(rows), causal, commit

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = [row.tokens for row in self._rows]
        parts = zip(self._rows, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([self._attend(layer, row, *qkv) for row, *qkv in parts])

    def finish(self) -> None:
        """The step has run: what it wrote belongs to its streams, unless it does not commit."""
        if self._commits:
            for row in self._rows:
                self._lengths[row.stream] = self.length(row.stream) + row.tokens
        self._rows = ()

    def _attend(self, layer: int, row: ContiguousRow, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start = self.length(row.stream)
        stop = start + row.tokens
        kv = self._stream(row.stream)[layer]  # [2, kv_heads, capacity, head_dim]
        for stored, new in zip(kv, (k, v), strict=True):
            stored[:, start:stop] = new.detach().transpose(0, 1)
        keys, values = kv[:, None, :, :stop].to(q.dtype)  # 2 x [1, kv_heads, stop, head_dim]
        mask = None
        if self._causal and row.tokens > 1:
            mask = torch.ones(row.tokens, stop, dtype=torch.bool, device=q.device).tril(start)
        out = scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)  # [tokens, num_heads, head_dim]

    def _stream(self, name: str) -> Tensor:
        if name not in self._kv:
            self._kv[name] = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._kv[name]
