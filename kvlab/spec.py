"""What the rooms of kvlab share: a model's declaration, a step, its tables, and the seams between rooms.

Standard library only. The cache sees page numbers, the engine sees walks and labels, a model sees ids and positions;
what passes between them is declared here, and in ``streams``, ``step`` and ``seams``, whose names are offered here too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from kvlab.errors import InputError
from kvlab.options import whole
from kvlab.seams import (
    MISS_CAUSES,
    AdmissionDeferred,
    AdmitRuntimeError,
    AllocationFailed,
    GrantDeferred,
    Miss,
    PageStore,
    PageTransport,
    PendingRead,
    PublishedStream,
    ReadPending,
    Refusal,
    RequestOffloading,
    Resource,
)
from kvlab.step import (
    Fork,
    Prefix,
    RequestId,
    RetentionPolicy,
    RowInputs,
    Segment,
    Step,
    StepContext,
    StepRow,
    StepTables,
    StreamKey,
    last_page_length,
)
from kvlab.streams import (
    DEFAULT_PRIORITY,
    MAX_PRIORITY,
    RESERVED_FIELDS,
    SEQUENTIAL,
    Block,
    Item,
    KeyedPrompt,
    KVLayout,
    Match,
    PrefixStream,
    RequestConfig,
    Retention,
    Span,
    Walk,
    WalkInputs,
    check_salt,
    drop_leading,
)

__all__ = [
    "AdmissionDeferred",
    "AdmitRuntimeError",
    "AllocationFailed",
    "Block",
    "Chat",
    "Continued",
    "DEFAULT_PRIORITY",
    "Fork",
    "GrantDeferred",
    "HistoryFork",
    "Item",
    "KVLayout",
    "Kept",
    "KeyedPrompt",
    "MAX_PRIORITY",
    "MISS_CAUSES",
    "Match",
    "Miss",
    "Mixed",
    "ModelSpec",
    "PageStore",
    "PageTransport",
    "PendingRead",
    "Prefix",
    "PrefixStream",
    "Prompt",
    "PromptProcessor",
    "PromptRecord",
    "PublishedStream",
    "RESERVED_FIELDS",
    "ReadPending",
    "Refusal",
    "RequestConfig",
    "RequestId",
    "RequestOffloading",
    "Resource",
    "Retention",
    "RetentionPolicy",
    "RowInputs",
    "SEQUENTIAL",
    "Segment",
    "Span",
    "Step",
    "StepContext",
    "StepRow",
    "StepTables",
    "StreamKey",
    "TextOnly",
    "Walk",
    "WalkInputs",
    "ask",
    "chat",
    "check_salt",
    "draw",
    "drop_leading",
    "last_page_length",
]


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

    Args:
        parts: a str is text, never a path; a picture is a PIL image, a ``pathlib.Path``, or an array [height, width, channels].
        think: let the model write down its reasoning first.

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
    vae_noise: Any = None,
) -> Mixed:
    """Ask for a picture: of a text, or an edit of the pictures among ``parts``. What is None is the model's default.

    Pictures are encoded with noise from the request's ``seed``. Without one the noise is new each time, and pages that hold
    such a picture are not found again; give a seed, or ``vae_sample="mean"``.

    Args:
        parts: as those of ``ask``.
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
        vae_noise: the noise with which each picture given is encoded, [channels, height, width] of its latent each, instead
            of the seed's.

    >>> draw("a red circle", size=(64, 64)).settings
    {'size': (64, 64)}
    """
    settings = {
        "size": size, "num_timesteps": num_timesteps, "timestep_shift": timestep_shift, "cfg_text_scale": cfg_text_scale,
        "cfg_img_scale": cfg_img_scale, "cfg_interval": cfg_interval, "cfg_renorm": cfg_renorm,
        "cfg_renorm_min": cfg_renorm_min, "vae_sample": vae_sample, "noise": noise,
        "vae_noise": vae_noise,
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
        """Names of the walks a request runs, in order; with ``max_tokens`` 0 those that write its prompt."""
        ...

    def slots(self, record: PromptRecord, max_tokens: int) -> Mapping[str, tuple[int, int]]:
        """Slots each label needs: {label: (of the prompt, at the end)}. The last sampled token is never written."""
        ...

    def begin(self, record: PromptRecord) -> Any:
        """Make what the model keeps of one request between passes (the picture being drawn); None for most."""
        ...

    def prepare_inputs(
        self, walk: str, record: PromptRecord, generated: Sequence[int], state: Any = None, walk_index: int = 0
    ) -> WalkInputs | None:
        """Untrimmed inputs of the next pass of ``walk``; None vetoes the step.

        Args:
            generated: ids sampled so far; while there are none, a loop that ``starts_with`` an id gets that one.
            state: what ``begin`` made, unchanged.
            walk_index: place of the walk in the schedule, which tells one text of a prompt from the next.
        """
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
        """A pass of a loop that samples nothing is over: take main's ``output`` into ``state``; True when the loop ends.

        Called once a pass, after its step was committed; nothing else changes ``state``. A request that is sent back begins
        anew with another ``begin``.
        """
        ...

    def outputs(self, state: Any) -> Mapping[str, Any]:
        """What a request hands out whose loop without sampling has ended, by field of GenerationResult."""
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
