"""A request and its results: what a client may say, and what it gets back."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from importlib import import_module
from numbers import Number
from typing import Any

from kvlab.engine.sampler import SamplingParams
from kvlab.errors import InputError, missing_extra
from kvlab.options import is_number, plain, require_switch, require_text, whole
from kvlab.spec import (
    Chat,
    Continued,
    HistoryFork,
    Kept,
    Miss,
    Mixed,
    Prompt,
    RequestId,
    Retention,
    RetentionPolicy,
    check_salt,
)


@dataclass(frozen=True)
class StreamChunk:
    """One generated token as it arrives. ``text`` is what became readable with it (often empty, sometimes several words)."""

    token: int
    text: str
    index: int
    logprob: float | None = None


@dataclass(frozen=True)
class RequestOptions:
    """Everything a client may ask for beside the prompt.

    Args:
        max_tokens: most tokens to generate; 0 = prefill only.
        stop: strings that end the reply; they are not part of ``text``.
        stop_ids: token ids that end it, beside the model's own.
        ignore_eos: do not stop at the model's own stop ids.
        prefix_cache: False = neither reuse pages nor offer them.
        salt: requests share pages only with requests of the same salt.
        retention: how long ranges of its pages should stay cached; needs policy "priority".
        deadline_s: end the request with DeadlineError this long after submission.
        deadline_steps: the same, in engine steps; a held step counts.
        window: (context_budget, protected_prefix): once the prompt is computed, KV beyond the first ``protected_prefix`` and
            the last ``context_budget`` tokens is released in whole pages. None keeps all.
        name: how tables and figures call the request.
        on_token: called with each StreamChunk.
        fields: model-specific inputs, handed to the model's prompt processor.
        sampling: how tokens are chosen.
    """

    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    prefix_cache: bool = True
    salt: str = ""
    retention: tuple[Retention, ...] = ()
    deadline_s: float | None = None
    deadline_steps: int | None = None
    window: tuple[int, int] | None = None
    name: str = ""
    on_token: Callable[[StreamChunk], None] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @property
    def deadlines(self) -> str:
        """The deadlines that were asked for, in words.

        >>> RequestOptions(deadline_s=2.5, deadline_steps=9).deadlines
        'deadline_s is 2.5, deadline_steps is 9'
        """
        asked = {"deadline_s": self.deadline_s, "deadline_steps": self.deadline_steps}
        return ", ".join(f"{name} is {value}" for name, value in asked.items() if value is not None)

    @property
    def window_policy(self) -> RetentionPolicy | None:
        """The window as the cache takes it."""
        return None if self.window is None else RetentionPolicy(*self.window)

    def __post_init__(self) -> None:
        whole("max_tokens", self.max_tokens, 0)
        if self.deadline_steps is not None:
            whole("deadline_steps", self.deadline_steps, 1)
        if self.deadline_s is not None and not (is_number(self.deadline_s) and self.deadline_s > 0):
            raise InputError(f"deadline_s is {self.deadline_s!r}; give a number of seconds above 0, or None")
        if self.window is not None:
            _check_window(self.window)
        for name in ("ignore_eos", "prefix_cache"):
            require_switch(name, getattr(self, name))
        for name in ("salt", "name"):
            require_text(name, getattr(self, name))
        check_salt("salt", self.salt)
        if not isinstance(self.fields, Mapping):
            raise InputError(f"fields is {self.fields!r}; give a mapping of the model's own inputs")
        for text in self.stop:
            _check_stop_string(text)
        for token in self.stop_ids:
            whole("an entry of stop_ids", token, 0)
        for wish in self.retention:
            if not isinstance(wish, Retention):
                raise InputError(
                    f"an entry of retention is {wish!r}; give kvlab.spec.Retention(start, stop, priority, duration_s)"
                )
        if self.on_token is not None and not callable(self.on_token):
            raise InputError(f"on_token is {self.on_token!r}; give a function of one StreamChunk")
        self._keep_plain_numbers()

    def _keep_plain_numbers(self) -> None:
        for name in ("max_tokens", "deadline_steps", "deadline_s"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        object.__setattr__(self, "stop_ids", tuple(map(int, self.stop_ids)))
        if self.window is not None:
            object.__setattr__(self, "window", tuple(map(int, self.window)))


def _check_window(window: Any) -> None:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise InputError(f"window is {window!r}; give (context_budget, protected_prefix), or None")
    RetentionPolicy(*window)


def _check_stop_string(text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise InputError(f"a stop string is {text!r}; give a str of at least one character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"stop string {text!r} is not valid UTF-8 ({error.reason} at {error.start}); remove lone surrogates"
        ) from None


_SAMPLING_NAMES = frozenset(f.name for f in fields(SamplingParams))
_OPTION_NAMES = frozenset(f.name for f in fields(RequestOptions)) - {"sampling"}


def read_options(options: Mapping[str, Any]) -> RequestOptions:
    """Build RequestOptions from keywords; those of SamplingParams stand beside the rest.

    Raises:
        InputError: an unknown option (with the nearest known one) or an illegal value.

    >>> read_options({"max_tokens": 3, "temperature": 0.5}).sampling.temperature
    0.5
    """
    known = _SAMPLING_NAMES | _OPTION_NAMES
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}"
            raise InputError(f"unknown option {name}{hint}")
    sampling = SamplingParams(**{k: v for k, v in options.items() if k in _SAMPLING_NAMES})
    rest = {k: v for k, v in options.items() if k in _OPTION_NAMES}
    for name in ("stop", "stop_ids", "retention"):
        if name in rest:
            rest[name] = _as_tuple(name, rest[name])
    return RequestOptions(**rest, sampling=sampling)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | Number | Retention):
        return (value,)
    try:
        return tuple(value)
    except TypeError:
        raise InputError(f"{name} is {value!r}; give one value or a list of them") from None


@dataclass(frozen=True)
class Request:
    """What was asked: ``engine.generate(request.prompt, ...)`` asks it again."""

    rid: RequestId
    prompt: Prompt
    options: RequestOptions


class MissTable(Sequence[Miss]):
    """Why prompt tokens were computed: one row a token range, with cause and evidence."""

    def __init__(self, rows: Sequence[Miss] = ()) -> None:
        self._rows = tuple(rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Miss]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MissTable) and self._rows == other._rows

    def __hash__(self) -> int:
        return hash(self._rows)

    def __repr__(self) -> str:
        shown = ", ".join(f"{m.label}[{m.start}:{m.stop}] {_cause_words(m)}" for m in self._rows[:4])
        more = f", and {len(self._rows) - 4} more" if len(self._rows) > 4 else ""
        return f"MissTable({shown}{more})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr>{''.join(map(_cell, (m.label, f'{m.start}-{m.stop}', m.cause, m.evidence)))}</tr>" for m in self._rows[:100]
        )
        more = f"<tr><td colspan=4>and {len(self._rows) - 100} more</td></tr>" if len(self._rows) > 100 else ""
        head = f"<tr>{''.join(_cell(name, 'th') for name in ('label', 'prompt tokens', 'cause', 'evidence'))}</tr>"
        return f"<table>{head}{rows}{more}</table>"

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict a row."""
        return [
            {"label": m.label, "start": m.start, "stop": m.stop, "cause": m.cause, "evidence": m.evidence} for m in self._rows
        ]


def _cause_words(miss: Miss) -> str:
    """The cause, and of an eviction that made no room (a reset) also why."""
    says_more = miss.cause == "evicted" and not miss.evidence.startswith("evicted")
    return f"{miss.cause}, {miss.evidence}" if says_more and miss.evidence else miss.cause


def _cell(text: str, tag: str = "td") -> str:
    return f'<{tag} style="text-align:left">{html.escape(text)}</{tag}>'  # notebooks align cells right when not told


@dataclass(frozen=True)
class GenerationResult:
    """What came of one request.

    ``ids`` are the sampled ids, the stop id included; ``text`` is the reply without it. ``prompt_tokens`` and ``cached_tokens``
    count KV slots of main's prompt, pictures included; ``cached_by_label`` has every label. ``ttft_ms`` runs from submission to
    the first token, or where none is generated to the first denoising step; ``first_pass_ms`` runs to the first denoising step
    always. ``tokens_per_s`` is the rate after the first token (None for fewer than two). ``finish_reason``: stop | length |
    cancelled | deadline | error; ``error`` is set for the last two; a picture without a written plan ends with "stop".
    ``resumed_tokens`` were found cached after preemptions, and count as no hit; ``offloads`` = times it made room on host
    pages. ``encoder_calls`` = encoder runs for its pictures. ``pixels`` of the picture: uint8 tensor [height, width, 3].
    ``opening_ids`` were written before the first of ``ids`` and not sampled. With a ``keying`` other than "walk" hits may be
    wrong, for pages were filed as the historical fault did.
    """

    rid: RequestId
    name: str
    text: str
    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    cached_by_label: Mapping[str, int]
    pages_matched: int
    page_size: int
    finish_reason: str
    ttft_ms: float | None
    total_ms: float
    tokens_per_s: float | None
    misses: MissTable
    model: str
    request: Request
    fork: HistoryFork | None = None
    logprobs: tuple[Mapping[str, Any], ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    held_steps: int = 0
    preemptions: int = 0
    resumed_tokens: int = 0
    offloads: int = 0
    error: Exception | None = None
    stop_ids: frozenset[int] = frozenset()
    encoder_calls: int = 0
    first_pass_ms: float | None = None
    pixels: Any = field(default=None, compare=False)
    opening_ids: tuple[int, ...] = ()
    keying: str = "walk"

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 40 else self.text[:37] + "..."
        words = f"{text!r}, {len(self.ids)} tokens, " if self.pixels is None or self.ids else ""
        picture = "" if self.pixels is None else f"picture {self.pixels.shape[0]}x{self.pixels.shape[1]}, "
        return (
            f"GenerationResult({self.name or self.rid}: {picture}{words}{self.finish_reason}, "
            f"cached {self.cached_tokens} of {self.prompt_tokens}{'' if self.keying == 'walk' else f', keying {self.keying}'})"
        )

    @property
    def image(self) -> Any:
        """The picture as a PIL image; None where none was made."""
        if self.pixels is None:
            return None
        try:
            from PIL import Image
        except ImportError as error:
            raise missing_extra("pillow", "bagel", "to make an image of pixels") from error
        return Image.fromarray(self.pixels.numpy())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        # views are above this layer: found at call time
        bundle: dict[str, Any] = import_module("kvlab.viz.display").request_bundle(self)
        return bundle

    def follow_up(self, text: str) -> Chat | Continued | Mixed:
        """Return the next turn's prompt: everything so far exactly as it was computed, then ``text``.

        The ids of the reply are kept, never tokenised again, so the next turn extends this one token for token.

        Raises:
            InputError: the reply is a picture, whose pages nobody keeps: it would have to be read as a picture first.
        """
        prompt = self.request.prompt
        if isinstance(prompt, Mixed):
            return self._follow_up_mixed(prompt, text)
        kept = (*self.prompt_ids, *self.opening_ids, *self._reply_ids())
        if isinstance(prompt, Chat):
            messages = (*prompt.messages, ("assistant", self.text), ("user", text))
            return Chat(messages, kept, len(prompt.messages) + 1)
        return Continued(kept, text)

    def _follow_up_mixed(self, prompt: Mixed, text: str) -> Mixed:
        if prompt.output != "text":
            raise InputError(
                "the reply is a picture, and a conversation goes on from words; give the picture with the next prompt, as in "
                "draw(result.image, text) or ask(result.image, text)"
            )
        return replace(prompt, parts=(*prompt.parts, Kept(self._reply_ids()), text))

    def _reply_ids(self) -> tuple[int, ...]:
        # the id that ended the reply belongs to the template that follows it
        ended_by_id = self.finish_reason == "stop" and self.ids and self.ids[-1] in self.stop_ids
        return self.ids[:-1] if ended_by_id else self.ids
