"""Which pages are free, how many owners each has, and which are sealed. Page numbers only; the bytes are a PageStore's.

>>> arena = PageArena(num_pages=4)
>>> arena.acquire(2)
[1, 2]
>>> arena.retain([2]); arena.release([1, 2])
>>> arena.owners(2), arena.num_free
(1, 2)
>>> arena.acquire(3) is None    # all or nothing
True
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvlab.errors import InputError, IntegrityError

#: The page that writes without a home go to: never freed, in no request.
SINK = 0


class OwnerListener(Protocol):
    """Told, once a call, of the pages that changed between one owner and two."""

    def shared(self, pages: Sequence[int]) -> None:
        """Each of ``pages`` has a second owner now."""
        ...

    def unshared(self, pages: Sequence[int]) -> None:
        """Each of ``pages`` has one owner left."""
        ...

    def __len__(self) -> int:
        """Pages the listener owns."""
        ...


class PageArena:
    """The pages of one pool. It has no lock of its own: every caller holds the KV resource's.

    ``num_owners[page]`` is there to read, never to write. ``owner_changes`` grows with every retain and release, so that
    a decision made from owner counts knows when to be made again.

    Raises:
        InputError: a pool of fewer than two pages (page 0 is the sink, so one page would leave none to use).
    """

    def __init__(self, num_pages: int) -> None:
        if type(num_pages) is not int or num_pages < 2:
            raise InputError(f"num_pages is {num_pages!r}; a pool needs at least 2 pages: page 0 is the sink and of no use")
        self.num_pages = num_pages
        self.num_owners = [0] * num_pages
        self.owner_changes = 0
        self._sealed = bytearray(num_pages)
        self._free = deque(range(num_pages))
        self._listener: OwnerListener | None = None
        self.acquire(1)  # the sink

    def __repr__(self) -> str:
        return f"PageArena({self.num_pages} pages, {self.num_free} free)"

    def attach(self, listener: OwnerListener) -> None:
        """Make ``listener`` the one that hears of shared pages.

        Raises:
            IntegrityError: another listener still owns pages here.
        """
        if self._listener is not None and len(self._listener):
            raise IntegrityError(f"the arena's index still owns {len(self._listener)} pages; clear() it before opening another")
        self._listener = listener

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def free_pages(self) -> list[int]:
        """The free pages in the order they will be handed out."""
        return list(self._free)

    def owners(self, page: int) -> int:
        """How many owners ``page`` has."""
        self._require_pages((page,))
        return self.num_owners[page]

    def is_sealed(self, page: int) -> bool:
        """True when ``page`` is never to be written again."""
        self._require_pages((page,))
        return bool(self._sealed[page])

    def any_sealed(self, pages: Iterable[int]) -> bool:
        """True when a write into one of ``pages`` would land in bytes that another owner may read."""
        return any(map(self._sealed.__getitem__, pages))

    def acquire(self, n: int) -> list[int] | None:
        """Take ``n`` free pages, oldest first, each with one owner: all of them, or None."""
        if n < 0:
            raise InputError(f"cannot acquire {n} pages; give 0 or more")
        if n > len(self._free):
            return None
        take, num_owners = self._free.popleft, self.num_owners
        pages = [take() for _ in range(n)]
        for page in pages:
            num_owners[page] = 1
        return pages

    def seal(self, pages: Sequence[int]) -> None:
        """Promise that ``pages`` are never written again; only a free page loses its seal."""
        self.require_owned(pages, "sealed")
        sealed = self._sealed
        for page in pages:
            sealed[page] = 1

    def retain(self, pages: Sequence[int]) -> None:
        """Add one owner for each listing of a page.

        Raises:
            IntegrityError: a page is free, or not of this pool; then nothing changed.
        """
        self._require_pages(pages)
        num_owners = self.num_owners
        shared: list[int] = []
        free: list[int] = []
        for page in pages:
            owners = num_owners[page]
            num_owners[page] = owners + 1
            if owners < 2:
                (shared if owners else free).append(page)
        if free:
            self._add_owners(pages, -1)
            raise IntegrityError(f"pages {free[:8]} cannot be retained: they are free; acquire them first")
        self.owner_changes += 1
        if shared and self._listener is not None:
            self._listener.shared(shared)

    def adopt(self, pages: Sequence[int]) -> None:
        """Seal pages that somebody owns and add the listener as an owner; it is not told of what it does itself."""
        num_owners, sealed = self.num_owners, self._sealed
        for page in pages:
            sealed[page] = 1
            num_owners[page] += 1
        self.owner_changes += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take one owner away for each listing of a page; the last one frees it and breaks its seal.

        Raises:
            IntegrityError: a page has no owner left to take away, or is not of this pool; then nothing changed.
        """
        self._require_pages(pages)
        num_owners = self.num_owners
        unshared: list[int] = []
        freed: list[int] = []
        missing: list[int] = []
        for page in pages:
            left = num_owners[page] - 1
            num_owners[page] = left
            if left < 2:
                (unshared if left == 1 else freed if left == 0 else missing).append(page)
        if missing:
            self._add_owners(pages, 1)
            page, times = missing[0], list(pages).count(missing[0])
            raise IntegrityError(
                f"page {page} is released {times} times and has {self.num_owners[page]} owners; somebody let go of it twice"
            )
        self._set_free(freed)
        self.owner_changes += 1  # after the pages are free: who sees the new number sees them
        if unshared and self._listener is not None:
            self._listener.unshared(unshared)

    def _set_free(self, pages: list[int]) -> None:
        for page in pages:
            self._sealed[page] = 0
        self._free.extend(pages)

    def _add_owners(self, pages: Sequence[int], count: int) -> None:
        for page in pages:
            self.num_owners[page] += count

    def _require_pages(self, pages: Sequence[int]) -> None:
        if pages and (min(pages) < 0 or max(pages) >= self.num_pages):
            strangers = [page for page in pages if not 0 <= page < self.num_pages]
            raise IntegrityError(f"pages {strangers[:8]} are not of this pool of {self.num_pages} pages")

    def require_owned(self, pages: Sequence[int], verb: str) -> None:
        """Raise IntegrityError unless every page is of this pool and not free; ``verb`` says what was about to be done."""
        self._require_pages(pages)
        if 0 in map(self.num_owners.__getitem__, pages):
            free = [page for page in pages if not self.num_owners[page]]
            raise IntegrityError(f"pages {free[:8]} cannot be {verb}: they are free; acquire them first")
