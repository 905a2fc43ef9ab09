"""Host page ids of one budget. Plain allocation: a host page has one owner, so nothing is counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvlab.errors import InputError, IntegrityError


class HostPages:
    """Host pages [first, first + num_pages) of a PageStore.

    >>> host = HostPages(3, first=10, name="cpu_offload_pages")
    >>> host.take(2), host.take(2), host.num_free
    ([10, 11], None, 1)
    >>> host.give([10, 11])
    >>> host.take(3)
    [12, 10, 11]

    Raises:
        InputError: ``num_pages`` is no whole number of at least 0; the message calls it ``name``.
    """

    def __init__(self, num_pages: int, *, first: int = 0, name: str = "host pages") -> None:
        if type(num_pages) is not int or num_pages < 0:
            raise InputError(f"{name} is {num_pages!r}; it must be a whole number of at least 0")
        self.num_pages = num_pages
        self._free = deque(range(first, first + num_pages))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Take ``count`` pages, or none of them."""
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """Put pages back.

        Raises:
            IntegrityError: one of them was not taken.
        """
        if not self._taken.issuperset(pages):
            raise IntegrityError(f"host pages {sorted(set(pages) - self._taken)[:8]} were given back and not taken")
        self._taken.difference_update(pages)
        self._free.extend(pages)
