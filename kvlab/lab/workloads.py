"""Workloads: requests with the step they arrive at, drawn by named generators or read from a JSONL file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvlab.errors import InputError
from kvlab.options import is_number, is_whole, whole


@dataclass(frozen=True)
class WorkItem:
    """One request of a workload.

    ``ids`` is its prompt, or with ``follows`` what it adds to that request's prompt and reply. ``cancel_after`` ends it that
    many steps after it was submitted.

    Raises:
        InputError: a field that cannot be what it should; the message names it.
    """

    id: str
    at_step: int
    ids: tuple[int, ...]
    max_tokens: int
    follows: str | None = None
    cancel_after: int | None = None
    seed: int | None = None
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.id, str):
            raise InputError(f"the id of a request is {self.id!r}; give a str")
        of = f"of request {self.id}"
        _check_ids(self.ids, of)
        for name in ("at_step", "max_tokens", "cancel_after"):
            value = getattr(self, name)
            if value is not None or name != "cancel_after":
                whole(f"{name} {of}", value, 0)
        if self.follows is not None and not isinstance(self.follows, str):
            raise InputError(f"follows {of} is {self.follows!r}; give the id of another request, or nothing")
        if self.seed is not None and not is_whole(self.seed):
            raise InputError(f"seed {of} is {self.seed!r}; give a whole number, or nothing")
        if not is_number(self.temperature) or self.temperature < 0:
            raise InputError(f"temperature {of} is {self.temperature!r}; give a number of at least 0")


def _check_ids(ids: Any, of: str) -> None:
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise InputError(f"ids {of} are {ids!r}; give a list of token ids")
    if not ids:
        raise InputError(f"there are 0 ids {of}; give at least one")
    wrong = next((i for i, value in enumerate(ids) if not is_whole(value)), None)
    if wrong is not None:
        raise InputError(f"id {wrong} {of} is {ids[wrong]!r}; give a whole number")


@dataclass(frozen=True)
class WorkloadShape:
    """What the generators are told; each uses what concerns it. ``prefix_pages`` in pages, other lengths in tokens."""

    requests: int = 32
    prefix_pages: int = 59
    page_size: int = 16
    tail: int = 8
    max_tokens: int = 64
    vocab_size: int = 64
    seed: int = 0
    faults: float = 0.0

    def __post_init__(self) -> None:
        for name in ("requests", "prefix_pages", "page_size", "tail", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if not 0 <= self.faults < 1:
            raise InputError(f"faults is {self.faults}; it is a share in [0, 1)")


def shared_prefix(shape: WorkloadShape) -> Iterator[WorkItem]:
    """All requests at once, one prefix of whole pages before tails of their own: the published stall."""
    draw = _Draw(shape)
    prefix = draw.ids(shape.prefix_pages * shape.page_size)
    for number in range(shape.requests):
        yield WorkItem(f"r{number}", 0, (*prefix, *draw.ids(shape.tail)), shape.max_tokens)


def chats(shape: WorkloadShape) -> Iterator[WorkItem]:
    """Chats of three turns under one system prompt, a new one every few steps."""
    draw = _Draw(shape)
    system = draw.ids(max(shape.prefix_pages * shape.page_size // 4, 1))
    for number in range(shape.requests):
        chat, turn = divmod(number, 3)
        before = f"r{number - 1}" if turn else None
        ids = draw.ids(shape.tail) if turn else (*system, *draw.ids(shape.tail))
        yield WorkItem(f"r{number}", 4 * chat, ids, shape.max_tokens, follows=before)


def edit_chains(shape: WorkloadShape) -> Iterator[WorkItem]:
    """Chains of four requests over one document: every request adds to what came before, but the third takes the second back
    and goes another way.
    """
    draw = _Draw(shape)
    document = draw.ids(max(shape.prefix_pages * shape.page_size // 2, 1))
    for number in range(shape.requests):
        chain, turn = divmod(number, 4)
        before = None if turn == 0 else number - 2 if turn == 2 else number - 1
        ids = (*document, *draw.ids(shape.tail)) if before is None else draw.ids(shape.tail)
        yield WorkItem(f"r{number}", 4 * chain, ids, shape.max_tokens, follows=None if before is None else f"r{before}")


def voices(shape: WorkloadShape) -> Iterator[WorkItem]:
    """Four voices, each a long prefix of its own before texts of different lengths, a new one every other step."""
    draw = _Draw(shape)
    prefixes = [draw.ids(max(shape.prefix_pages * shape.page_size // 4, 1)) for _ in range(4)]
    for number in range(shape.requests):
        text = draw.ids(draw.random.randrange(1, 2 * shape.tail))
        yield WorkItem(f"r{number}", 2 * number, (*draw.random.choice(prefixes), *text), shape.max_tokens)


def churn(shape: WorkloadShape) -> Iterator[WorkItem]:
    """Short requests that share some of a few prefixes, come and go, and are sometimes cancelled; for endurance."""
    draw = _Draw(shape)
    prefixes = [draw.ids(shape.page_size * (1 + n % 3)) for n in range(8)]
    steps = accumulate(draw.random.choice((0, 0, 0, 1)) for _ in range(shape.requests))
    for number, step in enumerate(steps):
        prefix = prefixes[draw.random.randrange(8)]
        is_cancelled = draw.random.random() < shape.faults
        yield WorkItem(
            f"r{number}",
            step,
            (*prefix[: draw.random.randrange(1, len(prefix) + 1)], *draw.ids(draw.random.randrange(1, shape.tail + 1))),
            draw.random.randrange(1, min(shape.max_tokens, 8) + 1),
            cancel_after=draw.random.randrange(1, 6) if is_cancelled else None,
            seed=number,
            temperature=draw.random.choice((0.0, 1.0)),
        )


WORKLOADS: dict[str, Callable[[WorkloadShape], Iterator[WorkItem]]] = {
    "shared-prefix": shared_prefix,
    "chats": chats,
    "edit-chains": edit_chains,
    "voices": voices,
    "churn": churn,
}


class _Draw:
    """Seeded ids, the lowest sixteenth of the vocabulary (special tokens) left out."""

    def __init__(self, shape: WorkloadShape) -> None:
        self.random = random.Random(shape.seed)
        self._low, self._high = shape.vocab_size // 16, shape.vocab_size

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(self._low, self._high) for _ in range(count))


def make_workload(name: str, shape: WorkloadShape) -> Iterator[WorkItem]:
    """Return the requests of a named workload, or of a JSONL file when ``name`` is the path of one.

    Raises:
        InputError: neither a known name nor a file, or a line that is no request; the message names the line.

    >>> [item.at_step for item in make_workload("shared-prefix", WorkloadShape(requests=2, prefix_pages=1))]
    [0, 0]
    """
    if name in WORKLOADS:
        return WORKLOADS[name](shape)
    if Path(name).is_file():
        return iter(read_workload(Path(name)))
    raise InputError(f"there is no workload {name!r}; known are {', '.join(WORKLOADS)}, or give a JSONL file")


def read_workload(path: Path) -> list[WorkItem]:
    """Return the requests of a JSONL file, one object of WorkItem's fields a line.

    Raises:
        InputError: no UTF-8, no request at all, a line that is none, or one that names a request twice or an unknown one; the
            message names the line.
    """
    names = {f.name for f in fields(WorkItem)}
    items: dict[str, WorkItem] = {}
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            item = _read_item(path, number, line, names)
            if item.id in items:
                raise InputError(
                    f"{path}, line {number}: there is a request {item.id} above already; give each an id of its own"
                )
            if item.follows is not None and item.follows not in items:
                raise InputError(f"{path}, line {number}: {item.id} follows {item.follows}, which is none of those above it")
            items[item.id] = item
    if not items:
        raise InputError(f"{path} holds no request; give one JSON object a line, with id, at_step, ids and max_tokens")
    return list(items.values())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise InputError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error


def _read_item(path: Path, number: int, line: str, names: set[str]) -> WorkItem:
    try:
        values: dict[str, Any] = json.loads(line)
        unknown = values.keys() - names
        if unknown:
            raise InputError(f"unknown fields {', '.join(sorted(unknown))}; known are {', '.join(sorted(names))}")
        ids = values["ids"]
        return WorkItem(**(values | {"ids": tuple(ids) if isinstance(ids, list) else ids}))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, InputError) as error:
        raise InputError(f"{path}, line {number}: not a request of a workload ({error})") from error


def write_workload(path: Path, items: Iterable[WorkItem]) -> None:
    """Write requests so that ``read_workload`` gives them back."""
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        f.writelines(json.dumps(asdict(item)) + "\n" for item in items)
