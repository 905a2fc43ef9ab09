"""The seam of eviction policies: one policy, one class, one file."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol, runtime_checkable


class IndexView(Protocol):
    """What a policy may read, and never write, of the index it orders.

    ``num_children``: by page, -1 when it is not indexed, 0 for a leaf. ``stamps``: by page, the clock of its last insert or
    matching lookup. ``keys``: by page, its key, empty when it is not indexed; it outlives the page as the name of a ghost. All
    are live lists of ``num_pages``.
    """

    num_pages: int
    num_children: list[int]
    stamps: list[int]
    keys: list[bytes]


@runtime_checkable
class EvictionPolicy(Protocol):
    """In which order cached pages go.

    A policy proposes pages and decides nothing else. The index takes a proposal only if the page is a leaf that nobody
    else owns, and does the accounting. A page passed over keeps its place: asked again, the policy proposes it again.

    Whatever a policy keeps is bounded by the pages of the pool. A call that raises, or proposals that are no pages, without end
    or too few, are refused by the index with the policy's name, and the index is as it was.
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
        """Propose pages in the policy's order, at least every leaf; one iterator at a time.

        The caller may evict the page just proposed before it asks for the next one (then ``removed`` and ``became_leaf``
        are called in between, and new leaves take their place in the order), or pass it over. It closes the iterator. What
        was passed over or moved since the last ``removed`` is as if the policy had never been asked.
        """
        ...


@runtime_checkable
class RetentionPolicy(EvictionPolicy, Protocol):
    """A policy that can be told to keep some pages longer, or less long, than others."""

    def retain(self, pages: Sequence[int], priority: int, duration_s: float | None) -> None:
        """Give indexed ``pages`` a priority, 0 (goes first) to 100, for ``duration_s`` seconds (None = until they go)."""
        ...
