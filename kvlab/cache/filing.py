"""The store side: a stream's chain from seed to end, and the pages it offers to the index as they fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvlab import events
from kvlab.cache.chain import MOVED_PAGES, PrefixChain
from kvlab.cache.counters import KVCounters
from kvlab.cache.endings import EndCopies
from kvlab.cache.index import PrefixIndex
from kvlab.cache.keys import chain_ids, plain_ids
from kvlab.cache.pool import PagePool
from kvlab.cache.roots import stream_root
from kvlab.cache.stream import CacheStream, ChainEnd, RootName
from kvlab.errors import InputError, IntegrityError
from kvlab.spec import KeyedPrompt, PrefixStream, RequestConfig

#: What names a page: all that was written, or (the historical fault) the ids alone.
KEYINGS = ("walk", "ignore-walk")


class Filing:
    """Seeds, extends and ends chains, and files filled pages under the stream's root.

    Args:
        ends: keeps copies of pages that a picture ends on.
        counters: told of every chain that ends.
        keying: "walk", or "ignore-walk": keys name texts alone and no walk ends a chain, so that pages of pictures are filed
            under the keys of texts. It is the historical fault, to be studied.
    """

    def __init__(self, pool: PagePool, ends: EndCopies, counters: KVCounters, keying: str = "walk") -> None:
        if keying not in KEYINGS:
            raise InputError(f"keying is {keying!r}; it must be one of {', '.join(KEYINGS)}")
        self._pool, self._ends = pool, ends
        self._counters = counters
        self.keying = keying
        self.base_root: bytes | None = None
        self.declared: Mapping[str, PrefixStream] = {}

    def move_root(self, base_root: bytes, resource: str) -> None:
        """Hang streams that are seeded from now on from ``base_root``."""
        self.base_root = base_root
        if self._pool.record is not None:
            self._pool.record(events.RootOpened(resource, base_root.hex()[:16], sorted(self.declared)))

    def is_keyed(self, label: str) -> bool:
        """True when streams under ``label`` may have a chain; without declarations (direct use) all may."""
        return not self.declared or label in self.declared

    def is_probed(self, stream: CacheStream, walk: str) -> bool:
        """True when ``walk`` writes the keyed text that opens this stream, or a span of its layout."""
        declared, chain = self.declared.get(stream.label), stream.chain
        if declared is None or chain is None:
            return chain is not None
        return walk == declared.walk or (bool(chain.layout) and walk in declared.layout_walks)

    def seed(self, stream: CacheStream, prompt: KeyedPrompt | None, salt: str) -> None:
        """Give a stream that has not begun its chain and root.

        A stream that lost its chain keeps none until it is rewound: what it holds is not what the keys say.
        """
        if self._pool.index is None or prompt is None or not prompt.keys or not self.is_keyed(stream.label):
            return
        if stream.chain is None and stream.chain_end is None and stream.is_fresh and not stream.step_in_flight:
            stream.chain = PrefixChain(self._as_keyed(prompt), self._pool.page_size)
            stream.laid = stream.chain.laid
            self.set_root(stream, salt)

    def _as_keyed(self, prompt: KeyedPrompt) -> KeyedPrompt:
        if self.keying == "walk" or not prompt.layout:
            return prompt
        ids, size = plain_ids(prompt.ids), self._pool.page_size
        return KeyedPrompt(ids, chain_ids(ids, size), ids[len(ids) // size * size :], len(ids), prompt.decode_tensor)

    def set_root(self, stream: CacheStream, salt: str) -> None:
        """Hang the stream from the base root of now."""
        if self.base_root is None:
            raise IntegrityError(f"stream {stream.key} has keys and the cache has no root; enable the prefix cache first")
        stream.root_name = RootName(self.base_root, stream.label, salt)
        stream.root = stream_root(self.base_root, stream.label, salt)

    def end(self, stream: CacheStream, why: str, walk: str, slot: int) -> None:
        """The keys do not describe the stream any more; what is indexed stays indexed."""
        if stream.chain is None:
            return
        stream.chain, stream.chain_end = None, ChainEnd(why, walk, slot)
        self._counters.chains_ended[why] += 1
        if self._pool.record is not None:
            self._pool.record(events.ChainEnded(stream.rid, stream.label, why, walk, slot))

    def extend(self, stream: CacheStream, walk: str, outputs: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Count the ids a step sampled for this stream, if any."""
        chain = stream.chain
        if chain is None or chain.decode_tensor is None or chain.decode_tensor not in outputs:
            return
        if stream.released:
            self.end(stream, MOVED_PAGES, walk, stream.stored_len)
            return
        for ids in outputs[chain.decode_tensor][:1]:
            chain.extend(ids)

    def after_commit(self, stream: CacheStream, walk: str, span: int) -> None:
        """A walk wrote the last ``span`` slots: end the chain if it does not foresee that, else file what is full."""
        chain = stream.chain
        if chain is None:
            return
        start = stream.stored_len - span
        declared = self.declared.get(stream.label) if self.keying == "walk" else None
        why = MOVED_PAGES if stream.released else chain.why_end(declared, walk, start, stream.stored_len)
        if why is not None:
            self.end(stream, why, walk, start)
        elif self._pool.index is not None:
            self._file(stream, chain, self._pool.index)
            if chain.layout and not (stream.is_windowed and stream.stored_len > stream.protected_prefix):
                self._ends.keep(stream, chain, self._pool.index)

    def cached_pages(self, config: RequestConfig) -> list[int]:
        """The index's pages for the whole pages of a prompt, all labels.

        Raises:
            InputError: one of them is not cached, or there are none.
        """
        pages: list[int] = []
        num_whole = 0
        for label, prompt in config.prompts.items():
            if self._pool.index is not None and self.base_root is not None and self.is_keyed(label):
                keys = prompt.keys[: prompt.prompt_slots // self._pool.page_size]
                pages += self._pool.index.peek(stream_root(self.base_root, label, config.salt), keys)
                num_whole += len(keys)
        if not pages or len(pages) < num_whole:
            raise InputError(
                f"{len(pages)} of the prompt's {num_whole} whole pages are cached; a prompt is pinned once all of them are, "
                "after its prefill"
            )
        return pages

    def _file(self, stream: CacheStream, chain: PrefixChain, index: PrefixIndex) -> None:
        filled = chain.pages_filled(stream.stored_len)
        if stream.is_windowed:
            filled = min(filled, stream.protected_prefix // self._pool.page_size)
        if chain.cursor >= filled:
            return
        parent = self._parent(stream, chain, index)
        begin, chain.cursor = chain.cursor, filled
        keys, pages = chain.keys[begin:filled], stream.page_indices[begin:filled]
        known = {page for page in pages if index.key_of(page) is not None} if self._pool.is_told else set()
        winners = index.insert_run(stream.root, keys, pages, parent)
        self._pool.retain(stream, winners, begin)
        if not self._pool.is_told:
            return
        for position, (page, winner) in enumerate(zip(pages, winners, strict=True), begin):
            if page != winner:
                self._pool.tell_race_lost(stream, page, winner)
            elif page not in known:
                self._pool.tell_indexed(stream, chain, page, position)

    def _parent(self, stream: CacheStream, chain: PrefixChain, index: PrefixIndex) -> int | None:
        """The index's page before the cursor, found by key: after a lost race this stream holds only a private copy.

        When the winner's page is gone since, the cursor steps back and the private copies are offered again.
        """
        while chain.cursor:
            page = index.page_for(stream.root, chain.keys[chain.cursor - 1])
            if page is not None:
                return page
            chain.cursor -= 1
        return None
