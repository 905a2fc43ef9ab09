"""AttentionBackend: how a model reads and writes pages, whatever computes the attention.

A step goes: ``begin(tables)`` once, then in each layer ``write(layer, k, v)`` and ``attend(layer, q)``. Tokens of all rows are
packed in row order, so row r owns the tokens after those of the rows before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlab.attention.store import KVStore
from kvlab.errors import InputError, IntegrityError
from kvlab.spec import Resource, StepRow, StepTables


class AttentionBackend(Resource, ABC):
    """Attention of one model over the pages of one KVStore.

    Args:
        store: The pages.
        num_heads: Query heads, a multiple of the store's KV heads; query head h reads KV head h // (num_heads / kv_heads).
        scale: What scores are multiplied by; None = head_dim ** -0.5.
    """

    key = "attention"
    depends_on = ("kv",)
    prefix_skip_safe: ClassVar[bool] = True
    #: Short name, folded into the root of the cache.
    name: ClassVar[str] = ""

    def __init__(self, store: KVStore, *, num_heads: int, scale: float | None = None) -> None:
        num_kv_heads = store.layout.num_kv_heads
        if num_heads < 1 or num_heads % num_kv_heads:
            raise InputError(f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly")
        self.store = store
        self.num_heads = num_heads
        self.scale = store.layout.head_dim**-0.5 if scale is None else scale
        self._slots: Tensor | None = None

    def root_fields(self) -> Mapping[str, Any]:
        return {"backend": self.name, "scale": self.scale}

    def begin(self, tables: StepTables) -> None:
        """Take the page tables of the next step.

        Raises:
            IntegrityError: A table that does not describe pages of this store.

        Changes:
            What ``write`` and ``attend`` address, until the next call.
        """
        self._slots = None
        for row in tables.rows:
            _check_row(row, tables.page_size, self.store)
        slots = [slot for row in tables.rows for slot in new_slots(row, tables.page_size)]
        self._plan(tables)
        self._slots = torch.tensor(slots, dtype=torch.int64, device=self.store.device)  # [tokens]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store K and V of the step's tokens in the slots the tables gave them.

        Shapes:
            k, v: [tokens, kv_heads, head_dim]; K already rotated.

        Changes:
            The pages of ``layer``.
        """
        slots = self._begun()
        if k.shape[0] != slots.shape[0]:
            raise IntegrityError(f"layer {layer} writes {len(k)} tokens in a step of {len(slots)}")
        self.store.write(layer, slots, k, v)

    @abstractmethod
    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attend from each token over its row's pages; K and V of this step are written before.

        Under ``tables.causal`` a token sees the slots up to its own, else every slot of its row.

        Shapes:
            q and result: [tokens, num_heads, head_dim].
        """

    @abstractmethod
    def _plan(self, tables: StepTables) -> None:
        """Prepare what all layers of the step share."""

    def _begun(self) -> Tensor:
        if self._slots is None:
            raise IntegrityError("attention was used before begin(tables); begin takes the page tables once a step")
        return self._slots


def new_slots(row: StepRow, page_size: int) -> list[int]:
    """Return the slots of the tokens a row computes, in order.

    >>> new_slots(StepRow(rid=1, label="main", pages=[9, 4], length=6, to_compute=3), page_size=4)
    [39, 16, 17]
    """
    pages = row.pages
    return [pages[i // page_size] * page_size + i % page_size for i in range(row.length - row.to_compute, row.length)]


def _check_row(row: StepRow, page_size: int, store: KVStore) -> None:
    where = f"row of request {row.rid!r}, label {row.label!r}"
    if page_size != store.layout.page_size:
        raise IntegrityError(f"{where}: tables are cut at {page_size} slots a page and the store at {store.layout.page_size}")
    if not 0 < row.to_compute <= row.length:
        raise IntegrityError(f"{where}: computes {row.to_compute} of {row.length} slots")
    if len(row.pages) != -(-row.length // page_size):
        raise IntegrityError(f"{where}: lists {len(row.pages)} pages of {page_size} slots for {row.length} slots")
    if min(row.pages) < 0 or max(row.pages) >= store.num_pages:
        raise IntegrityError(f"{where}: pages {min(row.pages)}..{max(row.pages)} reach outside a pool of {store.num_pages}")
