"""The log of a run: what it keeps, how it replays, and that it survives a file."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kvlab import events as ev
from kvlab.errors import InputError, IntegrityError
from kvlab.events import EVENT_TYPES, SCHEMA
from kvlab.pool_state import PoolState
from kvlab.recorder import Entry, Recorder
from tests.synthetic_log import Clock, three_sharers, under_pressure


def owners_by_hand(entries: list[Entry]) -> dict[int, list[object]]:
    """Owners of each page, the index as None: counted with one dict and no classes of kvlab."""
    owners: dict[int, list[object]] = {}
    for event in (entry.event for entry in entries):
        match event:
            case ev.PagesAcquired(rid, label, pages) | ev.PagesLeased(rid, label, pages):
                for page in pages:
                    owners.setdefault(page, []).append((rid, label))
            case ev.PagesReleased(rid, label, pages, _) | ev.LeaseReleased(rid, label, pages, _):
                for page in pages:
                    owners[page].remove((rid, label))
            case ev.PageIndexed(page=page):
                owners[page].append(None)
            case ev.PageEvicted(page=page):
                owners[page].remove(None)
            case ev.IndexReset(pages=pages):
                for page in pages:
                    owners[page].remove(None)
    return {page: sorted(map(str, who)) for page, who in owners.items() if who}


def owners_of(state: PoolState) -> dict[int, list[object]]:
    found = {p: sorted(map(str, [*s.owners, *([None] if s.key is not None else [])])) for p, s in state.pages.items()}
    return {page: who for page, who in found.items() if who}


def one_of_each() -> list[ev.Event]:
    """Every kind of event once, with the sequences that engines pass: lists, tuples, ranges, nested."""
    samples = {"rid": "r1", "pages": [3, 4], "spans": [(1, "main", 5)], "labels": ["main"], "duration_ms": 1.5, "parent": None}
    numbers = {"position", "page", "winner", "epoch", "start", "stop", "slot", "span", "token"}

    def value(name: str) -> object:
        if name in samples:
            return samples[name]
        return (
            2
            if name in numbers or name.startswith(("num_", "page_size", "bytes_")) or name.endswith(("_tokens", "_pages"))
            else "é"
        )

    made = []
    for cls in EVENT_TYPES.values():
        made.append(cls(**{name: value(name) for name in cls.__dataclass_fields__}))
    return made


def test_an_event_does_not_change_when_its_makers_list_does() -> None:
    pages = [1, 2]
    event = ev.PagesAcquired(1, "main", pages)
    pages.append(3)
    assert event.pages == (1, 2)


def test_equal_events_are_equal_and_hashable_whatever_sequence_they_were_made_of() -> None:
    made = {
        ev.StepRan("w", [(1, "main", 5)], 1.0),
        ev.StepRan("w", (("1", "main", 5),), 1.0),
        ev.StepRan("w", [[1, "main", 5]], 1.0),
    }
    assert len(made) == 2


def test_every_kind_of_event_comes_back_equal_from_a_file(tmp_path: Path) -> None:
    recorder = Recorder(clock=Clock())
    for event in one_of_each():
        recorder(event)
    recorder.to_jsonl(tmp_path / "log.jsonl")
    assert list(Recorder.from_jsonl(tmp_path / "log.jsonl")) == list(recorder)
    assert len(recorder) == len(EVENT_TYPES) > 20


def test_a_log_file_written_while_running_reads_back_equal(tmp_path: Path) -> None:
    recorder = three_sharers(log_path=tmp_path / "log.jsonl")
    recorder.close()
    assert list(Recorder.from_jsonl(tmp_path / "log.jsonl")) == list(recorder)


def test_a_log_says_when_it_began_and_a_copy_says_the_same(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    recorder = three_sharers(log_path=tmp_path / "log.jsonl")
    recorder.close()
    read = Recorder.from_jsonl(tmp_path / "log.jsonl")
    read.to_jsonl(tmp_path / "copy.jsonl")
    assert read.began_at == Recorder.from_jsonl(tmp_path / "copy.jsonl").began_at == recorder.began_at
    assert timedelta(milliseconds=-1) <= datetime.fromisoformat(read.began_at) - before < timedelta(minutes=1)


def test_a_log_file_is_complete_although_memory_is_bounded(tmp_path: Path) -> None:
    recorder = three_sharers(log_path=tmp_path / "log.jsonl", max_events=10)
    recorder.close()
    assert list(Recorder.from_jsonl(tmp_path / "log.jsonl")) == list(three_sharers())


@pytest.mark.parametrize("make", [three_sharers, under_pressure])
def test_replay_gives_the_owners_of_every_page_after_every_event(make) -> None:
    recorder = make()
    entries = list(recorder)
    for entry in entries:
        assert owners_of(recorder.replay(entry.seq)) == owners_by_hand(entries[: entry.seq + 1])


def test_states_yields_what_replay_rebuilds() -> None:
    recorder = three_sharers()
    for entry, state in recorder.states():
        assert state == recorder.replay(entry.seq)


def test_replay_leaves_the_recorder_as_it_was() -> None:
    recorder = three_sharers(max_events=20)
    first = recorder.replay()
    first.pages.clear()
    first.streams.clear()
    assert recorder.replay().pages


def test_counts_cover_the_usable_pages_at_every_event() -> None:
    for entry, state in three_sharers().states():
        if entry.seq >= 1:
            assert sum(state.counts().values()) == 63


def test_three_sharers_end_with_the_states_worked_out_by_hand() -> None:
    # request 1 left 2 pages cached, "other" 3; 2 and 3 run: 4 shared with the index and each other, 1 + 3 indexed, 2 tails
    assert three_sharers().replay().counts() == {"live": 2, "shared": 8, "cached": 5, "free": 48}


@pytest.mark.parametrize("max_events", [2, 3, 7, 30, 77])
def test_folding_keeps_memory_bounded_and_replay_exact(max_events: int) -> None:
    whole, folded = three_sharers(max_events=None), three_sharers(max_events=max_events)
    assert len(folded) <= max_events
    assert len(folded) + folded.num_folded == len(whole)
    for seq in range(folded.num_folded - 1, len(whole)):
        assert folded.replay(seq) == whole.replay(seq)


def test_replay_of_an_event_that_is_not_kept_raises_with_the_numbers() -> None:
    recorder = three_sharers(max_events=20)
    first, last = recorder[0].seq, recorder[-1].seq
    with pytest.raises(InputError, match=f"event 0 is not kept; events {first}..{last} are"):
        recorder.replay(0)
    with pytest.raises(InputError, match=f"event {last + 1} is not kept"):
        recorder.replay(last + 1)


def test_a_folded_recorder_replays_the_same_from_its_file(tmp_path: Path) -> None:
    recorder = three_sharers(max_events=20)
    recorder.to_jsonl(tmp_path / "log.jsonl")
    back = Recorder.from_jsonl(tmp_path / "log.jsonl")
    assert (back.num_folded, list(back)) == (recorder.num_folded, list(recorder))
    for seq in range(recorder.num_folded - 1, recorder[-1].seq + 1):
        assert back.replay(seq) == recorder.replay(seq)


def test_a_log_read_back_goes_on_counting(tmp_path: Path) -> None:
    recorder = three_sharers(max_events=20)
    recorder.to_jsonl(tmp_path / "log.jsonl")
    back = Recorder.from_jsonl(tmp_path / "log.jsonl")
    back(ev.RequestStarted(9))
    assert back[-1].seq == recorder[-1].seq + 1


def write_log(tmp_path: Path, change) -> Path:
    """A log of the synthetic run whose lines ``change`` has edited."""
    path = tmp_path / "log.jsonl"
    three_sharers().to_jsonl(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(change(lines)) + "\n", encoding="utf-8")
    return path


def with_line(number: int, text: str):
    return lambda lines: [*lines[: number - 1], text, *lines[number:]]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"seq": 3, "step": 0', "a line cut short"),
        ('{"seq": 3, "step": 0, "at_ms": 0.0, "kind": "PagesBorrowed"}', "an unknown kind"),
        ('{"seq": 3, "step": 0, "at_ms": 0.0, "kind": "RequestStarted"}', "a missing field"),
        ('{"seq": 3, "step": 0, "at_ms": 0.0, "kind": "RequestStarted", "rid": 1, "mood": 2}', "a field it does not have"),
        ('{"step": 0, "at_ms": 0.0, "kind": "RequestStarted", "rid": 1}', "no number"),
        ("[1, 2]", "not an object"),
        ("7", "a bare number"),
    ],
)
def test_a_broken_line_is_refused_and_named(tmp_path: Path, text: str, why: str) -> None:
    path = write_log(tmp_path, with_line(5, text))
    with pytest.raises(InputError, match="line 5"):
        Recorder.from_jsonl(path)


def test_a_line_that_is_not_utf8_is_refused_and_named(tmp_path: Path) -> None:
    path = write_log(tmp_path, lambda lines: lines)
    raw = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*raw[:7], b'{"seq": "\xff"}\n', *raw[8:]]))
    with pytest.raises(InputError, match="line 8"):
        Recorder.from_jsonl(path)


def test_a_missing_line_is_noticed_because_replay_would_be_wrong(tmp_path: Path) -> None:
    path = write_log(tmp_path, lambda lines: lines[:9] + lines[10:])
    with pytest.raises(InputError, match="line 10: event 9 where event 8 belongs"):
        Recorder.from_jsonl(path)


def test_another_schema_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = write_log(tmp_path, with_line(1, json.dumps({"kvlab_events": 99})))
    with pytest.raises(InputError, match=f"line 1: events of schema 99; this kvlab reads schema {SCHEMA}"):
        Recorder.from_jsonl(path)


BROKEN_HEADS = [
    with_line(1, json.dumps({"kvlab_events": SCHEMA} | rest)) for rest in ({}, {"began_at": "2030-01-01T00:00:00", "folded": 3})
]


@pytest.mark.parametrize("change", [lambda lines: lines[1:], lambda lines: [], *BROKEN_HEADS])
def test_a_file_without_a_sound_head_is_refused(tmp_path: Path, change) -> None:
    with pytest.raises(InputError, match=r"log\.jsonl"):
        Recorder.from_jsonl(write_log(tmp_path, change))


def test_an_absent_log_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Recorder.from_jsonl(tmp_path / "none.jsonl")


def test_a_log_that_gives_up_pages_nobody_lists_is_called_broken() -> None:
    recorder = Recorder(clock=Clock())
    recorder(ev.PagesAcquired(1, "main", [4]))
    recorder(ev.PagesReleased(1, "main", [5], "finished"))
    with pytest.raises(IntegrityError, match=r"page 5.*lists \[4\]"):
        recorder.replay()


def test_a_released_lease_leaves_no_owner() -> None:
    state = PoolState(num_pages=4)
    state.apply(ev.PagesLeased(1, "main", [2]))
    state.apply(ev.LeaseReleased(1, "main", [2], "cancelled"))
    assert (state.leases, state.page(2).state) == ({}, "free")


def test_an_index_reset_frees_what_only_the_index_held() -> None:
    recorder = three_sharers()
    indexed = sorted(recorder.replay().indexed())
    recorder(ev.IndexReset("weights changed", 1, indexed))
    assert recorder.replay().indexed() == {}
    assert recorder.replay().counts() == {"live": 6, "shared": 4, "cached": 0, "free": 53}


def test_filter_finds_kinds_and_requests() -> None:
    recorder = three_sharers()
    found = recorder.filter(ev.PagesReleased, ev.RequestFinished, rid=1)
    assert [e.event.kind for e in found] == ["RequestFinished", "PagesReleased"]


def test_repr_is_one_bounded_line() -> None:
    assert repr(three_sharers(max_events=20)).count("\n") == 0
    assert len(repr(three_sharers(max_events=20))) < 80


def test_max_events_below_two_is_refused() -> None:
    with pytest.raises(InputError, match="max_events is 1"):
        Recorder(clock=Clock(), max_events=1)


def test_a_real_engines_log_replays_to_the_owners_of_its_arena(tracer, tmp_path: Path) -> None:
    engine = tracer(page_size=4, num_pages=24, max_concurrent_requests=2)
    system = [1 + i % 50 for i in range(16)]
    for number in range(6):
        engine.submit([*system, *[(7 * number + j) % 60 + 1 for j in range(9 + number)]], max_tokens=9)
    for _ in range(40):
        engine.step()
        pages = engine.events.replay().pages
        owners = {p: len(pages[p].owners) + (pages[p].key is not None) if p in pages else 0 for p in range(1, 24)}
        assert owners == {p: engine.kv.arena.owners(p) for p in range(1, 24)}
    assert engine.events.filter(ev.PageEvicted)
    engine.events.to_jsonl(tmp_path / "log.jsonl")
    assert list(Recorder.from_jsonl(tmp_path / "log.jsonl")) == list(engine.events)
