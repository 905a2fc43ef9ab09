"""A prompt as the naive twin sees it: one entry a slot, an id or a part of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from kvlab.spec import KeyedPrompt


class Part(NamedTuple):
    """One slot of a picture."""

    digest: bytes
    offset: int
    length: int


Slot: TypeAlias = int | Part
Slots: TypeAlias = tuple[Slot, ...]


def slots_of(prompt: KeyedPrompt) -> list[Slot]:
    """Every slot that the keys of ``prompt`` cover.

    >>> from kvlab.spec import Span
    >>> layout = (Span("ids", "text", 1, 1), Span("digest", "vit", 2, 1, b"red"))
    >>> slots_of(KeyedPrompt([7], [], [], 3, layout=layout))
    [7, Part(digest=b'red', offset=0, length=2), Part(digest=b'red', offset=1, length=2)]
    """
    if not prompt.layout:
        return list(prompt.ids)
    slots: list[Slot] = []
    rest = list(prompt.ids)
    for span in prompt.layout:
        if span.kind == "ids":
            slots += rest[: span.length]
            del rest[: span.length]
        else:
            slots += [Part(span.source, offset, span.length) for offset in range(span.length)]
    return slots


def part_at(known: Sequence[Slot], slot: int) -> Part | None:
    """The picture's part that a match of ``slot`` slots would cut off, None where it would cut none."""
    at = known[slot] if slot < len(known) else 0
    return at if isinstance(at, Part) and at.offset else None


def is_end(known: Sequence[Slot], slot: int) -> bool:
    """True when a picture ends just before ``slot``."""
    at = known[slot - 1] if 0 < slot <= len(known) else 0
    return isinstance(at, Part) and at.offset == at.length - 1


def positions(known: Sequence[Slot], slots: int) -> int:
    """The rope id after ``slots`` slots: a text slot counts, and a picture counts once."""
    return sum(not isinstance(known[at], Part) or is_end(known, at + 1) for at in range(slots))
