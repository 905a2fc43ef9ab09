"""Everything that happens to a page or a request, as frozen dataclasses, and the Recorder that keeps them.

A log is replayed to the exact state of the pool at any event, so figures and studies never look at a live engine. Field
units: ``pages`` are page ids, ``*_tokens`` tokens, ``*_ms`` milliseconds. The schema number changes when a field does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kvlab.errors import InputError, IntegrityError

SCHEMA = 1


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
class RequestHeld(Event):
    """Left a step for want of pages."""

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


# -- replay ------------------------------------------------------------------------------------------------------------


@dataclass
class PageState:
    """One page at one moment."""

    owners: list[tuple[int | str, str]] = field(default_factory=list)  # streams and leases, one entry a listing
    key: str | None = None
    root: str | None = None
    parent: int | None = None
    position: int | None = None

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

    def _on_LeaseReleased(self, e: LeaseReleased) -> None:
        self._disown(self.leases, (e.rid, e.label), e.pages)

    def _on_LeaseConverted(self, e: LeaseConverted) -> None:
        self._disown(self.leases, (e.rid, e.label), e.pages)
        self._own(self.streams, (e.rid, e.label), e.pages)

    def _on_PagesReleased(self, e: PagesReleased) -> None:
        self._disown(self.streams, (e.rid, e.label), e.pages)
        if (e.rid, e.label) not in self.streams:
            self.stored_tokens.pop((e.rid, e.label), None)

    def _on_StreamCommitted(self, e: StreamCommitted) -> None:
        self.stored_tokens[e.rid, e.label] = e.stored_tokens

    def _on_StreamLengthSet(self, e: StreamLengthSet) -> None:
        self.stored_tokens[e.rid, e.label] = e.stored_tokens

    def _on_PageIndexed(self, e: PageIndexed) -> None:
        state = self.page(e.page)
        state.key, state.root, state.parent, state.position = e.key, e.root, e.parent, e.position

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
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PoolState:
        """Build the state that ``to_json`` described."""
        pages = {p: PageState([(r, x) for r, x in owners], *filed) for p, owners, *filed in data["pages"]}
        streams = {(r, x): list(listed) for r, x, listed in data["streams"]}
        leases = {(r, x): list(listed) for r, x, listed in data["leases"]}
        stored = {(r, x): tokens for r, x, tokens in data["stored_tokens"]}
        return cls(data["num_pages"], data["page_size"], pages, streams, leases, stored)


# -- the recorder ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """An event with its place in the run: running number, engine step, and milliseconds since the recorder began."""

    seq: int
    step: int
    at_ms: float
    event: Event


class Recorder:
    """Keeps events, in bounded memory; what falls out is folded into the state that ``replay`` starts from.

    Args:
        clock: seconds, monotone; ``at_ms`` counts from the first call.
        max_events: most entries kept; None = all.
        log_path: also write every event to this JSONL file.

    >>> recorder = Recorder(clock=lambda: 0.0)
    >>> recorder(PoolCreated("kv", num_pages=4, page_size=16, bytes_per_page=0))
    >>> recorder(PagesAcquired(1, "main", [1, 2]))
    >>> recorder.replay().counts()
    {'live': 2, 'shared': 0, 'cached': 0, 'free': 1}
    """

    schema: ClassVar[int] = SCHEMA

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        max_events: int | None = 500_000,
        log_path: str | Path | None = None,
    ) -> None:
        if max_events is not None and max_events < 2:
            raise InputError(f"max_events is {max_events}; give 2 or more, or None to keep all events")
        self.step = 0
        self._clock, self._begin = clock, clock()
        self._entries: list[Entry] = []
        self._max_events = max_events
        self._base = PoolState()
        self._num_folded = 0
        self._log = open(log_path, "w", encoding="utf-8", newline="\n") if log_path is not None else None  # noqa: SIM115
        if self._log is not None:
            self._log.write(json.dumps({"kvlab_events": SCHEMA}) + "\n")

    def __call__(self, event: Event) -> None:
        """Append ``event`` at the current step."""
        at_ms = round((self._clock() - self._begin) * 1e3, 3)
        entry = Entry(self._num_folded + len(self._entries), self.step, at_ms, event)
        self._entries.append(entry)
        if self._log is not None:
            self._log.write(_to_line(entry))
        if self._max_events is not None and len(self._entries) > self._max_events:
            self._fold(self._max_events // 2)

    def _fold(self, count: int) -> None:
        for entry in self._entries[:count]:
            self._base.apply(entry.event)
        del self._entries[:count]
        self._num_folded += count

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __getitem__(self, index: int) -> Entry:
        return self._entries[index]

    def __repr__(self) -> str:
        return f"Recorder({len(self._entries)} events, {self._num_folded} folded, step {self.step})"

    @property
    def num_folded(self) -> int:
        """Events that fell out of memory; ``replay`` starts after them."""
        return self._num_folded

    def filter(self, *kinds: type[Event], rid: int | str | None = None) -> list[Entry]:
        """Entries whose event is one of ``kinds`` (all if none are given) and concerns ``rid`` (any if None)."""
        return [
            entry
            for entry in self._entries
            if (not kinds or isinstance(entry.event, kinds)) and (rid is None or getattr(entry.event, "rid", None) == rid)
        ]

    def replay(self, until_seq: int | None = None) -> PoolState:
        """Rebuild the pool as it was after event ``until_seq`` (None = the last one).

        Raises:
            InputError: the event is not in memory any more, or was never recorded.
        """
        end = self._num_folded + len(self._entries) if until_seq is None else until_seq + 1
        if not self._num_folded <= end <= self._num_folded + len(self._entries):
            last = self._num_folded + len(self._entries) - 1
            raise InputError(f"event {until_seq} is not kept; events {self._num_folded}..{last} are")
        state = self._base.copy()
        for entry in self._entries[: end - self._num_folded]:
            state.apply(entry.event)
        return state

    def states(self) -> Iterator[tuple[Entry, PoolState]]:
        """Yield each entry with the pool after it; the state is one object that moves on."""
        state = self._base.copy()
        for entry in self._entries:
            state.apply(entry.event)
            yield entry, state

    def to_jsonl(self, path: str | Path) -> None:
        """Write the kept entries, one JSON object a line; the first line has the schema and what was folded away."""
        head: dict[str, Any] = {"kvlab_events": SCHEMA}
        if self._num_folded:
            head |= {"folded": self._num_folded, "base": self._base.to_json()}
        with open(path, "w", encoding="utf-8", newline="\n") as f:
            f.write(json.dumps(head) + "\n")
            f.writelines(_to_line(entry) for entry in self._entries)

    @classmethod
    def from_jsonl(cls, path: str | Path) -> Recorder:
        """Read a log back; it replays as the one that was written.

        Raises:
            InputError: no such log, another schema, an unknown event, a broken or missing line; the message names the line.
        """
        recorder = cls(clock=lambda: 0.0, max_events=None)
        try:
            with open(path, "rb") as f:
                lines = [(number, line) for number, line in enumerate(f, 1) if line.strip()]
        except OSError as error:
            raise InputError(f"{path}: the event log cannot be read ({error.strerror})") from error
        if not lines:
            raise InputError(f"{path}: an empty file; an event log begins with its schema number")
        recorder._read_head(f"{path}, line {lines[0][0]}", lines[0][1])
        for number, line in lines[1:]:
            recorder._read_entry(f"{path}, line {number}", line)
        return recorder

    def _read_head(self, where: str, line: bytes) -> None:
        try:
            head = json.loads(line)
            schema = head["kvlab_events"]
            if schema == SCHEMA and "folded" in head:
                self._num_folded, self._base = int(head["folded"]), PoolState.from_json(head["base"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{where}: not the head of an event log ({error})") from error
        if schema != SCHEMA:
            raise InputError(
                f"{where}: events of schema {schema}; this kvlab reads schema {SCHEMA}; read it with the version that wrote it"
            )

    def _read_entry(self, where: str, line: bytes) -> None:
        try:
            data = json.loads(line)
            seq, step, at_ms, kind = (data.pop(name) for name in ("seq", "step", "at_ms", "kind"))
            entry = Entry(seq, step, at_ms, EVENT_TYPES[kind](**data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise InputError(f"{where}: not an event of schema {SCHEMA} ({problem}); the log is damaged") from error
        expected = self._num_folded + len(self._entries)
        if seq != expected:
            raise InputError(f"{where}: event {seq} where event {expected} belongs; lines are missing from the log")
        self._entries.append(entry)

    def flush(self) -> None:
        """Push what was logged to the file."""
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        """Finish the log file."""
        if self._log is not None:
            self._log.close()
            self._log = None


def _to_line(entry: Entry) -> str:
    head = {"seq": entry.seq, "step": entry.step, "at_ms": entry.at_ms, "kind": entry.event.kind}
    return json.dumps(head | vars(entry.event)) + "\n"
