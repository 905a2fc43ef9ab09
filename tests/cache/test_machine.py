"""The whole lifecycle in random order, against the naive twin, the invariants, the event log and the truth about bytes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_driver import NODE, TEXT, keyed, step_of

from kvlab.cache.keys import chain_ids
from kvlab.cache.kv import KVResource
from kvlab.cache.misses import MissLog
from kvlab.cache.naive import NaiveKV
from kvlab.cache.policies import POLICIES
from kvlab.cache.policies.belady import Belady
from kvlab.cache.policies.priority import Priority
from kvlab.cache.roots import stream_root
from kvlab.errors import InputError
from kvlab.events import PageEvicted
from kvlab.pool_state import PoolState
from kvlab.recorder import Recorder
from kvlab.spec import MISS_CAUSES, KVLayout, Match, RequestConfig, Retention, WalkInputs

PAGE = 4
NUM_PAGES = 24
MAX_PINNED = 5
RIDS = st.integers(0, 5)
TRUNK = [1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4]
PROMPTS = st.builds(
    lambda shared, tail: [*TRUNK[:shared], *tail] or [1],
    st.sampled_from([20, 16, 12, 8, 5, 0]),
    st.lists(st.integers(0, 1), max_size=5),
)


@dataclass
class Truth:
    """What one request's stream really holds: a digest of every token before it, slot by slot."""

    prompt: list[int]
    config: RequestConfig
    digests: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    num_read: int = 0  # generated ids the KV resource was told of
    is_plain: bool = True  # only probed at its start and only written by its own walks
    hit: int | None = None

    def next_ids(self, walk: str) -> list[int]:
        """Ids that ``walk`` would write next, at most."""
        stored, prompt = len(self.digests), self.prompt
        if walk == "prefill":
            return prompt[stored:]
        if walk == "decode":
            written = stored - len(prompt)
            return self.generated[written : written + 1] if written >= 0 else []
        return [-7 - stored] * 3


is_due = precondition(lambda self: self.calm >= 6)  # the cache must fill up before it is worth dropping

has_requests = precondition(lambda self: bool(self.truths))
is_idle = precondition(lambda self: self.in_flight is None)


class Lifecycle(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.replayed = PoolState()
        self.recorder = Recorder(clock=lambda: 0.0, max_events=None)
        self.victims: deque[int] = deque()  # pages the real one evicted and the naive one has not
        self.truths: dict[int, Truth] = {}
        self.store: dict[tuple[int, int], int] = {}  # (page, slot) -> digest
        self.weights = 0
        self.in_flight = None  # step, context, {rid: (truth, digests)}
        self.num_steps = 0
        self.calm = 0  # steps since the cache was last dropped

    def record(self, event) -> None:
        self.recorder(event)
        self.replayed.apply(event)
        if isinstance(event, PageEvicted):
            self.victims.append(event.page)

    def choose(self, leaves: Sequence[int]) -> int:
        """Other policies than lru have twins of their own; here it is asked only that what went was a leaf that might go."""
        return self.victims.popleft()

    def both(self, verb: str, *args):
        """Call ``verb`` on the real and on the naive one; their answers must be equal."""
        real, naive = getattr(self.kv, verb)(*args), getattr(self.naive, verb)(*args)
        assert real == naive, f"{verb}{args}: {real} is not {naive}"
        return real

    def digest(self, truth: Truth, ids: list[int], before: int | None) -> list[int]:
        """Digests of ``ids`` after ``before``, as the weights of now compute them."""
        made, last = [], before if before is not None else hash(("start", truth.config.salt))
        for token in ids:
            last = hash((last, token, self.weights))
            made.append(last)
        return made

    # -- the cache as a whole

    @initialize(is_gated=st.booleans(), policy=st.sampled_from(["lru", *sorted(POLICIES)]))
    def open(self, is_gated: bool, policy: str) -> None:
        self.policy = policy
        made = {"belady": lambda: Belady([]), "priority": lambda: Priority(clock=lambda: float(self.num_steps))}
        self.kv = KVResource(
            KVLayout(1, 1, 8, PAGE), NUM_PAGES, record=self.record, miss_log=MissLog(NUM_PAGES), max_pinned_pages=MAX_PINNED,
            policy=made[policy]() if policy in made else policy, check_invariants=True,
        )  # fmt: skip
        self.naive = NaiveKV(PAGE, NUM_PAGES, None if policy == "lru" else self.choose)
        self.walks = TEXT if is_gated else {}
        self.both("enable_prefix_cache", b"root 0", self.walks)

    @is_due
    @rule()
    def enable_again(self) -> None:
        self.calm = 0
        self.weights += 1
        self.both("enable_prefix_cache", b"root %d" % self.weights, self.walks)

    @is_due
    @rule()
    def reset_cache(self) -> None:
        self.calm = 0
        epoch = self.kv.epoch
        assert self.both("reset_prefix_cache", "asked")
        assert self.kv.epoch == epoch + 1
        assert len(self.kv.index) == 0

    @is_due
    @rule()
    def change_weights(self) -> None:
        self.calm = 0
        self.weights += 1
        assert self.both("reset_prefix_cache", "weights", b"root %d" % self.weights)

    @is_due
    @rule(num_pages=st.integers(1, 4))
    def evict(self, num_pages: int) -> None:
        self.both("evict", num_pages)

    @rule(rid=RIDS, name=st.sampled_from("pq"))
    def pin(self, rid: int, name: str) -> None:
        if rid in self.truths:
            config = self.truths[rid].config
            try:
                pinned = self.kv.pins.pin(name, config)
            except InputError:
                pinned = None
            assert pinned == self.naive.pin(name, config, MAX_PINNED)

    @rule(name=st.sampled_from("pq"))
    def unpin(self, name: str) -> None:
        unpinned = self.naive.unpin(name)
        if unpinned is None:
            with pytest.raises(InputError):
                self.kv.pins.unpin(name)
        else:
            assert self.kv.pins.unpin(name) == unpinned

    # -- a request comes and goes

    @rule(
        rid=RIDS,
        prompt=PROMPTS,
        is_cached=st.integers(0, 7),
        salt=st.sampled_from(["", "", "", "s"]),
        logprobs=st.integers(0, 9),
        grows=st.booleans(),
    )
    def ingest(self, rid: int, prompt: list[int], is_cached: int, salt: str, logprobs: int, grows: bool) -> None:
        keys = {"main": keyed(prompt, PAGE, grows=grows)}
        kept = (Retention(0, 10, 80, 20.0), Retention(12, None, 30)) if self.policy == "priority" and len(prompt) % 2 else ()
        config = RequestConfig(keys, is_cached > 0, salt, None, logprobs == 9, kept)
        self.both("ingest_request", rid, config)
        self.truths.setdefault(rid, Truth(prompt, config))

    def one_of_them(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.truths)))

    @is_due
    @has_requests
    @rule(data=st.data(), free=st.booleans())
    def reset_request(self, data, free: bool) -> None:
        self.rewind(self.one_of_them(data), free)

    def rewind(self, rid: int, free: bool) -> None:
        self.both("reset_request", rid, free)
        self.truths[rid] = Truth(self.truths[rid].prompt, self.truths[rid].config)

    @has_requests
    @rule(data=st.data())
    def remove_one(self, data) -> None:
        self.remove(self.one_of_them(data))

    def remove(self, rid: int) -> None:
        self.both("remove_request", rid)
        self.truths.pop(rid, None)

    @rule(rid=RIDS)
    def name_a_stranger(self, rid: int) -> None:
        """Ingesting twice keeps what is there; ending what is not there is nothing."""
        if rid in self.truths:
            self.both("ingest_request", rid, self.truths[rid].config)
        else:
            self.both("remove_request", rid)
            self.both("reset_request", rid)

    # -- a step

    def probe(self, rid: int, walk: str, keep: float | None) -> int:
        """Ask what need not run and agree to a share of it, on whole pages; None = no agreement."""
        truth = self.truths[rid]
        inputs = WalkInputs({"main": truth.prompt})
        answer = self.both("resolve_cached_prefix", rid, NODE, walk, inputs)
        slots = answer["main"].slots if answer else 0
        assert slots <= max(0, len(truth.prompt) - 1)
        if self.kv.stream(rid).converted:
            return slots
        if not slots or keep is None:
            return 0
        agreed = {"main": Match(int(slots * keep) // PAGE * PAGE, 0)}
        self.both("apply_cached_prefix", rid, NODE, walk, inputs, agreed)
        return agreed["main"].slots

    @has_requests
    @rule(data=st.data(), walk=st.sampled_from(["prefill"] * 3 + ["image"]), keep=st.sampled_from([None, 0.5, 1.0]))
    def only_probe(self, data, walk: str, keep: float | None) -> None:
        rid = self.one_of_them(data)
        self.truths[rid].is_plain &= not self.truths[rid].digests and walk == "prefill"
        self.probe(rid, walk, keep)

    @is_idle
    @rule(rid=RIDS, prompt=PROMPTS, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6), leaves=st.booleans())
    def serve(self, rid: int, prompt: list[int], tokens: list[int], leaves: bool) -> None:
        """Take one request as far as the pool lets it go."""
        self.ingest(rid, prompt, 1, "", 0, True)
        for token in tokens:
            for walk in ("prefill", "decode"):
                if self.in_flight is None and self.truths[rid].next_ids(walk):
                    self.start(walk, [rid], [1.0], [1.0])
            if self.in_flight is not None:
                self.commit([token])
            self.extend(rid)
        if leaves:
            self.remove(rid)

    @is_idle
    @rule(prompts=st.lists(PROMPTS, min_size=2, max_size=2), share=st.sampled_from([None, 0.5, 1.0, 1.0]), again=st.booleans())
    def crowd(self, prompts: list[list[int]], share: float | None, again: bool) -> None:
        """Two strangers arrive and are prefilled in one step, perhaps with one prompt; refused, they try again."""
        rids = [rid for rid in range(6, 10) if rid not in self.truths][:2]
        for rid, prompt in zip(rids, prompts, strict=False):
            self.ingest(rid, prompts[0] if again else prompt, 1, "", 0, True)
        for _ in range(2):
            if len(rids) == 2 and self.in_flight is None:
                self.start("prefill", rids, [share, 1.0], [1.0, 1.0])

    @is_idle
    @has_requests
    @rule(walk=st.sampled_from(["prefill"] * 2 + ["decode"] * 3 + ["image"]), data=st.data())
    def admit(self, walk: str, data) -> None:
        if not self.walks and walk == "image":
            return  # without declarations nobody can tell that the keys do not describe a picture
        able = sorted(rid for rid, truth in self.truths.items() if truth.next_ids(walk))
        rids = data.draw(st.lists(st.sampled_from(able), unique=True, min_size=1, max_size=4)) if able else []
        shares = [data.draw(st.sampled_from([None, 0.5, 1.0, 1.0, 1.0])) for _ in rids]
        self.start(walk, rids, shares, [data.draw(st.sampled_from([0.5, 1.0, 1.0])) for _ in rids])

    def start(self, walk: str, rids: list[int], shares: list[float | None], chunks: list[float]) -> None:
        """Admit a step and, if it is let in, run it; ``shares`` of the hit are agreed to, ``chunks`` of the rest computed."""
        ids: dict[int, list[int]] = {}
        for rid, share, chunk in zip(rids, shares, chunks, strict=True):
            truth = self.truths[rid]
            start = self.probe(rid, walk, share) if walk == "prefill" and not truth.digests else 0
            truth.is_plain &= walk != "image"
            todo = truth.next_ids(walk)[start:]
            ids[rid] = todo[: max(1, int(len(todo) * chunk))]
        step, ctx = step_of(walk, {rid: len(x) for rid, x in ids.items()}, index=self.num_steps)
        self.num_steps += 1
        self.calm += 1
        if self.both("admit", step, ctx) is None:
            self.forward(step, ctx, ids)

    def forward(self, step, ctx, ids: dict[int, list[int]]) -> None:
        """Plan, check that every slot to be read holds what a cold run would hold, and write."""
        written = {}
        for row in self.both("plan", step, ctx).rows:
            truth, stored = self.truths[row.rid], row.length - row.to_compute
            assert len(row.pages) == -(-row.length // PAGE)
            if not truth.digests:
                truth.digests = self.digest(truth, truth.prompt[:stored], None)  # lent by the cache
                truth.hit = stored
                self.check_misses(row.rid)
            assert len(truth.digests) == stored
            assert step.walk != "prefill" or ids[row.rid] == truth.prompt[stored : stored + len(ids[row.rid])]
            made = self.digest(truth, ids[row.rid], truth.digests[-1] if stored else None)
            for slot, digest in enumerate([*truth.digests, *made]):
                place = row.pages[slot // PAGE], slot % PAGE
                if slot < stored:
                    assert self.store[place] == digest, f"slot {slot} of {row.rid}, page {place[0]}: not what a cold run holds"
                self.store[place] = digest
            written[row.rid] = truth, made
        self.in_flight = step, ctx, written

    def check_misses(self, rid: int) -> None:
        """Every prompt token that is computed has exactly one cause."""
        truth = self.truths[rid]
        if not truth.is_plain:
            return
        misses = self.kv.cached_misses(rid)
        assert [m.start for m in misses] == [truth.hit, *(m.stop for m in misses)][: len(misses)]
        assert misses[-1].stop == len(truth.prompt)
        assert all(m.start < m.stop and m.cause in MISS_CAUSES for m in misses)

    @precondition(lambda self: self.in_flight is not None)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=4, max_size=4))
    def commit(self, tokens: list[int]) -> None:
        step, ctx, written = self.in_flight
        self.in_flight = None
        self.both("commit", step, ctx)
        for token, (rid, (truth, made)) in zip(tokens, sorted(written.items()), strict=False):
            if self.truths.get(rid) is truth:
                truth.digests += made
                if len(truth.digests) >= len(truth.prompt):
                    truth.generated.append(token)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def abort(self) -> None:
        step, ctx, _ = self.in_flight
        self.in_flight = None
        self.both("abort", step, ctx)

    @has_requests
    @rule(data=st.data())
    def extend_one(self, data) -> None:
        self.extend(self.one_of_them(data))

    def extend(self, rid: int) -> None:
        truth = self.truths[rid]
        ids = truth.generated[truth.num_read :]
        truth.num_read = len(truth.generated)
        self.both("extend_prefix_chain", rid, NODE, "decode", {"tokens": [ids]})

    # -- after each

    @invariant()
    def invariants_hold(self) -> None:
        self.kv.check()
        assert self.policy == "lru" or not self.victims

    @invariant()
    def pages_are_where_the_twin_has_them(self) -> None:
        kv, naive = self.kv, self.naive
        assert kv.arena.free_pages() == naive.free
        assert [kv.arena.owners(p) for p in range(NUM_PAGES)] == [naive.owners(p) for p in range(NUM_PAGES)]
        for key, twin in naive.streams.items():
            stream = kv.stream(*key)
            assert (stream.page_indices, stream.stored_len, stream.lease or []) == (twin.pages, twin.stored, twin.lease)
            assert (stream.chain is None) == (twin.known is None)

    @invariant()
    def the_index_holds_what_the_twin_holds(self) -> None:
        index = self.kv.index
        named = {
            entry.page: (stream_root(*root), chain_ids(ids, PAGE)[-1])
            for root, entries in self.naive.entries.items()
            for ids, entry in entries.items()
        }
        assert named == {p: (index.root_of(p), index.key_of(p)) for p in index.pages()} if index else not named

    @invariant()
    def the_log_replays_to_the_state(self) -> None:
        streams = [s for rid in self.truths for s in self.kv.streams_of(rid).values()]
        assert self.replayed.streams == {s.key: s.page_indices for s in streams if s.page_indices}
        assert self.replayed.leases == {s.key: s.lease for s in streams if s.lease}
        assert {s.key: self.replayed.stored_tokens.get(s.key, 0) for s in streams} == {s.key: s.stored_len for s in streams}
        index = self.kv.index
        assert self.replayed.indexed() == ({p: index.key_of(p).hex()[:16] for p in index.pages()} if index else {})
        assert self.replayed.pins == {name: list(pages) for name, pages in self.kv.pins.by_name().items()}
        for page, state in self.replayed.pages.items():
            assert self.kv.arena.owners(page) == len(state.owners) + len(state.pins) + (state.key is not None)
            if state.key is not None:
                assert state.root == index.root_of(page).hex()[:16]
                assert state.position == index.position_of(page)

    def teardown(self) -> None:
        assert self.recorder.replay() == self.replayed
        for rid in list(self.truths):
            self.kv.remove_request(rid)
        self.kv.check()
        assert self.kv.arena.num_free + len(self.kv.index or ()) == NUM_PAGES - 1
        self.kv.cleanup()
        assert self.kv.arena.num_free == NUM_PAGES - 1


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(
    deadline=None,
    max_examples=int(os.environ.get("KVLAB_MACHINE_EXAMPLES", "120")),
    stateful_step_count=80,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
