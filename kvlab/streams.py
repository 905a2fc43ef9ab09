"""What a model declares of its streams, and what a request brings for them: keys, layouts, inputs of a walk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlab.errors import InputError
from kvlab.options import is_number, is_whole, plain
from kvlab.step import Prefix

#: Field names that belong to the preprocess worker. A client that could name keys could be served another request's KV.
RESERVED_FIELDS = ("prefix_keys", "prefix_tail", "prefix_decode", "prefix_layout")

#: Eviction priorities of pages go from 0 (first) to 100 (last).
DEFAULT_PRIORITY, MAX_PRIORITY = 50, 100

SEQUENTIAL = "sequential"  # the only position scheme under which a page of rotated K may be reused


@dataclass(frozen=True)
class Walk:
    """One kind of forward pass in a model's schedule.

    ``loops``: runs again until the stop check ends it, or the model says so where no token is sampled. ``samples``: its last
    row's logits choose a token. ``commits``: writes KV. ``causal``: mask inside the block. ``feeds``: parts of the model that
    read its per-token outputs. ``encodes``: what it writes comes from ``ModelSpec.encode``. ``starts_with``: the id a sampling
    loop is opened with where no walk before it sampled one.
    """

    name: str
    node: str = "LLM"
    loops: bool = False
    samples: bool = False
    commits: bool = True
    causal: bool = True
    feeds: tuple[str, ...] = ()
    encodes: bool = False
    starts_with: int | None = None


@dataclass(frozen=True)
class PrefixStream:
    """A stream whose pages may be reused, declared by a model under (resource, label).

    ``tensor`` holds the ids (and is what decode samples into). ``walk`` writes the keyed text and is the only text walk that
    is probed. ``decode_walk`` takes the token just sampled; None keys the prompt only. ``layout_walks`` write media spans.
    """

    tensor: str
    keyed_by: str = "ids"
    walk: str = "prefill"
    decode_walk: str | None = None
    layout_walks: tuple[str, ...] = ()
    trims_guided: bool = False

    def walks(self) -> frozenset[str]:
        """Every walk that may write this stream without ending its chain."""
        return frozenset(w for w in (self.walk, self.decode_walk, *self.layout_walks) if w is not None)


@dataclass(frozen=True)
class Span:
    """One write of a laid-out prompt, in slots; ``kind`` is "ids" or "digest"."""

    kind: str
    walk: str
    length: int
    advance: int
    source: Any = None
    params: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Item:
    """The part of a picture (or other medium) that lies on one page, in slots of that page.

    ``start`` first slot on this page, ``offset`` slots of the item on earlier pages, ``length`` its slots on all pages.
    """

    start: int
    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True)
class KVLayout:
    """Shape of the pages of one KV resource."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "float32"
    compute_dtype: str = "float32"
    layout: str = "NHD"

    def bytes_per_page(self, bytes_per_value: int) -> int:
        """Bytes of K and V of one page over all layers."""
        return self.num_layers * 2 * self.page_size * self.num_kv_heads * self.head_dim * bytes_per_value


def check_salt(name: str, salt: str) -> None:
    """Raise InputError for a salt that has no bytes."""
    try:
        salt.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{name} is {salt!r}, which is not valid UTF-8; remove lone surrogates") from None


@dataclass(frozen=True)
class KeyedPrompt:
    """What the preprocess worker ships for one (resource, label): the keys of a prompt and the ids behind them.

    ``keys`` has ceil(slots / page_size) unrooted page keys, the last one provisional when the prompt ends inside a page.
    ``tail`` = ids past the last whole page. ``decode_tensor`` = output tensor whose ids extend the chain, None if none do.
    ``tail_items`` = media on the last partial page. ``layout`` = one entry a write (empty: one text span).
    """

    ids: Sequence[int]
    keys: Sequence[bytes]
    tail: Sequence[int]
    prompt_slots: int
    decode_tensor: str | None = None
    tail_items: tuple[Item, ...] = ()
    layout: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Retention:
    """How long the pages that lie in slots [start, stop) of a stream should stay cached; ``stop`` None = to the end.

    ``priority`` 0 goes first, 100 last, pages nobody asked to retain have 50. It counts for ``duration_s`` seconds from when a
    page is filed or lent again, None = as long as the page is cached. Only the policy "priority" heeds it.

    Raises:
        InputError: a range, priority or duration that cannot be.
    """

    start: int = 0
    stop: int | None = None
    priority: int = MAX_PRIORITY
    duration_s: float | None = None
    label: str = "main"

    def __post_init__(self) -> None:
        stop = self.start + 1 if self.stop is None else self.stop
        if not is_whole(self.start) or not is_whole(stop) or not 0 <= self.start < stop:
            raise InputError(f"retention of slots [{self.start!r}, {self.stop!r}); give 0 <= start < stop, or None for stop")
        if not is_whole(self.priority) or not 0 <= self.priority <= MAX_PRIORITY:
            raise InputError(f"retention priority is {self.priority!r}; give a whole number from 0 to {MAX_PRIORITY}")
        seconds = self.duration_s
        if seconds is not None and not (is_number(seconds) and seconds > 0):
            raise InputError(f"retention duration_s is {seconds!r}; give a number of seconds above 0, or None")
        for name in ("start", "stop", "priority", "duration_s"):
            object.__setattr__(self, name, plain(getattr(self, name)))

    def pages(self, page_size: int, num_pages: int) -> range:
        """Positions of the pages, of the first ``num_pages``, that the range lies on.

        >>> Retention(10, 33).pages(page_size=16, num_pages=9)
        range(0, 3)
        """
        stop = num_pages if self.stop is None else min(num_pages, -(-self.stop // page_size))
        return range(self.start // page_size, stop)


@dataclass(frozen=True)
class RequestConfig:
    """A request as one resource sees it: its own part of the worker's keys and the client's knobs."""

    prompts: Mapping[str, KeyedPrompt] = field(default_factory=dict)
    prefix_cache: bool = True
    salt: str = ""
    sampling: Any = None
    prompt_logprobs: bool = False  # needs every prompt row, so the hit is skipped and not booked as a miss
    retention: tuple[Retention, ...] = ()


@dataclass(frozen=True)
class Block:
    """Slots of one label that are no text: a picture between its markers.

    All slots stand at one rope id and see each other; the next rope id is ``advance`` further. ``content`` is the model's own
    and comes back to it in RowInputs; ``digest`` names it where it is to be encoded (None: encoded each time). ``prefix``: in a
    walk that writes nothing, what the block reads instead of its own label's stream.
    """

    slots: int
    advance: int
    content: Any = None
    digest: bytes | None = None
    prefix: Prefix | None = None


@dataclass(frozen=True)
class WalkInputs:
    """What one walk of one request would run: ids and blocks by label, and whatever else the model reads.

    Only ``ids`` can be cut; a block is served whole or runs whole. ``tensors``, ``kwargs`` and a truthy ``step_info`` are
    opaque to the default cut, and custom ``positions`` are an error on a keyed walk.
    """

    ids: Mapping[str, Sequence[int]]
    tensors: Mapping[str, Any] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    step_info: Any = False
    positions: Mapping[str, Sequence[int]] | None = None
    blocks: Mapping[str, Block] = field(default_factory=dict)

    def slots(self) -> dict[str, int]:
        """Slots each label would write, labels of ids first."""
        return {label: len(ids) for label, ids in self.ids.items()} | {label: b.slots for label, b in self.blocks.items()}

    @property
    def opaque(self) -> bool:
        """True when something beside ids would have to be cut too."""
        return bool(self.tensors) or bool(self.kwargs) or bool(self.step_info)


@dataclass(frozen=True)
class Match:
    """How much of a walk's inputs the cache holds: KV slots, and rope positions."""

    slots: int
    positions: int


def drop_leading(inputs: WalkInputs, matches: Mapping[str, Match]) -> WalkInputs:
    """The default cut: each label loses as many leading ids as matched.

    >>> drop_leading(WalkInputs({"main": [5, 6, 7]}), {"main": Match(2, 2)}).ids
    {'main': [7]}
    """
    ids = {label: x[matches[label].slots :] if label in matches else x for label, x in inputs.ids.items()}
    blocks = {label: block for label, block in inputs.blocks.items() if label not in matches}
    return replace(inputs, ids=ids, blocks=blocks)
