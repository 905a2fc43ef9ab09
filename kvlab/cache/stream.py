"""One (request, label): its pages, how much of them is written, and what the index lent it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvlab.cache.chain import PrefixChain
from kvlab.cache.layouts import LaidOut
from kvlab.spec import PendingRead, RequestId, Retention, RetentionPolicy, StreamKey


class RootName(NamedTuple):
    """What a stream's root is made of."""

    base: bytes
    label: str
    salt: str


NO_ROOT = RootName(b"", "", "")


class ChainEnd(NamedTuple):
    """What ended a stream's chain: the reason, and the walk that wrote slot ``slot`` then."""

    why: str
    walk: str
    slot: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class CacheStream:
    """State of one stream. Pages of a stream with a hit, before and after its first commit:

        lease      [L0 L1 L2]                        held, stored_len 0
        converted  [L0 L1 L2 | P3 P4]                stored_len = 3 pages, P private and still empty
        committed  [L0 L1 L2 | P3 P4]                stored_len = 3 pages + span; L lent (hits), P offered when full

    A lease may end with one page of its own, [L0 L1 L2 | E]: the copy of a page up to a picture's end.

    ``page_indices`` is a high-water list: it may hold more pages than ``stored_len`` needs.
    """

    rid: RequestId
    label: str
    root: bytes = b""  # empty until the stream has a chain
    root_name: RootName = NO_ROOT
    page_indices: list[int] = field(default_factory=list)
    stored_len: int = 0
    released: int = 0  # tokens compacted out of the front by a window
    protected_prefix: int = 0  # tokens that no window releases
    window: RetentionPolicy | None = None
    chain: PrefixChain | None = None
    laid: LaidOut | None = None  # what the chain began with; outlives it
    chain_end: ChainEnd | None = None
    lease: list[int] | None = None
    end_slots: int = 0  # slots used on the last leased page, which is a private copy; 0 = whole lent pages only
    walked: int = 0  # slots of earlier walks that the lease served, while nothing of the stream was computed
    cut_from: int = 0  # a match that ended inside a picture went up to here
    recalled_from: int | None = None  # leading pages found on the device; those after them came back from the host
    lease_agreed: bool = False  # the engine trimmed the step to the lease
    converted: bool = False  # a lease became pages and its step has not committed yet
    hits: int = 0  # leading pages lent by the index
    generation: int = 0  # moves when pages or bytes change
    reset_generation: int = 0  # moves when the content is rewound or replaced; unique in its pool
    peer: tuple[str, int] | None = None  # source and logical epoch of what was retrieved
    read: PendingRead | None = None  # pages on their way from a peer
    read_error: str = ""  # a read failed: what is stored is not what it should be
    step_in_flight: bool = False
    offloaded: bool = False  # on the host, or on its way there
    host_pages: list[int] = field(default_factory=list)
    host_len: int = 0  # slots stored on them
    retention: tuple[Retention, ...] = ()  # how long its pages should stay cached

    @property
    def key(self) -> StreamKey:
        """(request, label)."""
        return self.rid, self.label

    @property
    def begins_at(self) -> int:
        """The slot that the walk under way begins at."""
        if self.offloaded:
            return self.host_len
        return self.walked if self.converted or not self.stored_len else self.stored_len

    @property
    def lent_pages(self) -> int:
        """Leased pages that the index owns too."""
        return len(self.lease or ()) - (self.end_slots > 0)

    @property
    def is_windowed(self) -> bool:
        """True once a window was declared: only protected pages are filed then."""
        return self.window is not None or self.protected_prefix > 0

    @property
    def is_fresh(self) -> bool:
        """True while nothing is stored, on the host neither: only then can the stream hit."""
        return self.stored_len == 0 and not self.offloaded
