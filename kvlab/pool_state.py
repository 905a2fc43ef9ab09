"""The pool as a log tells it: every page with its owners after any event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvlab.errors import IntegrityError
from kvlab.events import (
    Event,
    HostPagesFreed,
    IndexReset,
    LeaseConverted,
    LeaseReleased,
    PageEvicted,
    PageIndexed,
    PagesAcquired,
    PagesCachedOnHost,
    PagesLeased,
    PagesOffloaded,
    PagesPinned,
    PagesRecalled,
    PagesReleased,
    PagesReloaded,
    PagesUnpinned,
    PictureEndCopied,
    PoolCreated,
    StreamCommitted,
    StreamLengthSet,
)


@dataclass
class PageState:
    """One page at one moment."""

    owners: list[tuple[int | str, str]] = field(default_factory=list)  # streams and leases, one entry a listing
    key: str | None = None
    root: str | None = None
    parent: int | None = None
    position: int | None = None
    pins: list[str] = field(default_factory=list)  # names it is pinned under

    @property
    def state(self) -> str:
        """free | live (one stream) | shared (several streams, or streams and the index) | cached (index only)."""
        owners = len(self.owners) + (self.key is not None)
        if owners == 0:
            return "free"
        if not self.owners:
            return "cached"
        return "live" if owners == 1 else "shared"


@dataclass
class PoolState:
    """The pool after some event: every page, and the page list of every stream and lease."""

    num_pages: int = 0
    page_size: int = 0
    pages: dict[int, PageState] = field(default_factory=dict)
    streams: dict[tuple[int | str, str], list[int]] = field(default_factory=dict)
    leases: dict[tuple[int | str, str], list[int]] = field(default_factory=dict)
    stored_tokens: dict[tuple[int | str, str], int] = field(default_factory=dict)
    host: dict[int, tuple[int | str, str]] = field(default_factory=dict)  # host page -> the stream it belongs to
    host_cached: dict[int, str] = field(default_factory=dict)  # host page -> key of the cached page on it
    pins: dict[str, list[int]] = field(default_factory=dict)

    def page(self, page: int) -> PageState:
        """State of ``page``; pages never touched are free."""
        return self.pages.setdefault(page, PageState())

    def counts(self) -> dict[str, int]:
        """Pages by state over the usable pages."""
        counts = {"live": 0, "shared": 0, "cached": 0, "free": 0}
        for page in range(1, self.num_pages):
            counts[self.pages[page].state if page in self.pages else "free"] += 1
        return counts

    def indexed(self) -> dict[int, str]:
        """Indexed pages and their keys."""
        return {p: s.key for p, s in self.pages.items() if s.key is not None}

    # each event changes owners the way the arena did
    def apply(self, event: Event) -> None:
        """Advance by one event."""
        change = getattr(self, f"_on_{type(event).__name__}", None)
        if change is not None:
            change(event)

    def _own(self, listing: dict[Any, list[int]], stream: tuple[int | str, str], pages: Iterable[int]) -> None:
        pages = list(pages)
        listing.setdefault(stream, []).extend(pages)
        for p in pages:
            self.page(p).owners.append(stream)

    def _disown(self, listing: dict[Any, list[int]], stream: tuple[int | str, str], pages: Iterable[int]) -> None:
        held = listing.get(stream, [])
        for p in pages:
            if p not in held:
                raise IntegrityError(f"the log lets {stream} give up page {p}, which it does not list; it lists {held[:20]}")
            held.remove(p)
            self.page(p).owners.remove(stream)
        if not held:
            listing.pop(stream, None)

    def _on_PoolCreated(self, e: PoolCreated) -> None:
        self.num_pages, self.page_size = e.num_pages, e.page_size

    def _on_PagesAcquired(self, e: PagesAcquired) -> None:
        self._own(self.streams, (e.rid, e.label), e.pages)

    def _on_PagesLeased(self, e: PagesLeased) -> None:
        self._own(self.leases, (e.rid, e.label), e.pages)

    def _on_PictureEndCopied(self, e: PictureEndCopied) -> None:
        self._own(self.leases, (e.rid, e.label), [e.page])

    def _on_LeaseReleased(self, e: LeaseReleased) -> None:
        self._disown(self.leases, (e.rid, e.label), e.pages)

    def _on_LeaseConverted(self, e: LeaseConverted) -> None:
        self._disown(self.leases, (e.rid, e.label), e.pages)
        self._own(self.streams, (e.rid, e.label), e.pages)

    def _on_PagesReleased(self, e: PagesReleased) -> None:
        self._disown(self.streams, (e.rid, e.label), e.pages)
        if (e.rid, e.label) not in self.streams:
            self.stored_tokens.pop((e.rid, e.label), None)

    def _on_PagesOffloaded(self, e: PagesOffloaded) -> None:
        self._disown(self.streams, (e.rid, e.label), e.pages)
        self.stored_tokens.pop((e.rid, e.label), None)
        self.host.update(dict.fromkeys(e.host_pages, (e.rid, e.label)))

    def _on_PagesReloaded(self, e: PagesReloaded) -> None:
        self._free_host(e.host_pages)
        self._own(self.streams, (e.rid, e.label), e.pages)
        self.stored_tokens[e.rid, e.label] = e.stored_tokens

    def _on_PagesCachedOnHost(self, e: PagesCachedOnHost) -> None:
        self.host_cached.update(zip(e.host_pages, e.keys, strict=True))

    def _on_PagesRecalled(self, e: PagesRecalled) -> None:
        self._free_host(e.host_pages)
        self._own(self.leases, (e.rid, e.label), e.pages)

    def _on_HostPagesFreed(self, e: HostPagesFreed) -> None:
        self._free_host(e.host_pages)

    def _free_host(self, host_pages: Iterable[int]) -> None:
        for page in host_pages:
            del (self.host if page in self.host else self.host_cached)[page]

    def _on_StreamCommitted(self, e: StreamCommitted) -> None:
        self.stored_tokens[e.rid, e.label] = e.stored_tokens

    def _on_StreamLengthSet(self, e: StreamLengthSet) -> None:
        self.stored_tokens[e.rid, e.label] = e.stored_tokens

    def _on_PageIndexed(self, e: PageIndexed) -> None:
        state = self.page(e.page)
        state.key, state.root, state.parent, state.position = e.key, e.root, e.parent, e.position

    def _on_PagesPinned(self, e: PagesPinned) -> None:
        self._pin(e.name, e.pages)

    def _pin(self, name: str, pages: Iterable[int]) -> None:
        self.pins[name] = list(pages)
        for p in self.pins[name]:
            self.page(p).pins.append(name)

    def _on_PagesUnpinned(self, e: PagesUnpinned) -> None:
        if self.pins.get(e.name) != list(e.pages):
            raise IntegrityError(f"the log unpins pages {e.pages[:20]} of {e.name!r}, which pins {self.pins.get(e.name)}")
        for p in self.pins.pop(e.name):
            self.page(p).pins.remove(e.name)

    def _on_PageEvicted(self, e: PageEvicted) -> None:
        self._unindex(e.page)

    def _on_IndexReset(self, e: IndexReset) -> None:
        for p in e.pages:
            self._unindex(p)

    def _unindex(self, page: int) -> None:
        state = self.page(page)
        state.key = state.root = state.parent = state.position = None

    def copy(self) -> PoolState:
        """An equal state that shares nothing with this one."""
        return PoolState.from_json(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The state in lists, numbers and strings; ``from_json`` takes it back."""
        return {
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "pages": [[p, [list(o) for o in s.owners], s.key, s.root, s.parent, s.position] for p, s in self.pages.items()],
            "streams": [[*stream, list(pages)] for stream, pages in self.streams.items()],
            "leases": [[*stream, list(pages)] for stream, pages in self.leases.items()],
            "stored_tokens": [[*stream, tokens] for stream, tokens in self.stored_tokens.items()],
            "host": [[page, *owner] for page, owner in self.host.items()],
            "host_cached": [[page, key] for page, key in self.host_cached.items()],
            "pins": self.pins,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PoolState:
        """Build the state that ``to_json`` described."""
        pages = {p: PageState([(r, x) for r, x in owners], *filed) for p, owners, *filed in data["pages"]}
        streams = {(r, x): list(listed) for r, x, listed in data["streams"]}
        leases = {(r, x): list(listed) for r, x, listed in data["leases"]}
        stored = {(r, x): tokens for r, x, tokens in data["stored_tokens"]}
        host = {page: (owner[0], owner[1]) for page, *owner in data.get("host", ())}
        host_cached = dict(data.get("host_cached", ()))
        state = cls(data["num_pages"], data["page_size"], pages, streams, leases, stored, host, host_cached)
        for name, pinned in data["pins"].items():
            state._pin(name, pinned)
        return state
