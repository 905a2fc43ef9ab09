"""Prompts in, ids and page keys out. Only this part of kvlab names pages: what a client says about keys is thrown away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.cache.keys import cut_layout, plain_ids
from kvlab.cache.memo import KeyMemo
from kvlab.errors import InputError
from kvlab.spec import RESERVED_FIELDS, KeyedPrompt, PrefixStream, PromptProcessor, PromptRecord, Span


@dataclass(frozen=True)
class Prepared:
    """A prompt ready to run: its record, and each resource's own part of the keys, {resource: {label: KeyedPrompt}}."""

    record: PromptRecord
    configs: Mapping[str, Mapping[str, KeyedPrompt]]


class PromptKeyer:
    """Tokenises prompts and keys every declared stream, at the page size its pages really have.

    Args:
        processor: makes ids of a prompt.
        streams: the model's declaration, {resource: {label: PrefixStream}}.
        page_sizes: slots per page of each declared resource, as the engine uses them (not a model's default).
        memo_bytes: memory for prefixes already hashed, for each page size.
        profile: "published" keys a prompt of several texts or pictures up to the end of the text that opens it.
    """

    def __init__(
        self,
        processor: PromptProcessor,
        streams: Mapping[str, Mapping[str, PrefixStream]],
        page_sizes: Mapping[str, int],
        *,
        memo_bytes: int,
        profile: str = "kvlab",
    ) -> None:
        missing = sorted(set(streams) - set(page_sizes))
        if missing:
            raise InputError(f"no page size given for {', '.join(missing)}; pages keyed at another size would never match")
        self._processor, self._streams = processor, {resource: dict(by_label) for resource, by_label in streams.items()}
        self._page_sizes, self._opening_only = dict(page_sizes), profile == "published"
        self._memos = {size: KeyMemo(size, memo_bytes) for size in sorted(set(page_sizes.values()))}

    def prepare(self, prompt: Any, fields: Mapping[str, Any]) -> Prepared:
        """Return ``prompt`` as ids and keys. The processor sees the client's ``fields`` without the reserved names.

        Raises:
            InputError: the prompt cannot be tokenised, or an id is none.
        """
        record = self._processor.process_prompt(prompt, {k: v for k, v in fields.items() if k not in RESERVED_FIELDS})
        configs = {resource: self._key_resource(resource, record) for resource in self._streams}
        return Prepared(record, configs)

    def remember(self, resource: str, ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Keep the keys of the whole pages of ``ids`` for prompts that go on from them."""
        self._memos[self._page_sizes[resource]].remember(ids, keys)

    def num_memo_bytes(self) -> int:
        """Memory held for prefixes already hashed."""
        return sum(memo.num_bytes for memo in self._memos.values())

    def _key_resource(self, resource: str, record: PromptRecord) -> dict[str, KeyedPrompt]:
        keyed = {}
        for label, stream in self._streams[resource].items():
            if stream.keyed_by == "ids" and stream.tensor in record.tensors:
                layout: tuple[Span, ...] = tuple(record.layouts.get(resource, {}).get(label, ()))
                ids = plain_ids(record.tensors[stream.tensor])
                if layout and self._opening_only:
                    ids, layout = ids[: layout[0].length if layout[0].kind == "ids" else 0], ()
                if all(span.kind != "digest" or span.source for span in layout):  # a medium without identity has no key
                    keyed[label] = self._key_stream(stream, ids, layout, resource)
        return keyed

    def _key_stream(self, stream: PrefixStream, ids: Sequence[int], layout: tuple[Span, ...], resource: str) -> KeyedPrompt:
        page_size = self._page_sizes[resource]
        decode_tensor = None if stream.decode_walk is None else stream.tensor
        if not layout:
            keys = self._memos[page_size].chain(ids)
            return KeyedPrompt(ids, keys, ids[len(ids) // page_size * page_size :], len(ids), decode_tensor)
        cut = cut_layout(layout, ids, page_size)
        slots = sum(span.length for span in layout)
        is_partial = slots % page_size > 0
        tail, tail_items = (cut.ids[-1], cut.items[-1]) if is_partial else ([], ())
        return KeyedPrompt(ids, cut.keys(), tail, slots, decode_tensor, tail_items, layout)
