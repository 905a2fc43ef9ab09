"""What pressure costs: a pass of the gate, an eviction, the index after a million inserts, and every eviction policy."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

from kvlab.bench.index import PAGE_SIZE, ROOT, in_fresh_process, resident_bytes, without_collection
from kvlab.bench.policies import policy_rows
from kvlab.bench.rows import Row, document, interleave
from kvlab.cache.arena import PageArena
from kvlab.cache.index import PrefixIndex
from kvlab.engine.engine import Engine
from kvlab.errors import IntegrityError
from kvlab.run import tracer_engine

POOL_PAGES, RESERVED, WAITING = 2048, 170, 1500
MAX_PASS_MS = 20.0
MAX_GROWTH_MIB = 1.0


def run(quick: bool = False) -> dict[str, Any]:
    """Measure everything; ``quick`` takes fewer requests, inserts and rounds."""
    reserved, waiting = (17, 150) if quick else (RESERVED, WAITING)
    rounds = 3 if quick else 7
    inserts = 20_000 if quick else 1_000_000
    rows = [row for order in ("fifo", "backfill") for row in admission_rows(order, reserved, waiting, rounds)]
    rows.append(eviction_row(2_000 if quick else 100_000, rounds))
    rows.append(in_fresh_process(memory_row, inserts))
    rows += policy_rows(quick)
    return document(
        rows,
        reserved=reserved,
        waiting=waiting,
        inserts=inserts,
        clock="CPU time of the process, so that other load disturbs neither side",
    )


# -- the gate ----------------------------------------------------------------------------------------------------------


def admission_rows(order: str, reserved: int, waiting: int, rounds: int) -> list[Row]:
    """A pass that has to look and lets nobody in: its milliseconds, and the ratio to one scan of both lists of requests.

    Raises:
        IntegrityError: the pass would not measure what its name says.
    """
    with crowded_engine(order, reserved, waiting) as engine:
        running, queue = list(engine._running), list(engine._waiting)

        def ours() -> float:
            engine._gate._refused = None  # else it would not look: nothing has changed since it refused
            return _ms(engine._start_waiting)

        def scan() -> float:
            return _ms(lambda: sum(run.tokens_left for run in (*running, *queue)))

        with without_collection():
            mine, plain = interleave(ours, scan, rounds)
        if len(engine._running) != reserved or len(engine._waiting) != waiting:
            raise IntegrityError(f"the pass changed who runs: {len(engine._running)} of {reserved}")
        name = f"admission_pass_{order}"
        return [
            Row.of(f"{name}_ms", mine, target=MAX_PASS_MS, unit="ms"),
            Row.of(f"{name}_over_scan", mine, plain, target=None, unit="ms"),
        ]


def crowded_engine(order: str, reserved: int, waiting: int) -> Engine:
    """An engine whose pool is reserved to the last page by ``reserved`` requests while ``waiting`` others wait."""
    pages = POOL_PAGES // RESERVED
    engine = tracer_engine(
        num_pages=reserved * pages + 1, page_size=PAGE_SIZE, admission_order=order, record=False, check_invariants=False
    )
    for number in range(reserved + waiting):
        ids = [4 + (number * 7 + i * i) % 60 for i in range(PAGE_SIZE)]
        engine.submit(ids, max_tokens=(pages - 1) * PAGE_SIZE, ignore_eos=True)
    engine._start_waiting()
    return engine


def _ms(work: Callable[[], Any]) -> float:
    begin = process_time()
    work()
    return (process_time() - begin) * 1e3


# -- the index ---------------------------------------------------------------------------------------------------------


def eviction_row(num_pages: int, rounds: int) -> Row:
    """Microseconds to evict one page of ``num_pages`` indexed, against one of a hundredth as many."""
    large, small = (indexed_leaves(pages) for pages in (num_pages, num_pages // 100))
    with without_collection():
        mine, theirs = interleave(partial(_evict_some, large), partial(_evict_some, small), rounds)
    return Row.of(f"evict_1_of_{num_pages}", mine, theirs, target=2.0, unit="us/eviction")


def indexed_leaves(num_pages: int) -> tuple[PageArena, PrefixIndex]:
    """An index of chains of one page each, all of them evictable."""
    arena = PageArena(num_pages + 1)
    index = PrefixIndex(arena)
    for number in range(num_pages):
        _insert(arena, index, number)
    return arena, index


def _insert(arena: PageArena, index: PrefixIndex, number: int) -> None:
    fresh = arena.acquire(1) or []
    index.insert_run(ROOT, [number.to_bytes(32, "big")], fresh, parent=None)
    arena.release(fresh)


def _evict_some(filled: tuple[PageArena, PrefixIndex], number: int = 5) -> float:
    """Microseconds an eviction; what is evicted is put back outside the clock."""
    arena, index = filled
    seconds = 0.0
    for _ in range(number):
        begin = process_time()
        index.evict(1)
        seconds += process_time() - begin
        _insert(arena, index, index.counters.inserts)
    return seconds / number * 1e6


def memory_row(inserts: int, usable_pages: int = 1000) -> Row:
    """MiB by which an index grows from twice its pages in inserts to ``inserts`` of them; every later one evicts."""
    arena = PageArena(usable_pages + 1)
    index = PrefixIndex(arena)
    _insert_many(arena, index, 2 * usable_pages)
    gc.collect()
    before = resident_bytes()
    _insert_many(arena, index, inserts)
    gc.collect()
    grown = resident_bytes() - before
    return Row.of("index_memory_growth", [grown / (1 << 20)], target=MAX_GROWTH_MIB, unit="MiB")


def _insert_many(arena: PageArena, index: PrefixIndex, until: int) -> None:
    for number in range(index.counters.inserts, until):
        if not arena.num_free:
            index.evict(1)
        _insert(arena, index, number)
