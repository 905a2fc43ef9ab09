"""NaiveKV: the lifecycle of KVResource done the slow, obvious way, to check the real one against.

No hashes, no counts, no heap: an entry is named by the whole tuple of slots up to the end of its page, owners are counted by
looking at every list that names a page, and the page to evict is found by looking at all of them. It answers the same hits,
owners, victims and refusals for prompts of texts and pictures, under least recently used eviction or one that is told. It moves
no bytes, does no forks, and names no misses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvlab.cache.naive_leases import NaiveLeases
from kvlab.cache.naive_pool import NaiveStream
from kvlab.cache.naive_prompts import part_at, positions, slots_of
from kvlab.errors import InputError
from kvlab.spec import (
    AllocationFailed,
    KeyedPrompt,
    Match,
    PrefixStream,
    RequestConfig,
    RequestId,
    Segment,
    Step,
    StepContext,
    StepRow,
    StepTables,
    WalkInputs,
)


class NaiveKV(NaiveLeases):
    """Same verbs, same answers as KVResource.

    Args:
        page_size: slots a page.
        num_pages: pages of the pool, the sink included.
        choose: says which of the leaves that may go does; None = the least recently used.
        keeps_ends: keep copies of pages that a picture ends on, as a resource with a PageStore does.

    >>> kv = NaiveKV(page_size=4, num_pages=8)
    >>> kv.enable_prefix_cache(b"root", {})
    >>> kv.ingest_request(1, RequestConfig({"main": KeyedPrompt([5] * 9, [b""] * 3, [5], 9)}))
    >>> kv.resolve_cached_prefix(1, "LLM", "prefill", WalkInputs({"main": [5] * 9}))
    {'main': Match(slots=0, positions=0)}
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        choose: Callable[[Sequence[int]], int] | None = None,
        keeps_ends: bool = False,
    ) -> None:
        super().__init__(page_size, num_pages, choose)
        self.keeps_ends = keeps_ends
        self.is_open = False
        self.base_root = b""
        self.declared: dict[str, PrefixStream] = {}
        self.configs: dict[RequestId, RequestConfig] = {}

    # -- the lifecycle

    def enable_prefix_cache(self, base_root: bytes, walks: Mapping[str, PrefixStream]) -> None:
        self.declared = dict(walks)
        self.reset_prefix_cache("enabled", base_root)
        self.is_open = True
        for rid, label in self.streams:
            self._seed(rid, label)

    def reset_prefix_cache(self, reason: str = "asked", base_root: bytes | None = None) -> bool:
        for stream in self.streams.values():
            if stream.walked:  # walks that were served will not run
                self._become_stored(stream)
            self._drop_lease(stream)
        for name in list(self.pins):
            self.unpin(name)
        dropped = [e.page for entries in self.entries.values() for e in entries.values()]
        self.entries = {}
        self._let_go(dropped)
        self.base_root = self.base_root if base_root is None else base_root
        for stream in self.streams.values():
            if stream.known is not None and (stream.stored or stream.in_flight):
                self._end(stream)
            stream.cursor = 0
            stream.root = (self.base_root, *stream.root[1:])
        return True

    def pin(self, name: str, config: RequestConfig, max_pages: int) -> int | None:
        """Pin the whole pages of a prompt; returns their number, None if that is refused."""
        pages = []
        for label, prompt in config.prompts.items():
            entries = self.entries.get((self.base_root, label, config.salt), {})
            ends = range(self.page_size, prompt.prompt_slots + 1, self.page_size)
            slots = slots_of(prompt)
            if not all(tuple(slots[:end]) in entries for end in ends):
                return None
            pages += [entries[tuple(slots[:end])].page for end in ends]
        if name in self.pins or not pages or len({*pages, *(p for pinned in self.pins.values() for p in pinned)}) > max_pages:
            return None
        self.pins[name] = pages
        return len(pages)

    def ingest_request(self, rid: RequestId, config: RequestConfig) -> None:
        self.configs.setdefault(rid, config)
        self._ensure(rid, "main")
        for key in self.streams:
            if key[0] == rid:
                self._seed(*key)

    def _ensure(self, rid: RequestId, label: str) -> NaiveStream:
        if (rid, label) not in self.streams:
            self.streams[rid, label] = NaiveStream()
            self._seed(rid, label)
        return self.streams[rid, label]

    def _seed(self, rid: RequestId, label: str) -> None:
        config, stream = self.configs[rid], self.streams[rid, label]
        prompt: KeyedPrompt | None = config.prompts.get(label)
        if not self.is_open or not config.prefix_cache or prompt is None or not prompt.keys:
            return
        if self.declared and label not in self.declared:
            return
        if stream.known is None and not stream.was_ended and not stream.stored and not stream.in_flight:
            stream.known, stream.prompt_slots, stream.grows = slots_of(prompt), prompt.prompt_slots, bool(prompt.decode_tensor)
            stream.prompt, stream.layout = list(stream.known), prompt.layout
            stream.root = (self.base_root, label, config.salt)

    def _end(self, stream: NaiveStream) -> None:
        stream.known, stream.was_ended = None, True

    def reset_request(self, rid: RequestId, free: bool = False) -> None:
        for key, stream in self.streams.items():
            if key[0] == rid:
                self._drop_lease(stream)
                if free or self.sealed.intersection(stream.pages):
                    self._drop_pages(stream)
                self.streams[key] = NaiveStream(pages=stream.pages)
                self._seed(*key)

    def remove_request(self, rid: RequestId) -> None:
        for key in [key for key in self.streams if key[0] == rid]:
            stream = self.streams[key]
            self._drop_lease(stream)
            self._drop_pages(stream)
            del self.streams[key]
        self.configs.pop(rid, None)

    def resolve_cached_prefix(self, rid: RequestId, node: str, walk: str, inputs: WalkInputs) -> Mapping[str, Match] | None:
        answers = {}
        for (owner, _), stream in self.streams.items():
            stream.served = 0 if owner == rid else stream.served
        for label, count in inputs.slots().items() if rid in self.configs else ():
            stream = self._ensure(rid, label)
            if self._probe(rid, label, walk, count):
                slots = max(0, min(self._lent(stream) - stream.walked, count))
                end = stream.walked + slots
                answers[label] = Match(slots, positions(stream.prompt, end) if stream.layout else end)
        return answers or None

    def _probe(self, rid: RequestId, label: str, walk: str, count: int) -> bool:
        """Take the lease if there is none yet; False = no opinion."""
        stream = self._ensure(rid, label)
        if stream.converted:
            return True
        if not self.is_open or stream.known is None:
            return False
        stream.agreed = False
        if self._is_unforeseen(stream, label, walk, count):
            self._end_layout(stream)
            return False
        if stream.lease:
            return True
        if stream.stored or self.configs[rid].prompt_logprobs:
            return False
        if (
            self.declared
            and walk != self.declared[label].walk
            and not (stream.layout and walk in self.declared[label].layout_walks)
        ):
            return False
        self._look_up(stream, stream.known)
        return True

    def _is_unforeseen(self, stream: NaiveStream, label: str, walk: str, count: int) -> bool:
        start = stream.walked if stream.converted or not stream.stored else stream.stored
        if not stream.layout or label not in self.declared or not count or start >= stream.prompt_slots:
            return False
        starts = [sum(s.length for s in stream.layout[:at]) for at in range(len(stream.layout))]
        foreseen = [(at, s.walk, s.length) for at, s in zip(starts, stream.layout, strict=True)]
        return (start, walk, count) not in foreseen

    def _end_layout(self, stream: NaiveStream) -> None:
        start = stream.walked if stream.converted or not stream.stored else stream.stored
        self._end(stream)
        if self._lent(stream) > start:
            if stream.converted or start % self.page_size:
                raise InputError("served slots end inside a page")
            self._drop_lease(stream, start // self.page_size)
        stream.agreed = bool(stream.lease)

    def note_unprobed(self, rid: RequestId, node: str, walk: str, inputs: WalkInputs, cause: str) -> None:
        for label in inputs.slots() if rid in self.configs else ():
            stream = self._ensure(rid, label)
            start = stream.walked if stream.converted or not stream.stored else stream.stored
            if stream.known is not None and stream.layout and start < stream.prompt_slots:
                self._end_layout(stream)

    def apply_cached_prefix(
        self, rid: RequestId, node: str, walk: str, inputs: WalkInputs, matches: Mapping[str, Match]
    ) -> None:
        counts = inputs.slots()
        for label, match in matches.items():
            stream = self.streams.get((rid, label))
            if stream is None:
                continue
            if stream.lease and not stream.stored:
                self._trim(stream, counts[label], match.slots)
                stream.agreed = bool(stream.lease)
            if counts[label] and match.slots >= counts[label] and (stream.lease or stream.converted):
                stream.served = counts[label]
        if all(self.streams[rid, label].served for label, count in counts.items() if count):
            self._end_walk(rid)

    def _end_walk(self, rid: RequestId) -> None:
        for (owner, _), stream in self.streams.items():
            if owner == rid:
                stream.walked += stream.served
                stream.served = 0

    def admit(self, step: Step, ctx: StepContext) -> AllocationFailed | None:
        rows = [segment for segment in step.segments if segment.rid in ctx.request_ids]
        streams = [self._ensure(segment.rid, _read_label(segment)) for segment in rows]
        for stream in streams:
            self._convert(stream)
        for segment in rows if step.commit else ():
            total = self.streams[segment.rid, segment.label].stored + segment.span
            if segment.span and (refusal := self._grow(segment.rid, segment.label, total)):
                return refusal
        for stream in streams:
            stream.in_flight = True
        return None

    def plan(self, step: Step, ctx: StepContext) -> StepTables:
        rows = []
        for segment in step.segments:
            stream = self.streams[segment.rid, _read_label(segment)]
            length = stream.stored + segment.span
            if not step.commit:
                length = stream.stored if segment.prefix is None else segment.prefix.slots
            pages = stream.pages[: -(-length // self.page_size)]
            rows.append(StepRow(segment.rid, segment.label, pages, length, segment.span))
        return StepTables(self.page_size, tuple(rows), commit=step.commit)

    def commit(self, step: Step, ctx: StepContext) -> None:
        landed = [(s, self.streams.get((s.rid, _read_label(s)))) for s in step.segments]
        for segment, stream in landed:
            if stream is None or not stream.in_flight:
                continue
            self._end_walk(segment.rid)
            stream.in_flight = False
            if not step.commit:
                stream.converted = False
            elif segment.span:
                start = stream.stored
                stream.stored += segment.span
                stream.converted = False
                self._after_write(stream, segment.label, step.walk, start)

    def _after_write(self, stream: NaiveStream, label: str, walk: str, start: int) -> None:
        known, declared = stream.known, self.declared.get(label)
        if known is None:
            return
        if start > len(known) or (declared is not None and self._is_misplaced(stream, declared, walk, start)):
            self._end(stream)
        elif self.is_open:
            self._file(stream, known)
            if self.keeps_ends:
                self._keep_end(stream, known)

    def _is_misplaced(self, stream: NaiveStream, declared: PrefixStream, walk: str, start: int) -> bool:
        if walk == declared.decode_walk:
            return False
        if not stream.layout:
            return walk != declared.walk or start >= stream.prompt_slots
        walks = [span.walk for span in stream.layout for _ in range(span.length)]
        if start >= len(walks) or walks[start] != walk or walk not in declared.walks():
            return True
        ends = [sum(span.length for span in stream.layout[: at + 1]) for at in range(len(stream.layout))]
        stop = min(end for end in ends if end > start)
        is_cut = bool(part_at(stream.prompt, start) or part_at(stream.prompt, stream.stored))
        return stream.stored > stop or is_cut

    def abort(self, step: Step, ctx: StepContext) -> None:
        for segment in step.segments:
            if stream := self.streams.get((segment.rid, _read_label(segment))):
                stream.in_flight = False

    def extend_prefix_chain(self, rid: RequestId, node: str, walk: str, outputs: Mapping[str, Sequence[Sequence[int]]]) -> None:
        for (owner, label), stream in self.streams.items():
            if owner == rid and stream.known is not None and stream.grows:
                tensor = self.configs[rid].prompts[label].decode_tensor
                for ids in outputs.get(tensor or "", ())[:1]:
                    stream.known += ids


def _read_label(segment: Segment) -> str:
    """The label whose pages a row reads."""
    return segment.label if segment.prefix is None else segment.prefix.label
