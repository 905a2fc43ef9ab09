"""Names of pages: chained SHA-256 keys over token ids and media items, in one canonical encoding.

A key names a page *and everything before it*. Keys are unrooted: an index holds one map per root (see roots.py), so a
worker that knows no root computes the same keys as everybody else. Encoding: little-endian 4-byte integers, and a 4-byte
length before every field.

>>> first, second = chain_ids([1, 2, 3, 4, 5], page_size=4)     # the second page is not full: its key is provisional
>>> first == page_key(b"", [1, 2, 3, 4]) and second == page_key(first, [5])
True
>>> first.hex()[:16]
'e0073bb807f41c91'
"""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from kvlab.errors import InputError
from kvlab.spec import Item, Span

_NO_ITEMS = b"\0\0\0\0"  # the empty field


def u32le(value: int) -> bytes:
    """Four bytes, least significant first."""
    return value.to_bytes(4, "little")


def encode_field(data: bytes) -> bytes:
    """``data`` behind its length, so that no two lists of fields have one encoding.

    >>> encode_field(b"ab")
    b'\\x02\\x00\\x00\\x00ab'
    """
    return u32le(len(data)) + data


# -- token ids ---------------------------------------------------------------------------------------------------------


def id_bytes(ids: Any) -> bytes:
    """Encode token ids, 4 bytes each. The values decide: equal ids in a list, a tuple or a tensor give equal bytes.

    >>> id_bytes([1, 23]) == id_bytes((1, 23)) == id_bytes(range(1, 24, 22))
    True

    Raises:
        InputError: an element is no int in [0, 2**32); a bool is none. The message has its position and value.
    """
    values = plain_ids(ids)
    require_ints(values)
    return pack_ids(values)


def plain_ids(ids: Any) -> Sequence[int]:
    """``ids`` as a list or tuple: an array or tensor turns itself into one, anything else is iterated.

    Raises:
        InputError: it is no sequence.
    """
    if isinstance(ids, (list, tuple)):
        return ids
    try:
        values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    except TypeError:
        values = None
    if not isinstance(values, list):
        raise InputError(f"token ids must be a sequence of ints, not {type(ids).__name__} {ids!r:.40}")
    return values


def require_ints(ids: Sequence[Any], start: int = 0) -> None:
    """Raise InputError unless ``ids[start:]`` are ints; a bool is none, though ``array`` would take it for 0 or 1."""
    new = ids[start:] if start else ids
    if operator.countOf(map(type, new), int) != len(new):
        for position, value in enumerate(new, start):
            _require_id(position, value)


def pack_ids(ids: Sequence[int], start: int = 0) -> bytes:
    """Encode ``ids[start:]``, which are known to hold no bool.

    Raises:
        InputError: an id is no int in [0, 2**32).
    """
    try:
        packed = array("I", ids[start:] if start else ids)
    except (OverflowError, TypeError):
        for position, value in enumerate(ids):
            _require_id(position, value)
        raise
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _require_id(position: int, value: Any) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"token id at position {position} is {value!r:.40} ({type(value).__name__}); ids are ints")
    if not 0 <= operator.index(value) < 1 << 32:
        raise InputError(f"token id at position {position} is {value}; ids are in [0, 2**32)")


# -- page keys ---------------------------------------------------------------------------------------------------------


def item_bytes(item: Item) -> bytes:
    """Encode one medium on a page: where it starts, how much of it lies before and in all, and what it is."""
    return u32le(item.start) + u32le(item.offset) + u32le(item.length) + encode_field(item.digest)


def page_key(prev: bytes, ids: Any, items: Iterable[Item] = ()) -> bytes:
    """Key of the page that follows the page ``prev`` names (b"" before the first page)."""
    media = b"".join(map(item_bytes, items))
    return sha256(encode_field(prev) + encode_field(id_bytes(ids)) + encode_field(media)).digest()


def chain(pages_of_ids: Iterable[Any], items_by_page: Sequence[Sequence[Item]] = ()) -> list[bytes]:
    """One key a page, a last partial page included. Pages past the end of ``items_by_page`` hold no items."""
    keys: list[bytes] = []
    for page_index, ids in enumerate(pages_of_ids):
        items = items_by_page[page_index] if page_index < len(items_by_page) else ()
        keys.append(page_key(keys[-1] if keys else b"", ids, items))
    return keys


def end_key(prev: bytes, ids: Sequence[int], items: Sequence[Item], end: int) -> bytes:
    """Key of the first ``end`` slots of a page on which an item ends.

    It names the items that start before ``end`` and as many ids as the slots left over hold, so what follows the item on
    its page does not enter.
    """
    kept = [item for item in items if item.start < end]
    taken = sum(item.length - item.offset for item in kept)  # items do not overlap, so each of these ends by then
    return page_key(prev, ids[: end - taken], kept)


def chain_ids(ids: Any, page_size: int, known: Sequence[bytes] | None = None) -> list[bytes]:
    """Keys of a prompt that is one text span; ceil(len(ids) / page_size) of them.

    Args:
        known: keys of its first ``len(known)`` whole pages, from an earlier turn; only what follows is checked and hashed.
    """
    require_page_size(page_size)
    values, keys = plain_ids(ids), list(known or ())
    if len(keys) * page_size > len(values):
        raise InputError(f"{len(keys)} known pages of {page_size} ids are more than the {len(values)} ids given")
    known_ids = len(keys) * page_size
    require_ints(values, known_ids)
    hash_pages(keys, pack_ids(values, known_ids), 4 * page_size)
    return keys


def hash_pages(keys: list[bytes], data: bytes, page_bytes: int) -> None:
    """Append to ``keys`` one key for each page of ``data`` (encoded ids), the last one perhaps partial."""
    prev, middle, whole = keys[-1] if keys else b"", u32le(page_bytes), len(data) // page_bytes * page_bytes
    head = encode_field(prev)
    for start in range(0, whole, page_bytes):
        prev = sha256(head + middle + data[start : start + page_bytes] + _NO_ITEMS).digest()
        keys.append(prev)
        head = b"\x20\0\0\0" + prev
    if whole < len(data):
        keys.append(sha256(head + encode_field(data[whole:]) + _NO_ITEMS).digest())


def require_page_size(page_size: int) -> None:
    """Raise InputError unless ``page_size`` is an int of 1 or more."""
    if type(page_size) is not int or page_size < 1:
        raise InputError(f"page_size is {page_size!r}; give a number of tokens, 1 or more")


# -- layouts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PagedLayout:
    """A laid-out prompt cut into pages: the ids on each page and the items that touch it."""

    ids: list[list[int]]
    items: list[tuple[Item, ...]]

    def keys(self) -> list[bytes]:
        """One key a page."""
        return chain(self.ids, self.items)


def cut_layout(spans: Sequence[Span], ids: Sequence[int], page_size: int) -> PagedLayout:
    """The one reading of a layout: ids fill, in order, the slots that media leave free; every touched page gets an item.

    Args:
        spans: one a write. "ids" spans consume ``ids`` in order; the ``source`` of a "digest" span is its digest.
        ids: the ids of all text spans, one after another.

    >>> cut = cut_layout([Span("ids", "text", 3, 3), Span("digest", "vit", 4, 1, b"red")], [7, 8, 9], page_size=4)
    >>> cut.ids, [[(i.start, i.offset, i.length) for i in page] for page in cut.items]
    ([[7, 8, 9], []], [[(3, 0, 4)], [(0, 1, 4)]])

    Raises:
        InputError: the spans and the ids disagree.
    """
    require_page_size(page_size)
    _require_spans(spans, len(ids))
    num_pages = -(-sum(span.length for span in spans) // page_size)
    cut = PagedLayout([[] for _ in range(num_pages)], [() for _ in range(num_pages)])
    slot = taken = 0
    for span in spans:
        for page_index, start, offset, count in _page_pieces(slot, span.length, page_size):
            if span.kind == "ids":
                cut.ids[page_index].extend(ids[taken : taken + count])
                taken += count
            else:
                cut.items[page_index] += (Item(start, offset, span.length, span.source),)
        slot += span.length
    return cut


def _page_pieces(slot: int, length: int, page_size: int) -> Iterable[tuple[int, int, int, int]]:
    """Cut [slot, slot + length) at page ends: (page, first slot on it, slots on earlier pages, slots on it)."""
    offset = 0
    while offset < length:
        page_index, start = divmod(slot + offset, page_size)
        count = min(page_size - start, length - offset)
        yield page_index, start, offset, count
        offset += count


def _require_spans(spans: Sequence[Span], num_ids: int) -> None:
    for index, span in enumerate(spans):
        if span.kind not in ("ids", "digest"):
            raise InputError(f'span {index} is of kind {span.kind!r}; known kinds: "ids", "digest"')
        if span.length < 1:
            raise InputError(f"span {index} ({span.walk}) has {span.length} slots; a write has 1 or more")
        if span.kind == "digest" and not (isinstance(span.source, bytes) and span.source):
            raise InputError(f"span {index} ({span.walk}) is a medium without a digest: its source is {span.source!r:.40}")
    text_slots = sum(span.length for span in spans if span.kind == "ids")
    if text_slots != num_ids:
        raise InputError(f"the layout's text spans have {text_slots} slots and {num_ids} ids were given; they must be equal")
