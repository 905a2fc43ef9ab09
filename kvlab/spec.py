"""What the rooms of kvlab share: a model's declaration, a step, its tables, and the seams between rooms.

Standard library only. The cache sees page numbers, the engine sees walks and labels, a model sees ids and positions;
what passes between them is declared here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeAlias

from kvlab.errors import InputError
from kvlab.options import is_number, is_whole, plain, whole

RequestId: TypeAlias = int | str
StreamKey: TypeAlias = tuple[RequestId, str]  # (request, label)

#: Field names that belong to the preprocess worker. A client that could name keys could be served another request's KV.
RESERVED_FIELDS = ("prefix_keys", "prefix_tail", "prefix_decode", "prefix_layout")

#: Eviction priorities of pages go from 0 (first) to 100 (last).
DEFAULT_PRIORITY, MAX_PRIORITY = 50, 100

SEQUENTIAL = "sequential"  # the only position scheme under which a page of rotated K may be reused


# -- what a model declares ---------------------------------------------------------------------------------------------


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


# -- what a request brings ---------------------------------------------------------------------------------------------


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
class Prefix:
    """The first ``slots`` slots of stream ``label`` of the same request; the rope id after them is ``positions``."""

    label: str
    slots: int
    positions: int


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


# -- one step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """This step extends stream (rid, label) by ``span`` tokens.

    ``advance`` None: rope ids grow by one a token; else all tokens share one rope id and the next is ``advance`` further.
    ``prefix``: in a step that does not commit, the row reads these slots instead of its own stream.
    """

    rid: RequestId
    label: str
    span: int
    advance: int | None = None
    prefix: Prefix | None = None


@dataclass(frozen=True)
class Fork:
    """Copy stream (rid, source) onto (rid, target), before the step's write ("pre") or after it ("post")."""

    rid: RequestId
    source: str
    target: str
    when: str = "pre"


@dataclass(frozen=True)
class RetentionPolicy:
    """A window over a stream: the first ``protected_prefix`` tokens stay, and of the others the last ``context_budget``.

    What is beyond goes page by page, so up to a page more than the budget stays.

    Raises:
        InputError: a budget below 1, or a prefix below 0.
    """

    context_budget: int
    protected_prefix: int = 0

    def __post_init__(self) -> None:
        for name, least in (("context_budget", 1), ("protected_prefix", 0)):
            object.__setattr__(self, name, whole(f"{name} of a window", getattr(self, name), least))

    def most_tokens(self, page_size: int) -> int:
        """Tokens such a stream holds at most after a step of one token."""
        return self.protected_prefix + self.context_budget + 2 * page_size


@dataclass(frozen=True)
class Step:
    """One batched forward: every row runs the same walk of the same node; ``windows`` are declared with it."""

    index: int
    node: str
    walk: str
    segments: tuple[Segment, ...]
    forks: tuple[Fork, ...] = ()
    commit: bool = True
    windows: Mapping[StreamKey, RetentionPolicy] = field(default_factory=dict)


@dataclass(frozen=True)
class StepContext:
    """Who is really in the step: rows that are not in ``request_ids`` are padding of a captured batch."""

    request_ids: frozenset[RequestId]
    capture: bool = False


@dataclass(frozen=True)
class StepRow:
    """One stream's view in a step. ``length`` counts the slots after the write; pages cover exactly that length.

    Where the tables do not commit, ``length`` counts the slots that are read from pages, which may be none.
    """

    rid: RequestId
    label: str
    pages: Sequence[int]
    length: int
    to_compute: int


@dataclass(frozen=True)
class StepTables:
    """The page tables of one step as plain lists, in segment order.

    ``commit`` False: K and V of the step's tokens are seen by their own row, after its pages, and are stored nowhere.
    """

    page_size: int
    rows: tuple[StepRow, ...]
    causal: bool = True
    commit: bool = True


def last_page_length(length: int, page_size: int) -> int:
    """Slots used on the last page, 1..page_size for any non-empty row and 0 for an empty one.

    >>> [last_page_length(n, 4) for n in (0, 1, 3, 4, 5, 8)]
    [0, 1, 3, 4, 1, 4]
    """
    return length - (length - 1) // page_size * page_size if length else 0


@dataclass(frozen=True)
class RowInputs:
    """What a model runs for one row: ids [tokens] at rope ids ``positions`` [tokens].

    ``logits_from``: logits are wanted for tokens[logits_from:] of this row; None = for none of them. A row that is a block has
    no ids: ``block`` is its content, encoded where the walk encodes, and ``positions`` has one entry a slot.
    """

    ids: Sequence[int]
    positions: Sequence[int]
    logits_from: int | None = None
    block: Any = None


# -- why admit said no -------------------------------------------------------------------------------------------------


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


# -- why a prompt token was computed -----------------------------------------------------------------------------------

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


# -- seams -------------------------------------------------------------------------------------------------------------


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

    ``source`` names the pool and how to reach it. ``reset_generation`` moves when the content is rewound or replaced.
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

    def read(self, source: str, src: Sequence[int], dst: Sequence[int]) -> PendingRead:
        """Begin to copy pages ``src`` of a peer onto own pages ``dst``, whole pages, all layers, K and V."""
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


# -- what a client sends -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chat:
    """A conversation: (role, content) messages, the last one the user's.

    ``kept_ids`` are the ids of the first ``kept_messages`` messages exactly as they were prefilled and generated, so that a
    follow-up extends them token for token; the processor renders only what comes after them.

    Raises:
        InputError: messages or ids that are no sequence, or a number of messages that is none.
    """

    messages: tuple[tuple[str, str], ...]
    kept_ids: tuple[int, ...] = ()
    kept_messages: int = 0

    def __post_init__(self) -> None:
        for name, of in (("messages", "(role, content) pairs"), ("kept_ids", "token ids")):
            value = getattr(self, name)
            if isinstance(value, str | bytes) or not isinstance(value, Sequence):
                raise InputError(f"{name} of a chat is {value!r}; give a list of {of}")
        whole("kept_messages of a chat", self.kept_messages, 0)


@dataclass(frozen=True)
class Continued:
    """Ids that were prefilled and generated, then more text: the follow-up of a prompt that was no chat."""

    kept_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Kept:
    """A text of a conversation as the ids that were really generated, without the model's begin and end tokens."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Mixed:
    """Texts and pictures in the order written, answered in words (``output`` "text") or with a picture ("picture").

    A part is a str, Kept, or a picture: a PIL image, a path (pathlib.Path), or an array [height, width, channels].
    ``settings`` say how a picture is drawn, by the names of ``draw``; what is not named is the model's default.
    """

    parts: tuple[Any, ...]
    output: str = "text"
    think: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


#: Raw text, token ids, a chat, a continuation, or texts and pictures.
Prompt: TypeAlias = str | Sequence[int] | Chat | Continued | Mixed


def ask(*parts: Any, think: bool = False) -> Mixed:
    """Ask about pictures: texts and pictures in the order written, answered in words.

    >>> ask("How many circles?").output
    'text'
    """
    return Mixed(parts, "text", think)


def draw(
    *parts: Any,
    think: bool = False,
    size: tuple[int, int] | None = None,
    num_timesteps: int | None = None,
    timestep_shift: float | None = None,
    cfg_text_scale: float | None = None,
    cfg_img_scale: float | None = None,
    cfg_interval: tuple[float, float] | None = None,
    cfg_renorm: str | None = None,
    cfg_renorm_min: float | None = None,
    vae_sample: str | None = None,
    noise: Any = None,
) -> Mixed:
    """Ask for a picture: of a text, or an edit of the pictures among ``parts``. What is None is the model's default.

    Args:
        think: let the model write down a plan first.
        size: (height, width) in pixels.
        num_timesteps: points of the noise schedule; one less is the number of evaluations.
        timestep_shift: how much of the schedule is spent where the picture is noise.
        cfg_text_scale: how far the picture follows the latest text; 1 = no guidance.
        cfg_img_scale: how far it follows the pictures given; does nothing without text guidance.
        cfg_interval: (low, high): guided while low < t <= high.
        cfg_renorm: "global", "channel" or "text_channel".
        cfg_renorm_min: least factor by which guidance may shrink a velocity.
        vae_sample: "sample" encodes pictures with noise from the request's seed, "mean" without.
        noise: the start noise itself, [tokens, channels], instead of the seed's.

    >>> draw("a red circle", size=(64, 64)).settings
    {'size': (64, 64)}
    """
    settings = {
        "size": size, "num_timesteps": num_timesteps, "timestep_shift": timestep_shift, "cfg_text_scale": cfg_text_scale,
        "cfg_img_scale": cfg_img_scale, "cfg_interval": cfg_interval, "cfg_renorm": cfg_renorm,
        "cfg_renorm_min": cfg_renorm_min, "vae_sample": vae_sample, "noise": noise,
    }  # fmt: skip
    return Mixed(parts, "picture", think, {name: value for name, value in settings.items() if value is not None})


def chat(user: str, *, system: str | None = None) -> Chat:
    """Start a conversation.

    >>> chat("Hi", system="Be brief.").messages
    (('system', 'Be brief.'), ('user', 'Hi'))
    """
    head = () if system is None else (("system", system),)
    return Chat((*head, ("user", user)))


@dataclass(frozen=True)
class HistoryFork:
    """Where a re-tokenised history parts from the ids that were really used: token ``index`` and both ids (-1 = ended)."""

    index: int
    kept_id: int
    retokenised_id: int


@dataclass(frozen=True)
class PromptRecord:
    """What a processor made of a prompt: named id tensors and, per (resource, label), a layout where there is one.

    ``text`` is the rendered prompt where there was text. ``fork`` is set when tokenising the history again would have given
    other ids than those kept.
    """

    tensors: Mapping[str, Sequence[int]]
    layouts: Mapping[str, Mapping[str, tuple[Span, ...]]] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    fork: HistoryFork | None = None


class PromptProcessor(Protocol):
    """Turns what a client sends into ids. Picklable, so that it can run in a worker process; holds no weights."""

    stop_ids: tuple[int, ...]
    vocab_size: int

    def process_prompt(self, prompt: Any, fields: Mapping[str, Any]) -> PromptRecord:
        """Tokenise ``prompt``; ``fields`` are the client's model kwargs without the reserved names."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens left out."""
        ...


class ModelSpec(Protocol):
    """A model as the engine sees it: a schedule of walks over keyed streams. Shapes are those of RowInputs."""

    name: str
    identity: str  # one line: the name's pinned bytes, e.g. "smollm2-135m sha256:..."
    processor: PromptProcessor
    vocab_size: int
    max_seq_len: int
    num_heads: int

    @property
    def default_options(self) -> Mapping[str, Any]:
        """Options of a request that does not say otherwise, by the names a client uses."""
        ...

    @property
    def device(self) -> str:
        """Where the model computes; its pages belong there."""
        ...

    def walks(self) -> Mapping[str, Walk]:
        """Every walk the model runs, by name."""
        ...

    def kv_labels(self) -> Mapping[str, tuple[str, ...]]:
        """Labels of each KV resource."""
        ...

    def prefix_key_streams(self) -> Mapping[str, Mapping[str, PrefixStream]]:
        """Streams whose pages may be reused: {resource: {label: PrefixStream}}; {} = never cached."""
        ...

    def checkpoint_path(self) -> str | None:
        """The folder or GGUF file the weights came from, None if they came from nowhere that can be named."""
        ...

    def preprocess_fingerprint(self) -> str:
        """Identity of how prompts are built."""
        ...

    def rope_fields(self) -> Mapping[str, Any]:
        """What turns a position into a rotation, for the root."""
        ...

    def kv_layout(self, page_size: int, kv_dtype: str | None = None) -> KVLayout:
        """Shape of the model's pages; ``kv_dtype`` None stores K and V as computed."""
        ...

    def weights_version(self) -> Hashable:
        """A value that changes when weights change in place."""
        ...

    def schedule(self, record: PromptRecord, max_tokens: int) -> tuple[str, ...]:
        """Names of the walks a request runs, in order."""
        ...

    def slots(self, record: PromptRecord, max_tokens: int) -> Mapping[str, tuple[int, int]]:
        """Slots each label needs: {label: (of the prompt, at the end)}. The last sampled token is never written."""
        ...

    def begin(self, record: PromptRecord) -> Any:
        """Make what the model keeps of one request between passes (the picture being drawn); None for most."""
        ...

    def prepare_inputs(self, walk: str, record: PromptRecord, generated: Sequence[int], state: Any = None) -> WalkInputs | None:
        """Untrimmed inputs of the next pass of ``walk``; None vetoes the step. ``state`` is what ``begin`` made, unchanged."""
        ...

    def encode(self, walk: str, content: Any) -> Any:
        """Turn the content of a block into what ``forward`` takes of it; called for walks that encode, once a digest."""
        ...

    def split_inputs(self, walk: str, inputs: WalkInputs, matches: Mapping[str, Match]) -> WalkInputs:
        """Drop what the cache holds from the front of ``inputs``."""
        ...

    def forward(self, walk: str, rows: Sequence[RowInputs], attention: Any) -> Sequence[Any]:
        """Run one step; ``attention`` is a planned AttentionBackend.

        Returns, for each row, float32 logits [wanted, vocab_size]; where ``logits_from`` is None, None, or in a walk that loops
        without sampling what ``finish_pass`` is told.
        """
        ...

    def finish_pass(self, walk: str, state: Any, output: Any) -> bool:
        """A pass of a loop that samples nothing is over: take main's ``output`` into ``state``; True when the loop ends."""
        ...

    def outputs(self, state: Any) -> Mapping[str, Any]:
        """What a finished request hands out beside its tokens, by field of GenerationResult."""
        ...


class TextOnly:
    """The hooks of a ModelSpec that a model of ids in and ids out has no use for."""

    def begin(self, record: PromptRecord) -> Any:
        return None

    def encode(self, walk: str, content: Any) -> Any:
        return content

    def finish_pass(self, walk: str, state: Any, output: Any) -> bool:
        return True

    def outputs(self, state: Any) -> Mapping[str, Any]:
        return {}


def drop_leading(inputs: WalkInputs, matches: Mapping[str, Match]) -> WalkInputs:
    """The default cut: each label loses as many leading ids as matched.

    >>> drop_leading(WalkInputs({"main": [5, 6, 7]}), {"main": Match(2, 2)}).ids
    {'main': [7]}
    """
    ids = {label: x[matches[label].slots :] if label in matches else x for label, x in inputs.ids.items()}
    blocks = {label: block for label, block in inputs.blocks.items() if label not in matches}
    return replace(inputs, ids=ids, blocks=blocks)
