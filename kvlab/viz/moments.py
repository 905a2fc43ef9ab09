"""A run at one moment, read from its log: the pool, who is who, and who has used which page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvlab.errors import InputError
from kvlab.events import LeaseConverted, PageEvicted, PageIndexed, RequestSubmitted, StepRan
from kvlab.options import whole
from kvlab.pool_state import PoolState
from kvlab.recorder import Entry, Recorder
from kvlab.spec import RequestId
from kvlab.viz.given import require_events

Events: TypeAlias = Recorder | Sequence[Entry]
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass
class Moment:
    """The pool after some event, and what led to it.

    ``users`` = requests that filed or reused an indexed page, in order of first use. ``evicted`` = pages evicted in this
    step. ``walks`` = forward passes of this step.
    """

    pool: PoolState
    step: int = 0
    letters: dict[RequestId, str] = field(default_factory=dict)
    names: dict[RequestId, str] = field(default_factory=dict)
    users: dict[int, list[RequestId]] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)
    walks: list[str] = field(default_factory=list)

    def advance(self, entry: Entry) -> None:
        """Move on by one entry."""
        if entry.step != self.step:
            self.step, self.evicted, self.walks = entry.step, [], []
        event = entry.event
        self.pool.apply(event)
        if isinstance(event, RequestSubmitted) and event.name:
            self.names[event.rid] = event.name
        elif isinstance(event, PageIndexed):
            self.users[event.page] = [event.rid]
        elif isinstance(event, LeaseConverted):
            for page in event.pages:
                self._used(page, event.rid)
        elif isinstance(event, PageEvicted):
            self.evicted.append(event.page)
        elif isinstance(event, StepRan):
            self.walks.append(event.walk)

    def _used(self, page: int, rid: RequestId) -> None:
        users = self.users.setdefault(page, [])
        if rid not in users:
            users.append(rid)

    def owners(self, page: int) -> list[RequestId]:
        """Requests that list or lease ``page``, each once."""
        state = self.pool.pages.get(page)
        return list(dict.fromkeys(rid for rid, _ in state.owners)) if state else []

    def called(self, rid: RequestId) -> str:
        """Letter, id and name of a request, as in ``A: request 1 (first question)``."""
        name = self.names.get(rid, "")
        return f"{self.letters[rid]}: request {rid}" + (f" ({name})" if name and name != str(rid) else "")


def letter(index: int) -> str:
    """Return the mark of the ``index``-th request: A..Z, then A2..Z2, and so on.

    >>> letter(0), letter(25), letter(26)
    ('A', 'Z', 'A2')
    """
    turn, place = divmod(index, len(_LETTERS))
    return _LETTERS[place] + (str(turn + 1) if turn else "")


def begin(events: Events) -> Moment:
    """Return the moment before the first entry, with a letter for every request of the whole log.

    Raises:
        InputError: a list of entries that begins in the middle of a run.
    """
    require_events(events)
    if isinstance(events, Recorder):
        pool = events.replay(events.num_folded - 1)
    elif events and events[0].seq != 0:
        raise InputError(f"the entries begin at event {events[0].seq}; give the Recorder, which knows the pool before it")
    else:
        pool = PoolState()
    listed = [rid for rid, _ in (*pool.streams, *pool.leases)]
    named = [rid for entry in events if (rid := getattr(entry.event, "rid", None)) is not None]
    rids = dict.fromkeys([*listed, *named])
    return Moment(pool, letters={rid: letter(i) for i, rid in enumerate(rids)})


def moment(events: Events, *, step: int | None = None, until_seq: int | None = None) -> Moment:
    """Return the run after ``step`` (its last event), after event ``until_seq``, or at its end.

    Raises:
        InputError: both are given, or the log has no such step or event.
    """
    _check_choice(events, step, until_seq)
    now = begin(events)
    for entry in events:
        if (step is not None and entry.step > step) or (until_seq is not None and entry.seq > until_seq):
            break
        now.advance(entry)
    return now


def _check_choice(events: Events, step: int | None, until_seq: int | None) -> None:
    require_events(events)
    for name, value in (("step", step), ("until_seq", until_seq)):
        if value is not None:
            whole(name, value, 0)
    if step is None and until_seq is None:
        return
    if step is not None and until_seq is not None:
        raise InputError(f"step={step} and until_seq={until_seq} name two moments; give one")
    if not len(events):
        raise InputError("the log has no events; record a run first")
    first, last = events[0], events[len(events) - 1]
    if step is not None and not first.step <= step <= last.step:
        raise InputError(f"step {step} is not in the log; it has steps {first.step} to {last.step}")
    if until_seq is not None and not first.seq <= until_seq <= last.seq:
        raise InputError(f"event {until_seq} is not in the log; it has events {first.seq} to {last.seq}")


def step_moments(events: Events) -> Iterator[Moment]:
    """Yield the run after each step that has events; one object that moves on."""
    now = begin(events)
    previous: int | None = None
    for entry in events:
        if previous is not None and entry.step != previous:
            yield now
        now.advance(entry)
        previous = entry.step
    if previous is not None:
        yield now


def steps_of(events: Events) -> list[int]:
    """Return the steps that the log has events of, in order."""
    require_events(events)
    return sorted({entry.step for entry in events})
