"""NaiveKV: the lifecycle of KVResource done the slow, obvious way, to check the real one against.

No hashes, no counts, no heap: an entry is named by the whole tuple of ids up to the end of its page, owners are counted by
looking at every list that names a page, and the page to evict is found by looking at all of them. It answers the same hits,
owners, victims and refusals for prompts of one text span, under least recently used eviction or one that is told. It moves no
bytes, does no forks, and names no misses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvlab.cache.naive_pool import NaivePool, NaiveStream
from kvlab.spec import (
    AllocationFailed,
    KeyedPrompt,
    Match,
    PrefixStream,
    RequestConfig,
    RequestId,
    Step,
    StepContext,
    StepRow,
    StepTables,
    WalkInputs,
)


class NaiveKV(NaivePool):
    """Same verbs, same answers as KVResource.

    Args:
        page_size: slots a page.
        num_pages: pages of the pool, the sink included.
        choose: says which of the leaves that may go does; None = the least recently used.

    >>> kv = NaiveKV(page_size=4, num_pages=8)
    >>> kv.enable_prefix_cache(b"root", {})
    >>> kv.ingest_request(1, RequestConfig({"main": KeyedPrompt([5] * 9, [b""] * 3, [5], 9)}))
    >>> kv.resolve_cached_prefix(1, "LLM", "prefill", WalkInputs({"main": [5] * 9}))
    {'main': Match(slots=0, positions=0)}
    """

    def __init__(self, page_size: int, num_pages: int, choose: Callable[[Sequence[int]], int] | None = None) -> None:
        super().__init__(page_size, num_pages, choose)
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
            if not all(tuple(prompt.ids[:end]) in entries for end in ends):
                return None
            pages += [entries[tuple(prompt.ids[:end])].page for end in ends]
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
            stream.known, stream.prompt_slots, stream.grows = list(prompt.ids), prompt.prompt_slots, bool(prompt.decode_tensor)
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
        for label in inputs.ids if rid in self.configs else ():
            slots = self._probe(rid, label, walk)
            if slots is not None:
                answers[label] = Match(slots, slots)
        return answers or None

    def _probe(self, rid: RequestId, label: str, walk: str) -> int | None:
        stream = self._ensure(rid, label)
        if stream.converted:
            return stream.stored
        if not self.is_open or stream.known is None:
            return None
        stream.agreed = False
        if stream.lease:
            return len(stream.lease) * self.page_size
        if stream.stored or self.configs[rid].prompt_logprobs:
            return None
        if self.declared and walk != self.declared[label].walk:
            return None
        stream.lease = self._look_up(stream, stream.known)
        return len(stream.lease) * self.page_size

    def _look_up(self, stream: NaiveStream, known: list[int]) -> list[int]:
        matched = []
        entries = self.entries.get(stream.root, {})
        for end in range(self.page_size, len(known) + 1, self.page_size):
            if tuple(known[:end]) not in entries:
                break
            matched.append(entries[tuple(known[:end])])
        self.clock += bool(matched)
        for entry in matched:
            entry.stamp = self.clock
        return [entry.page for entry in matched][: (len(known) - 1) // self.page_size]

    def apply_cached_prefix(
        self, rid: RequestId, node: str, walk: str, inputs: WalkInputs, matches: Mapping[str, Match]
    ) -> None:
        for label, match in matches.items():
            stream = self.streams.get((rid, label))
            if stream is not None and stream.lease and not stream.stored:
                self._drop_lease(stream, -(-match.slots // self.page_size))
                stream.agreed = bool(stream.lease)

    def admit(self, step: Step, ctx: StepContext) -> AllocationFailed | None:
        rows = [segment for segment in step.segments if segment.rid in ctx.request_ids]
        for segment in rows:
            self._convert(self._ensure(segment.rid, segment.label))
        for segment in rows:
            total = self.streams[segment.rid, segment.label].stored + segment.span
            if segment.span and (refusal := self._grow(segment.rid, segment.label, total)):
                return refusal
        for segment in rows:
            self.streams[segment.rid, segment.label].in_flight = True
        return None

    def _convert(self, stream: NaiveStream) -> None:
        if stream.stored or not stream.lease:
            return
        if not stream.agreed:
            self._drop_lease(stream)
            return
        self._drop_pages(stream)
        stream.pages, stream.lease = stream.lease, []
        stream.cursor, stream.converted = len(stream.pages), True
        stream.stored = stream.cursor * self.page_size

    def plan(self, step: Step, ctx: StepContext) -> StepTables:
        rows = []
        for rid, label, span in ((s.rid, s.label, s.span) for s in step.segments):
            stream = self.streams[rid, label]
            length = stream.stored + span
            rows.append(StepRow(rid, label, stream.pages[: -(-length // self.page_size)], length, span))
        return StepTables(self.page_size, tuple(rows))

    def commit(self, step: Step, ctx: StepContext) -> None:
        for segment in step.segments:
            stream = self.streams.get((segment.rid, segment.label))
            if stream is None or not stream.in_flight:
                continue
            stream.in_flight = False
            if step.commit and segment.span:
                start = stream.stored
                stream.stored += segment.span
                stream.converted = False
                self._after_write(stream, segment.label, step.walk, start)

    def _after_write(self, stream: NaiveStream, label: str, walk: str, start: int) -> None:
        known, declared = stream.known, self.declared.get(label)
        if known is None:
            return
        is_foreign = declared is not None and walk not in (declared.walk, declared.decode_walk)
        is_past_prompt = declared is not None and walk == declared.walk and start >= stream.prompt_slots
        if is_foreign or is_past_prompt or start > len(known):
            self._end(stream)
        elif self.is_open:
            self._file(stream, known)

    def abort(self, step: Step, ctx: StepContext) -> None:
        for segment in step.segments:
            if stream := self.streams.get((segment.rid, segment.label)):
                stream.in_flight = False

    def extend_prefix_chain(self, rid: RequestId, node: str, walk: str, outputs: Mapping[str, Sequence[Sequence[int]]]) -> None:
        for (owner, label), stream in self.streams.items():
            if owner == rid and stream.known is not None and stream.grows:
                tensor = self.configs[rid].prompts[label].decode_tensor
                for ids in outputs.get(tensor or "", ())[:1]:
                    stream.known += ids
