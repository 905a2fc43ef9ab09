"""Two pools with host pages, tiers and windows hand requests to each other in random order, against the truth about bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_driver import NODE, TEXT, keyed

from kvlab.cache.keys import chain_ids
from kvlab.cache.kv import KVResource
from kvlab.engine.handover import Done
from kvlab.pool_state import PoolState
from kvlab.spec import (
    AdmitRuntimeError,
    KVLayout,
    RequestConfig,
    RequestOffloading,
    RetentionPolicy,
    Segment,
    Step,
    StepContext,
    WalkInputs,
)

PAGE = 4
NUM_PAGES = 14
HOST_PAGES = 9
TIER_PAGES = 5
SIDES = st.sampled_from("ab")
RIDS = st.integers(0, 3)
TRUNK = [1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2]
PROMPTS = st.builds(
    lambda shared, tail: [*TRUNK[:shared], *tail] or [1],
    st.sampled_from([16, 12, 8, 5, 0]),
    st.lists(st.integers(0, 1), max_size=5),
)


class DigestStore:
    """A page store of one digest a slot; it is also the transport that reads the stores of its peers."""

    def __init__(self, source: str, peers: dict[str, DigestStore]) -> None:
        self.source, self.peers, self.is_broken = source, peers, False
        self.pages = [[0] * PAGE for _ in range(NUM_PAGES)]
        self.host = [[0] * PAGE for _ in range(HOST_PAGES + TIER_PAGES)]
        peers[source] = self

    def copy_pages(self, src, dst) -> None:
        self.move(self.pages, src, self.pages, dst)

    def to_host(self, pages, host_pages) -> None:
        self.move(self.pages, pages, self.host, host_pages)

    def from_host(self, host_pages, pages) -> None:
        self.move(self.host, host_pages, self.pages, pages)

    def serve(self, holds) -> None:
        self.holds = holds

    def read(self, source, src, dst, *, epoch, begin) -> Done:
        if self.peers[source].is_broken:
            return Done(ConnectionError("the peer was killed"))
        assert self.peers[source].holds(epoch, begin, src)
        self.move(self.peers[source].pages, src, self.pages, dst)
        return Done()

    @staticmethod
    def move(of, src, onto, dst) -> None:
        for s, d in zip(src, dst, strict=True):
            onto[d] = list(of[s])


@dataclass
class Truth:
    """What one stream really holds."""

    prompt: list[int]
    version: int
    tokens: list[int] = field(default_factory=list)  # every id written, released ones included
    digests: list[int] = field(default_factory=list)  # of all of them
    slots: list[int] = field(default_factory=list)  # digests of what is stored
    is_failed: bool = False
    foreign: bool = False  # a step wrote it with other weights than those it began with


class Side:
    """One pool and what should be in it."""

    def __init__(self, name: str, peers: dict[str, DigestStore], has_tier: bool) -> None:
        self.replayed = PoolState()
        self.store = DigestStore(name, peers)
        self.version = 0
        self.kv = KVResource(
            KVLayout(1, 1, 8, PAGE),
            NUM_PAGES,
            store=self.store,
            cpu_offload_pages=HOST_PAGES,
            host_tier_pages=TIER_PAGES if has_tier else 0,
            transport=self.store,
            check_invariants=True,
            record=self.replayed.apply,
        )
        self.kv.enable_prefix_cache(b"root 0", TEXT)
        self.truths: dict[int, Truth] = {}
        self.filed: dict[tuple[int, bytes], list[int]] = {}  # (weights, key) -> what such a page holds

    def digest(self, truth: Truth, ids: list[int]) -> list[int]:
        made, last = [], truth.digests[-1] if truth.digests else 0
        for token in ids:
            last = hash((last, token, self.version))
            made.append(last)
        return made

    def learn(self, truth: Truth) -> None:
        """Every whole page that keys may name."""
        if not truth.foreign:
            for position, key in enumerate(chain_ids(truth.tokens, PAGE)[: len(truth.tokens) // PAGE]):
                self.filed[truth.version, key] = truth.digests[position * PAGE : (position + 1) * PAGE]


class Tiers(RuleBasedStateMachine):
    @initialize(has_tier=st.booleans())
    def open(self, has_tier: bool) -> None:
        peers: dict[str, DigestStore] = {}
        self.sides = {name: Side(name, peers, has_tier) for name in "ab"}

    def one_of(self, data, name: str) -> tuple[Side, int, Truth]:
        side = self.sides[name]
        rid = data.draw(st.sampled_from(sorted(side.truths)))
        return side, rid, side.truths[rid]

    has_requests = precondition(lambda self: all(side.truths for side in self.sides.values()))

    # -- a request comes, runs, goes

    @rule(name=SIDES, rid=RIDS, prompt=PROMPTS)
    def begin(self, name: str, rid: int, prompt: list[int]) -> None:
        side = self.sides[name]
        if rid not in side.truths:
            side.kv.ingest_request(rid, RequestConfig({"main": keyed(prompt, PAGE)}))
            side.truths[rid] = Truth(prompt, side.version)
            self.run(side, rid, 1.0, None)

    @has_requests
    @rule(name=SIDES, data=st.data(), token=st.integers(0, 1), chunk=st.sampled_from([0.5, 1.0, 1.0]), times=st.integers(1, 5))
    def go_on(self, name: str, data, token: int, chunk: float, times: int) -> None:
        side, rid, _ = self.one_of(data, name)
        for _ in range(times):
            self.run(side, rid, chunk, None, token)

    @has_requests
    @rule(name=SIDES, data=st.data(), budget=st.integers(1, 9), protected=st.sampled_from([0, 0, 4, 6]))
    def go_on_in_a_window(self, name: str, data, budget: int, protected: int) -> None:
        side, rid, truth = self.one_of(data, name)
        stream = side.kv.stream(rid)
        is_fit = protected in (0, stream.protected_prefix) or not (stream.protected_prefix or stream.released)
        if is_fit and len(truth.tokens) >= max(protected, 1):
            self.run(side, rid, 1.0, RetentionPolicy(budget, protected))

    def run(self, side: Side, rid: int, chunk: float, window: RetentionPolicy | None, token: int = 0) -> None:
        """One step of a request: the next part of its prompt, or one token."""
        truth, kv = side.truths[rid], side.kv
        done = len(truth.tokens)
        is_prompt = done < len(truth.prompt)
        walk, skipped = "prefill" if is_prompt else "decode", 0
        if is_prompt:
            inputs = WalkInputs({"main": truth.prompt[done:]})
            answer = kv.resolve_cached_prefix(rid, NODE, walk, inputs) or {}
            if match := answer.get("main"):
                kv.apply_cached_prefix(rid, NODE, walk, inputs, answer)
                skipped = match.slots
            ids = truth.prompt[done + skipped :]
            ids = ids[: max(1, int(len(ids) * chunk))]
        else:
            ids = [token]
        policies = {} if window is None else {(rid, "main"): window}
        step, ctx = Step(0, NODE, walk, (Segment(rid, "main", len(ids)),), windows=policies), StepContext(frozenset({rid}))
        if (refusal := kv.admit(step, ctx)) is not None:
            assert isinstance(refusal, RequestOffloading) == kv.is_offloaded(rid)
            assert isinstance(refusal, AdmitRuntimeError) == truth.is_failed
            return
        if not is_prompt:
            kv.extend_prefix_chain(rid, NODE, walk, {"tokens": [ids]})
        truth.foreign |= truth.version != side.version
        self.write(side, truth, kv.plan(step, ctx).rows[0], [*truth.prompt[done : done + skipped], *ids])
        kv.commit(step, ctx)
        if window is not None or kv.stream(rid).window is not None:
            self.release(truth, kv.stream(rid), len(truth.slots) - kv.stored_tokens(rid))
        side.learn(truth)

    def write(self, side: Side, truth: Truth, row, ids: list[int]) -> None:
        truth_was = list(truth.slots)
        made = side.digest(truth, ids)
        truth.tokens += ids
        truth.digests += made
        truth.slots += made
        assert row.length == len(truth.slots)
        side.learn(truth)
        for slot in range(row.length):
            page, offset = row.pages[slot // PAGE], slot % PAGE
            if slot < row.length - row.to_compute:
                assert side.store.pages[page][offset] == truth.slots[slot], f"slot {slot}: not what a cold run holds"
            side.store.pages[page][offset] = truth.slots[slot]
        assert truth.slots[: len(truth_was)] == truth_was

    @staticmethod
    def release(truth: Truth, stream, num_tokens: int) -> None:
        assert num_tokens % PAGE == 0
        first = -(-stream.protected_prefix // PAGE) * PAGE
        del truth.slots[first : first + num_tokens]

    @has_requests
    @rule(name=SIDES, data=st.data(), how=st.sampled_from(["remove", "remove", "reset", "reset and free"]))
    def end(self, name: str, data, how: str) -> None:
        side, rid, truth = self.one_of(data, name)
        if how == "remove":
            side.kv.remove_request(rid)
            del side.truths[rid]
        else:
            side.kv.reset_request(rid, free=how != "reset")
            side.truths[rid] = Truth(truth.prompt, side.version)

    # -- the tiers

    @has_requests
    @rule(name=SIDES, data=st.data())
    def offload(self, name: str, data) -> None:
        side, rid, _ = self.one_of(data, name)
        held = side.kv.get_offload_priority(rid)
        free, fits = side.kv.arena.num_free, side.kv.pages_needed(side.kv.stored_tokens(rid)) <= side.kv._pool.host.num_free
        freed = side.kv.offload(rid)
        assert side.kv.arena.num_free == free + freed
        if held:
            assert side.kv.is_offloaded(rid) == fits

    @has_requests
    @rule(name=SIDES, data=st.data())
    def reload(self, name: str, data) -> None:
        side, rid, _ = self.one_of(data, name)
        need, supply = len(side.kv.stream(rid).host_pages), side.kv.supply_pages()
        assert side.kv.reload(rid) == (need <= supply)

    @rule(name=SIDES, num_pages=st.integers(1, 5))
    def evict(self, name: str, num_pages: int) -> None:
        self.sides[name].kv.evict(num_pages)

    @has_requests
    @rule(name=SIDES, data=st.data(), num_tokens=st.integers(1, 9))
    def release_oldest(self, name: str, data, num_tokens: int) -> None:
        side, rid, truth = self.one_of(data, name)
        if not side.kv.is_offloaded(rid):
            self.release(truth, side.kv.stream(rid), side.kv.release_oldest(rid, num_tokens))

    @rule(name=SIDES, is_changed=st.booleans(), luck=st.integers(0, 5))
    def reset_cache(self, name: str, is_changed: bool, luck: int) -> None:
        """Rarely: the cache must fill up before it is worth dropping."""
        side = self.sides[name]
        if luck == 0:
            side.version += is_changed
            side.kv.reset_prefix_cache("weights" if is_changed else "asked", b"root %d" % side.version)
            for truth in side.truths.values():
                if not truth.tokens:
                    truth.version = side.version

    # -- from one pool to the other

    @has_requests
    @rule(name=SIDES, data=st.data(), is_broken=st.sampled_from([False] * 5 + [True]))
    def hand_over(self, name: str, data, is_broken: bool) -> None:
        side, rid, truth = self.one_of(data, name)
        other = self.sides["b" if name == "a" else "a"]
        if rid not in other.truths:
            other.kv.ingest_request(rid, RequestConfig({"main": keyed(truth.prompt, PAGE)}))
            other.truths[rid] = Truth(truth.prompt, other.version)
        theirs = other.truths[rid]
        published = side.kv.publish(rid)
        is_same = theirs.prompt == truth.prompt and theirs.tokens == truth.tokens[: len(theirs.tokens)]
        is_pure = len(theirs.slots) == len(theirs.tokens) and truth.version == theirs.version == side.version == other.version
        if not published or not is_same or not is_pure or truth.foreign or theirs.foreign:
            return
        stored = other.kv.stored_tokens(rid)
        side.store.is_broken = is_broken
        refusal = other.kv.admit_retrieve(rid, NODE, "decode", published)
        side.store.is_broken = False
        if isinstance(refusal, AdmitRuntimeError):
            theirs.is_failed = True
        elif refusal is None and other.kv.stored_tokens(rid) != stored:
            assert other.kv.stored_tokens(rid) == len(truth.tokens)
            theirs.tokens, theirs.digests, theirs.slots = list(truth.tokens), list(truth.digests), list(truth.slots)

    @has_requests
    @rule(name=SIDES, data=st.data())
    def read_the_own_record(self, name: str, data) -> None:
        side, rid, _ = self.one_of(data, name)
        stored = side.kv.stored_tokens(rid)
        side.kv.admit_retrieve(rid, NODE, "decode", side.kv.publish(rid))
        assert side.kv.stored_tokens(rid) == stored

    # -- after each

    @invariant()
    def every_stream_holds_what_a_cold_run_holds(self) -> None:
        for side in getattr(self, "sides", {}).values():
            side.kv.check()
            for rid, truth in side.truths.items():
                stream = side.kv.stream(rid)
                if stream.offloaded or truth.is_failed or stream.converted:
                    continue
                pages = [slot for page in stream.page_indices for slot in side.store.pages[page]]
                assert (stream.stored_len, pages[: stream.stored_len]) == (len(truth.slots), truth.slots)

    @invariant()
    def every_cached_page_holds_what_its_key_says(self) -> None:
        for side in getattr(self, "sides", {}).values():
            for page in side.kv.index.pages():
                assert side.store.pages[page] == side.filed[side.version, side.kv.index.key_of(page)]
            tier = side.kv._pool.tier
            for (_, key), page in tier._pages.items() if tier is not None else ():
                assert side.store.host[page] == side.filed[side.version, key]

    @invariant()
    def the_log_replays_to_the_state(self) -> None:
        for side in getattr(self, "sides", {}).values():
            streams, state = [side.kv.stream(rid) for rid in side.truths], side.replayed
            assert state.streams == {s.key: s.page_indices for s in streams if s.page_indices}
            assert state.leases == {s.key: s.lease for s in streams if s.lease}
            assert state.host == {page: s.key for s in streams for page in s.host_pages}
            assert {s.key: state.stored_tokens.get(s.key, 0) for s in streams} == {s.key: s.stored_len for s in streams}
            assert set(state.indexed()) == set(side.kv.index.pages())
            tier = side.kv._pool.tier
            assert set(state.host_cached) == (set(tier._pages.values()) if tier is not None else set())

    def teardown(self) -> None:
        for side in getattr(self, "sides", {}).values():
            side.kv.cleanup()
            assert side.kv.arena.num_free == NUM_PAGES - 1
            assert side.kv._pool.host.num_free == HOST_PAGES
            assert side.kv._pool.tier is None or side.kv._pool.tier.host.num_free == TIER_PAGES


TestTiers = Tiers.TestCase
TestTiers.settings = settings(
    deadline=None,
    max_examples=int(os.environ.get("KVLAB_MACHINE_EXAMPLES", "120")),
    stateful_step_count=80,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
