"""A bounded memory of prefixes already hashed: system prompts and earlier turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvlab.cache.keys import hash_pages, id_bytes, pack_ids, plain_ids, require_ints, require_page_size
from kvlab.errors import InputError

_KEY_BYTES = 33 + 32 + 7 + 8  # a bytes object of 32 bytes, as allocated, and its place in a list
_RUN_BYTES = 640  # an empty _Run with its containers and its places in the parent's children and in the recency order


class _Run:
    """Pages that every remembered prefix through them shares: encoded ids, one key a page, and what may follow."""

    __slots__ = ("children", "data", "keys", "parent")

    def __init__(self, parent: _Run | None, data: bytes, keys: list[bytes]) -> None:
        self.parent = self if parent is None else parent  # the root is its own parent
        self.data, self.keys = data, keys
        self.children: dict[bytes, _Run] = {}  # by the encoded ids of their first page


class KeyMemo:
    """Keys of prefixes seen before, found by comparing id bytes, so that only what is new is hashed.

    Runs of pages form a tree; the least recently used run that nothing follows goes first. Only whole pages are kept. It
    has no lock: it belongs to one worker.

    >>> memo = KeyMemo(page_size=4, max_bytes=1 << 20)
    >>> turn_one = memo.chain([1, 2, 3, 4, 5])
    >>> memo.chain([1, 2, 3, 4, 9])[0] == turn_one[0], memo.hashed_pages
    (True, 3)

    Args:
        max_bytes: most memory to keep, by ``num_bytes``.
    """

    def __init__(self, page_size: int, max_bytes: int = 64 << 20) -> None:
        require_page_size(page_size)
        if max_bytes < 0:
            raise InputError(f"max_bytes is {max_bytes}; give 0 (remember nothing) or more")
        self.page_size, self.max_bytes = page_size, max_bytes
        self.num_bytes = 0
        self.hashed_pages = 0
        self._page_bytes = 4 * page_size
        self._root = _Run(None, b"", [])
        self._recency: OrderedDict[_Run, None] = OrderedDict()  # a run stands before all it follows, so first = a leaf

    def __repr__(self) -> str:
        return f"KeyMemo({len(self._recency)} runs, {self.num_bytes} of {self.max_bytes} bytes)"

    def chain(self, ids: Any) -> list[bytes]:
        """Keys of ``ids`` like ``chain_ids``, hashing only what follows the longest remembered prefix.

        Raises:
            InputError: an id is no int in [0, 2**32).
        """
        values = plain_ids(ids)
        data = pack_ids(values)
        last, keys = self._walk(data)
        known = len(keys)
        start = known * self._page_bytes
        if start < len(data):
            require_ints(values, known * self.page_size)  # the others equal ids that were checked when they were hashed
            hash_pages(keys, data[start:], self._page_bytes)
            self.hashed_pages += len(keys) - known
            self._grow(last, data, keys, known)
        self._shrink()
        return keys

    def remember(self, ids: Any, keys: Sequence[bytes]) -> None:
        """Keep ``keys``, which the caller knows to be those of the first pages of ``ids``."""
        data = id_bytes(ids)
        last, found = self._walk(data)
        self._grow(last, data, list(keys), len(found))
        self._shrink()

    def _walk(self, data: bytes) -> tuple[_Run, list[bytes]]:
        """Follow ``data`` as far as it is remembered: the last run, and the keys of all pages up to its end."""
        run, keys, start = self._root, [], 0
        while (child := run.children.get(data[start : start + self._page_bytes])) is not None:
            if not data.startswith(child.data, start):
                child = self._split(child, self._common_pages(child.data, data[start : start + len(child.data)]))
            keys += child.keys
            start += len(child.data)
            run = child
        self._touch(run)
        return run, keys

    def _touch(self, run: _Run) -> None:
        while run is not self._root:
            self._recency.move_to_end(run)
            run = run.parent

    def _common_pages(self, run: bytes, data: bytes) -> int:
        """Pages that two encodings share from their beginning; the first one is known to be."""
        low, high = 1, min(len(run), len(data)) // self._page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if run[: middle * self._page_bytes] == data[: middle * self._page_bytes]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, run: _Run, num_pages: int) -> _Run:
        """Cut ``run`` after ``num_pages`` and return the upper part."""
        cut = num_pages * self._page_bytes
        upper = self._add(run.parent, run.data[:cut], run.keys[:num_pages])
        run.parent, run.data, run.keys = upper, run.data[cut:], run.keys[num_pages:]
        upper.children[run.data[: self._page_bytes]] = run
        self.num_bytes -= cut + num_pages * _KEY_BYTES  # counted by the upper part now
        return upper

    def _grow(self, last: _Run, data: bytes, keys: list[bytes], known: int) -> None:
        """Remember the whole pages after ``last``."""
        whole = min(len(data) // self._page_bytes, len(keys))
        if whole > known:
            self._touch(self._add(last, data[known * self._page_bytes : whole * self._page_bytes], keys[known:whole]))

    def _shrink(self) -> None:
        while self.num_bytes > self.max_bytes:
            run, _ = self._recency.popitem(last=False)
            del run.parent.children[run.data[: self._page_bytes]]
            self.num_bytes -= _size(run)

    def _add(self, parent: _Run, data: bytes, keys: list[bytes]) -> _Run:
        run = _Run(parent, data, keys)
        parent.children[data[: self._page_bytes]] = run
        self._recency[run] = None
        self.num_bytes += _size(run)
        return run


def _size(run: _Run) -> int:
    return _RUN_BYTES + len(run.data) + len(run.keys) * _KEY_BYTES
