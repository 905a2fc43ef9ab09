"""Streams that keep only their beginning and their end.

    pages     [ protected ][ straddle ][ oldest ... ][ ... newest ][ partial ]
    released                            k whole pages

What stays is moved together, so slots shrink; rope ids do not move, for K is stored with the position it was written at.
"""

from __future__ import annotations

from kvlab.cache.pool import PagePool
from kvlab.cache.stream import CacheStream
from kvlab.errors import InputError
from kvlab.spec import RetentionPolicy


class Windows:
    """Declares and applies windows. Callers hold the lock of the KV resource."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def check(self, stream: CacheStream, policy: RetentionPolicy, stored_len: int) -> None:
        """Refuse a window that ``stream`` cannot take once it stores ``stored_len`` slots; a prefix of 0 keeps the one it has.

        Raises:
            InputError: the protected prefix is not there yet, or another one is protected already.
        """
        wanted, protected = policy.protected_prefix, stream.protected_prefix
        if wanted in (0, protected):
            return
        if protected or stream.released:
            raise InputError(
                f"stream {stream.key} protects {protected} tokens and has released {stream.released}; "
                f"it cannot protect {wanted} now"
            )
        if wanted > stored_len:
            raise InputError(f"stream {stream.key} cannot protect {wanted} tokens: it will store only {stored_len}")

    def adopt(self, stream: CacheStream, policy: RetentionPolicy) -> None:
        """Take the window that a step declared."""
        stream.window, stream.protected_prefix = policy, policy.protected_prefix or stream.protected_prefix

    def apply(self, stream: CacheStream) -> None:
        """Release what the stream's window does not keep."""
        if stream.window is not None:
            excess = stream.stored_len - stream.protected_prefix - stream.window.context_budget
            self._release(stream, excess)

    def protect(self, stream: CacheStream, num_tokens: int) -> None:
        """Protect the first ``num_tokens`` of what is stored.

        Raises:
            InputError: they are not stored, others are protected, or something was released already.
        """
        self._require_at_rest(stream, "protected")
        if num_tokens == stream.protected_prefix:
            return
        if stream.protected_prefix or stream.released:
            raise InputError(
                f"stream {stream.key} protects {stream.protected_prefix} tokens and has released {stream.released}; "
                "a prefix is protected once, before anything is released"
            )
        if not 0 < num_tokens <= stream.stored_len:
            raise InputError(f"stream {stream.key} stores {stream.stored_len} tokens; {num_tokens} of them cannot be protected")
        stream.protected_prefix = num_tokens

    def release_oldest(self, stream: CacheStream, num_tokens: int) -> int:
        """Release whole pages of at most ``num_tokens`` unprotected tokens, oldest first; returns the tokens that went.

        Raises:
            InputError: a number below 1, or the stream is in a step, on the host, or being read.
        """
        self._require_at_rest(stream, "released")
        if num_tokens < 1:
            raise InputError(f"cannot release {num_tokens} tokens of stream {stream.key}; give 1 or more")
        return self._release(stream, num_tokens)

    def _require_at_rest(self, stream: CacheStream, verb: str) -> None:
        if stream.step_in_flight or stream.offloaded or stream.read is not None:
            where = "in a step" if stream.step_in_flight else "on the host" if stream.offloaded else "being read from a peer"
            raise InputError(f"stream {stream.key} is {where}: nothing of it can be {verb} now")

    def _release(self, stream: CacheStream, excess: int) -> int:
        """Release ``excess`` tokens in whole pages; the page that straddles the protected end and a partial tail stay."""
        size = self._pool.page_size
        first = self._pool.pages_for(stream.protected_prefix)
        count = min(excess // size, stream.stored_len // size - first)
        if count <= 0:
            return 0
        self._pool.release_run(stream, first, count)
        return count * size
