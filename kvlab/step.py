"""One batched forward: which streams it extends, what it copies first, and its tables as plain lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvlab.options import whole

RequestId: TypeAlias = int | str
StreamKey: TypeAlias = tuple[RequestId, str]  # (request, label)


@dataclass(frozen=True)
class Prefix:
    """The first ``slots`` slots of stream ``label`` of the same request; the rope id after them is ``positions``."""

    label: str
    slots: int
    positions: int


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
