"""How far one stream is keyed, and what ended it.

A chain starts as the keys of a prompt. Generated ids wait in ``unkeyed`` until they fill a page, which then gets its own key:

    slots    0 ........ prompt_slots ........ covered_len
    keys     [k0] [k1] [k2 provisional]                        prompt of 2.5 pages
    extend   [k0] [k1] [k2] [k3]                unkeyed: rest  the provisional key is replaced, never filed

A page is offered to the index once it is both written and keyed (``pages_filled``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from kvlab.cache.keys import cut_layout, end_key, page_key
from kvlab.cache.layouts import ONE_TEXT, LaidOut
from kvlab.errors import InputError
from kvlab.spec import Item, KeyedPrompt, PrefixStream, Span

# Why a chain ends. Pages already indexed stay indexed.
FOREIGN_WALK = "a walk outside the declaration wrote the stream"
OUTSIDE_LAYOUT = "a walk wrote what the prompt's layout does not say"
PAST_PROMPT = "a keyed text walk wrote past the laid-out prompt"
UNSEEN_TOKENS = "the stream holds tokens the keys never saw"
MOVED_PAGES = "a window moved the pages"
CACHE_RESET = "reset"
REMOTE_REWIND = "the peer it is read from began anew"
FORK_TARGET = "the stream became a fork target"


class PictureEnd(NamedTuple):
    """The first ``slots`` slots of page ``position``, at which a picture ends inside it; ``ids`` are the ids among them."""

    position: int
    slots: int
    key: bytes
    ids: tuple[int, ...]


class PrefixChain:
    """Page keys of one stream and the bookkeeping of how far they describe it.

    Args:
        prompt: keys, tail and layout from the preprocess worker; the key list is copied.
        page_size: slots a page of the pool that will hold the stream.

    Raises:
        InputError: the keys do not fit ``page_size`` (they were cut for another one).

    >>> from kvlab.cache.keys import chain_ids
    >>> ids = [5, 6, 7, 8, 9, 10]
    >>> chain = PrefixChain(KeyedPrompt(ids, chain_ids(ids, 4), ids[4:], 6, decode_tensor="tokens"), page_size=4)
    >>> chain.keyed_pages, len(chain.keys), chain.unkeyed
    (1, 2, [9, 10])
    >>> chain.extend([11, 12, 13])
    >>> chain.keyed_pages, chain.unkeyed, chain.keys == chain_ids([*ids, 11, 12], 4)
    (2, [13], True)
    >>> [chain.pages_filled(stored) for stored in (3, 4, 8, 40)]
    [0, 1, 2, 2]
    """

    def __init__(self, prompt: KeyedPrompt, page_size: int) -> None:
        check_fit(prompt, page_size)
        self.page_size = page_size
        self.keys: list[bytes] = list(prompt.keys)
        self.prompt_ids: Sequence[int] = prompt.ids
        self.prompt_slots = prompt.prompt_slots
        self.layout: tuple[Span, ...] = prompt.layout
        self.laid = LaidOut(prompt.layout) if prompt.layout else ONE_TEXT
        self.keyed_pages = prompt.prompt_slots // page_size
        self.tail_items: tuple[Item, ...] = prompt.tail_items
        self.decode_tensor = prompt.decode_tensor
        #: Ids not yet in a whole page; None = growing is over, or never began.
        self.unkeyed: list[int] | None = None if prompt.decode_tensor is None else list(prompt.tail)
        self.generated_ids: list[int] = []
        self.covered_len = prompt.prompt_slots
        #: Pages of this stream that were offered to the index already.
        self.cursor = 0

    def __repr__(self) -> str:
        return f"PrefixChain({self.keyed_pages} keyed pages, cursor {self.cursor}, covers {self.covered_len} slots)"

    def extend(self, ids: Sequence[int]) -> None:
        """Count sampled ids; each page they fill gets its key."""
        if self.unkeyed is None:
            return
        self.unkeyed.extend(ids)
        self.generated_ids.extend(ids)
        self.covered_len += len(ids)
        while len(self.unkeyed) >= (room := self.page_size - _item_slots(self.tail_items, self.page_size)):
            self._key_page(self.unkeyed[:room])
            del self.unkeyed[:room]

    def freeze(self) -> None:
        """What is generated from now on is not keyed: a peer holds the tokens before it."""
        self.unkeyed = None

    def _key_page(self, ids: Sequence[int]) -> None:
        prev = self.keys[self.keyed_pages - 1] if self.keyed_pages else b""
        self.keys[self.keyed_pages :] = [page_key(prev, ids, self.tail_items)]
        self.tail_items = ()
        self.keyed_pages += 1

    def pages_filled(self, stored_len: int) -> int:
        """Leading pages that are both written and keyed when ``stored_len`` slots are stored."""
        return min(stored_len // self.page_size, self.keyed_pages)

    def match_limit(self, slots: int) -> int:
        """Most pages a probe of the first ``slots`` may match: one token at least is always recomputed."""
        return max(0, slots - 1) // self.page_size

    @property
    def lendable_pages(self) -> int:
        """Most pages a prompt may match; one that ends with a picture may be served whole, for no logits are wanted of it."""
        return self.match_limit(self.prompt_slots + self.laid.ends_with_medium)

    @cached_property
    def ends(self) -> dict[int, PictureEnd]:
        """The ends of pictures that lie inside a page, by slot."""
        if not self.layout:
            return {}
        cut = cut_layout(self.layout, self.prompt_ids, self.page_size)
        at = ((stop, *divmod(stop, self.page_size)) for stop in self.laid.media_ends)
        return {stop: self._end(page, slots, cut.ids[page], cut.items[page]) for stop, page, slots in at if slots}

    def _end(self, page: int, slots: int, ids: Sequence[int], items: Sequence[Item]) -> PictureEnd:
        kept = [item for item in items if item.start < slots]
        taken = slots - sum(item.length - item.offset for item in kept)
        key = end_key(self.keys[page - 1] if page else b"", ids, items, slots)
        return PictureEnd(page, slots, key, tuple(ids[:taken]))

    def ends_on(self, page: int) -> list[PictureEnd]:
        """The ends of pictures inside ``page``, the last one first."""
        return [end for _, end in sorted(self.ends.items(), reverse=True) if end.position == page]

    def why_end(self, declared: PrefixStream | None, walk: str, start: int, stop: int) -> str | None:
        """Say why a commit of slots [start, stop) by ``walk`` ends the chain, or None.

        ``start`` is the length *before* the write on purpose: a decode step may write a token before it was read back and
        counted. ``declared`` None = direct use, where walks are not looked at.
        """
        if declared is not None:
            if walk not in declared.walks():
                return FOREIGN_WALK
            if walk != declared.decode_walk and (why := self._why_misplaced(declared, walk, start, stop)):
                return why
        return UNSEEN_TOKENS if start > self.covered_len else None

    def _why_misplaced(self, declared: PrefixStream, walk: str, start: int, stop: int) -> str | None:
        if not self.layout:
            if walk != declared.walk:
                return OUTSIDE_LAYOUT  # a picture nobody laid out
            return PAST_PROMPT if start >= self.prompt_slots else None
        at = 0
        for span in self.layout:
            if at <= start < at + span.length:
                is_foreseen = stop <= at + span.length if span.kind == "ids" else (start, stop) == (at, at + span.length)
                return None if span.walk == walk and is_foreseen else OUTSIDE_LAYOUT
            at += span.length
        return PAST_PROMPT

    def ids_of_page(self, page_index: int) -> tuple[int, ...]:
        """The ids on one page, media slots left out."""
        begin = self._ids_before(page_index * self.page_size)
        end = self._ids_before((page_index + 1) * self.page_size)
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return tuple(self.prompt_ids[begin:end])
        generated = self.generated_ids[max(0, begin - num_prompt) : end - num_prompt]
        return (*self.prompt_ids[begin:num_prompt], *generated)

    def _ids_before(self, slot: int) -> int:
        """How many ids lie before ``slot``."""
        at = media = 0
        for span in self.layout:
            if span.kind != "ids":
                media += min(max(0, slot - at), span.length)
            at += span.length
        return slot - media


def _item_slots(items: Sequence[Item], page_size: int) -> int:
    return sum(min(page_size - item.start, item.length - item.offset) for item in items)


def check_fit(prompt: KeyedPrompt, page_size: int) -> None:
    """Raise InputError unless the keys were cut for pages of ``page_size``; a prompt without keys fits."""
    if not prompt.keys:
        return
    num_keys = -(-prompt.prompt_slots // page_size)
    if len(prompt.keys) != num_keys:
        raise InputError(
            f"a prompt of {prompt.prompt_slots} slots has {len(prompt.keys)} page keys, and pages of {page_size} slots need "
            f"{num_keys}; key it with the pool's page size"
        )
    tail = len(prompt.tail) + _item_slots(prompt.tail_items, page_size)
    if tail != prompt.prompt_slots % page_size:
        raise InputError(
            f"a prompt of {prompt.prompt_slots} slots has {tail} slots on its last page, and pages of {page_size} slots leave "
            f"{prompt.prompt_slots % page_size}; key it with the pool's page size"
        )
