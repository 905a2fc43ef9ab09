"""Requests of texts and pictures under two labels in random order: against the naive twin, the invariants, the event log and
the truth about bytes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_driver import MEDIA, NODE, SlotStore, cold_slots, laid_out, picture, text

from kvlab.cache.keys import cut_layout
from kvlab.cache.kv import KVResource
from kvlab.cache.misses import MissLog
from kvlab.cache.naive import NaiveKV
from kvlab.cache.naive_prompts import Part
from kvlab.cache.policies import POLICIES
from kvlab.cache.policies.belady import Belady
from kvlab.cache.roots import stream_root
from kvlab.errors import InputError
from kvlab.events import PageEvicted
from kvlab.pool_state import PoolState
from kvlab.recorder import Recorder
from kvlab.spec import (
    MISS_CAUSES,
    Block,
    KVLayout,
    Match,
    Prefix,
    PrefixStream,
    RequestConfig,
    Segment,
    Span,
    Step,
    StepContext,
    WalkInputs,
)

PAGE = 4
NUM_PAGES = 20
GUIDED = MEDIA | {"cfg_img": PrefixStream("cfg_img", walk="prefill_text", trims_guided=True)}
RIDS = st.integers(0, 3)
TEXTS = st.builds(text, st.sampled_from([3, 6, 8]))
WALKS = st.sampled_from(["prefill_vae", "prefill_vit"])
PICTURES = st.builds(picture, st.sampled_from([4, 5, 7, 11]), st.sampled_from([b"red", b"red", b"blue"]), WALKS)
OPENINGS = st.sampled_from(
    [[text(8), picture(6)], [text(6), picture(7)], [picture(5), picture(11)], [text(4), picture(4), text(3), picture(2)]]
)
RESTS = st.lists(st.one_of(TEXTS, PICTURES), min_size=1, max_size=3)
PROMPTS = st.builds(lambda opening, rest: [*opening, *rest], OPENINGS, RESTS)


@dataclass
class Truth:
    """A request: the walks of its prompt, how far it is, and what each label's stream must hold."""

    spans: list[Span]
    ids: list[int]
    config: RequestConfig
    done: int = 0  # walks that are over
    generated: list[int] = field(default_factory=list)
    written: dict[str, list[int]] = field(default_factory=lambda: {"main": [], "cfg_img": []})
    prompt_hit: int | None = None

    def part(self, index: int) -> list[int]:
        """Ids of walk ``index``."""
        begin = sum(span.length for span in self.spans[:index] if span.kind == "ids")
        return self.ids[begin : begin + self.spans[index].length]

    def inputs(self, index: int) -> WalkInputs:
        """What walk ``index`` would run: texts for every label that is keyed, pictures for main."""
        if self.spans[index].kind != "ids":
            return WalkInputs({}, blocks={"main": Block(self.spans[index].length, 1)})
        return WalkInputs(dict.fromkeys(self.config.prompts, self.part(index)))

    def cold(self, label: str, walks: int) -> list[int]:
        """What a cold run holds after so many walks."""
        spans = [span for span in self.spans[:walks] if label == "main" or span.kind == "ids"]
        return cold_slots(spans, self.ids)


is_idle = precondition(lambda self: self.in_flight is None)
has_requests = precondition(lambda self: bool(self.truths) and self.in_flight is None)


class MediaLifecycle(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.replayed = PoolState()
        self.recorder = Recorder(clock=lambda: 0.0, max_events=None)
        self.victims: deque[int] = deque()
        self.truths: dict[int, Truth] = {}
        self.store = SlotStore()
        self.epoch = 0
        self.in_flight = None  # step, context, truth, {label: what it wrote}, walks done after it

    def record(self, event) -> None:
        self.recorder(event)
        self.replayed.apply(event)
        if isinstance(event, PageEvicted):
            self.victims.append(event.page)

    def choose(self, leaves: Sequence[int]) -> int:
        return self.victims.popleft()

    def both(self, verb: str, *args):
        """Call ``verb`` on the real and on the naive one; answers, and refusals of what is asked, must be the same."""
        answers = []
        for one in (self.kv, self.naive):
            try:
                answers.append(getattr(one, verb)(*args))
            except InputError:
                answers.append("refused")
        assert answers[0] == answers[1], f"{verb}{args}: {answers[0]} is not {answers[1]}"
        return answers[0]

    @initialize(policy=st.sampled_from(["lru", *sorted(set(POLICIES) - {"priority"})]))
    def open(self, policy: str) -> None:
        self.policy = policy
        self.kv = KVResource(
            KVLayout(1, 1, 8, PAGE), NUM_PAGES, store=self.store, record=self.record, miss_log=MissLog(NUM_PAGES),
            policy=Belady([]) if policy == "belady" else policy, check_invariants=True,
        )  # fmt: skip
        self.naive = NaiveKV(PAGE, NUM_PAGES, None if policy == "lru" else self.choose, keeps_ends=True)
        self.both("enable_prefix_cache", b"root 0", GUIDED)

    # -- the cache as a whole

    @is_idle
    @rule(num_pages=st.sampled_from([0, 0, 1, 1, 2, 3]))
    def evict(self, num_pages: int) -> None:
        self.both("evict", num_pages)

    @is_idle
    @rule(really=st.integers(0, 15))
    def reset_cache(self, really: int) -> None:
        if not really:
            self.epoch += 1
            assert self.both("reset_prefix_cache", "asked", b"root %d" % self.epoch)

    # -- a request comes and goes

    @rule(rid=RIDS, spans=PROMPTS, is_guided=st.booleans(), last=st.integers(0, 1))
    def ingest(self, rid: int, spans: list[Span], is_guided: bool, last: int) -> None:
        if rid in self.truths:
            return
        ids = list(range(sum(span.length for span in spans if span.kind == "ids")))
        texts = [span for span in spans if span.kind == "ids"]
        if texts:
            ids[-texts[-1].length :] = [1000 + last] * texts[-1].length
        prompts = {"main": laid_out(spans, ids, PAGE)}
        if is_guided and texts:
            prompts["cfg_img"] = laid_out(texts, ids, PAGE)
        config = RequestConfig(prompts)
        self.both("ingest_request", rid, config)
        self.truths[rid] = Truth(spans, ids, config)

    def one(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.truths)))

    @has_requests
    @rule(data=st.data(), really=st.booleans())
    def remove(self, data, really: bool) -> None:
        if really:
            self.drop(self.one(data))

    def drop(self, rid: int) -> None:
        self.both("remove_request", rid)
        self.truths.pop(rid)

    @has_requests
    @rule(data=st.data(), free=st.booleans(), really=st.integers(0, 3))
    def rewind(self, data, free: bool, really: int) -> None:
        rid = self.one(data)
        if really:
            return
        self.both("reset_request", rid, free)
        old = self.truths[rid]
        self.truths[rid] = Truth(old.spans, old.ids, old.config)

    # -- walks

    @is_idle
    @rule(rid=RIDS, spans=PROMPTS, is_guided=st.booleans(), last=st.integers(0, 1), leaves=st.booleans())
    def serve(self, rid: int, spans: list[Span], is_guided: bool, last: int, leaves: bool) -> None:
        """Take a request as far as the pool lets it go."""
        self.ingest(rid, spans, is_guided, last)
        for _ in spans:
            self.advance(rid, None)
            if self.in_flight is not None:
                self.commit()
        if leaves and rid in self.truths:
            self.drop(rid)

    @is_idle
    @rule(spans=PROMPTS, lasts=st.lists(st.integers(0, 1), min_size=2, max_size=3))
    def ask_again(self, spans: list[Span], lasts: list[int]) -> None:
        """Strangers come with one prompt but for its last text, one after another."""
        for rid, last in enumerate(lasts, 4):
            if rid not in self.truths:
                self.serve(rid, spans, bool(last), last, rid == 4)

    @is_idle
    @rule(spans=PROMPTS, walks=st.integers(1, 3), agreed=st.sampled_from([None, 0, 4]), by=st.integers(-1, 1))
    def fall_out(self, spans: list[Span], walks: int, agreed: int | None, by: int) -> None:
        """A repeat is served some walks, and then the next is not what it was laid out as, or is agreed on less."""
        self.serve(7, spans, False, 0, True)
        self.ingest(7, spans, False, 0)
        for _ in spans[:walks]:
            self.advance(7, None)
            if self.in_flight is not None:
                self.commit()
        if agreed is not None:
            self.advance(7, agreed)
        if self.in_flight is None and 7 in self.truths:
            self.fall_apart(7, by)
        self.both("remove_request", 7)
        self.truths.pop(7, None)

    @has_requests
    @rule(data=st.data(), agreed=st.sampled_from([None] * 6 + [0, 4]))
    def go_on(self, data, agreed: int | None) -> None:
        """The next walk of one request; sometimes another resource holds less."""
        self.advance(self.one(data), agreed)

    def advance(self, rid: int, agreed: int | None) -> None:
        truth = self.truths[rid]
        if truth.done >= len(truth.spans):
            return
        span, inputs = truth.spans[truth.done], truth.inputs(truth.done)
        answer = self.both("resolve_cached_prefix", rid, NODE, span.walk, inputs)
        matches = dict(answer or {})
        if agreed is not None:
            matches = {label: Match(min(match.slots, agreed), 0) for label, match in matches.items()}
        if matches and self.both("apply_cached_prefix", rid, NODE, span.walk, inputs, matches) == "refused":
            self.drop(rid)
            return
        hits = {label: matches[label].slots if label in matches else 0 for label in inputs.slots()}
        self.check_answer(truth, answer)
        left = {label: count - hits[label] for label, count in inputs.slots().items() if hits[label] < count}
        if not left:
            truth.done += 1
        elif span.kind == "ids" or not any(hits.values()):
            self.start(rid, span.walk, [Segment(rid, label, count) for label, count in left.items()], truth.done + 1)

    def check_answer(self, truth: Truth, answer) -> None:
        """A picture is served whole or not at all, and rope ids count it once."""
        span = truth.spans[truth.done]
        for label, match in (answer or {}).items():
            assert span.kind == "ids" or match.slots in (0, span.length)
            if label == "main" and match.slots:
                before = sum(1 if s.kind != "ids" else s.length for s in truth.spans[: truth.done])
                assert match.positions == before + (1 if span.kind != "ids" else match.slots)

    @has_requests
    @rule(data=st.data(), by=st.integers(-1, 1))
    def disagree(self, data, by: int) -> None:
        self.fall_apart(self.one(data), by)

    def fall_apart(self, rid: int, by: int) -> None:
        """A walk of another size than its span, or (by 0) one that nobody was asked about; the request ends afterwards."""
        truth = self.truths[rid]
        if not 0 < truth.done < len(truth.spans):
            return
        span = truth.spans[truth.done]
        inputs = WalkInputs({}, blocks={"main": Block(span.length + by, 1)})
        if by:
            self.both("resolve_cached_prefix", rid, NODE, span.walk, inputs)
        elif self.both("note_unprobed", rid, NODE, span.walk, inputs, "opaque_inputs") != "refused":
            step, ctx = Step(0, NODE, span.walk, (Segment(rid, "main", span.length),)), StepContext(frozenset({rid}))
            if self.both("admit", step, ctx) is None:
                assert self.both("plan", step, ctx).rows[0].length == len(truth.cold("main", truth.done + 1))
                self.both("commit", step, ctx)
                assert self.kv.stream(rid).chain is None
        self.drop(rid)

    @has_requests
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data, token: int) -> None:
        rid = self.one(data)
        truth = self.truths[rid]
        if truth.done == len(truth.spans):
            self.both("extend_prefix_chain", rid, NODE, "decode", {"tokens": [[token]]})
            truth.generated.append(token)
            self.start(rid, "decode", [Segment(rid, "main", 1)], truth.done)

    @has_requests
    @rule(data=st.data(), share=st.floats(0, 1))
    def draw(self, data, share: float) -> None:
        """A step that stores nothing reads main, and the beginning of main for another label."""
        rid = self.one(data)
        truth = self.truths[rid]
        if truth.done == len(truth.spans):
            prefix = Prefix("main", int(share * len(truth.cold("main", truth.done))), 0)
            rows = [Segment(rid, "main", 5, 0), Segment(rid, "cfg_text", 5, 0, prefix), Segment(rid, "cfg_img", 5, 0)]
            self.start(rid, "image_gen", rows, truth.done, commit=False)

    # -- a step

    def start(self, rid: int, walk: str, rows: list[Segment], done: int, *, commit: bool = True) -> None:
        step, ctx = Step(self.epoch, NODE, walk, tuple(rows), commit=commit), StepContext(frozenset({rid}))
        if self.both("admit", step, ctx) is not None:
            if walk == "decode":  # it was told of a token that it will not write now: let it go, as a preemption would
                self.drop(rid)
            return
        truth = self.truths[rid]
        for row in self.both("plan", step, ctx).rows:
            label = "main" if row.label == "cfg_text" else row.label
            cold = truth.cold(label, done)
            for token in truth.generated if label == "main" else ():
                cold.append(hash((cold[-1] if cold else 0, token)))
            begin = row.length - row.to_compute if commit else row.length
            assert row.length == len(cold) if commit else row.length <= len(cold)
            assert len(row.pages) == -(-row.length // PAGE)
            for slot in range(row.length):
                at = row.pages[slot // PAGE], slot % PAGE
                if slot >= begin:
                    self.store.slots[at] = cold[slot]
                assert self.store.slots.get(at) == cold[slot], f"slot {slot} of {rid}, {label}: not what a cold run holds"
            if label == "main" and truth.prompt_hit is None and commit:
                truth.prompt_hit = begin
                self.check_misses(rid, begin)
        self.in_flight = step, ctx, truth, done

    def check_misses(self, rid: int, begin: int) -> None:
        """Every prompt slot that is computed has exactly one cause."""
        if self.kv.stream(rid).chain is None:
            return
        misses = [miss for miss in self.kv.cached_misses(rid) if miss.label == "main"]
        prompt_slots = sum(span.length for span in self.truths[rid].spans)
        edges = [begin, *(miss.stop for miss in misses)]
        assert [miss.start for miss in misses] == edges[: len(misses)]
        assert edges[-1] == max(prompt_slots, begin) if misses else begin >= prompt_slots
        assert all(miss.start < miss.stop and miss.cause in MISS_CAUSES for miss in misses)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def commit(self) -> None:
        step, ctx, truth, done = self.in_flight
        self.in_flight = None
        self.both("commit", step, ctx)
        truth.done = done

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def abort(self) -> None:
        step, ctx, truth, _ = self.in_flight
        self.in_flight = None
        self.both("abort", step, ctx)
        if step.walk == "decode":
            truth.generated.pop()
            self.drop(step.segments[0].rid)

    # -- after each

    @invariant()
    def pages_are_where_the_twin_has_them(self) -> None:
        kv, naive = self.kv, self.naive
        kv.check()
        assert self.policy == "lru" or not self.victims
        assert kv.arena.free_pages() == naive.free
        assert [kv.arena.owners(p) for p in range(NUM_PAGES)] == [naive.owners(p) for p in range(NUM_PAGES)]
        for key, twin in naive.streams.items():
            stream = kv.stream(*key)
            assert (stream.page_indices, stream.stored_len, stream.lease or []) == (twin.pages, twin.stored, twin.lease)
            assert (stream.end_slots, stream.walked) == (twin.own, twin.walked)
            assert (stream.chain is None) == (twin.known is None)

    @invariant()
    def the_index_holds_what_the_twin_holds(self) -> None:
        named = {
            entry.page: (stream_root(*root), key_of(slots))
            for root, entries in self.naive.entries.items()
            for slots, entry in entries.items()
        }
        assert named == {p: (self.kv.index.root_of(p), self.kv.index.key_of(p)) for p in self.kv.index.pages()}

    @invariant()
    def the_log_replays_to_the_state(self) -> None:
        streams = [s for rid in self.truths for s in self.kv.streams_of(rid).values()]
        assert self.replayed.streams == {s.key: s.page_indices for s in streams if s.page_indices}
        assert self.replayed.leases == {s.key: s.lease for s in streams if s.lease}
        assert {s.key: self.replayed.stored_tokens.get(s.key, 0) for s in streams} == {s.key: s.stored_len for s in streams}
        assert self.replayed.indexed() == {p: self.kv.index.key_of(p).hex()[:16] for p in self.kv.index.pages()}

    def teardown(self) -> None:
        for rid in list(self.truths):
            self.kv.remove_request(rid)
        self.kv.cleanup()
        assert self.kv.arena.num_free == NUM_PAGES - 1


def key_of(slots) -> bytes:
    """The key of the page that ends where ``slots`` do."""
    spans: list[Span] = []
    for slot in slots:
        if not isinstance(slot, Part):
            spans.append(Span("ids", "", 1, 1))
        elif slot.offset == 0:
            spans.append(Span("digest", "", slot.length, 1, slot.digest))
    cut = cut_layout(spans, [slot for slot in slots if not isinstance(slot, Part)], PAGE)
    return cut.keys()[-(-len(slots) // PAGE) - 1]


TestMediaLifecycle = MediaLifecycle.TestCase
TestMediaLifecycle.settings = settings(
    deadline=None,
    max_examples=int(os.environ.get("KVLAB_MACHINE_EXAMPLES", "50")),
    stateful_step_count=60,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
