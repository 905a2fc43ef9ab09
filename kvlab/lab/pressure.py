"""Studies of pools that are too small: who completes, who stalls, what cures it, and what each eviction policy saves.

A study takes ``make_engine(**settings)``, for example ``kvlab.run.tracer_engine``. All of it is the same in every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlab.events import Stalled
from kvlab.lab.playback import Player, PlayReport
from kvlab.lab.results import PressureRow
from kvlab.lab.workloads import WorkItem, WorkloadShape, shared_prefix
from kvlab.progress import progress

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine
    from kvlab.recorder import Recorder

MakeEngine = Callable[..., "Engine"]

#: Policies that need no knowledge of the future and no hints.
PLAIN_POLICIES = ("lru", "fifo", "lfu", "slru", "s3fifo", "sieve", "arc", "random")


@dataclass(frozen=True)
class PressureRun:
    """A workload played to its end: what became of it, and every event on the way."""

    row: PressureRow
    events: Recorder

    def __repr__(self) -> str:
        row = self.row
        ending = "" if row.stalled_step is None else f", stalled in step {row.stalled_step}"
        share = f"{row.completed} of {row.requests} completed"
        return f"PressureRun({row.name or 'unnamed'}: {share} on {row.pool_pages} pages{ending})"


def press(make_engine: MakeEngine, items: Iterable[WorkItem], *, name: str = "", **settings: Any) -> PressureRun:
    """Play ``items`` on a new engine, to the end or to a stall.

    Raises:
        InputError: an unknown or illegal setting.
    """
    requests = list(items)
    with make_engine(**settings) as engine:
        report = Player(engine).play(requests)
        return PressureRun(_row(name, engine, report, len(requests)), engine.events)


def _row(name: str, engine: Engine, report: PlayReport, requests: int) -> PressureRow:
    index = engine.kv.index
    return PressureRow(
        name=name,
        pool_pages=engine.kv.usable_pages,
        prefix_cache=index is not None,
        requests=requests,
        completed=report.completed,
        steps=report.steps,
        stalled_step=next((entry.step for entry in engine.events.filter(Stalled)), None),
        cached_tokens=report.cached_tokens,
        prompt_tokens=report.prompt_tokens,
        evicted_pages=0 if index is None else index.counters.evictions,
        preemptions=report.preemptions,
        host_moves=report.host_moves,
    )


def stall_sandbox(
    make_engine: MakeEngine,
    *,
    pool_pages: int = 96,
    page_size: int = 16,
    requests: int = 32,
    prefix_pages: int = 59,
    tail: int = 8,
    max_tokens: int = 24,
    first_alone: bool = False,
    seed: int = 0,
    name: str = "",
    **settings: Any,
) -> PressureRun:
    """Play requests that arrive at once and share a prefix, by default the case that was published as a stall.

    Args:
        pool_pages: usable pages.
        first_alone: the first request comes one step before the others, so that they all find the prefix cached.
        settings: keywords of ``kvlab.load``, such as admission, preemption or max_concurrent_requests.
    """
    first, *others = shared_prefix(WorkloadShape(requests, prefix_pages, page_size, tail, max_tokens, seed=seed))
    items = [first, *(replace(item, at_step=int(first_alone)) for item in others)]
    return press(make_engine, items, name=name, num_pages=pool_pages + 1, page_size=page_size, **settings)


def stall_cures(make_engine: MakeEngine, cures: Mapping[str, Mapping[str, Any]], **shape: Any) -> list[PressureRow]:
    """Play the same sandbox under each of the named settings; ``shape`` are other arguments of ``stall_sandbox``."""
    return [
        stall_sandbox(make_engine, name=name, **shape, **settings).row
        for name, settings in progress(cures.items(), "settings", unit="run")
    ]


def stall_threshold(make_engine: MakeEngine, pools: Sequence[int], **shape: Any) -> list[PressureRow]:
    """Play the sandbox without a gate on each pool, with the cache on and off: how many complete before a stall."""
    return [
        stall_sandbox(make_engine, name=name, pool_pages=pages, prefix_cache=cached, admission="none", **shape).row
        for name, cached in (("cache on", True), ("cache off", False))
        for pages in progress(pools, f"pools, {name}", unit="run")
    ]


def regulars_and_passers(visits: int = 120, *, page_size: int = 16, regulars: int = 5, seed: int = 0) -> list[WorkItem]:
    """Return requests one after another: every other one comes back with one of a few prompts, the rest never come again.

    A policy that keeps what was used last gives the regulars' pages to those who only pass.
    """
    draw = random.Random(seed)

    def ids(pages: int) -> tuple[int, ...]:
        return tuple(draw.randrange(4, 64) for _ in range(pages * page_size))

    known = [ids(4) for _ in range(regulars)]
    return [WorkItem(f"v{n}", 3 * n, (*(ids(5) if n % 2 else draw.choice(known)), 5), max_tokens=1) for n in range(visits)]


def policy_study(
    make_engine: MakeEngine, items: Iterable[WorkItem], policies: Sequence[str] = PLAIN_POLICIES, **settings: Any
) -> list[PressureRow]:
    """Play the same ``items`` once under each eviction policy; one row a policy, in the order given."""
    requests = list(items)
    return [
        press(make_engine, requests, name=policy, policy=policy, **settings).row
        for policy in progress(policies, "policies", unit="run")
    ]
