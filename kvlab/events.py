"""Everything that happens to a page or a request, as frozen dataclasses.

A log of them is replayed to the exact state of the pool at any event, so figures and studies never look at a live engine. Field
units: ``pages`` are page ids, ``*_tokens`` tokens, ``*_ms`` milliseconds. The schema number changes when a field does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = 2


@dataclass(frozen=True)
class Event:
    """Base of all events; ``kind`` is the class name in a log.

    Sequences become tuples: an event must not change when its maker's list does, and equals itself read back from a log.

    >>> PagesAcquired(1, "main", [1, 2]).pages
    (1, 2)
    """

    def __post_init__(self) -> None:
        values = vars(self)
        for name, value in values.items():
            if isinstance(value, (list, tuple, range)):
                values[name] = _frozen(value)

    @property
    def kind(self) -> str:
        return type(self).__name__


def _frozen(value: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_frozen(v) if isinstance(v, (list, tuple)) else v for v in value)


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelLoaded(Event):
    """Which bytes the run was made with."""

    name: str
    identity: str


@dataclass(frozen=True)
class PoolCreated(Event):
    """Page 0 is the sink; usable pages = num_pages - 1."""

    resource: str
    num_pages: int
    page_size: int
    bytes_per_page: int


@dataclass(frozen=True)
class StepRan(Event):
    """One batched forward. ``spans`` = (rid, label, tokens computed) of each row."""

    walk: str
    spans: Sequence[tuple[int | str, str, int]]
    duration_ms: float


@dataclass(frozen=True)
class MediaEncoded(Event):
    """An encoder ran for a picture that becomes ``slots`` slots; ``digest`` in hex, "" where it has none."""

    rid: int | str
    walk: str
    digest: str
    slots: int
    duration_ms: float


@dataclass(frozen=True)
class WalkServed(Event):
    """All of a walk was cached: no forward ran, and no encoder."""

    rid: int | str
    walk: str
    walk_index: int


# -- a request ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestSubmitted(Event):
    rid: int | str
    prompt_tokens: int
    max_tokens: int
    name: str = ""


@dataclass(frozen=True)
class RequestStarted(Event):
    rid: int | str


@dataclass(frozen=True)
class PrefixMatched(Event):
    """One line for each admitted request of a keyed stream: what was matched of what is keyed."""

    rid: int | str
    label: str
    matched_pages: int
    keyed_pages: int
    matched_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class GateOpened(Event):
    """How requests are let in, in the words of ``load``."""

    admission: str
    admission_order: str
    backfill_window: int
    max_concurrent_requests: int | None
    preemption: bool


@dataclass(frozen=True)
class RequestReserved(Event):
    """Let in: ``claim_pages`` over its life, ``hit_pages`` of them lent by the index.

    The other numbers are those after it: pages free or evictable, pages that all admitted may still take, how many are in and
    how many wait. With "peak" ``planned_peak_pages`` estimates the most that their lives side by side will take from the free
    list: lent pages are not counted, and a request whose last page is just full may take one more.
    """

    rid: int | str
    claim_pages: int
    hit_pages: int
    supply_pages: int
    outstanding_pages: int
    num_admitted: int
    num_waiting: int
    planned_peak_pages: int | None


@dataclass(frozen=True)
class RequestWaits(Event):
    """The head of the queue does not fit; told again only when the reason changes. With "peak" ``planned_peak_pages`` is that
    of the admitted alone.
    """

    rid: int | str
    need_pages: int
    hit_pages: int
    supply_pages: int
    outstanding_pages: int
    num_admitted: int
    num_waiting: int
    planned_peak_pages: int | None


@dataclass(frozen=True)
class GrantRefused(Event):
    """With these pages granted the admitted requests could not all finish."""

    rid: int | str
    grant_pages: int
    free_pages: int
    owed_pages: int


@dataclass(frozen=True)
class ReservationReleased(Event):
    """A request of ``claim_pages`` is in no longer; the other numbers are those without it."""

    rid: int | str
    claim_pages: int
    outstanding_pages: int
    num_admitted: int


@dataclass(frozen=True)
class RequestPreempted(Event):
    """Gave its pages back and waits to resume with what it has generated as part of its input."""

    rid: int | str
    for_rid: int | str
    generated_tokens: int
    pages: int


@dataclass(frozen=True)
class Stalled(Event):
    """Every running request waits for pages and nothing can free one."""

    held: Sequence[int | str]
    usable_pages: int
    live_pages: int
    settings: str


@dataclass(frozen=True)
class RequestHeld(Event):
    """Left a step for want of pages; none are short where its grant was refused."""

    rid: int | str
    label: str
    pages_short: int


@dataclass(frozen=True)
class TokenSampled(Event):
    rid: int | str
    token: int


@dataclass(frozen=True)
class RequestFinished(Event):
    """``reason``: stop | length | cancelled | deadline | error. ``error`` is the message of the last two."""

    rid: int | str
    reason: str
    cached_tokens: int
    generated_tokens: int
    ttft_ms: float | None = None
    error: str = ""


@dataclass(frozen=True)
class TokensMissed(Event):
    """Prompt tokens [start, stop) were computed because of ``cause``."""

    rid: int | str
    label: str
    start: int
    stop: int
    cause: str
    evidence: str


# -- a page ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PagesAcquired(Event):
    """Fresh pages from the free list, appended to the stream."""

    rid: int | str
    label: str
    pages: Sequence[int]


@dataclass(frozen=True)
class PagesLeased(Event):
    """Indexed pages held for a stream that is not admitted yet."""

    rid: int | str
    label: str
    pages: Sequence[int]


@dataclass(frozen=True)
class PictureEndCopied(Event):
    """A private copy of the cached page that a picture ends on, ``slots`` of it used, joined the lease."""

    rid: int | str
    label: str
    page: int
    slots: int


@dataclass(frozen=True)
class LeaseReleased(Event):
    rid: int | str
    label: str
    pages: Sequence[int]
    why: str


@dataclass(frozen=True)
class LeaseConverted(Event):
    """The leased pages became the stream's leading pages."""

    rid: int | str
    label: str
    pages: Sequence[int]


@dataclass(frozen=True)
class PagesReleased(Event):
    """The stream lets go of pages; each is free only if this was its last owner."""

    rid: int | str
    label: str
    pages: Sequence[int]
    why: str


@dataclass(frozen=True)
class StreamCommitted(Event):
    rid: int | str
    label: str
    walk: str
    span: int
    stored_tokens: int


@dataclass(frozen=True)
class StreamLengthSet(Event):
    """A lease, a fork or a rewind set the stream's length; what a step writes is a StreamCommitted."""

    rid: int | str
    label: str
    stored_tokens: int
    why: str


@dataclass(frozen=True)
class PagesForked(Event):
    """Whole pages copied onto another label's private pages."""

    rid: int | str
    source: str
    target: str
    pages: Sequence[int]


@dataclass(frozen=True)
class PagesOffloaded(Event):
    """The stream gave all its ``pages`` up; what it stores is on ``host_pages``, which may be fewer."""

    rid: int | str
    label: str
    pages: Sequence[int]
    host_pages: Sequence[int]


@dataclass(frozen=True)
class PagesReloaded(Event):
    """Back from the host, on pages of its own."""

    rid: int | str
    label: str
    pages: Sequence[int]
    host_pages: Sequence[int]
    stored_tokens: int


@dataclass(frozen=True)
class PagesCachedOnHost(Event):
    """Pages that were just evicted are kept on the host under their keys."""

    keys: Sequence[str]
    host_pages: Sequence[int]


@dataclass(frozen=True)
class PagesRecalled(Event):
    """Cached pages came back from the host for a stream that leases them; each was indexed just before."""

    rid: int | str
    label: str
    pages: Sequence[int]
    host_pages: Sequence[int]


@dataclass(frozen=True)
class HostPagesFreed(Event):
    """Host copies that nobody needs any more."""

    host_pages: Sequence[int]
    why: str


@dataclass(frozen=True)
class PageIndexed(Event):
    """The index became an owner of ``page``. ``position`` counts pages from the start of the chain."""

    rid: int | str
    label: str
    page: int
    key: str
    root: str
    parent: int | None
    position: int


@dataclass(frozen=True)
class IndexRaceLost(Event):
    """Another request filed this key first; ``page`` stays private and ``winner`` is the indexed one."""

    rid: int | str
    label: str
    page: int
    winner: int


@dataclass(frozen=True)
class PageEvicted(Event):
    """The index let go of ``page``, which is free now. ``for_rid`` needed it."""

    page: int
    key: str
    for_rid: int | str | None


@dataclass(frozen=True)
class PagesPinned(Event):
    """Cached pages that stay until ``name`` is unpinned."""

    name: str
    pages: Sequence[int]


@dataclass(frozen=True)
class PagesUnpinned(Event):
    name: str
    pages: Sequence[int]
    why: str


@dataclass(frozen=True)
class IndexReset(Event):
    """Every entry was dropped; ``pages`` are those the index let go of."""

    reason: str
    epoch: int
    pages: Sequence[int]


@dataclass(frozen=True)
class RootOpened(Event):
    """An index was opened (or moved). ``root`` = first 16 hex digits of the base root."""

    resource: str
    root: str
    labels: Sequence[str]


@dataclass(frozen=True)
class ChainEnded(Event):
    rid: int | str
    label: str
    why: str
    walk: str
    slot: int


EVENT_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in Event.__subclasses__()}
