"""What the gate decides, as events: who was let in on which numbers, who waits for what, and who gave a reservation back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvlab.events import Event, GateOpened, GrantRefused, RequestReserved, RequestWaits, ReservationReleased
from kvlab.spec import RequestId


@dataclass(frozen=True)
class GateState:
    """The gate's numbers at a decision; ``planned_peak_pages`` is None where lives are not laid side by side."""

    supply_pages: int
    outstanding_pages: int
    num_admitted: int
    num_waiting: int
    planned_peak_pages: int | None = None


class GateLog:
    """Records a gate's decisions; a request that waits is told of again only when what it needs has changed."""

    def __init__(self, record: Callable[[Event], None], settings: GateOpened) -> None:
        self._record = record
        self._told: dict[RequestId, int] = {}
        record(settings)

    def let_in(self, rid: RequestId, claim_pages: int, hit_pages: int, state: GateState) -> None:
        self._told.pop(rid, None)
        self._record(RequestReserved(rid, claim_pages, hit_pages, **vars(state)))

    def waits(self, rid: RequestId, need_pages: int, hit_pages: int, state: Callable[[], GateState]) -> None:
        if self._told.get(rid) != need_pages:
            self._told[rid] = need_pages
            self._record(RequestWaits(rid, need_pages, hit_pages, **vars(state())))

    def released(self, rid: RequestId, claim_pages: int, outstanding_pages: int, num_admitted: int) -> None:
        self._record(ReservationReleased(rid, claim_pages, outstanding_pages, num_admitted))

    def refused(self, rid: RequestId, grant_pages: int, free_pages: int, owed_pages: int) -> None:
        self._record(GrantRefused(rid, grant_pages, free_pages, owed_pages))

    def forget(self, rid: RequestId) -> None:
        """It waits no longer, or anew."""
        self._told.pop(rid, None)
