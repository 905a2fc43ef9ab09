"""Where an event log may lie, and what becomes of a run whose disk is full."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

from kvlab.errors import InputError
from kvlab.events import RequestStarted
from kvlab.recorder import Recorder


@pytest.mark.parametrize("path", [3, True, b"log", ["log"]])
def test_a_log_is_the_path_of_a_file(path: Any) -> None:
    with pytest.raises(InputError, match="give the path of a file"):
        Recorder(clock=lambda: 0.0, log_path=path)


def test_a_log_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        Recorder(clock=lambda: 0.0, log_path=tmp_path)
    with pytest.raises(InputError, match="no folder"):
        Recorder(clock=lambda: 0.0).to_jsonl(tmp_path / "missing" / "log.jsonl")
    assert os.listdir(tmp_path) == []


def test_what_is_no_event_number_cannot_be_replayed_to() -> None:
    with pytest.raises(InputError, match="until_seq is 'x'"):
        Recorder(clock=lambda: 0.0).replay("x")  # type: ignore[arg-type]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")
def test_a_log_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first = Recorder(clock=lambda: 0.0, log_path=path)
    first(RequestStarted(1))
    with pytest.raises(InputError, match=r"another engine is writing the event log .*log.jsonl; close it first"):
        Recorder(clock=lambda: 0.0, log_path=path)
    first.close()
    assert [entry.event for entry in Recorder.from_jsonl(path).filter(RequestStarted)] == [RequestStarted(1)]
    Recorder(clock=lambda: 0.0, log_path=path).close()
    assert len(Recorder.from_jsonl(path).filter()) == 0


@pytest.mark.parametrize("kind", [3, "RequestStarted", int])
def test_only_kinds_of_events_can_be_picked(kind: Any) -> None:
    with pytest.raises(InputError, match="is no kind of event; give classes of kvlab.events"):
        Recorder(clock=lambda: 0.0).filter(RequestStarted, kind)


def test_a_log_to_read_is_a_path_too() -> None:
    with pytest.raises(InputError, match="give the path of a file"):
        Recorder.from_jsonl(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, True, 2.5, "x"])
def test_a_bound_that_keeps_too_little_or_is_no_number_is_refused(count: Any) -> None:
    with pytest.raises(InputError, match="max_events"):
        Recorder(clock=lambda: 0.0, max_events=count)


class FullDisk(io.StringIO):
    """A file that takes ``room`` characters, and then raises on every write and flush."""

    name = "log.jsonl"

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, text: str) -> int:
        if self.tell() + len(text) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


@pytest.mark.parametrize("room", [0, 30, 500, 2_000])
def test_a_full_disk_ends_the_log_and_not_the_run(
    tracer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    plain = tracer(page_size=4, num_pages=20)
    monkeypatch.setattr("kvlab.recorder._open_log", lambda path: FullDisk(room))
    engine = tracer(page_size=4, num_pages=20, event_log=tmp_path / "log.jsonl")
    prompts = [[1, 2, 3, 4, 5, 6, 7, n] for n in range(6)]
    told = [e.generate(prompts, max_tokens=9) for e in (plain, engine)]
    assert [r.ids for r in told[0]] == [r.ids for r in told[1]]
    assert [entry.event.kind for entry in plain.events] == [entry.event.kind for entry in engine.events]
    assert engine.events.log_error == "the event log log.jsonl is incomplete (No space left on device)"
    assert [record.message.partition(";")[0] for record in caplog.records] == [engine.events.log_error]
    engine.check()
    assert engine.kv.arena.num_free + len(engine.kv.index) == engine.kv.usable_pages


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize("verb", ["flush", "close"])
def test_what_only_fails_as_the_log_is_finished_is_told_too(verb: str) -> None:
    recorder = Recorder(clock=lambda: 0.0, log_path="/dev/full")
    assert recorder.log_error is None
    getattr(recorder, verb)()
    assert recorder.log_error == "the event log /dev/full is incomplete (No space left on device)"


def test_entries_since_an_event_leave_out_what_fell_out_of_memory() -> None:
    recorder = Recorder(clock=lambda: 0.0, max_events=4)
    for rid in range(7):
        recorder(RequestStarted(rid))
    assert recorder.num_folded > 0
    assert [entry.seq for entry in recorder.since(5)] == [5, 6]
    assert [entry.seq for entry in recorder.since(0)] == [entry.seq for entry in recorder]
    assert recorder.since(7) == []
