"""How large must the pool be? Pages for the final context of every request that may run, a shared prefix counted once."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.errors import InputError
from kvlab.spec import KVLayout


@dataclass(frozen=True)
class PoolSize:
    """A pool under which no request ever waits for pages, and the settings to put in."""

    num_pages: int
    pool_bytes: int
    max_concurrent_requests: int
    context_tokens: int
    page_size: int
    shared_pages: int
    pages_per_request: int

    def settings(self) -> str:
        """The arguments of ``kvlab.load``."""
        return (
            f"num_pages={self.num_pages}, page_size={self.page_size}, max_concurrent_requests={self.max_concurrent_requests}, "
            f"max_seq_len={self.context_tokens}"
        )


def size_pool(
    layout: KVLayout, *, bytes_per_value: int, concurrency: int, context_tokens: int, shared_tokens: int = 0
) -> PoolSize:
    """Return the smallest pool for ``concurrency`` requests of ``context_tokens`` (completions included).

    ``shared_tokens`` of each context are a prefix that an earlier request has left in the cache; of these only the whole pages
    before the last token can be shared, since one token is always computed. The sink is the page more.

    Raises:
        InputError: a number that cannot be.

    >>> layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_size=16)
    >>> size_pool(layout, bytes_per_value=4, concurrency=4, context_tokens=1024, shared_tokens=944).num_pages
    83
    """
    given = (("concurrency", concurrency, 1), ("context_tokens", context_tokens, 1), ("shared_tokens", shared_tokens, 0))
    for name, value, least in given:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    if shared_tokens >= context_tokens:
        raise InputError(f"shared_tokens is {shared_tokens}; a prefix is shorter than its context of {context_tokens}")
    shared = max(shared_tokens - 1, 0) // layout.page_size
    each = -(-context_tokens // layout.page_size) - shared
    num_pages = 1 + shared + concurrency * each
    num_bytes = num_pages * layout.bytes_per_page(bytes_per_value)
    return PoolSize(num_pages, num_bytes, concurrency, context_tokens, layout.page_size, shared, each)
