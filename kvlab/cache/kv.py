"""KVResource: the lifecycle of every stream of one pool, built of the pieces beside it.

    ingest -> resolve (lease) -> apply (cut) -> admit (lease becomes pages, fresh pages) -> plan (tables)
           -> commit (lengths, filing) -> extend (keys of generated pages) -> ... -> remove

A walk that the lease covers whole runs no step; the lease waits for the first walk that does. One re-entrant lock guards it
all; looking up and retaining a match is one hold. It moves page numbers; bytes move in forks, to and from the host, and where a
page is copied that a picture ends on, through a PageStore.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from kvlab import events
from kvlab.cache.counters import KVCounters
from kvlab.cache.endings import EndCopies
from kvlab.cache.filing import Filing
from kvlab.cache.forks import Forks
from kvlab.cache.host import HostPages
from kvlab.cache.invariants import check_pool
from kvlab.cache.keys import require_page_size
from kvlab.cache.ledger import MissLedger
from kvlab.cache.misses import MissLog
from kvlab.cache.offloading import Offloading
from kvlab.cache.pins import Pins
from kvlab.cache.policies.base import EvictionPolicy
from kvlab.cache.pool import PagePool
from kvlab.cache.probing import Prober
from kvlab.cache.remote import Remote
from kvlab.cache.stepping import Stepper
from kvlab.cache.table import StreamTable
from kvlab.cache.tier import HostTier
from kvlab.cache.verbs import PoolVerbs
from kvlab.cache.windows import Windows
from kvlab.errors import InputError
from kvlab.options import checks_invariants
from kvlab.spec import (
    KVLayout,
    Match,
    Miss,
    PageStore,
    PageTransport,
    PrefixStream,
    Refusal,
    RequestConfig,
    RequestId,
    Step,
    StepContext,
    StepTables,
    WalkInputs,
)

log = logging.getLogger("kvlab.cache")

BYTES_PER_VALUE = {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class KVResource(PoolVerbs):
    """Pages of every stream of a node, and the prefix cache over them.

    Args:
        layout: shape of a page; ``layout.page_size`` slots each.
        num_pages: pages of the pool, the sink included.
        store: moves bytes for forks and to the host; None is enough without them.
        policy: eviction policy, by name or as an object.
        prefix_cache: False never opens the index.
        salt: folded into the root.
        world_size: above 1 the index stays shut.
        cpu_offload_pages: host pages for requests that make room for others.
        host_tier_pages: host pages for cached pages that were evicted; the store must have as many as both together.
        transport: reads pages of peers, for requests that were begun elsewhere.
        max_pinned_pages: most pages that ``pins`` may hold; None = half of those usable.
        check_invariants: check the pool after admit, commit, reset and remove; None = the environment's ``KVLAB_CHECK=1``.
        record: told of every event; None = no event is built.
        miss_log: remembers what was cached, so that misses can be explained; None = only the index is asked.
        keying: "walk", or "ignore-walk" for the historical fault: keys name texts alone, so that a picture's pages are filed
            under the keys of a text. Results made with it are wrong on purpose.

    Raises:
        InputError: a page size, pool size, dtype, policy or keying that cannot be.
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
        cpu_offload_pages: int = 0,
        host_tier_pages: int = 0,
        transport: PageTransport | None = None,
        max_pinned_pages: int | None = None,
        check_invariants: bool | None = None,
        record: Callable[[events.Event], None] | None = None,
        miss_log: MissLog | None = None,
        keying: str = "walk",
    ) -> None:
        require_page_size(layout.page_size)
        if layout.dtype not in BYTES_PER_VALUE:
            raise InputError(f"KV dtype is {layout.dtype!r}; known: {', '.join(sorted(BYTES_PER_VALUE))}")
        self.key, self.layout, self.page_size = key, layout, layout.page_size
        self.prefix_cache, self.salt, self.world_size = prefix_cache, salt, world_size
        self.counters = KVCounters()
        self.epoch = 0  # moves when everything cached is dropped
        self._lock = threading.RLock()
        self._pool = PagePool(num_pages, layout.page_size, policy, record, miss_log, cpu_offload_pages)
        ends = EndCopies(self._pool, store, self.counters)
        self._filing = Filing(self._pool, ends, self.counters, keying)
        self._table = StreamTable(self._pool, self._filing)
        self._ledger = MissLedger(self._pool, self._filing, key)
        self._prober = Prober(key, self._pool, self._filing, self._table, self._ledger, ends, self.counters)
        forks = Forks(self._pool, self._filing, self._table, store)
        self._offloading = Offloading(key, self._pool, self._table, store, self.counters, self._lock)
        self._remote = Remote(key, self._pool, self._filing, self._table, layout, world_size, transport)
        self._stepper = Stepper(self._pool, self._filing, self._table, forks, self._remote, self._ledger, self.counters)
        tier_pages = HostPages(host_tier_pages, first=cpu_offload_pages, name="host_tier_pages")
        if tier_pages.num_pages:
            self._pool.tier = HostTier(tier_pages, _copier(store, key), self.counters, record)
        self._windows = Windows(self._pool)
        self.checks = checks_invariants(check_invariants)
        self.pins = Pins(self._pool, self._filing, self._lock, max_pinned_pages)
        if record is not None:
            page_bytes = layout.bytes_per_page(BYTES_PER_VALUE[layout.dtype])
            record(events.PoolCreated(key, num_pages, layout.page_size, page_bytes))

    def __repr__(self) -> str:
        cached = "index shut" if self.index is None else f"{len(self.index)} indexed"
        size, free = self.page_size, self.arena.num_free
        keying = "" if self.keying == "walk" else f", keying {self.keying!r}"
        return f"KVResource({self.key!r}, {self.usable_pages} usable pages of {size} slots, {free} free, {cached}{keying})"

    # -- what it is made of

    @property
    def keying(self) -> str:
        """What names a page: "walk", or "ignore-walk" for the historical fault."""
        return self._filing.keying

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
            "keying": None if self.keying == "walk" else self.keying,
        }

    # -- the cache as a whole

    def enable_prefix_cache(self, base_root: bytes, walks: Mapping[str, PrefixStream]) -> None:
        with self._lock:
            if not self.prefix_cache:
                self._ledger.shut_because = "prefix_cache is off for this resource"
                return
            if self.world_size > 1:
                self._ledger.shut_because = f"world size is {self.world_size}"
                log.info("%s: the prefix cache stays shut: world size %d, and ranks would disagree", self.key, self.world_size)
                return
            self._filing.declared = dict(walks)
            self.reset_prefix_cache("enabled", base_root)
            if self.index is None:
                self._pool.open_index()
            for request in self._table.requests.values():
                self._table.seed(request)

    def name_root(self, base_root: bytes, fields: Mapping[str, Any]) -> None:
        if self._pool.miss_log is not None:
            self._pool.miss_log.know_root(base_root, fields)

    def reset_prefix_cache(self, reason: str = "asked", base_root: bytes | None = None) -> bool:
        with self._lock:
            self._table.drop_leases()
            self.pins.unpin_all(reason)
            self.epoch += 1
            self._pool.clear_index(reason, self.epoch)
            if base_root is not None:
                self._filing.move_root(base_root, self.key)
            self._table.rekey()
            return self.index is None or len(self.index) == 0

    def evict(self, num_pages: int) -> int:
        """Free up to ``num_pages`` cached pages by the policy; returns how many were freed. Live pages stay."""
        with self._lock:
            return self._pool.evict(num_pages)

    # -- a request comes, is rewound, goes

    def ingest_request(self, rid: RequestId, config: RequestConfig) -> None:
        with self._lock:
            self._table.ingest(rid, config)

    def reset_request(self, rid: RequestId, free: bool = False) -> None:
        self._remote.wait(rid)
        with self._lock:
            request = self._table.requests.get(rid)
            if request is not None:
                self._table.rewind(request, free)
                self._check()

    def resume_request(self, rid: RequestId, config: RequestConfig) -> None:
        self._remote.wait(rid)
        with self._lock:
            self._table.resume(rid, config)
            self._check()

    def remove_request(self, rid: RequestId) -> None:
        self._remote.wait(rid)
        with self._lock:
            self._table.remove(rid)
            self._check()

    # -- a step

    def resolve_cached_prefix(self, rid: RequestId, node: str, walk: str, inputs: WalkInputs) -> Mapping[str, Match] | None:
        with self._lock:
            request = self._table.requests.get(rid)
            if request is None:
                return None
            request.served.clear()  # asked again, a walk has not run
            slots = inputs.slots().items()
            answers = {label: self._prober.probe(request, node, walk, label, count) for label, count in slots}
            return {label: match for label, match in answers.items() if match is not None} or None

    def apply_cached_prefix(
        self, rid: RequestId, node: str, walk: str, inputs: WalkInputs, matches: Mapping[str, Match]
    ) -> None:
        with self._lock:
            if rid in self._table.requests:
                self._prober.agree(self._table.requests[rid], inputs.slots(), matches)

    def note_unprobed(self, rid: RequestId, node: str, walk: str, inputs: WalkInputs, cause: str) -> None:
        with self._lock:
            for label, count in inputs.slots().items() if rid in self._table.requests else ():
                self._prober.note_unprobed(rid, node, walk, label, count, cause)

    def admit(self, step: Step, ctx: StepContext) -> Refusal | None:
        with self._lock:
            refusal = self._stepper.admit(step, ctx)
            self._check()
            return refusal

    def plan(self, step: Step, ctx: StepContext) -> StepTables:
        with self._lock:
            return StepTables(self.page_size, self._stepper.tables(step, ctx), commit=step.commit)

    def commit(self, step: Step, ctx: StepContext) -> None:
        with self._lock:
            self._stepper.commit(step, ctx)
            self._check()

    def abort(self, step: Step, ctx: StepContext) -> None:
        with self._lock:
            self._stepper.abort(step, ctx)
            self._check()

    def extend_prefix_chain(self, rid: RequestId, node: str, walk: str, outputs: Mapping[str, Sequence[Sequence[int]]]) -> None:
        with self._lock:
            for stream in self._table.streams_of(rid).values():
                self._filing.extend(stream, walk, outputs)

    # -- afterwards

    def cached_misses(self, rid: RequestId) -> Sequence[Miss]:
        with self._lock:
            request = self._table.requests.get(rid)
            return () if request is None else self._ledger.misses(request)

    def check(self) -> None:
        with self._lock:
            indexed = () if self.index is None else self.index.pages()
            check_pool(self.arena, indexed, self.pins.listed(), self._table.all_streams(), self.page_size)
            if self.index is not None:
                self.index.check()

    def _check(self) -> None:
        if self.checks:
            self.check()

    def cleanup(self) -> None:
        with self._lock:
            for rid in list(self._table.requests):
                self._remote.wait(rid)
                self._table.remove(rid)
            self.pins.unpin_all("cleanup")
            self._pool.clear_index("cleanup", self.epoch)


def _copier(store: PageStore | None, key: str) -> PageStore:
    if store is None:
        raise InputError(f"{key}: host_tier_pages are given and there is no PageStore to copy pages with; give it one")
    return store
