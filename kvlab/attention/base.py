"""AttentionBackend: how a model reads and writes pages, whatever computes the attention.

A step goes: ``begin(tables)`` once, then in each layer ``write(layer, k, v)`` and ``attend(layer, q)``. Tokens of all rows are
packed in row order, so row r owns the tokens after those of the rows before it. In a step that does not commit, ``write`` keeps
K and V only until the next layer writes, and a token sees its row's pages and then the row's own tokens.
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
        self._commits = True
        self._num_tokens = 0
        self._own: tuple[int, Tensor, Tensor] | None = None  # (layer, k, v) of a step that does not commit

    def root_fields(self) -> Mapping[str, Any]:
        return {"backend": self.name, "scale": self.scale}

    def begin(self, tables: StepTables) -> None:
        """Take the page tables of the next step.

        Raises:
            IntegrityError: A table that does not describe pages of this store.

        Changes:
            What ``write`` and ``attend`` address, until the next call.
        """
        self._slots = self._own = None
        for row in tables.rows:
            _check_row(row, tables, self.store)
        self._commits = tables.commit
        self._num_tokens = sum(row.to_compute for row in tables.rows)
        written = tables.rows if tables.commit else ()
        slots = [slot for row in written for slot in new_slots(row, tables.page_size)]
        self._plan(tables)
        self._slots = torch.tensor(slots, dtype=torch.int64, device=self.store.device)  # [written]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store K and V of the step's tokens in the slots the tables gave them, or keep them for ``attend`` alone.

        Shapes:
            k, v: [tokens, kv_heads, head_dim]; K already rotated.

        Changes:
            The pages of ``layer``, in a step that commits.
        """
        slots = self._begun()
        if k.shape[0] != self._num_tokens:
            raise IntegrityError(f"layer {layer} writes {len(k)} tokens in a step of {self._num_tokens}")
        if self._commits:
            self.store.write(layer, slots, k, v)
        else:
            self._own = (layer, k, v)

    @abstractmethod
    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attend from each token over its row's pages; K and V of this step are written before.

        Under ``tables.causal`` a token sees the slots up to its own, else every slot of its row; in a step that does not commit
        the row's own tokens count as slots after its pages.

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

    def _own_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V that a step without commit has for ``layer``, [tokens, kv_heads, head_dim] each."""
        if self._own is None or self._own[0] != layer:
            raise IntegrityError(f"layer {layer} attends in a step that keeps nothing, before write was given its own K and V")
        return self._own[1:]


def new_slots(row: StepRow, page_size: int) -> list[int]:
    """Return the slots of the tokens a row computes, in order.

    >>> new_slots(StepRow(rid=1, label="main", pages=[9, 4], length=6, to_compute=3), page_size=4)
    [39, 16, 17]
    """
    pages = row.pages
    return [pages[i // page_size] * page_size + i % page_size for i in range(row.length - row.to_compute, row.length)]


def _check_row(row: StepRow, tables: StepTables, store: KVStore) -> None:
    page_size = tables.page_size
    where = f"row of request {row.rid!r}, label {row.label!r}"
    if page_size != store.layout.page_size:
        raise IntegrityError(f"{where}: tables are cut at {page_size} slots a page and the store at {store.layout.page_size}")
    if row.to_compute < 1 or row.length < (row.to_compute if tables.commit else 0):
        raise IntegrityError(f"{where}: computes {row.to_compute} of {row.length} slots")
    if len(row.pages) != -(-row.length // page_size):
        raise IntegrityError(f"{where}: lists {len(row.pages)} pages of {page_size} slots for {row.length} slots")
    if row.pages and (min(row.pages) < 0 or max(row.pages) >= store.num_pages):
        raise IntegrityError(f"{where}: pages {min(row.pages)}..{max(row.pages)} reach outside a pool of {store.num_pages}")
