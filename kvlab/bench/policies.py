"""What each eviction policy costs per page operation, against lru in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import process_time

from kvlab.bench.index import PAGE_SIZE, ROOT, chats, count_pages, without_collection
from kvlab.bench.rows import Row, take_turns
from kvlab.cache.arena import PageArena
from kvlab.cache.index import PrefixIndex
from kvlab.cache.keys import chain_ids
from kvlab.cache.policies import POLICIES, EvictionPolicy, make_policy
from kvlab.cache.policies.belady import Belady

#: Most that a policy may cost, as a multiple of lru. Belady is for replays that know the future: measured, not judged.
TARGETS = {"arc": 2.0, "s3fifo": 2.0, "belady": None}
DEFAULT_TARGET = 1.5
POOL_SHARE = 0.3


def policy_rows(quick: bool = False) -> list[Row]:
    """Microseconds a page operation of every policy over the same chats, and the ratio to lru."""
    prompts = chats(num_requests=150 if quick else 600, seed=11)
    usable_pages = int(count_pages(prompts)[1] * POOL_SHARE)
    keys_of = [chain_ids(ids, PAGE_SIZE)[: len(ids) // PAGE_SIZE] for ids in prompts]
    names = ["lru", *sorted(POLICIES.keys() - {"lru"})]

    def side(name: str) -> float:
        policy = Belady(keys_of) if name == "belady" else make_policy(name)
        begin = process_time()
        num_operations = replay(policy, keys_of, usable_pages)
        return (process_time() - begin) / num_operations * 1e6

    with without_collection():
        measured = take_turns([partial(side, name) for name in names], rounds=3 if quick else 7)
    lru, *others = measured
    return [
        Row.of(f"policy_{name}", ours, lru, target=TARGETS.get(name, DEFAULT_TARGET), unit="us/page operation")
        for name, ours in zip(names[1:], others, strict=True)
    ]


def replay(policy: EvictionPolicy, keys_of: Sequence[Sequence[bytes]], usable_pages: int) -> int:
    """Serve requests one after another; returns the pages that were matched, inserted or evicted."""
    arena = PageArena(usable_pages + 1)
    index = PrefixIndex(arena, policy)
    for keys in keys_of:
        if isinstance(policy, Belady):
            policy.advance()
        shared = index.lookup(ROOT, keys)
        arena.retain(shared)
        need = len(keys) - len(shared)
        if need > arena.num_free:
            index.evict(need - arena.num_free)
        fresh = arena.acquire(need) or []
        index.insert_run(ROOT, keys[len(shared) :], fresh, shared[-1] if shared else None)
        arena.release(shared + fresh)
    counters = index.counters
    return counters.matched_pages + counters.inserts + counters.evictions
