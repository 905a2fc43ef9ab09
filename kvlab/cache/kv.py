"""KVResource: the lifecycle of every stream of one pool, built of the pieces beside it.

    ingest -> resolve (lease) -> apply (cut) -> admit (lease becomes pages, fresh pages) -> plan (tables)
           -> commit (lengths, filing) -> extend (keys of generated pages) -> ... -> remove

One re-entrant lock guards it all; looking up and retaining a match is one hold. It moves page numbers; bytes move only in
forks, through a PageStore.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from kvlab import events
from kvlab.cache.arena import SINK, PageArena
from kvlab.cache.chain import CACHE_RESET, check_fit
from kvlab.cache.counters import KVCounters
from kvlab.cache.filing import Filing
from kvlab.cache.forks import Forks, OpenFork, length_before
from kvlab.cache.index import PrefixIndex
from kvlab.cache.invariants import check_pool
from kvlab.cache.keys import require_page_size
from kvlab.cache.ledger import KVRequest, MissLedger
from kvlab.cache.misses import MissLog
from kvlab.cache.policies.base import EvictionPolicy
from kvlab.cache.pool import PagePool
from kvlab.cache.stream import CacheStream
from kvlab.errors import InputError, IntegrityError
from kvlab.spec import (
    AllocationFailed,
    KVLayout,
    Match,
    Miss,
    PageStore,
    PrefixStream,
    Refusal,
    RequestConfig,
    RequestId,
    Resource,
    Segment,
    Step,
    StepContext,
    StepRow,
    StepTables,
    StreamKey,
    WalkInputs,
)

log = logging.getLogger("kvlab.cache")

BYTES_PER_VALUE = {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class KVResource(Resource):
    """Pages of every stream of a node, and the prefix cache over them.

    Args:
        layout: shape of a page; ``layout.page_size`` slots each.
        num_pages: pages of the pool, the sink included.
        store: moves bytes for forks; None is enough without them.
        policy: eviction policy, by name or as an object.
        prefix_cache: False never opens the index.
        salt: folded into the root.
        world_size: above 1 the index stays shut.
        check_invariants: check the pool after admit, commit, reset and remove; None = the environment's ``KVLAB_CHECK=1``.
        record: told of every event; None = no event is built.
        miss_log: remembers what was cached, so that misses can be explained; None = only the index is asked.

    Raises:
        InputError: a page size, pool size, dtype or policy that cannot be.
    """

    prefix_skip_safe: ClassVar[bool] = True

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        *,
        key: str = "kv",
        store: PageStore | None = None,
        policy: EvictionPolicy | str = "lru",
        prefix_cache: bool = True,
        salt: str = "",
        world_size: int = 1,
        check_invariants: bool | None = None,
        record: Callable[[events.Event], None] | None = None,
        miss_log: MissLog | None = None,
    ) -> None:
        require_page_size(layout.page_size)
        if layout.dtype not in BYTES_PER_VALUE:
            raise InputError(f"KV dtype is {layout.dtype!r}; known: {', '.join(sorted(BYTES_PER_VALUE))}")
        self.key, self.layout, self.page_size = key, layout, layout.page_size
        self.salt, self.world_size = salt, world_size
        self.counters = KVCounters()
        self.epoch = 0  # moves when everything cached is dropped
        self._pool = PagePool(num_pages, layout.page_size, policy, record, miss_log)
        self._filing = Filing(self._pool, self.counters)
        self._forks = Forks(self._pool, self._filing, store, self._stream_of)
        self._ledger = MissLedger(self._pool, self._filing, key)
        self._requests: dict[RequestId, KVRequest] = {}
        self.prefix_cache = prefix_cache
        self._checks = os.environ.get("KVLAB_CHECK") == "1" if check_invariants is None else check_invariants
        self._warned_nodes: set[str] = set()
        self._lock = threading.RLock()
        if record is not None:
            page_bytes = layout.bytes_per_page(BYTES_PER_VALUE[layout.dtype])
            record(events.PoolCreated(key, num_pages, layout.page_size, page_bytes))

    def __repr__(self) -> str:
        cached = "shut" if self.index is None else f"{len(self.index)} pages indexed"
        return f"KVResource({self.key!r}, {self.usable_pages} usable pages of {self.page_size} slots, {self.arena.num_free} free, {cached})"

    # -- what one may look at

    @property
    def arena(self) -> PageArena:
        """The pages."""
        return self._pool.arena

    @property
    def index(self) -> PrefixIndex | None:
        """The prefix index, None while it is shut."""
        return self._pool.index

    @property
    def usable_pages(self) -> int:
        """Pages of the pool less the sink."""
        return self.arena.num_pages - 1

    def pages_needed(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` slots of one stream need."""
        return self._pool.pages_for(num_tokens)

    def stream(self, rid: RequestId, label: str = "main") -> CacheStream:
        """The stream of (rid, label), to read.

        Raises:
            InputError: there is none.
        """
        with self._lock:
            streams = self.streams_of(rid)
            if label not in streams:
                raise InputError(f"request {rid!r} has no stream {label!r}; it has {sorted(streams)}")
            return streams[label]

    def streams_of(self, rid: RequestId) -> Mapping[str, CacheStream]:
        """Streams of a request by label; none for an unknown request."""
        request = self._requests.get(rid)
        return {} if request is None else request.streams

    def stored_tokens(self, rid: RequestId, label: str = "main") -> int:
        """Slots of (rid, label) that are written."""
        return self.stream(rid, label).stored_len

    def page_keys(self, rid: RequestId, label: str = "main") -> list[bytes]:
        """Keys of the stream's whole pages, generated ones included; empty when it has no chain."""
        chain = self.stream(rid, label).chain
        return [] if chain is None else chain.keys[: chain.keyed_pages]

    def root_fields(self) -> Mapping[str, Any]:
        shape = self.layout
        return {
            "layout": shape.layout,
            "page_size": shape.page_size,
            "dtype": shape.dtype,
            "compute_dtype": shape.compute_dtype,
            "layers": shape.num_layers,
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "world_size": self.world_size,
            "salt": self.salt,
        }

    # -- the cache as a whole

    def enable_prefix_cache(self, base_root: bytes, walks: Mapping[str, PrefixStream]) -> None:
        with self._lock:
            if not self.prefix_cache:
                self._ledger.shut_because = "prefix_cache is off for this resource"
                return
            if self.world_size > 1:
                log.info(
                    "%s: the prefix cache stays shut: world size is %d, and ranks would disagree", self.key, self.world_size
                )
                self._ledger.shut_because = f"world size is {self.world_size}"
                return
            self._filing.declared = dict(walks)
            self.reset_prefix_cache("enabled", base_root)
            if self.index is None:
                self._pool.open_index()
            for request in self._requests.values():
                self._seed(request)

    def name_root(self, base_root: bytes, fields: Mapping[str, Any]) -> None:
        if self._pool.miss_log is not None:
            self._pool.miss_log.know_root(base_root, fields)

    def reset_prefix_cache(self, reason: str = "asked", base_root: bytes | None = None) -> bool:
        with self._lock:
            streams = self._all_streams()
            for stream in streams:
                self._pool.cut_lease(stream, 0, CACHE_RESET)
            self.epoch += 1
            self.counters.resets += 1
            self._pool.clear_index(reason, self.epoch)
            if base_root is not None:
                self._move_root(base_root)
            for stream in streams:
                self._rekey(stream)
            return self.index is None or len(self.index) == 0

    def _move_root(self, base_root: bytes) -> None:
        self._filing.base_root = base_root
        if self._pool.record is not None:
            self._pool.record(events.RootOpened(self.key, base_root.hex()[:16], sorted(self._filing.declared)))

    def _rekey(self, stream: CacheStream) -> None:
        """What a stream holds was written under the old epoch and is never offered; one that holds nothing begins anew."""
        if stream.chain is None:
            return
        if stream.is_fresh and not stream.step_in_flight:
            stream.chain.cursor = 0
            self._filing.set_root(stream, stream.root_name.salt)
        else:
            self._filing.end(stream, CACHE_RESET, "", stream.stored_len)

    def evict(self, num_pages: int) -> int:
        """Free up to ``num_pages`` cached pages by the policy; returns how many were freed. Live pages stay."""
        with self._lock:
            return self._pool.evict(num_pages)

    # -- a request comes, is rewound, goes

    def ingest_request(self, rid: RequestId, config: RequestConfig) -> None:
        with self._lock:
            request = self._requests.get(rid)
            if request is None:
                if self.index is not None and config.prefix_cache:
                    for prompt in config.prompts.values():
                        check_fit(prompt, self.page_size)
                request = self._requests[rid] = KVRequest(rid, config)
            self._stream_of(rid, "main")
            self._seed(request)

    def _seed(self, request: KVRequest) -> None:
        if request.config.prefix_cache:
            for label, stream in request.streams.items():
                self._filing.seed(stream, request.config.prompts.get(label), request.config.salt)

    def _stream_of(self, rid: RequestId, label: str) -> CacheStream:
        """The stream of (rid, label), made and seeded by need."""
        request = self._requests.get(rid)
        if request is None:
            raise InputError(f"request {rid!r} is not known to {self.key!r}; ingest it first")
        if label not in request.streams:
            request.streams[label] = CacheStream(rid, label)
            self._seed(request)
        return request.streams[label]

    def reset_request(self, rid: RequestId, free: bool = False) -> None:
        with self._lock:
            request = self._requests.get(rid)
            if request is None:
                return
            for stream in request.streams.values():
                self._rewind(stream, free)
            request.notes.clear()
            self._seed(request)
            self._check()

    def _rewind(self, stream: CacheStream, free: bool) -> None:
        self._pool.cut_lease(stream, 0, "reset")
        if free or self.arena.any_sealed(stream.page_indices):
            self._pool.release_pages(stream, "reset")  # the next write may not land in bytes that others read
        self._pool.set_length(stream, 0, "reset")
        stream.converted = stream.lease_agreed = stream.step_in_flight = False
        stream.hits = stream.released = 0
        stream.chain = stream.chain_end = None
        stream.generation += 1
        stream.reset_generation += 1

    def remove_request(self, rid: RequestId) -> None:
        with self._lock:
            request = self._requests.pop(rid, None)
            if request is None:
                return
            for stream in request.streams.values():
                self._pool.cut_lease(stream, 0, "removed")
                self._pool.release_pages(stream, "removed")
            self._check()

    # -- before a step: what need not run

    def resolve_cached_prefix(self, rid: RequestId, node: str, walk: str, inputs: WalkInputs) -> Mapping[str, Match] | None:
        with self._lock:
            request = self._requests.get(rid)
            if request is None:
                return None
            answers = {}
            for label, ids in inputs.ids.items():
                match = self._probe(request, node, walk, label, len(ids))
                if match is not None:
                    answers[label] = match
            return answers or None

    def _probe(self, request: KVRequest, node: str, walk: str, label: str, num_tokens: int) -> Match | None:
        stream = self._stream_of(request.rid, label)
        chain = stream.chain
        if chain is None or self.index is None:
            self._warn_unkeyed(request, node, walk, stream)
            self._ledger.note_unkeyed(request, stream, walk, num_tokens)
            return None
        stream.lease_agreed = False  # each try is cut anew
        if stream.converted:
            return Match(stream.stored_len, stream.stored_len)  # a refused batch admit asks again: same answer
        if stream.lease is not None:
            held = len(stream.lease) * self.page_size
            return Match(held, held)
        if why := self._why_unprobed(request, stream, walk):
            self._ledger.note(request, stream, num_tokens, *why)
            return None
        request.notes.pop(label, None)
        return self._look_up(stream, num_tokens)

    def _why_unprobed(self, request: KVRequest, stream: CacheStream, walk: str) -> tuple[str, str] | None:
        if not self._filing.is_probed(stream, walk):
            return "walk_not_keyed", f"walk {walk!r} is not the one that writes the keyed text of {stream.label!r}"
        if not stream.is_fresh:
            return "not_fresh", f"the stream held {stream.stored_len} slots already"
        if request.config.prompt_logprobs:
            return "opted_out", "prompt logprobs need every row"
        return None

    def _look_up(self, stream: CacheStream, num_tokens: int) -> Match:
        """Match all but the last page and lease it. The look-up restamps the page that the cut then leaves out: harmless."""
        chain, index = stream.chain, self.index
        if chain is None or index is None:
            raise IntegrityError(f"stream {stream.key} is looked up without keys or without an index")
        limit = min(chain.match_limit(num_tokens), chain.match_limit(chain.first_span_slots))
        pages = index.lookup(stream.root, chain.keys)[:limit]
        self.counters.probes += 1
        if pages:
            self._pool.lease(stream, pages)
        held = len(pages) * self.page_size
        return Match(held, held)

    def _warn_unkeyed(self, request: KVRequest, node: str, walk: str, stream: CacheStream) -> None:
        declared = self._filing.declared.get(stream.label)
        is_keyed_walk = declared is not None and walk == declared.walk
        if self.index is None or not is_keyed_walk or node in self._warned_nodes or not request.config.prefix_cache:
            return
        if request.brought_keys(stream.label):
            return
        self._warned_nodes.add(node)
        log.warning(
            "%s: request %r reached node %s, walk %s, with no page keys for %r, so it can neither hit nor be cached; "
            "told once a node", self.key, request.rid, node, walk, stream.label
        )  # fmt: skip

    def apply_cached_prefix(
        self, rid: RequestId, node: str, walk: str, inputs: WalkInputs, matches: Mapping[str, Match]
    ) -> None:
        with self._lock:
            for label, match in matches.items():
                stream = self.streams_of(rid).get(label)
                if stream is None or stream.lease is None or not stream.is_fresh:
                    continue
                self._pool.cut_lease(stream, self._pool.pages_for(match.slots), "trimmed")
                stream.lease_agreed = stream.lease is not None

    def note_unprobed(self, rid: RequestId, node: str, walk: str, inputs: WalkInputs, cause: str) -> None:
        with self._lock:
            for label, ids in inputs.ids.items():
                if rid in self._requests:
                    stream = self._stream_of(rid, label)
                    self._ledger.note(self._requests[rid], stream, len(ids), cause, f"walk {walk!r} of node {node!r}")

    # -- a step

    def admit(self, step: Step, ctx: StepContext) -> Refusal | None:
        with self._lock:
            rows = self._rows(step, ctx)
            forks = self._forks.of_step(step, ctx)
            for stream, _ in rows:
                self._convert(stream)
            refusal = self._reserve(step, rows, forks)
            if refusal is not None:
                self.counters.refused_admits += 1
            else:
                self._begin(rows, forks)
            self._check()
            return refusal

    def _rows(self, step: Step, ctx: StepContext) -> list[tuple[CacheStream, int]]:
        """Streams and spans of the real rows; the others are padding.

        Raises:
            InputError: a negative span, or one stream twice.
            IntegrityError: a stream whose last step has neither committed nor been aborted.
        """
        rows = [(self._stream_of(s.rid, s.label), s.span) for s in step.segments if s.rid in ctx.request_ids]
        if len({stream.key for stream, _ in rows}) < len(rows):
            raise InputError(f"step {step.index} names a stream twice: {[stream.key for stream, _ in rows]}")
        for stream, span in rows:
            if span < 0:
                raise InputError(f"step {step.index} extends stream {stream.key} by {span} tokens; give 0 or more")
            if stream.step_in_flight:
                raise IntegrityError(f"stream {stream.key} is in a step already; commit or abort that first")
        return rows

    def _convert(self, stream: CacheStream) -> None:
        if not stream.is_fresh:
            return
        if stream.lease is None and stream.lease_agreed:
            raise IntegrityError(f"the step of {stream.key} was cut to a lease that is gone since; probe again and cut anew")
        if stream.lease is not None and not stream.lease_agreed:
            self._pool.cut_lease(stream, 0, "not agreed")  # the step was not cut to it
        if stream.lease is not None:
            self._pool.convert_lease(stream)
            if stream.chain is not None:
                stream.chain.cursor = stream.hits

    def _reserve(self, step: Step, rows: list[tuple[CacheStream, int]], forks: list[OpenFork]) -> AllocationFailed | None:
        """Fork targets, then segments; each stream gets all it needs or nothing, and earlier ones keep what they got."""
        growth: dict[StreamKey, int] = {stream.key: span for stream, span in rows}
        for fork in forks:
            if refusal := self._forks.reserve(fork, growth, step.index):
                return refusal
        starts = {f.target.key: length_before(f.source) for f in forks if f.fork.when == "pre"}
        for stream, span in rows:
            if span and (refusal := self._pool.grow(stream, starts.get(stream.key, stream.stored_len) + span, step.index)):
                return refusal
        return None

    def _begin(self, rows: list[tuple[CacheStream, int]], forks: list[OpenFork]) -> None:
        for stream in (*(stream for stream, _ in rows), *(fork.target for fork in forks)):
            stream.step_in_flight = True
        for stream, _ in rows:
            self._ledger.admitted(self._requests[stream.rid], stream, self.counters)

    def plan(self, step: Step, ctx: StepContext) -> StepTables:
        with self._lock:
            for fork in self._forks.of_step(step, ctx):
                if fork.fork.when == "pre":
                    self._forks.copy(fork)
            return StepTables(self.page_size, tuple(self._row(segment, ctx) for segment in step.segments))

    def _row(self, segment: Segment, ctx: StepContext) -> StepRow:
        if segment.rid not in ctx.request_ids:  # padding writes to the sink
            return StepRow(segment.rid, segment.label, [SINK] * self.pages_needed(segment.span), segment.span, segment.span)
        stream = self._stream_of(segment.rid, segment.label)
        length = stream.stored_len + segment.span
        pages = stream.page_indices[: self.pages_needed(length)]
        if len(pages) < self.pages_needed(length):
            raise IntegrityError(
                f"stream {stream.key} has {len(pages)} pages for {length} slots; admit the step before planning it"
            )
        return StepRow(segment.rid, segment.label, pages, length, segment.span)

    def commit(self, step: Step, ctx: StepContext) -> None:
        with self._lock:
            for segment in step.segments:
                self._commit_segment(step, ctx, segment)
            for fork in step.forks:
                target = self._in_flight(fork.rid, fork.target, ctx)
                if target is not None:
                    target.step_in_flight = False
                    if step.commit and fork.when == "post":
                        self._forks.copy(OpenFork(fork, self._stream_of(fork.rid, fork.source), target))
            self._check()

    def _commit_segment(self, step: Step, ctx: StepContext, segment: Segment) -> None:
        stream = self._in_flight(segment.rid, segment.label, ctx)
        if stream is None:
            return
        stream.step_in_flight = False
        if not step.commit or not segment.span:
            return
        stream.stored_len += segment.span
        stream.converted = False
        stream.generation += 1
        self.counters.committed_tokens += segment.span
        if self._pool.record is not None:
            self._pool.record(events.StreamCommitted(stream.rid, stream.label, step.walk, segment.span, stream.stored_len))
        if not ctx.capture:
            self._filing.after_commit(stream, step.walk, segment.span)

    def _in_flight(self, rid: RequestId, label: str, ctx: StepContext) -> CacheStream | None:
        """The stream of a real row; None when it was rewound or removed since, so that what was written is dropped."""
        stream = self.streams_of(rid).get(label) if rid in ctx.request_ids else None
        return stream if stream is not None and stream.step_in_flight else None

    def abort(self, step: Step, ctx: StepContext) -> None:
        with self._lock:
            for rid, label in (*((s.rid, s.label) for s in step.segments), *((f.rid, f.target) for f in step.forks)):
                stream = self._in_flight(rid, label, ctx)
                if stream is not None:
                    stream.step_in_flight = False
            self._check()

    def extend_prefix_chain(self, rid: RequestId, node: str, walk: str, outputs: Mapping[str, Sequence[Sequence[int]]]) -> None:
        with self._lock:
            for stream in self.streams_of(rid).values():
                self._filing.extend(stream, walk, outputs)

    # -- afterwards

    def cached_misses(self, rid: RequestId) -> Sequence[Miss]:
        with self._lock:
            request = self._requests.get(rid)
            return () if request is None else self._ledger.misses(request)

    def check(self) -> None:
        with self._lock:
            indexed = () if self.index is None else self.index.pages()
            check_pool(self.arena, indexed, self._all_streams(), self.page_size)
            if self.index is not None:
                self.index.check()

    def _check(self) -> None:
        if self._checks:
            self.check()

    def _all_streams(self) -> list[CacheStream]:
        return [stream for request in self._requests.values() for stream in request.streams.values()]

    def cleanup(self) -> None:
        with self._lock:
            for rid in list(self._requests):
                self.remove_request(rid)
            self._pool.clear_index("cleanup", self.epoch)
