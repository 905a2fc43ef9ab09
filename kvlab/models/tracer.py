"""TracerModel: a model whose KV is a digest of everything before it. No numerics, and it finds every wrong reuse.

K of a slot is a digest of the previous slot's K, the token and its rope id; V is the token. The previous K is read out of
the pages, so a page that holds anything else than a cold run would put there changes every later K, and the logits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlab.attention.base import AttentionBackend
from kvlab.attention.store import KVStore
from kvlab.errors import InputError, IntegrityError
from kvlab.models.prompting import check_chat
from kvlab.models.text import TextSchedule
from kvlab.options import is_whole
from kvlab.spec import Chat, Continued, KVLayout, PromptProcessor, PromptRecord, RowInputs, StepTables


class ToyProcessor:
    """Ids in, ids out: a prompt is ids or blank-separated numbers, and text is the numbers again.

    >>> toy = ToyProcessor(vocab_size=64)
    >>> toy.process_prompt("3 1 4", {}).tensors["tokens"], toy.decode([1, 5])
    ([3, 1, 4], '1 5')
    """

    def __init__(self, vocab_size: int = 128, stop_ids: Sequence[int] = ()) -> None:
        self.vocab_size = vocab_size
        self.stop_ids = tuple(stop_ids)

    def process_prompt(self, prompt: Any, fields: Mapping[str, Any]) -> PromptRecord:
        """The record's metadata is what arrived as ``fields``."""
        ids = self._ids(prompt)
        if not ids:
            raise InputError("the prompt is empty; give at least one id")
        return PromptRecord({"tokens": ids}, metadata=dict(fields), text=prompt if isinstance(prompt, str) else None)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids if i not in self.stop_ids)

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, Continued):
            return [*prompt.kept_ids, *self._ids(prompt.text)]
        if isinstance(prompt, Chat):
            check_chat(prompt)
            new = (text for _, text in prompt.messages[prompt.kept_messages :])
            return [*prompt.kept_ids, *(i for text in new for i in self._ids(text))]
        given = prompt.split() if isinstance(prompt, str) else prompt
        if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
            raise InputError(f"a prompt is text, a sequence of ids, a Chat or a Continued; got {type(prompt).__name__}")
        return [self._id(position, one) for position, one in enumerate(given)]

    def _id(self, position: int, given: Any) -> int:
        value = int(given) if isinstance(given, str) and given.isdecimal() else given
        if not is_whole(value) or not 0 <= value < self.vocab_size:
            raise InputError(f"{given!r} at position {position} is no id of a vocabulary of {self.vocab_size}")
        return int(value)


class TracerAttention(AttentionBackend):
    """Reads every slot a token sees and hashes what stands there, as attention would weigh it."""

    name: ClassVar[str] = "tracer"

    def __init__(self, store: KVStore) -> None:
        super().__init__(store, num_heads=1, scale=1.0)
        self._tables: StepTables | None = None

    def _plan(self, tables: StepTables) -> None:
        self._tables = tables

    def last_digests(self) -> list[int]:
        """Return K of the slot before each row's first new one, 0 where there is none."""
        tables = self._planned()
        new = [row.to_compute if tables.commit else 0 for row in tables.rows]
        return [_last_digest(self.store, row.pages, row.length - n) for row, n in zip(tables.rows, new, strict=True)]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        tables = self._planned()
        seen: list[int] = []
        for row, own in zip(tables.rows, self._own_bytes(layer, tables), strict=True):
            slots = _slot_bytes(*_slots(self.store, row.pages, row.length)) + own
            prefixes = _prefix_hashes(slots, len(slots) // 16 - row.to_compute)
            seen += prefixes if tables.causal else prefixes[-1:] * row.to_compute
        return torch.tensor(seen, dtype=torch.int64, device=q.device)[:, None, None]  # [tokens, 1, 1]

    def _own_bytes(self, layer: int, tables: StepTables) -> list[bytes]:
        """What each row sees after its pages: its own slots, where the step stores none."""
        if tables.commit:
            return [b""] * len(tables.rows)
        k, v = (x.flatten().split([row.to_compute for row in tables.rows]) for x in self._own_kv(layer))
        return [_slot_bytes(own_k.tolist(), own_v.tolist()) for own_k, own_v in zip(k, v, strict=True)]

    def _planned(self) -> StepTables:
        self._begun()
        if self._tables is None:
            raise IntegrityError("attention was used before begin(tables)")
        return self._tables


class TracerModel(TextSchedule):
    """A text model for checking the cache: run it over ``KVStore(model.kv_layout(page_size), num_pages)`` and
    ``TracerAttention(store)``, and compare pages and tokens with ``check_pages`` and ``continuation``.

    Args:
        processor: ToyProcessor() when None.
        seed: The model's weights, so to speak: another seed gives other digests, and changing it counts as a change in place.
    """

    def __init__(
        self,
        processor: PromptProcessor | None = None,
        *,
        name: str = "tracer",
        identity: str = "tracer",
        checkpoint_path: str | None = None,
        max_seq_len: int = 4096,
        seed: int = 0,
    ) -> None:
        self.processor: PromptProcessor = ToyProcessor() if processor is None else processor
        self.name, self.identity = name, identity
        self.vocab_size = self.processor.vocab_size
        self.num_heads = 1
        self.device = "cpu"
        self.max_seq_len = max_seq_len
        self.seed = seed
        self._checkpoint_path = checkpoint_path
        self._marks = torch.arange(self.vocab_size) * 0x632BE59BD9B4E019  # one an id

    def checkpoint_path(self) -> str | None:
        return self._checkpoint_path

    def weights_version(self) -> Hashable:
        return self.seed

    def kv_layout(self, page_size: int, kv_dtype: str | None = None) -> KVLayout:
        if kv_dtype not in (None, "int64"):
            raise InputError(f"the tracer stores digests, so its pages are int64, not {kv_dtype}")
        return KVLayout(1, 1, 1, page_size, dtype="int64", compute_dtype="int64")

    def forward(self, walk: str, rows: Sequence[RowInputs], attention: TracerAttention) -> list[Any]:
        before = attention.last_digests()
        written = [self.slot_values(walk, row, last) for row, last in zip(rows, before, strict=True)]
        k, v = (torch.tensor([i for slots in written for i in slots[kv]])[:, None, None] for kv in (0, 1))  # [tokens, 1, 1]
        attention.write(0, k, v)
        return self.answers(walk, rows, attention.attend(0, k).flatten().split([len(row.positions) for row in rows]))

    def slot_values(self, walk: str, row: RowInputs, last: int) -> tuple[list[int], list[int]]:
        """Return K and V of the slots of ``row``; ``last`` is K of the slot before them."""
        return self.digests(row.ids, row.positions, last), list(row.ids)

    def answers(self, walk: str, rows: Sequence[RowInputs], seen: Sequence[Tensor]) -> list[Any]:
        """Return what ``forward`` returns; seen: [tokens] of each row."""
        wanted = [None if row.logits_from is None else x[row.logits_from :] for row, x in zip(rows, seen, strict=True)]
        asked = [x for x in wanted if x is not None]
        logits = iter(self.logits(torch.cat(asked)).split([len(x) for x in asked]) if asked else ())
        return [None if x is None else next(logits) for x in wanted]

    def digests(self, ids: Sequence[int], positions: Sequence[int] | None = None, last: int = 0) -> list[int]:
        """Return K of each token; ``last`` is K of the slot before them and ``positions`` are 0, 1, ... when not given."""
        out = []
        for i, position in zip(ids, range(len(ids)) if positions is None else positions, strict=True):
            packed = struct.pack("<qqqq", self.seed, last, i, position)
            last = _int64(hashlib.blake2b(packed, digest_size=8))
            out.append(last)
        return out

    def logits(self, seen: Tensor) -> Tensor:
        """Return what follows from what was seen; seen [wanted] int64, result [wanted, vocab_size] float32 in [-8, 8)."""
        mixed = (seen[:, None] ^ self._marks) * 0x2545F4914F6CDD1D  # [wanted] -> [wanted, vocab_size]
        mixed = (mixed ^ (mixed >> 29)) * 0x369DEA0F31A53F85
        return (mixed >> 40).to(torch.float32) / 2**20

    def continuation(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return what greedy decoding adds to ``ids``, computed without pages and cut after a stop id."""
        known = list(ids)
        for _ in range(num_tokens):
            known.append(int(self.next_logits(known).argmax()))
            if known[-1] in self.processor.stop_ids:
                break
        return known[len(ids) :]

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits [vocab_size] after ``ids``, computed without pages."""
        return self.cold_logits(ids, len(ids) - 1)[0]

    def cold_logits(self, ids: Sequence[int], start: int) -> Tensor:
        """Return the logits after each of ``ids[start:]``, [len(ids) - start, vocab_size], computed without pages."""
        return self.logits(torch.tensor(_prefix_hashes(_slot_bytes(self.digests(ids), ids), start), dtype=torch.int64))

    def check_pages(
        self, store: KVStore, pages: Sequence[int], ids: Sequence[int], positions: Sequence[int] | None = None
    ) -> None:
        """Compare what stands in ``pages`` with what a cold run of ``ids`` writes.

        Raises:
            IntegrityError: They differ; the message names the first wrong slot.
        """
        stored = zip(*_slots(store, pages, len(ids)), strict=True)
        expected = zip(self.digests(ids, positions), ids, strict=True)
        for slot, (got, want) in enumerate(zip(stored, expected, strict=True)):
            if got != want:
                page, offset = pages[slot // store.layout.page_size], slot % store.layout.page_size
                raise IntegrityError(
                    f"slot {slot} (page {page}, offset {offset}) holds digest {got[0]} of token {got[1]}; "
                    f"a cold run puts digest {want[0]} of token {want[1]} there"
                )


def _last_digest(store: KVStore, pages: Sequence[int], length: int) -> int:
    if not length:
        return 0
    page, offset = divmod(length - 1, store.layout.page_size)
    return int(store.keys(0)[pages[page], offset, 0, 0])


def _slots(store: KVStore, pages: Sequence[int], length: int) -> list[list[int]]:
    """Return K and V of the first ``length`` slots of ``pages``."""
    kv: list[list[int]] = store.read(0, store.selector(pages), length).flatten(1).tolist()  # [2, length]
    return kv


def _slot_bytes(k: Sequence[int], v: Sequence[int]) -> bytes:
    """Return K and V of the slots, 16 bytes a slot."""
    return struct.pack(f"<{2 * len(k)}q", *chain.from_iterable(zip(k, v, strict=True)))


def _prefix_hashes(slots: bytes, start: int) -> list[int]:
    """Return the hash of slots [0, i] for each i from ``start`` on."""
    running = hashlib.blake2b(slots[: 16 * start], digest_size=8)
    hashes = []
    for at in range(16 * start, len(slots), 16):
        running.update(slots[at : at + 16])
        hashes.append(_int64(running))
    return hashes


def _int64(hashed: Any) -> int:
    return int.from_bytes(hashed.digest(), "little", signed=True)
