"""Every interleaving of two requests' lifecycles, evictions and resets on a pool of five pages, eight operations deep."""

from __future__ import annotations

import pytest
from kv_driver import NODE, TEXT, keyed, step_of

from kvlab.cache.kv import KVResource
from kvlab.spec import KVLayout, RequestConfig, WalkInputs

PAGE, USABLE_PAGES, DEPTH = 2, 5, 8
SAMPLED = 8  # every step samples it, so equal prompts go on alike
Op = tuple[str, str]


class World:
    """One KV resource, and what its two requests have done so far."""

    def __init__(self, prompts: dict[str, list[int]]) -> None:
        self.kv = KVResource(KVLayout(1, 1, 8, PAGE), USABLE_PAGES + 1, check_invariants=False)
        self.kv.enable_prefix_cache(b"root", TEXT)
        self.prompts = prompts
        self.content: dict[str, list[int]] = {}  # ids a request's slots hold
        self.agreed: dict[str, int | None] = {}  # slots its next step is cut by
        self.in_flight: dict[str, tuple] = {}
        self.unread: dict[str, int] = {}
        self.store: dict[tuple[int, int], tuple[int, ...]] = {}

    def ops(self) -> list[Op]:
        """What may happen next."""
        found = [("evict", ""), ("reset_cache", "")]
        for rid in self.prompts:
            if rid not in self.content:
                found.append(("ingest", rid))
                continue
            found += [("reset", rid), ("remove", rid)]
            if rid in self.in_flight:
                found += [("commit", rid), ("abort", rid)]
            else:
                found.append(("admit", rid))
                if not self.content[rid]:
                    found += [("probe", rid), ("chunk", rid)]
            if self.unread[rid]:
                found.append(("extend", rid))
        if len(self.content) == len(self.prompts) and not self.in_flight and len(set(map(self.is_prefill, self.content))) == 1:
            found.append(("both", ""))
        return found

    def is_prefill(self, rid: str) -> bool:
        return len(self.content[rid]) < len(self.prompts[rid])

    def do(self, op: Op) -> None:
        getattr(self, op[0])(*op[1:] if op[1] else ())

    def forget(self, rid: str) -> None:
        self.in_flight.pop(rid, None)
        self.agreed[rid], self.unread[rid] = None, 0

    def ingest(self, rid: str) -> None:
        self.kv.ingest_request(rid, RequestConfig({"main": keyed(self.prompts[rid], PAGE)}))
        self.content[rid] = []
        self.forget(rid)

    def reset(self, rid: str) -> None:
        self.kv.reset_request(rid)
        self.content[rid] = []
        self.forget(rid)

    def remove(self, rid: str) -> None:
        self.kv.remove_request(rid)
        del self.content[rid]
        self.forget(rid)

    def evict(self) -> None:
        self.kv.evict(1)

    def reset_cache(self) -> None:
        assert self.kv.reset_prefix_cache()
        self.agreed = dict.fromkeys(self.agreed)

    def probe(self, rid: str) -> None:
        inputs = WalkInputs({"main": self.prompts[rid]})
        matches = self.kv.resolve_cached_prefix(rid, NODE, "prefill", inputs) or {}  # none once a reset ended the chain
        self.kv.apply_cached_prefix(rid, NODE, "prefill", inputs, matches)
        self.agreed[rid] = matches["main"].slots if matches else 0

    def admit(self, rid: str) -> None:
        self.start([rid])

    def chunk(self, rid: str) -> None:
        self.start([rid], max_tokens=2)

    def both(self) -> None:
        self.start(list(self.prompts))

    def start(self, rids: list[str], max_tokens: int = 99) -> None:
        """Probe where that is due, admit one step of ``rids``, and write what it writes."""
        ids = {rid: self.next_ids(rid)[:max_tokens] for rid in rids}
        walk = "prefill" if self.is_prefill(rids[0]) else "decode"
        step, ctx = step_of(walk, {rid: len(x) for rid, x in ids.items()})
        if self.kv.admit(step, ctx) is not None:
            return
        for row in self.kv.plan(step, ctx).rows:
            self.write(row, ids[row.rid])
            self.in_flight[row.rid] = step_of(walk, {row.rid: row.to_compute}), ids[row.rid]

    def next_ids(self, rid: str) -> list[int]:
        content, prompt = self.content[rid], self.prompts[rid]
        if not self.is_prefill(rid):
            return [SAMPLED]
        if not content and self.agreed[rid] is None:
            self.probe(rid)
        return prompt[len(content) or self.agreed[rid] :]

    def write(self, row, ids: list[int]) -> None:
        content = self.content[row.rid] or self.prompts[row.rid][: row.length - len(ids)]
        assert len(content) == row.length - len(ids)
        self.content[row.rid] = content
        for slot, token in enumerate(ids, len(content)):
            past = self.store[row.pages[(slot - 1) // PAGE], (slot - 1) % PAGE] if slot else ()
            self.store[row.pages[slot // PAGE], slot % PAGE] = (*past, token)

    def commit(self, rid: str) -> None:
        (step, ctx), ids = self.in_flight.pop(rid)
        self.kv.commit(step, ctx)
        self.content[rid] = [*self.content[rid], *ids]
        self.unread[rid] += len(self.content[rid]) >= len(self.prompts[rid])

    def abort(self, rid: str) -> None:
        (step, ctx), _ = self.in_flight.pop(rid)
        self.kv.abort(step, ctx)

    def extend(self, rid: str) -> None:
        self.kv.extend_prefix_chain(rid, NODE, "decode", {"tokens": [[SAMPLED] * self.unread[rid]]})
        self.unread[rid] = 0

    def check(self) -> None:
        """The invariants, and that every stored slot holds what a cold run would."""
        self.kv.check()
        for rid, content in self.content.items():
            stream = self.kv.stream(rid)
            assert stream.stored_len == len(content) or not content
            for slot in range(stream.stored_len if content else 0):
                held = self.store[stream.page_indices[slot // PAGE], slot % PAGE]
                assert held == tuple(content[: slot + 1]), f"{rid}, slot {slot}: {held}"
        for page in self.kv.index.pages():
            assert (page, PAGE - 1) in self.store

    def state(self) -> tuple:
        """All that the future depends on; stamps count by their order alone."""
        kv, index = self.kv, self.kv.index
        stamps = sorted({index.stamp_of(p) for p in index.pages()})
        cached = [
            (p, index.key_of(p), index.parent_of(p), stamps.index(index.stamp_of(p)), self.store[p, PAGE - 1])
            for p in sorted(index.pages())
        ]
        streams = tuple(self._stream_state(rid) for rid in self.prompts)
        return tuple(kv.arena.free_pages()), tuple(cached), streams

    def _stream_state(self, rid: str) -> tuple | None:
        if rid not in self.content:
            return None
        s, step = self.kv.stream(rid), self.in_flight.get(rid)
        chain = s.chain and (tuple(s.chain.keys), s.chain.cursor, s.chain.covered_len)
        flags = s.converted, s.lease_agreed, s.step_in_flight, s.hits
        held = tuple(s.page_indices), s.stored_len, tuple(s.lease or ())
        return held, flags, chain, tuple(self.content[rid]), self.agreed[rid], step and tuple(step[1]), self.unread[rid]


def rebuild(prompts: dict[str, list[int]], path: tuple[Op, ...]) -> World:
    world = World(prompts)
    for op in path:
        world.do(op)
    return world


def walk(prompts: dict[str, list[int]], depth: int) -> tuple[int, int]:
    """Visit every state that ``depth`` operations can reach; returns how many states and operations that were."""
    frontier: list[tuple[Op, ...]] = [()]
    seen = {World(prompts).state()}
    num_ops = 0
    for _ in range(depth):
        reached = []
        for path in frontier:
            for op in rebuild(prompts, path).ops():
                world = rebuild(prompts, path)
                world.do(op)
                num_ops += 1
                state = world.state()
                if state not in seen:
                    world.check()
                    seen.add(state)
                    reached.append((*path, op))
        frontier = reached
    return len(seen), num_ops


@pytest.mark.parametrize("depth", [DEPTH, pytest.param(DEPTH + 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("second", [[1, 2, 3, 4, 5], [1, 2, 3, 9]], ids=["equal_prompts", "shared_first_page"])
def test_every_interleaving_holds_the_invariants(second, depth, capsys):
    num_states, num_ops = walk({"a": [1, 2, 3, 4, 5], "b": second}, depth)
    with capsys.disabled():
        print(f"\n{num_states} states by {num_ops} operations, {depth} deep, on {USABLE_PAGES} pages", end=" ")
    assert num_states > 4000
