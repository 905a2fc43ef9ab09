"""Keys, lookups, allocation, inserts and evictions of chats replayed through the index, against the least that could do it.

Both sides see the same prompts and must hit the same pages; a request's pages are live from its lookup to its end.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from time import process_time
from typing import Any

from kvlab.bench.rows import Row, document, interleave
from kvlab.cache.arena import PageArena
from kvlab.cache.index import PrefixIndex
from kvlab.cache.keys import chain_ids
from kvlab.cache.memo import KeyMemo
from kvlab.errors import IntegrityError, missing_extra

PAGE_SIZE = 16
POOL_SHARES = (2, 0.5, 0.25)  # usable pages over distinct pages
ROOT = b"bench"
MEMO_BYTES = 32 << 20
_VOCABULARY = 49152


def run(quick: bool = False) -> dict[str, Any]:
    """Measure everything; ``quick`` takes a tenth of the requests and fewer rounds."""
    prompts = chats(num_requests=120 if quick else 1200, seed=7)
    num_pages, distinct = count_pages(prompts)
    rounds = 3 if quick else 7
    rows = [replay_row(prompts, num_pages, int(distinct * share), f"replay_pool_{share:g}x", rounds) for share in POOL_SHARES]
    rows.append(lookup_row(prompts, rounds))
    rows.append(in_fresh_process(rss_row, 1 << (13 if quick else 16)))
    rows.append(memo_row(prompts))
    return document(
        rows,
        requests=len(prompts),
        prompt_tokens=sum(map(len, prompts)),
        pages=num_pages,
        distinct_pages=distinct,
        hit_shares=[round(replay(prompts, int(distinct * share)) / num_pages, 3) for share in POOL_SHARES],
        clock="CPU time of the process, so that other load disturbs neither side",
    )


# -- the chats ---------------------------------------------------------------------------------------------------------


def chats(num_requests: int, seed: int) -> list[list[int]]:
    """Prompts of multi-turn chats that take turns; each starts with one of eight system prompts and extends its last turn.

    No prompt ends on a page boundary, so no whole page is computed twice for want of a last token.
    """
    rng = random.Random(seed)
    systems = [_text(rng, rng.randrange(200, 1000)) for _ in range(8)]
    prompts: list[list[int]] = []
    open_chats: list[list[int]] = []
    while len(prompts) < num_requests:
        if len(open_chats) < 150:
            open_chats.append(list(rng.choice(systems)))
        history = open_chats[rng.randrange(len(open_chats))]
        history += _text(rng, rng.randrange(40, 300))
        if len(history) % PAGE_SIZE == 0:
            history.append(1)
        prompts.append(list(history))
        history += _text(rng, rng.randrange(40, 400))
        if len(history) > 3400 or rng.random() < 0.05:
            open_chats.remove(history)
    return prompts


def _text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, _VOCABULARY) for _ in range(length)]


def count_pages(prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Whole pages of all prompts, and how many of them differ."""
    keys = [key for ids in prompts for key in chain_ids(ids, PAGE_SIZE)[: len(ids) // PAGE_SIZE]]
    return len(keys), len(set(keys))


# -- the two sides -----------------------------------------------------------------------------------------------------


def replay(prompts: Sequence[Sequence[int]], usable_pages: int) -> int:
    """Serve ``prompts`` one after another through kvlab's index; returns how many pages hit."""
    arena = PageArena(usable_pages + 1)
    index = PrefixIndex(arena)
    memo = KeyMemo(PAGE_SIZE, MEMO_BYTES)
    hits = 0
    for ids in prompts:
        keys = memo.chain(ids)
        shared = index.lookup(ROOT, keys)
        arena.retain(shared)
        matched, whole = len(shared), len(ids) // PAGE_SIZE
        need = len(keys) - matched
        if need > arena.num_free:
            index.evict(need - arena.num_free)
        fresh = arena.acquire(need) or []
        index.insert_run(ROOT, keys[matched:whole], fresh[: whole - matched], shared[-1] if shared else None)
        arena.release(shared + fresh)
        hits += matched
    return hits


def replay_reference(prompts: Sequence[Sequence[int]], usable_pages: int) -> int:
    """The same with a dict, an OrderedDict and hashlib and without any check: the floor."""
    free = list(range(usable_pages))
    table: dict[bytes, int] = {}
    idle: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first, a page before what it follows
    hits = 0
    for ids in prompts:
        whole = len(ids) // PAGE_SIZE
        keys, key = [], b""
        for start in range(0, whole * PAGE_SIZE, PAGE_SIZE):
            key = sha256(key + array("I", ids[start : start + PAGE_SIZE]).tobytes()).digest()
            keys.append(key)
        matched = 0
        for key in keys:
            if key not in table:
                break
            matched += 1
            del idle[key]
        need = whole + 1 - matched
        while len(free) < need:
            key, _ = idle.popitem(last=False)
            free.append(table.pop(key))
        for key in keys[matched:]:
            table[key] = free.pop()
        for key in reversed(keys):
            idle[key] = None
        hits += matched
    return hits


# -- rows --------------------------------------------------------------------------------------------------------------


def replay_row(prompts: Sequence[Sequence[int]], num_pages: int, usable_pages: int, name: str, rounds: int) -> Row:
    """Microseconds a page of the whole replay.

    Raises:
        IntegrityError: the two sides did not hit equally many pages.
    """
    hits: dict[str, int] = {}

    def measure(side: Callable[[Sequence[Sequence[int]], int], int]) -> float:
        begin = process_time()
        hits[side.__name__] = side(prompts, usable_pages)
        return (process_time() - begin) / num_pages * 1e6

    with without_collection():
        ours, reference = interleave(lambda: measure(replay), lambda: measure(replay_reference), rounds)
    if len(set(hits.values())) != 1:
        raise IntegrityError(f"the two sides hit different pages in a pool of {usable_pages}: {hits}")
    return Row.of(name, ours, reference, target=1.5, unit="us/page")


def lookup_row(prompts: Sequence[Sequence[int]], rounds: int) -> Row:
    """Microseconds a page of a lookup that matches all of its keys, everything cached."""
    keys_of = [chain_ids(ids, PAGE_SIZE)[: len(ids) // PAGE_SIZE] for ids in prompts]
    num_pages = sum(map(len, keys_of))
    index = filled_index(keys_of, num_pages)

    def measure() -> float:
        begin = process_time()
        for keys in keys_of:
            index.lookup(ROOT, keys)
        return (process_time() - begin) / num_pages * 1e6

    with without_collection():
        measured = [measure() for _ in range(rounds)]
    return Row.of("lookup_us_per_page", measured, target=0.15, unit="us/page")


def memo_row(prompts: Sequence[Sequence[int]]) -> Row:
    """Bytes of the key memo after the replay: it is bounded, and not part of the bytes a page."""
    memo = KeyMemo(PAGE_SIZE, MEMO_BYTES)
    for ids in prompts:
        memo.chain(ids)
    return Row.of("key_memo_bytes", [memo.num_bytes], target=MEMO_BYTES, unit="bytes")


def rss_row(num_pages: int) -> Row:
    """Resident bytes that a full pool of ``num_pages`` adds to a fresh process: arena, index and keys."""
    chain_pages = 128
    filled_index([chain_ids([0] * PAGE_SIZE * chain_pages, PAGE_SIZE)], chain_pages)  # code and arenas are there now
    gc.collect()
    before = resident_bytes()
    prompts = ([number] * PAGE_SIZE * chain_pages for number in range(num_pages // chain_pages))
    index = filled_index((chain_ids(ids, PAGE_SIZE) for ids in prompts), num_pages)
    gc.collect()
    added = resident_bytes() - before
    return Row.of("rss_bytes_per_page", [added / len(index)], target=350, unit="bytes/page")


def filled_index(keys_of: Iterable[Sequence[bytes]], usable_pages: int) -> PrefixIndex:
    """An index that holds every key and whose pages nobody else owns."""
    arena = PageArena(usable_pages + 1)
    index = PrefixIndex(arena)
    for keys in keys_of:
        fresh = arena.acquire(len(keys)) or []
        index.insert_run(ROOT, keys, fresh, parent=None)
        arena.release(fresh)
    return index


# -- the process -------------------------------------------------------------------------------------------------------


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector from striking one side, as timeit does."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_fresh_process(measure: Callable[[int], Row], argument: int) -> Row:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (argument,))


def resident_bytes() -> int:
    """Memory of this process that is in RAM.

    Raises:
        MissingExtraError: neither /proc nor psutil can tell.
    """
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import psutil
    except ImportError as error:
        raise missing_extra("psutil", "dev", f"to read resident memory on {sys.platform}") from error
    return int(psutil.Process().memory_info().rss)
