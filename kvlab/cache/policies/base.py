"""The seam of eviction policies: one policy, one class, one file."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol


class IndexView(Protocol):
    """What a policy may read, and never write, of the index it orders.

    ``num_children``: by page, -1 when it is not indexed, 0 for a leaf. ``stamps``: by page, the clock of its last insert or
    matching lookup. Both are live lists of ``num_pages``.
    """

    num_pages: int
    num_children: list[int]
    stamps: list[int]

    def key_of(self, page: int) -> bytes | None:
        """Key of ``page``, None when it is not indexed. It outlives the page as the name of a ghost."""
        ...


class EvictionPolicy(Protocol):
    """In which order cached pages go.

    A policy proposes pages and decides nothing else. The index takes a proposal only if the page is a leaf that nobody
    else owns, and does the accounting. A page passed over keeps its place: asked again, the policy proposes it again.
    """

    name: str

    def attach(self, index: IndexView) -> None:
        """Begin anew with no pages, ordering ``index`` from now on; called before anything else."""
        ...

    def inserted(self, pages: Sequence[int], stamp: int) -> None:
        """``pages`` entered the index, in chain order. Those without children are told of by ``became_leaf`` next."""
        ...

    def touched(self, pages: Sequence[int], stamp: int) -> None:
        """A lookup matched ``pages``, a chain from its first page on."""
        ...

    def became_leaf(self, page: int) -> None:
        """``page`` has no children now: it just entered, or its last child went."""
        ...

    def removed(self, page: int) -> None:
        """``page`` left the index; its key can still be read during this call."""
        ...

    def candidates(self) -> Generator[int, None, None]:
        """Propose pages in the policy's order, at least every leaf.

        The caller may evict the page just proposed before it asks for the next one (then ``removed`` and ``became_leaf``
        are called in between, and new leaves take their place in the order), or pass it over. It closes the iterator.
        """
        ...
