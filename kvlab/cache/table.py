"""Every request of a KV resource and its streams: made by need, seeded, rewound, let go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlab.cache.chain import CACHE_RESET, check_fit
from kvlab.cache.filing import Filing
from kvlab.cache.pool import PagePool
from kvlab.cache.stream import CacheStream
from kvlab.errors import InputError
from kvlab.spec import Miss, RequestConfig, RequestId, StepContext


@dataclass(slots=True)
class KVRequest:
    """A request as the KV resource knows it.

    ``notes``: label -> first slot -> causes of what one walk computed. ``served``: slots of the walk under way, by label, that
    need not run at all. ``reported``: labels whose match was counted, in this life or in one before it.
    """

    rid: RequestId
    config: RequestConfig
    streams: dict[str, CacheStream] = field(default_factory=dict)
    notes: dict[str, dict[int, tuple[Miss, ...]]] = field(default_factory=dict)
    told: set[tuple[str, int]] = field(default_factory=set)
    served: dict[str, int] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def brought_keys(self, label: str) -> bool:
        """True when the worker keyed the prompt of ``label``."""
        prompt = self.config.prompts.get(label)
        return prompt is not None and bool(prompt.keys)

    def end_walk(self) -> None:
        """The walk under way is over: what was served of it lies behind."""
        for label, slots in self.served.items():
            self.streams[label].walked += slots
        self.served.clear()


class StreamTable:
    """Requests by id. Callers hold the lock of the KV resource."""

    def __init__(self, pool: PagePool, filing: Filing) -> None:
        self._pool, self._filing = pool, filing
        self.requests: dict[RequestId, KVRequest] = {}

    def ingest(self, rid: RequestId, config: RequestConfig) -> None:
        """Learn of a request; a second call keeps what exists and seeds streams that have no chain and have not begun.

        Raises:
            InputError: keys cut for another page size, or a retention that the policy cannot keep; then nothing is kept.
        """
        request = self.requests.get(rid)
        if request is None:
            if config.retention and not self._pool.keeps_retention:
                raise InputError(
                    f"request {rid!r} asks to retain pages, which only policy 'priority' can; set policy='priority'"
                )
            if self._pool.index is not None and config.prefix_cache:
                for prompt in config.prompts.values():
                    check_fit(prompt, self._pool.page_size)
            request = self.requests[rid] = KVRequest(rid, config)
        self.stream_of(rid, "main")
        self.seed(request)

    def resume(self, rid: RequestId, config: RequestConfig) -> None:
        """Begin anew with a request: what it finds from now on of a prompt that was counted is no hit.

        Raises:
            InputError: as ``ingest``.
        """
        before = self.requests.get(rid)
        self.remove(rid)
        self.ingest(rid, config)
        if before is not None:
            self.requests[rid].reported = before.reported

    def seed(self, request: KVRequest) -> None:
        """Give a chain to every stream that may have one."""
        if request.config.prefix_cache:
            for label, stream in request.streams.items():
                self._filing.seed(stream, request.config.prompts.get(label), request.config.salt)

    def streams_of(self, rid: RequestId) -> Mapping[str, CacheStream]:
        """Streams of a request by label; none for an unknown request."""
        request = self.requests.get(rid)
        return {} if request is None else request.streams

    def stream_of(self, rid: RequestId, label: str) -> CacheStream:
        """The stream of (rid, label), made and seeded by need."""
        request = self.requests.get(rid)
        if request is None:
            raise InputError(f"request {rid!r} is not known to this KV resource; ingest it first")
        if label not in request.streams:
            retention = tuple(wish for wish in request.config.retention if wish.label == label)
            request.streams[label] = CacheStream(rid, label, retention=retention, reset_generation=self._pool.next_epoch())
            self.seed(request)
        return request.streams[label]

    def in_flight(self, rid: RequestId, label: str, ctx: StepContext) -> CacheStream | None:
        """The stream of a real row; None when it was rewound or removed since, so that what was written is dropped."""
        stream = self.streams_of(rid).get(label) if rid in ctx.request_ids else None
        return stream if stream is not None and stream.step_in_flight else None

    def all_streams(self) -> list[CacheStream]:
        """Every stream of every request."""
        return [stream for request in self.requests.values() for stream in request.streams.values()]

    def rewind(self, request: KVRequest, free: bool) -> None:
        """Back to the beginning; pages stay unless ``free``, or unless others read one of them."""
        for stream in request.streams.values():
            self.rewind_stream(stream, free)
        request.notes.clear()
        request.served.clear()
        self.seed(request)

    def rewind_stream(self, stream: CacheStream, free: bool) -> None:
        """Nothing is stored any more, and there is no chain."""
        self._pool.cut_lease(stream, 0, "reset")
        if free or self._pool.arena.any_sealed(stream.page_indices):
            self._pool.release_pages(stream, "reset")  # the next write may not land in bytes that others read
        self._pool.drop_host_copy(stream, "reset")
        self._pool.set_length(stream, 0, "reset")
        stream.converted = stream.lease_agreed = stream.step_in_flight = False
        stream.hits = stream.released = stream.protected_prefix = stream.walked = stream.cut_from = 0
        stream.window = stream.recalled_from = stream.peer = None
        stream.read, stream.read_error = None, ""
        stream.chain = stream.chain_end = stream.laid = None
        stream.generation += 1
        stream.reset_generation = self._pool.next_epoch()

    def remove(self, rid: RequestId) -> None:
        """Let go of all a request holds, and forget it."""
        request = self.requests.pop(rid, None)
        for stream in request.streams.values() if request is not None else ():
            self._pool.cut_lease(stream, 0, "removed")
            self._pool.release_pages(stream, "removed")
            self._pool.drop_host_copy(stream, "removed")

    def drop_leases(self) -> None:
        """No stream holds a lease any more. One that served whole walks became what the stream stores: they will not run."""
        for stream in self.all_streams():
            if stream.walked and stream.lease is not None:
                self._pool.convert_lease(stream)
            self._pool.cut_lease(stream, 0, CACHE_RESET)

    def rekey(self) -> None:
        """Everything cached was dropped. What a stream holds was written before that and is never offered; a stream that
        holds nothing begins anew under the root of now."""
        for stream in self.all_streams():
            if stream.chain is None:
                continue
            if stream.is_fresh and not stream.step_in_flight:
                stream.chain.cursor = 0
                self._filing.set_root(stream, stream.root_name.salt)
            else:
                self._filing.end(stream, CACHE_RESET, "", stream.stored_len)
