"""KVStore: the tensors behind the page numbers of one KV resource."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.errors import InputError
from kvlab.spec import KVLayout

#: Names of KVLayout dtypes. int64 carries the digests of the tracer model.
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype a layout names.

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


class KVStore:
    """K and V of every page and layer in one tensor; a spec.PageStore.

    Args:
        layout: Shape of a page; only the NHD order is stored.
        num_pages: Pages of the pool, the sink included.
        device: Where the pages live.
        host_pages: Size of the host pool, which is allocated when the first page moves there.

    Shapes:
        pages: [layers, 2, num_pages, page_size, kv_heads, head_dim]; index 0 of axis 1 is K, index 1 is V.

    >>> store = KVStore(KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=4), num_pages=3)
    >>> store.keys(0)[1] = 7.0
    >>> store.copy_pages([1], [2])
    >>> store.keys(0)[2, 3].tolist(), store.values(0)[2, 3].tolist(), store.num_bytes
    ([[7.0, 7.0]], [[0.0, 0.0]], 192)
    """

    def __init__(self, layout: KVLayout, num_pages: int, *, device: str | torch.device = "cpu", host_pages: int = 0) -> None:
        if layout.layout != "NHD":
            raise InputError(f"pages are stored in NHD order, not {layout.layout!r}; ask for layout='NHD'")
        if num_pages < 2:
            raise InputError(f"a pool of {num_pages} pages has none to use: page 0 is the sink; ask for 2 or more")
        self.layout = layout
        self.num_pages = num_pages
        self.dtype = torch_dtype(layout.dtype)
        self.host_pages = host_pages
        page = (layout.page_size, layout.num_kv_heads, layout.head_dim)
        self.pages = torch.zeros((layout.num_layers, 2, num_pages, *page), dtype=self.dtype, device=device)
        #: One [2, num_pages, page_size, kv_heads, head_dim] view a layer.
        self.layers: tuple[Tensor, ...] = self.pages.unbind(0)
        #: K and V of each layer by slot: [num_pages * page_size, kv_heads, head_dim].
        self._slots = [layer.flatten(1, 2).unbind(0) for layer in self.layers]
        self._host: Tensor | None = None

    def __repr__(self) -> str:
        size = f"{self.num_pages} pages of {self.layout.page_size} slots, {self.num_bytes:,} bytes"
        return f"KVStore({size}, {self.layout.dtype}, {self.device})"

    @property
    def device(self) -> torch.device:
        return self.pages.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages on the device."""
        return self.pages.numel() * self.pages.element_size()

    def keys(self, layer: int) -> Tensor:
        """Return K of ``layer``, [num_pages, page_size, kv_heads, head_dim], as a view."""
        return self.layers[layer][0]

    def values(self, layer: int) -> Tensor:
        """Return V of ``layer``, [num_pages, page_size, kv_heads, head_dim], as a view."""
        return self.layers[layer][1]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one token's K and V a slot; slot = page * page_size + offset.

        Shapes:
            slots: [tokens] int64. k, v: [tokens, kv_heads, head_dim].
        """
        for stored, new in zip(self._slots[layer], (k, v), strict=True):
            stored.index_copy_(0, slots, new.detach().to(self.dtype))

    def read(self, layer: int, pages: slice | Tensor, length: int) -> Tensor:
        """Return K and V of the first ``length`` slots of ``pages``, [2, length, kv_heads, head_dim].

        A slice of neighbouring pages is read in place; page ids in any order are gathered.
        """
        stored = self.layers[layer]
        read = stored[:, pages] if isinstance(pages, slice) else stored.index_select(1, pages)
        return read.flatten(1, 2)[:, :length]

    def selector(self, pages: Sequence[int]) -> slice | Tensor:
        """Return what ``read`` takes for ``pages``: a slice when they lie one after another, else their ids on the device."""
        first = pages[0] if pages else 0
        if list(pages) == list(range(first, first + len(pages))):
            return slice(first, first + len(pages))
        return self._ids(pages)

    # -- moving whole pages --------------------------------------------------------------------------------------------

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self._check_move(src, self.num_pages, dst, self.num_pages)
        self.pages.index_copy_(2, self._ids(dst), self.pages.index_select(2, self._ids(src)))

    def to_host(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        self._check_move(pages, self.num_pages, host_pages, self.host_pages)
        moved = self.pages.index_select(2, self._ids(pages)).to("cpu")
        self._host_pool().index_copy_(2, torch.tensor(host_pages, dtype=torch.int64), moved)

    def from_host(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        self._check_move(host_pages, self.host_pages, pages, self.num_pages)
        moved = self._host_pool().index_select(2, torch.tensor(host_pages, dtype=torch.int64))
        self.pages.index_copy_(2, self._ids(pages), moved.to(self.device))

    def _host_pool(self) -> Tensor:
        if self._host is None:
            shape = (*self.pages.shape[:2], self.host_pages, *self.pages.shape[3:])
            self._host = torch.zeros(shape, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        return self._host

    def _ids(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.device)

    @staticmethod
    def _check_move(src: Sequence[int], src_pages: int, dst: Sequence[int], dst_pages: int) -> None:
        if len(src) != len(dst):
            raise InputError(f"{len(src)} pages cannot be copied onto {len(dst)}; name as many targets as sources")
        for pages, pool in ((src, src_pages), (dst, dst_pages)):
            for page in pages:
                if not 0 <= page < pool:
                    raise InputError(f"page {page} is outside a pool of {pool} pages")
