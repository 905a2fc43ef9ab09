"""Prefixes that stay cached whatever room is needed, each under a name, until they are unpinned.

A pin is one more owner of each page, so eviction and what counts as evictable leave pinned pages out like pages in use. It
outlives the request whose prompt it was, and ends with the cache: a reset drops every pin.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from kvlab import events
from kvlab.cache.filing import Filing
from kvlab.cache.pool import PagePool
from kvlab.errors import InputError
from kvlab.options import is_whole
from kvlab.spec import RequestConfig

log = logging.getLogger("kvlab.cache")


class Pins:
    """What is pinned in one pool.

    Args:
        lock: guards the pool.
        max_pages: most pages pinned at once, each counted once; None = half of those usable.

    Raises:
        InputError: a limit below 0 or above the pool.
    """

    def __init__(self, pool: PagePool, filing: Filing, lock: AbstractContextManager[object], max_pages: int | None) -> None:
        usable = pool.arena.num_pages - 1
        if max_pages is not None and (not is_whole(max_pages) or not 0 <= max_pages <= usable):
            raise InputError(f"max_pinned_pages is {max_pages!r}; the pool has {usable} usable pages, give 0 to {usable}")
        self._pool, self._filing, self._lock = pool, filing, lock
        self.max_pages = usable // 2 if max_pages is None else int(max_pages)
        self.can_spare: Callable[[Sequence[int]], bool] | None = None  # an admission gate's: can these pages be pinned now?
        self._pages: dict[str, list[int]] = {}
        self._uses: Counter[int] = Counter()

    def __len__(self) -> int:
        """Pages that are pinned, each counted once."""
        return len(self._uses)

    def __repr__(self) -> str:
        return f"Pins({len(self)} of at most {self.max_pages} pages, {', '.join(self._pages) or 'no names'})"

    def by_name(self) -> Mapping[str, Sequence[int]]:
        """Pinned pages of each name."""
        with self._lock:
            return {name: tuple(pages) for name, pages in self._pages.items()}

    def listed(self) -> list[int]:
        """Every pinned page, once a name."""
        return list(self._uses.elements())

    def pin(self, name: str, config: RequestConfig) -> int:
        """Keep the whole pages of a prompt, all labels, under ``name``; returns how many they are.

        Raises:
            InputError: no name or one that is taken, not all of these pages are cached, more would be pinned than may be, or
                admitted requests were promised the room; then nothing changed.
        """
        check_name(name)
        with self._lock:
            if name in self._pages:
                raise InputError(f"{name!r} is pinned already ({len(self._pages[name])} pages); unpin it first")
            pages = self._filing.cached_pages(config)
            self._check_room(name, pages)
            self._pool.arena.retain(pages)
            self._pages[name] = pages
            self._uses.update(pages)
            if self._pool.record is not None:
                self._pool.record(events.PagesPinned(name, pages))
            return len(pages)

    def _check_room(self, name: str, pages: Sequence[int]) -> None:
        total = len(self._uses.keys() | set(pages))
        if total > self.max_pages:
            raise InputError(
                f"pinning {name!r} would make {total} pinned pages and at most {self.max_pages} may be; unpin something, or "
                "give the pool a higher max_pinned_pages"
            )
        if self.can_spare is not None and not self.can_spare(pages):
            raise InputError(
                f"{len(pages)} pages cannot be pinned as {name!r} now: requests under way were promised the room; pin later"
            )

    def unpin(self, name: str) -> int:
        """Let the pages of ``name`` go when room is needed; returns how many they are.

        Raises:
            InputError: nothing is pinned under that name.
        """
        with self._lock:
            if not isinstance(name, str) or name not in self._pages:
                raise InputError(f"nothing is pinned as {name!r}; pinned are: {', '.join(sorted(self._pages)) or 'none'}")
            return self._drop(name, "asked")

    def unpin_all(self, why: str) -> None:
        """Drop every pin."""
        with self._lock:
            if self._pages:
                log.info("%d pinned pages are let go of (%s): %s", len(self), why, ", ".join(self._pages))
            for name in list(self._pages):
                self._drop(name, why)

    def _drop(self, name: str, why: str) -> int:
        pages = self._pages.pop(name)
        self._uses -= Counter(pages)
        self._pool.arena.release(pages)
        if self._pool.record is not None:
            self._pool.record(events.PagesUnpinned(name, pages, why))
        return len(pages)


def check_name(name: object) -> None:
    """Raise InputError for a pin's name that is no text, or empty."""
    if not isinstance(name, str) or not name:
        raise InputError(f"the name of a pin is {name!r}; give a str of at least one character")
