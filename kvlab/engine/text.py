"""From sampled ids to text, piece by piece, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_TEXTLESS = 64  # tokens that gave no text: more than any one character takes, so they are special tokens
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no whole character yet


class TextStream:
    """Grows the text of a reply token by token and says when a stop string has appeared.

    Text is held back while it may still change: an unfinished character, or the beginning of a stop string.

    Args:
        decode: ids -> text.
        stop: strings that end the reply; neither they nor what follows is part of the text.

    >>> stream = TextStream(lambda ids: "".join(map(chr, ids)), stop=("ll",))
    >>> [stream.push(ord(c)) for c in "hel"], stream.stopped
    (['h', 'e', ''], False)
    >>> stream.push(ord("l")), stream.stopped, stream.text
    ('', True, 'he')
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._begin = 0  # decoding restarts here: far enough back that the next token is decoded in context
        self._read = 0  # ids before this one are already in _whole
        self._whole = ""
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """The reply so far, up to a stop string."""
        return self._whole

    def push(self, token: int) -> str:
        """Add a token; returns the text that became certain."""
        self._ids.append(token)
        before = self._decode(self._ids[self._begin : self._read])
        after = self._decode(self._ids[self._begin :])
        if len(after) > len(before) and not after.endswith(REPLACEMENT):
            self._whole += after[len(before) :]
            self._begin, self._read = self._read, len(self._ids)
        elif len(after) <= len(before) and len(self._ids) - self._read > MAX_TEXTLESS:
            self._begin = self._read = len(self._ids)  # audio tokens, say: decoding them again would cost more each time
        self._find_stop()
        return self._release(len(self._whole) if self.stopped else self._certain())

    def finish(self) -> str:
        """The reply is over: returns what was held back."""
        if not self.stopped and self._read < len(self._ids):
            before = self._decode(self._ids[self._begin : self._read])
            self._whole += self._decode(self._ids[self._begin :])[len(before) :]
            self._read = len(self._ids)
            self._find_stop()
        return self._release(len(self._whole))

    def _find_stop(self) -> None:
        places = [p for p in (self._whole.find(s) for s in self._stop) if p >= 0]
        if places:
            self._whole = self._whole[: min(places)]
            self.stopped = True

    def _certain(self) -> int:
        for length in range(max((len(s) for s in self._stop), default=1) - 1, 0, -1):
            if any(s.startswith(self._whole[-length:]) for s in self._stop if len(s) > length) and length <= len(self._whole):
                return len(self._whole) - length
        return len(self._whole)

    def _release(self, end: int) -> str:
        piece = self._whole[self._shown : end]
        self._shown = max(self._shown, end)
        return piece
