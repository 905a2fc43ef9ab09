"""The recorder keeps a run's events, writes and reads them, and rebuilds the pool as it was after any of them."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, TextIO

from kvlab.errors import InputError
from kvlab.events import EVENT_TYPES, SCHEMA, Event
from kvlab.options import is_whole
from kvlab.pool_state import PoolState

logger = logging.getLogger("kvlab.events")

_BUFFER_BYTES = 64 << 10


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
        log_path: also write every event to this JSONL file, 64 KiB at a time. A disk that fills up ends the file, not the run:
            ``log_error`` says so, and events go on being kept in memory.

    Raises:
        InputError: fewer than 2 events, or a log that cannot be written.

    >>> from kvlab.events import PagesAcquired, PoolCreated
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
        if max_events is not None and (not is_whole(max_events) or max_events < 2):
            raise InputError(f"max_events is {max_events!r}; give 2 or more, or None to keep all events")
        self.step = 0
        self._clock, self._begin = clock, clock()
        self._entries: list[Entry] = []
        self._max_events = max_events
        self._base = PoolState()
        self._num_folded = 0
        self._log = None if log_path is None else _open_log(log_path)
        self.log_error: str | None = None
        #: When the recorder began, in UTC (ISO 8601); ``at_ms`` counts from here.
        self.began_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._write(json.dumps(self._head()) + "\n")

    def __call__(self, event: Event) -> None:
        """Append ``event`` at the current step."""
        at_ms = round((self._clock() - self._begin) * 1e3, 3)
        entry = Entry(self._num_folded + len(self._entries), self.step, at_ms, event)
        self._entries.append(entry)
        if self._log is not None:
            self._write(_to_line(entry))
        if self._max_events is not None and len(self._entries) > self._max_events:
            self._fold(self._max_events // 2)

    def _head(self) -> dict[str, Any]:
        return {"kvlab_events": SCHEMA, "began_at": self.began_at}

    def _write(self, line: str) -> None:
        if self._log is not None:
            try:
                self._log.write(line)
            except OSError as error:
                self._give_up_log(error)

    def _give_up_log(self, error: OSError) -> None:
        """Nobody can act on a full disk in the middle of a step: say so once, and go on without the file."""
        log, self._log = self._log, None
        if log is None:
            return
        self.log_error = f"the event log {log.name} is incomplete ({error.strerror})"
        logger.warning("%s; events are kept in memory only", self.log_error)
        with suppress(OSError):
            log.close()

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
        """Entries whose event is one of ``kinds`` (all if none are given) and concerns ``rid`` (any if None).

        Raises:
            InputError: one of ``kinds`` is no class of ``kvlab.events``.
        """
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, Event)):
                raise InputError(f"{kind!r} is no kind of event; give classes of kvlab.events, such as events.PrefixMatched")
        return [
            entry
            for entry in self._entries
            if (not kinds or isinstance(entry.event, kinds)) and (rid is None or getattr(entry.event, "rid", None) == rid)
        ]

    def since(self, seq: int) -> list[Entry]:
        """Entries from event ``seq`` on, those left out that fell out of memory."""
        return self._entries[max(seq - self._num_folded, 0) :]

    def replay(self, until_seq: int | None = None) -> PoolState:
        """Rebuild the pool as it was after event ``until_seq`` (None = the last one).

        Raises:
            InputError: the event is not in memory any more, or was never recorded.
        """
        if until_seq is not None and not is_whole(until_seq):
            raise InputError(f"until_seq is {until_seq!r}; give the number of an event, or None for the last one")
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
        head = self._head()
        if self._num_folded:
            head |= {"folded": self._num_folded, "base": self._base.to_json()}
        with _open_log(path) as f:
            f.write(json.dumps(head) + "\n")
            f.writelines(_to_line(entry) for entry in self._entries)

    @classmethod
    def from_jsonl(cls, path: str | Path) -> Recorder:
        """Read a log back; it replays as the one that was written.

        Raises:
            InputError: no such log, another schema, an unknown event, a broken or missing line; the message names the line.
        """
        _require_path(path)
        recorder = cls(clock=lambda: 0.0, max_events=None)
        try:
            with open(path, "rb") as f:
                lines = [(number, line) for number, line in enumerate(f, 1) if line.strip()]
        except OSError as error:
            raise InputError(f"{path}: the event log cannot be read ({error.strerror})") from error
        if not lines:
            raise InputError(
                f"{path}: an empty file; an event log begins with its schema number, and one that is being written is "
                "in its file after engine.close()"
            )
        recorder._read_head(f"{path}, line {lines[0][0]}", lines[0][1])
        for number, line in lines[1:]:
            recorder._read_entry(f"{path}, line {number}", line)
        return recorder

    def _read_head(self, where: str, line: bytes) -> None:
        try:
            head = json.loads(line)
            schema = head["kvlab_events"]
            if schema == SCHEMA:
                self.began_at = str(head["began_at"])
                if "folded" in head:
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
            try:
                self._log.flush()
            except OSError as error:
                self._give_up_log(error)

    def close(self) -> None:
        """Finish the log file."""
        self.flush()
        if self._log is not None:
            self._log.close()
            self._log = None


def check_log_path(path: Any) -> None:
    """Check that an event log can have this place.

    Raises:
        InputError: no path, or its folder does not exist.
    """
    _require_path(path)
    folder = Path(path).parent
    if not folder.is_dir():
        raise InputError(f"the event log cannot be written to {path}: there is no folder {folder}; make it first")


def _require_path(path: Any) -> None:
    if not isinstance(path, str | os.PathLike):  # a number would be taken for an open file
        raise InputError(f"the event log is {path!r}; give the path of a file")


def _open_log(path: str | Path) -> TextIO:
    """Open a log for one writer: it is emptied once it is clear that nobody else writes it.

    Raises:
        InputError: it cannot be written, or another recorder writes it.
    """
    check_log_path(path)
    try:
        file = open(path, "a", _BUFFER_BYTES, encoding="utf-8", newline="\n")  # noqa: SIM115 - the recorder closes it
        _claim(file)
    except BlockingIOError as error:
        file.close()
        raise InputError(f"another engine is writing the event log {path}; close it first, or give another path") from error
    except OSError as error:
        raise InputError(f"the event log cannot be written to {path} ({error.strerror}); give another path") from error
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.truncate(0)
    return file


def _claim(file: TextIO) -> None:
    """Lock a file against other writers until it is closed, where the system can (Windows has no such lock)."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _to_line(entry: Entry) -> str:
    head = {"seq": entry.seq, "step": entry.step, "at_ms": entry.at_ms, "kind": entry.event.kind}
    return json.dumps(head | vars(entry.event)) + "\n"
