"""A run as an engine records it, made by hand: three requests share a prefix of four pages, one is evicted, one misses.

The page numbers, owners and positions follow the life of a page: acquired, committed, indexed, released, leased,
converted, evicted. Views and logs are tested on it without an engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlab import events as ev
from kvlab.recorder import Recorder

PAGE_SIZE = 16
ROOT = "5eed5eed5eed5eed"


class Clock:
    """Seconds that pass by 2 ms a call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.002
        return self.now


class Run:
    """Emits correct event sequences; keeps a FIFO free list and an index of its own."""

    def __init__(self, num_pages: int = 64, **recorder_options: object) -> None:
        self.record = Recorder(clock=Clock(), **recorder_options)  # type: ignore[arg-type]
        self.free = list(range(1, num_pages))
        self.listed: dict[object, list[int]] = {}
        self.indexed: dict[str, int] = {}
        self.record(ev.ModelLoaded("synthetic", "0" * 16))
        self.record(ev.PoolCreated("kv", num_pages, PAGE_SIZE, 1024))
        self.record(ev.RootOpened("kv", ROOT, ("main",)))

    def start(self, rid: int | str, keys: Sequence[str], tail_tokens: int, name: str = "", decode: int = 2) -> None:
        """Admit a request of whole pages ``keys`` and ``tail_tokens`` more, run its prefill, then ``decode`` steps."""
        prompt = len(keys) * PAGE_SIZE + tail_tokens
        self.record(ev.RequestSubmitted(rid, prompt, decode, name))
        self.record(ev.RequestStarted(rid))
        hit = self._lease(rid, keys, prompt)
        self.record.step += 1
        self.record(ev.PrefixMatched(rid, "main", len(hit), len(keys), len(hit) * PAGE_SIZE, prompt))
        if hit:
            self.record(ev.LeaseConverted(rid, "main", hit))
        fresh = self._take(rid, -(-(prompt + decode) // PAGE_SIZE) - len(hit))
        self.listed[rid] = [*hit, *fresh]
        span = prompt - len(hit) * PAGE_SIZE
        self.record(ev.StreamCommitted(rid, "main", "prefill", span, prompt))
        self._file(rid, keys, len(hit))
        self._miss(rid, keys, len(hit), prompt)
        self.record(ev.StepRan("prefill", ((rid, "main", span),), 12.5))
        for _ in range(decode):
            self.decode(rid, prompt := prompt + 1)

    def _lease(self, rid: int | str, keys: Sequence[str], prompt: int) -> list[int]:
        matched = [self.indexed[k] for k in keys[: next((i for i, k in enumerate(keys) if k not in self.indexed), len(keys))]]
        matched = matched[: (prompt - 1) // PAGE_SIZE]
        if matched:
            self.record(ev.PagesLeased(rid, "main", matched))
        return matched

    def _take(self, rid: int | str, count: int) -> list[int]:
        for _ in range(count - len(self.free)):
            self.evict(rid)
        pages, self.free = self.free[:count], self.free[count:]
        self.record(ev.PagesAcquired(rid, "main", pages))
        return pages

    def _file(self, rid: int | str, keys: Sequence[str], first: int) -> None:
        pages = self.listed[rid]
        for position in range(first, len(keys)):
            if keys[position] in self.indexed:
                self.record(ev.IndexRaceLost(rid, "main", pages[position], self.indexed[keys[position]]))
                continue
            parent = self.indexed[keys[position - 1]] if position else None
            self.indexed[keys[position]] = pages[position]
            self.record(ev.PageIndexed(rid, "main", pages[position], keys[position], ROOT, parent, position))

    def _miss(self, rid: int | str, keys: Sequence[str], hit: int, prompt: int) -> None:
        if hit < len(keys):
            self.record(
                ev.TokensMissed(rid, "main", hit * PAGE_SIZE, len(keys) * PAGE_SIZE, "never_seen", "no page has this key")
            )
        if prompt > len(keys) * PAGE_SIZE:
            self.record(ev.TokensMissed(rid, "main", len(keys) * PAGE_SIZE, prompt, "last_page_cap", "a page is reused whole"))

    def decode(self, rid: int | str, stored: int) -> None:
        """One decode step of one request."""
        self.record.step += 1
        self.record(ev.StreamCommitted(rid, "main", "decode", 1, stored))
        self.record(ev.TokenSampled(rid, 7))
        self.record(ev.StepRan("decode", ((rid, "main", 1),), 3.25))

    def finish(self, rid: int | str, cached_tokens: int = 0) -> None:
        """End a request: its private pages become free, its indexed ones cached."""
        self.record.step += 1
        pages = self.listed.pop(rid)
        self.record(ev.RequestFinished(rid, "length", cached_tokens, 2, 41.5))
        self.record(ev.PagesReleased(rid, "main", pages, "finished"))
        held = {p for listed in self.listed.values() for p in listed}
        self.free += [p for p in pages if p not in self.indexed.values() and p not in held]

    def evict(self, for_rid: int | str) -> None:
        """The index lets go of the page it filed last that no request lists."""
        held = {p for listed in self.listed.values() for p in listed}
        key, page = next((k, p) for k, p in reversed(self.indexed.items()) if p not in held)
        del self.indexed[key]
        self.record(ev.PageEvicted(page, key, for_rid))
        self.free.append(page)


def prefix(name: str, pages: int, after: Sequence[str] = ()) -> list[str]:
    """Keys of ``pages`` whole pages of the text ``name`` after other pages."""
    return [*after, *(f"{name}{i}" for i in range(pages))]


def three_sharers(num_pages: int = 64, **recorder_options: object) -> Recorder:
    """Three requests share four pages and run together; a fourth shares nothing; two end."""
    run = Run(num_pages, **recorder_options)
    system = prefix("system", 4)
    run.start(1, prefix("first", 2, system), 9, "first question")
    run.start(2, prefix("second", 1, system), 5, "second question")
    run.start(3, prefix("third", 3, system), 12, "third question")
    run.start("other", prefix("other", 3), 4, "shares nothing")
    run.finish(1)
    run.finish("other")
    return run.record


def under_pressure() -> Recorder:
    """Thirteen usable pages: the third request can only start by evicting what the first left behind."""
    run = Run(14)
    run.start(1, prefix("a", 6), 3)
    run.finish(1)
    run.start(2, prefix("b", 4), 3)
    run.finish(2)
    run.start(3, prefix("c", 7), 3)
    return run.record
