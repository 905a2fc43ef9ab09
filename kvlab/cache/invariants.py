"""What must hold of a pool after every operation. Each rule has its own message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvlab.cache.arena import SINK, PageArena
from kvlab.cache.stream import CacheStream
from kvlab.errors import IntegrityError


def check_pool(
    arena: PageArena, indexed: Iterable[int], pinned: Sequence[int], streams: Sequence[CacheStream], page_size: int
) -> None:
    """Check that every page is where it should be.

    Args:
        indexed: every page the index owns.
        pinned: every pinned page, once a pin.

    Raises:
        IntegrityError: a rule is broken; the message begins with its number.
    """
    free = list(arena.free_pages())
    owned = [p for p in range(arena.num_pages) if arena.owners(p)]
    _check_free(arena, free, owned)
    indexed = list(indexed)
    _check_owners(arena, [*indexed, *pinned], streams)
    _check_pinned(pinned, set(indexed))
    _check_sealed(arena, owned)
    for stream in streams:
        _check_frontier(arena, stream, page_size)


def _check_free(arena: PageArena, free: Sequence[int], owned: Sequence[int]) -> None:
    both = sorted(set(free) & set(owned))
    if both:
        raise IntegrityError(f"I1: pages {both[:20]} are free and owned at once")
    twice = [p for p, n in Counter(free).items() if n > 1]
    if twice or len(free) + len(owned) != arena.num_pages:
        raise IntegrityError(
            f"I2: {len(free)} free + {len(owned)} owned pages are not the pool's {arena.num_pages}; listed free twice: {twice}"
        )


def _check_pinned(pinned: Sequence[int], indexed: set[int]) -> None:
    if lost := set(pinned) - indexed:
        raise IntegrityError(f"I6: pages {sorted(lost)[:20]} are pinned and not cached; a pin ends with the cache")


def _check_owners(arena: PageArena, held: Sequence[int], streams: Sequence[CacheStream]) -> None:
    named = Counter([SINK, *held])
    for stream in streams:
        named.update(stream.page_indices)
        named.update(stream.lease or ())
    wrong = [(p, arena.owners(p), named[p]) for p in range(arena.num_pages) if arena.owners(p) != named[p]]
    if wrong:
        raise IntegrityError("I3: " + "; ".join(f"page {p} owned {owned}, named {names}" for p, owned, names in wrong))


def _check_sealed(arena: PageArena, owned: Sequence[int]) -> None:
    unsealed = [p for p in owned if arena.owners(p) > 1 and not arena.is_sealed(p)]
    if unsealed:
        raise IntegrityError(f"I4: pages {unsealed[:20]} have several owners and are not sealed")


def _check_frontier(arena: PageArena, stream: CacheStream, page_size: int) -> None:
    if len(stream.page_indices) * page_size < stream.stored_len:
        raise IntegrityError(
            f"I5: stream {stream.key} stores {stream.stored_len} slots on {len(stream.page_indices)} pages of {page_size}"
        )
    shared = [p for p in stream.page_indices[stream.stored_len // page_size :] if arena.owners(p) != 1]
    if shared:
        raise IntegrityError(
            f"I5: stream {stream.key} at {stream.stored_len} slots may write pages {shared}, which others own too"
        )
