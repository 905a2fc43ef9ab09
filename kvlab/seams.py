"""The seams between rooms: what a resource of an engine does, what moves its pages, why it says no, and why tokens missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

from kvlab.step import RequestId, Step, StepContext
from kvlab.streams import KVLayout, Match, PrefixStream, RequestConfig, WalkInputs


@dataclass(frozen=True)
class AllocationFailed:
    """``rid`` lacks ``pages_short`` pages for ``label`` and nothing could be evicted for them."""

    pages_short: int
    rid: RequestId
    label: str


@dataclass(frozen=True)
class RequestOffloading:
    """``rid`` is on host pages (or on its way there)."""

    rid: RequestId


@dataclass(frozen=True)
class GrantDeferred:
    """A page grant would leave the admitted requests in an unsafe state."""

    rid: RequestId


@dataclass(frozen=True)
class AdmissionDeferred:
    """``rid`` reached admit unreserved and its reservation does not fit now."""

    rid: RequestId


@dataclass(frozen=True)
class AdmitRuntimeError:
    """``rid`` can never be admitted; it ends with ``message``."""

    rid: RequestId
    message: str


@dataclass(frozen=True)
class ReadPending:
    """What ``rid`` reads from a peer is still on its way."""

    rid: RequestId


Refusal: TypeAlias = AllocationFailed | RequestOffloading | GrantDeferred | AdmissionDeferred | ReadPending | AdmitRuntimeError
MISS_CAUSES = (
    "never_seen",
    "short_prefix",
    "diverged",
    "evicted",
    "other_root",
    "walk_not_keyed",
    "chain_ended",
    "opaque_inputs",
    "opted_out",
    "no_keys",
    "last_page_cap",
    "not_fresh",
    "gate_refused",
    "image_cut",
)


@dataclass(frozen=True)
class Miss:
    """Prompt tokens [start, stop) of one stream were computed because of ``cause``; ``evidence`` is one sentence."""

    label: str
    start: int
    stop: int
    cause: str
    evidence: str = ""


class PageStore(Protocol):
    """Moves the bytes behind page numbers. ``src`` and ``dst`` are equally long lists of page ids."""

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole pages, all layers, K and V."""
        ...

    def to_host(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy device pages onto host pages."""
        ...

    def from_host(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host pages onto device pages."""
        ...


@dataclass(frozen=True)
class PublishedStream:
    """What a peer may read of one stream while its request lives.

    ``source`` names the pool and how to reach it. ``reset_generation`` moves when the content is rewound or replaced; no two
    streams of a pool ever have the same.
    """

    seq_len: int
    source: str
    pages: tuple[int, ...]
    reset_generation: int
    layout: KVLayout
    root: bytes = b""
    world_size: int = 1


class PendingRead(Protocol):
    """Pages on their way from a peer."""

    def done(self) -> bool:
        """True once ``wait`` returns at once."""
        ...

    def wait(self) -> None:
        """Wait for the end, a bounded time, and raise what went wrong."""
        ...


class PageTransport(Protocol):
    """Reads the pages of peers. ``source`` is how peers name the pool of this side."""

    source: str

    def serve(self, holds: Callable[[int, int, Sequence[int]], bool]) -> None:
        """Ask this side's pool ``holds(epoch, begin, src)`` after pages were copied for a peer; a no fails the peer's read."""
        ...

    def read(self, source: str, src: Sequence[int], dst: Sequence[int], *, epoch: int, begin: int) -> PendingRead:
        """Begin to copy pages ``src`` of a peer onto own pages ``dst``, whole pages, all layers, K and V.

        They are pages ``begin`` and following of the stream published with ``reset_generation`` ``epoch``; the read fails when
        the peer does not hold it there any more.
        """
        ...


class Resource:
    """A per-node engine object with a lifecycle. Every hook is a no-op here; a resource overrides what concerns it.

    Order of a request's life: ingest_request, then for each step resolve_cached_prefix, apply_cached_prefix, admit, plan,
    commit, extend_prefix_chain; at its end remove_request.
    """

    key: str = ""
    #: The node it is attached to.
    node: str = "LLM"
    #: The deployment's switch: False keeps an index of this resource shut, silently.
    prefix_cache: bool = True
    #: Keys of the resources this one is planned against; its ``root_fields`` are folded into their roots.
    depends_on: tuple[str, ...] = ()
    #: A hit removes the front of a request from every resource of the node. False: such a request could not be planned.
    prefix_skip_safe: ClassVar[bool] = False
    #: How rope ids grow along a stream, for resources that hand them out; None elsewhere.
    position_scheme: str | None = None

    def root_fields(self) -> Mapping[str, Any]:
        """Configuration that changes KV bytes, folded into the root of every cache in ``depends_on``."""
        return {}

    def enable_prefix_cache(self, base_root: bytes, walks: Mapping[str, PrefixStream]) -> None:
        """Open an empty index under ``base_root`` for the declared labels."""

    def name_root(self, base_root: bytes, fields: Mapping[str, Any]) -> None:
        """Learn the named values a base root is made of, so that a miss can name the one that differs."""

    def reset_prefix_cache(self, reason: str = "asked", base_root: bytes | None = None) -> bool:
        """Drop every index entry, and move to ``base_root`` if one is given. Returns True when nothing is indexed any more."""
        return True

    def ingest_request(self, rid: RequestId, config: RequestConfig) -> None:
        """Learn of a request. A second call for one rid keeps what exists."""

    def remove_request(self, rid: RequestId) -> None:
        """Forget a request and let go of all it holds; unknown rids are ignored."""

    def reset_request(self, rid: RequestId, free: bool = False) -> None:
        """Rewind a request to its beginning."""

    def resume_request(self, rid: RequestId, config: RequestConfig) -> None:
        """Begin ``rid`` anew with another prompt: its own, and what it has generated since."""
        self.remove_request(rid)
        self.ingest_request(rid, config)

    def resolve_cached_prefix(self, rid: RequestId, node: str, walk: str, inputs: WalkInputs) -> Mapping[str, Match] | None:
        """Say, per label, how much of ``inputs`` need not run. None = no opinion, which is not zero."""
        return None

    def apply_cached_prefix(
        self, rid: RequestId, node: str, walk: str, inputs: WalkInputs, matches: Mapping[str, Match]
    ) -> None:
        """Take note of the agreed match; ``inputs`` are untrimmed."""

    def note_unprobed(self, rid: RequestId, node: str, walk: str, inputs: WalkInputs, cause: str) -> None:
        """Learn that a walk ran unprobed and why (a name of MISS_CAUSES)."""

    def extend_prefix_chain(self, rid: RequestId, node: str, walk: str, outputs: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Learn the ids a step sampled, once they are on the host: tensor name -> one list of ids a row."""

    def admit_retrieve(self, rid: RequestId, node: str, walk: str, published: Mapping[str, Any]) -> Refusal | None:
        """Read what a peer published."""
        return None

    def admit(self, step: Step, ctx: StepContext) -> Refusal | None:
        """Reserve what ``step`` needs, or say why not."""
        return None

    def plan(self, step: Step, ctx: StepContext) -> Any:
        """Return this resource's tables for ``step``."""
        return None

    def commit(self, step: Step, ctx: StepContext) -> None:
        """The step's writes have happened."""

    def abort(self, step: Step, ctx: StepContext) -> None:
        """The step was admitted and its writes did not happen (the forward raised)."""

    def publish(self, rid: RequestId) -> Mapping[str, Any]:
        """Describe what a peer could read."""
        return {}

    def clear_preplan(self) -> None:
        """Undo a step planned ahead."""

    def supports_preplan(self) -> bool:
        """True when ``plan`` may run one step ahead."""
        return False

    def supports_eviction(self) -> bool:
        """True when the resource can offload a request."""
        return False

    def is_offloaded(self, rid: RequestId) -> bool:
        """True from the claim of an offload to the end of a reload."""
        return False

    def offload(self, rid: RequestId) -> int:
        """Move a request to the host; returns the pages freed."""
        return 0

    def reload(self, rid: RequestId) -> bool:
        """Bring a request back; False and nothing moved when it does not fit."""
        return True

    def get_offload_priority(self, rid: RequestId) -> int:
        """Device pages the request holds, shared ones included; 0 when it cannot be offloaded now."""
        return 0

    def cached_misses(self, rid: RequestId) -> Sequence[Miss]:
        """Name a cause for every prompt token of ``rid`` that was (or will be) computed, all labels."""
        return ()

    def check(self) -> None:
        """Raise IntegrityError when an invariant does not hold."""

    def cleanup(self) -> None:
        """Let go of everything."""
