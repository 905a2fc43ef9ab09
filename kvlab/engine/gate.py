"""Who may start: a request reserves the pages of its whole life before its first step, so that none stops half way.

    supply = free pages + pages the index can give up        outstanding = pages admitted requests may still take

"reserve" admits while outstanding + need <= supply. "peak" admits while the worst moment of all lives together fits, and then
guards each grant so that the admitted can always finish one after another. "none" admits everybody: the historical behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvlab.engine.footprint import Footprint, can_finish, peak_pages
from kvlab.engine.gatelog import GateLog, GateState
from kvlab.errors import InputError, IntegrityError
from kvlab.events import Event, GateOpened
from kvlab.spec import RequestId

ADMISSIONS = ("reserve", "peak", "none")
ORDERS = ("fifo", "backfill")
PROTECTIONS = ("easy",)

#: Rounds left to a request of which only its model knows how often it loops.
UNKNOWN_ROUNDS = 1 << 30


@dataclass(frozen=True)
class AdmissionOptions:
    """How requests are let in.

    Args:
        admission: "reserve", "peak" or "none".
        admission_order: "fifo", or "backfill": requests behind the head may go first where that cannot delay it.
        backfill_protect: "easy": the head's earliest start is never moved back.
        backfill_window: waiting requests looked at behind the head.
        max_concurrent_requests: most requests in flight; None = no limit.
        preemption: whether the newest request gives its pages back when nothing else can free one; None = with "reserve" and
            "peak", but not with "none".

    Raises:
        InputError: an unknown name or an illegal number.
    """

    admission: str = "reserve"
    admission_order: str = "fifo"
    backfill_protect: str = "easy"
    backfill_window: int = 128
    max_concurrent_requests: int | None = None
    preemption: bool | None = None

    def __post_init__(self) -> None:
        for name, known in (("admission", ADMISSIONS), ("admission_order", ORDERS), ("backfill_protect", PROTECTIONS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        _check_whole("backfill_window", self.backfill_window)
        if self.max_concurrent_requests is not None:
            _check_whole("max_concurrent_requests", self.max_concurrent_requests)
        if self.preemption not in (None, True, False):
            raise InputError(f"preemption is {self.preemption!r}; it must be True, False or None")

    @property
    def opened(self) -> GateOpened:
        """The settings as the event log has them."""
        return GateOpened(
            self.admission, self.admission_order, self.backfill_window, self.max_concurrent_requests, self.preempts
        )

    @property
    def preempts(self) -> bool:
        """True when a request may be sent back to the queue for another's sake."""
        return self.admission != "none" if self.preemption is None else self.preemption


def admission_of(profile: str) -> AdmissionOptions:
    """Return how a profile lets requests in where nothing is said of it: the published system neither reserves nor preempts."""
    return AdmissionOptions(admission="none", preemption=False) if profile == "published" else AdmissionOptions()


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}; it must be a whole number of at least 1")


class Supply(Protocol):
    """What the gate asks of a pool; KVResource answers it."""

    page_size: int

    @property
    def usable_pages(self) -> int: ...

    def supply_pages(self, excluding: Sequence[int] = ()) -> int:
        """Free pages and those eviction could reach, ``excluding`` left out."""
        ...

    def supply_mark(self) -> tuple[int, ...]:
        """A value that stays the same while ``supply_pages`` cannot have changed."""
        ...

    def peek_prefix(self, rid: RequestId) -> list[int]:
        """Pages of the index a fresh request would be lent now, all labels; touches nothing."""
        ...

    def lease_prefix(self, rid: RequestId) -> int:
        """Hold those pages for the request; returns their number."""
        ...

    def pages_taken(self, rid: RequestId) -> tuple[int, int]:
        """Pages of a request: (taken from the free list, lent by the index or leased)."""
        ...


@dataclass(frozen=True)
class Claim:
    """What a request will hold over its life: ``total_pages``, lent ones included, of them ``prompt_pages`` for its prompt, in
    ``growth`` growing streams. ``own_pages`` it takes from the free list in the end however many are lent to it: a window lets
    go of lent pages as of others. ``looks_up``: False when the engine will not look for its prompt in the cache.
    """

    rid: RequestId
    total_pages: int
    prompt_pages: int
    growth: int = 1
    own_pages: int = 0
    looks_up: bool = True

    def fresh_pages(self, lent_pages: int) -> int:
        """Pages it takes from the free list over its life while so many are lent to it."""
        return max(self.total_pages - lent_pages, self.own_pages)


class Gate:
    """Admits requests to one pool.

    Args:
        rounds_left: rounds until a request ends, at most; 0 once it has ended, UNKNOWN_ROUNDS where nobody can say.
        record: event sink, or None.
    """

    def __init__(
        self,
        pool: Supply,
        options: AdmissionOptions,
        *,
        rounds_left: Callable[[RequestId], int],
        record: Callable[[Event], None] | None = None,
    ) -> None:
        self.options = options
        self._pool, self._rounds_left = pool, rounds_left
        self._log = None if record is None else GateLog(record, options.opened)
        self._claims: dict[RequestId, Claim] = {}
        self._epoch = 0  # moves when a reservation comes or goes
        self._refused: tuple[object, ...] | None = None
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._claims)

    # -- letting in

    @property
    def most_looked_at(self) -> int:
        """How many waiting requests a look considers, so that no claim needs to be made for those behind."""
        return self.options.backfill_window + 1 if self._backfills else 1

    def choose(self, waiting: Sequence[Claim], num_waiting: int | None = None) -> int | None:
        """Return which of ``waiting`` (in the order they came) is let in now, with its hit leased; None = nobody.

        A refused queue is not looked at again until a page, a reservation or the requests looked at have changed.

        Args:
            waiting: the first ``most_looked_at`` of the queue, or all of it.
            num_waiting: how long the queue is, for the log; None = as long as ``waiting``.
        """
        self._num_waiting = len(waiting) if num_waiting is None else num_waiting
        limit = self.options.max_concurrent_requests
        if not waiting or (limit is not None and len(self._claims) >= limit):
            return None
        if self.options.admission == "none":
            return self._let_in(waiting, 0, 0)
        last = waiting[min(len(waiting), self.most_looked_at) - 1]
        mark = (self._epoch, self._pool.supply_mark(), waiting[0].rid, last.rid, min(len(waiting), self.most_looked_at))
        if mark == self._refused:
            return None
        chosen = self._first_fitting(waiting)
        self._refused = mark if chosen is None else None
        return chosen

    @property
    def _backfills(self) -> bool:
        return self.options.admission_order == "backfill"

    def _first_fitting(self, waiting: Sequence[Claim]) -> int | None:
        hit = self._hit(waiting[0])
        supply, fits = self._pool.supply_pages(hit), self._room()
        if fits(waiting[0], len(hit), supply):
            return self._let_in(waiting, 0, len(hit))
        self._tell_waits(waiting[0], len(hit), supply)
        if not self._backfills:
            return None
        shadow_round, spare_pages = self._head_start(waiting[0].fresh_pages(len(hit)), supply)
        for place in range(1, min(len(waiting), self.options.backfill_window + 1)):
            claim = waiting[place]
            hit = self._hit(claim)
            is_gone_in_time = self._rounds_left(claim.rid) <= shadow_round < UNKNOWN_ROUNDS
            if (is_gone_in_time or claim.fresh_pages(len(hit)) <= spare_pages) and fits(
                claim, len(hit), self._pool.supply_pages(hit)
            ):
                return self._let_in(waiting, place, len(hit))
        return None

    def _hit(self, claim: Claim) -> list[int]:
        return self._pool.peek_prefix(claim.rid) if claim.looks_up else []

    def _fits(self, claim: Claim, hit_pages: int, supply: int) -> bool:
        return self._room()(claim, hit_pages, supply)

    def _room(self) -> Callable[[Claim, int, int], bool]:
        """Whether a claim with so many pages lent fits a supply, beside those admitted now: added up once for a whole look."""
        if self.options.admission == "reserve":
            owed = self.outstanding_pages()
            return lambda claim, hit_pages, supply: owed + claim.fresh_pages(hit_pages) <= supply
        held = self._footprints()
        held_pages = sum(f.held_pages for f in held)

        def fits(claim: Claim, hit_pages: int, supply: int) -> bool:
            need, now = claim.fresh_pages(hit_pages), max(claim.prompt_pages - hit_pages, 0)
            entering = Footprint(0, need, now, claim.growth, self._rounds_left(claim.rid))
            return peak_pages([*held, entering], self._pool.page_size) <= supply + held_pages

        return fits

    def _let_in(self, waiting: Sequence[Claim], place: int, hit_pages: int) -> int:
        claim = waiting[place]
        self._claims[claim.rid] = claim
        self._epoch += 1
        if self.options.admission != "none" and claim.looks_up:
            leased = self._pool.lease_prefix(claim.rid)
            if leased != hit_pages:
                raise IntegrityError(f"request {claim.rid} was let in with {hit_pages} cached pages and leased {leased}")
        if self._log is not None:
            self._log.let_in(claim.rid, claim.total_pages, hit_pages, self._state(self._num_waiting - 1))
        return place

    def _state(self, num_waiting: int, supply: int | None = None) -> GateState:
        supply = self._pool.supply_pages() if supply is None else supply
        peak = peak_pages(self._footprints(), self._pool.page_size) if self.options.admission == "peak" else None
        return GateState(supply, self.outstanding_pages(), len(self._claims), num_waiting, peak)

    def take_back(self, claim: Claim) -> bool:
        """Let a request in again whose pages are on the host; it will need all of its claim."""
        supply = self._pool.supply_pages()
        if not (claim.total_pages <= supply if self.options.admission == "none" else self._fits(claim, 0, supply)):
            return False
        self._claims[claim.rid] = claim
        self._epoch += 1
        return True

    def amend(self, claim: Claim) -> None:
        """What an admitted request will hold has changed: a window let go of pages that it does not take again."""
        if self._claims.get(claim.rid, claim) != claim:
            self._claims[claim.rid] = claim
            self._epoch += 1

    def _tell_waits(self, claim: Claim, hit_pages: int, supply: int) -> None:
        if self._log is not None:
            need = claim.fresh_pages(hit_pages)
            self._log.waits(claim.rid, need, hit_pages, lambda: self._state(self._num_waiting, supply))

    def _head_start(self, need: int, supply: int) -> tuple[int, int]:
        """The round in which the head can start at the latest, and the pages it leaves spare then."""
        room = supply - self.outstanding_pages()
        for claim in sorted(self._claims.values(), key=lambda c: self._rounds_left(c.rid)):
            _, lent = self._pool.pages_taken(claim.rid)
            room += claim.fresh_pages(lent)
            if room >= need:
                return self._rounds_left(claim.rid), room - need
        return 0, 0

    # -- what is owed

    def outstanding_pages(self) -> int:
        """Pages that admitted requests may still take from the free list."""
        taken = ((claim, *self._pool.pages_taken(claim.rid)) for claim in self._claims.values())
        return sum(max(claim.fresh_pages(lent) - fresh, 0) for claim, fresh, lent in taken)

    def _footprints(self) -> list[Footprint]:
        return [self._footprint(claim) for claim in self._claims.values()]

    def _footprint(self, claim: Claim) -> Footprint:
        fresh, lent = self._pool.pages_taken(claim.rid)
        now = max(claim.prompt_pages - lent - fresh, 0)
        return Footprint(fresh, claim.fresh_pages(lent), now, claim.growth, self._rounds_left(claim.rid))

    # -- grants, and the end

    def may_grant(self, rid: RequestId, num_pages: int) -> bool:
        """True when ``rid`` may take ``num_pages`` now; only "peak" ever says no."""
        if self.options.admission != "peak" or rid not in self._claims:
            return True
        free = self._pool.supply_pages()
        mine = self._footprint(self._claims[rid])
        if mine.owed_pages <= free:
            return True  # it can finish on what is free
        others = [self._footprint(c) for c in self._claims.values() if c.rid != rid]
        if not can_finish([mine, *others], free):
            return True  # unsafe already: refusing makes it no better
        granted = Footprint(mine.held_pages + num_pages, mine.claim_pages, 0, mine.growth, mine.rounds)
        is_safe = can_finish([granted, *others], free - num_pages)
        if not is_safe and self._log is not None:
            self._log.refused(rid, num_pages, free, mine.owed_pages)
        return is_safe

    def can_spare(self, pages: Sequence[int]) -> bool:
        """True when the admitted requests can still finish if cached ``pages`` cannot be had any more."""
        return self._is_enough(self._pool.supply_pages(pages))

    def may_recall(self, rid: RequestId, num_pages: int) -> bool:
        """True when cached pages may come back from the host for ``rid``; a window lets go of them again, so that they are
        taken beside what it reserved.
        """
        if rid not in self._claims or not self._claims[rid].own_pages:
            return self.may_grant(rid, num_pages)
        return self._is_enough(self._pool.supply_pages() - num_pages)

    def _is_enough(self, supply: int) -> bool:
        if self.options.admission == "reserve":
            return self.outstanding_pages() <= supply
        return self.options.admission == "none" or can_finish(self._footprints(), supply)

    def release(self, rid: RequestId) -> None:
        """The request has ended or gone back to the queue; unknown requests are ignored."""
        if self._log is not None:
            self._log.forget(rid)
        claim = self._claims.pop(rid, None)
        if claim is not None:
            self._epoch += 1
            if self._log is not None:
                self._log.released(rid, claim.total_pages, self.outstanding_pages(), len(self._claims))

    def check(self) -> None:
        """Verify that no request holds more than it reserved, and that what is owed can be had.

        Raises:
            IntegrityError: names the request and both numbers.
        """
        if self.options.admission == "none":
            return
        for claim in self._claims.values():
            fresh, lent = self._pool.pages_taken(claim.rid)
            if fresh + lent > claim.total_pages:
                raise IntegrityError(f"request {claim.rid} holds {fresh + lent} pages and reserved {claim.total_pages}")
        supply, owed = self._pool.supply_pages(), self.outstanding_pages()
        if self.options.admission == "reserve" and owed > supply:
            raise IntegrityError(f"admitted requests may take {owed} more pages and only {supply} are free or evictable")
        if self.options.admission == "peak" and not can_finish(self._footprints(), supply):
            raise IntegrityError(f"the admitted requests cannot all finish on {supply} free or evictable pages")

    def facts(self) -> Mapping[str, object]:
        """The settings that bound who runs, for a stall's message."""
        return {
            "admission": self.options.admission,
            "max_concurrent_requests": self.options.max_concurrent_requests,
            "preemption": self.options.preempts,
        }
