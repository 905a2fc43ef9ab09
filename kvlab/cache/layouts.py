"""Where the writes of a laid-out prompt lie: in slots, in rope ids, and which slots no match may end at.

spans      [ text 20 )[ picture 30 )[ text 25 )
slots      0         20            50        75
positions  0         20            21        46
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvlab.spec import Span


class LaidOut:
    """The spans of one stream by slot.

    >>> laid = LaidOut([Span("ids", "text", 20, 20), Span("digest", "vit", 30, 1, b"red"), Span("ids", "text", 25, 25)])
    >>> laid.index_at(20), laid.index_at(21), laid.medium_around(32), laid.medium_around(50)
    (1, None, (20, 50), None)
    >>> [laid.positions(slots) for slots in (16, 20, 50, 60)], laid.media_ends
    ([16, 20, 21, 31], [50])
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        self._starts = [0, *accumulate(span.length for span in spans)]

    @property
    def num_slots(self) -> int:
        """Slots of all spans."""
        return self._starts[-1]

    @property
    def ends_with_medium(self) -> bool:
        """True when the last write is no text, so that nothing of the prompt need be computed."""
        return bool(self.spans) and self.spans[-1].kind != "ids"

    @property
    def media_ends(self) -> list[int]:
        """The slot after each medium, in order."""
        return [stop for span, stop in zip(self.spans, self._starts[1:], strict=True) if span.kind != "ids"]

    def index_at(self, slot: int) -> int | None:
        """Which span begins at ``slot``, None where none does."""
        return self._starts.index(slot) if slot in self._starts[:-1] else None

    def medium_around(self, slot: int) -> tuple[int, int] | None:
        """The medium [start, stop) that has ``slot`` inside: a match may not end there, for its slots see each other."""
        for span, start in zip(self.spans, self._starts, strict=False):
            if span.kind != "ids" and start < slot < start + span.length:
                return start, start + span.length
        return None

    def has_medium(self, start: int, stop: int) -> bool:
        """True when one of the slots [start, stop) is no text's."""
        spans = zip(self.spans, self._starts, strict=False)
        return any(span.kind != "ids" and at < stop and start < at + span.length for span, at in spans)

    def positions(self, slots: int) -> int:
        """The rope id after the first ``slots`` slots, which end inside no medium."""
        if not self.spans:
            return slots
        position = 0
        for span, start in zip(self.spans, self._starts, strict=False):
            if slots >= start + span.length:
                position += span.advance
            elif slots > start:
                position += slots - start
        return position


#: The layout of a prompt that has none.
ONE_TEXT = LaidOut(())
