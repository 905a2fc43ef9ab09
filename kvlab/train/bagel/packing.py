"""Requests as BAGEL reads them, packed for one forward: texts, pictures and what is to be drawn, each block in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kvlab.train.bagel.vocabulary import SPECIAL

IGNORED = -100
PAD_ID = 0

#: What a part's inner tokens are: ids, latents of a picture, its patches, or latents being drawn.
Kind = Literal["text", "vae", "vit", "made"]
KINDS: tuple[Kind, ...] = ("vae", "vit", "made")


@dataclass(frozen=True)
class Part:
    """A block of a request: a text's ids, or the number of a picture of the batch; answers are what is learned to be said."""

    kind: Kind
    ids: tuple[int, ...] = ()
    picture: int = -1
    is_answer: bool = False


def text(ids: Sequence[int], *, is_answer: bool = False) -> Part:
    """Return a text block, opened and closed."""
    return Part("text", (SPECIAL.bos, *ids, SPECIAL.eos), is_answer=is_answer)


def open_answer(ids: Sequence[int] = ()) -> Part:
    """Return the beginning of an answer, to be gone on with."""
    return Part("text", (SPECIAL.bos, *ids))


def pictured(picture: int) -> tuple[Part, Part]:
    """Return the blocks of a picture to be edited: its latents, then its patches."""
    return Part("vae", picture=picture), Part("vit", picture=picture)


@dataclass
class Row:
    """One request laid out token by token."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    inner: list[tuple[Kind, int, int, int]] = field(default_factory=list)  # kind, picture, first slot, end
    next_position: int = 0

    def add(self, part: Part, sizes: dict[Kind, int]) -> None:
        """Lay out one more part; a picture's slots share one position."""
        if part.kind == "text":
            self._add_text(part)
            return
        start, size = len(self.ids), sizes[part.kind]
        self.ids += [SPECIAL.start_of_image, *[PAD_ID] * size, SPECIAL.end_of_image]
        self.positions += [self.next_position] * (size + 2)
        self.blocks += [max(self.blocks, default=0) + 1] * (size + 2)
        self.labels += [IGNORED] * (size + 2)
        self.inner.append((part.kind, part.picture, start + 1, start + 1 + size))
        self.next_position += 1

    def _add_text(self, part: Part) -> None:
        num = len(part.ids)
        self.ids += part.ids
        self.positions += range(self.next_position, self.next_position + num)
        self.blocks += [0] * num
        self.labels += [*part.ids[1:], IGNORED] if part.is_answer else [IGNORED] * num
        self.next_position += num


@dataclass(frozen=True)
class Packed:
    """Requests packed for one forward: groups one after the other, each filled up at its rows' ends to its longest.

    Shapes:
        ids, positions, labels: [tokens]; masks: one a group, [rows, length, length], True where seen.
        slots, pictures: by kind, the places of its tokens in the flat order, and the pictures they are of, in that order.
        ends: [requests], the flat place of each request's last token.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    masks: tuple[Tensor, ...]
    slots: dict[Kind, Tensor]
    pictures: dict[Kind, Tensor]
    ends: Tensor

    @property
    def is_gen(self) -> Tensor | None:
        """Where latents are, [tokens]; None = nowhere."""
        latents = torch.cat([self.slots["vae"], self.slots["made"]])
        if not len(latents):
            return None
        return torch.zeros(len(self.ids), dtype=torch.bool).index_fill(0, latents, True)


def pack(groups: Sequence[Sequence[Sequence[Part]]], *, num_latents: int, num_patches: int) -> Packed:
    """Lay out groups of requests for one forward; those of a group should be of about one length."""
    sizes: dict[Kind, int] = {"vae": num_latents, "vit": num_patches, "made": num_latents}
    parts = [_pack([_row(request, sizes) for request in group]) for group in groups]
    starts = [0]
    for part in parts[:-1]:
        starts.append(starts[-1] + len(part.ids))
    return Packed(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.positions for part in parts]),
        torch.cat([part.labels for part in parts]),
        tuple(mask for part in parts for mask in part.masks),
        {kind: torch.cat([part.slots[kind] + start for part, start in zip(parts, starts, strict=True)]) for kind in KINDS},
        {kind: torch.cat([part.pictures[kind] for part in parts]) for kind in KINDS},
        torch.cat([part.ends + start for part, start in zip(parts, starts, strict=True)]),
    )


def _row(request: Sequence[Part], sizes: dict[Kind, int]) -> Row:
    row = Row()
    for part in request:
        row.add(part, sizes)
    return row


def _pack(rows: Sequence[Row]) -> Packed:
    length = max(len(row.ids) for row in rows)
    blocks = _filled([row.blocks for row in rows], length, 0)
    same = (blocks[:, :, None] == blocks[:, None, :]) & (blocks > 0)[:, :, None]
    slots, pictures = _inner(rows, length)
    return Packed(
        _filled([row.ids for row in rows], length, PAD_ID).flatten(),
        _filled([row.positions for row in rows], length, 0).flatten(),
        _filled([row.labels for row in rows], length, IGNORED).flatten(),
        (torch.ones(length, length, dtype=torch.bool).tril() | same,),
        slots,
        pictures,
        torch.tensor([length * i + len(row.ids) - 1 for i, row in enumerate(rows)]),
    )


def _filled(rows: Sequence[Sequence[int]], length: int, value: int) -> Tensor:
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])


def _inner(rows: Sequence[Row], length: int) -> tuple[dict[Kind, Tensor], dict[Kind, Tensor]]:
    places: dict[Kind, list[int]] = {kind: [] for kind in KINDS}
    pictures: dict[Kind, list[int]] = {kind: [] for kind in KINDS}
    for i, row in enumerate(rows):
        for kind, picture, start, end in row.inner:
            places[kind] += range(length * i + start, length * i + end)
            pictures[kind].append(picture)
    return _whole(places), _whole(pictures)


def _whole(lists: dict[Kind, list[int]]) -> dict[Kind, Tensor]:
    return {kind: torch.tensor(found, dtype=torch.int64) for kind, found in lists.items()}
