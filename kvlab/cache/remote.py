"""Streams that a peer reads, and streams that are read from a peer.

    publish   here is what I hold: length, pages, epoch, and where to read it
    retrieve  take what is cached here first, then pages for the rest, and begin to read them

What was published may be let go of before it is read: its owner is asked after each copy, and a no fails the read.
A read that failed is remembered: the request can never be admitted again, so nothing computed after it is ever filed.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

from kvlab.cache.chain import REMOTE_REWIND
from kvlab.cache.filing import Filing
from kvlab.cache.pool import PagePool
from kvlab.cache.stream import CacheStream, ChainEnd
from kvlab.cache.table import StreamTable
from kvlab.spec import (
    AdmitRuntimeError,
    KVLayout,
    PageTransport,
    PublishedStream,
    ReadPending,
    Refusal,
    RequestId,
    RequestOffloading,
)

log = logging.getLogger("kvlab.cache")


class Remote:
    """Publishes and retrieves streams. Callers hold the lock of the KV resource, but for ``wait``.

    Args:
        key: name of the KV resource, for log lines.
        transport: reads pages of peers; without one only what is cached here, and own records, can be retrieved.
    """

    def __init__(
        self,
        key: str,
        pool: PagePool,
        filing: Filing,
        table: StreamTable,
        layout: KVLayout,
        world_size: int,
        transport: PageTransport | None,
    ) -> None:
        self._key, self._pool, self._filing, self._table = key, pool, filing, table
        self._layout, self._world_size, self._transport = layout, world_size, transport
        self.source = f"{key}-{uuid.uuid4().hex}" if transport is None else transport.source
        self._published: WeakValueDictionary[int, CacheStream] = WeakValueDictionary()  # by epoch; gone with its request
        if transport is not None:
            transport.serve(self.holds)

    def publish(self, rid: RequestId) -> dict[str, PublishedStream]:
        """Describe what a peer may read: streams whose pages are here, whole and sound."""
        streams = self._table.streams_of(rid)
        return {label: self._describe(stream) for label, stream in streams.items() if _is_sound(stream)}

    def _describe(self, stream: CacheStream) -> PublishedStream:
        pages = tuple(stream.page_indices[: self._pool.pages_for(stream.stored_len)])
        self._published[stream.reset_generation] = stream
        return PublishedStream(
            stream.stored_len, self.source, pages, stream.reset_generation, self._layout, stream.root, self._world_size
        )

    def holds(self, epoch: int, begin: int, pages: Sequence[int]) -> bool:
        """True while what was published as ``epoch`` still has ``pages``, from its page ``begin`` on.

        Pages leave a stream before they can be written anew, so a copy made before a yes is of the published content. No lock
        is needed: two pools may ask each other at the same time.
        """
        stream = self._published.get(epoch)
        if stream is None or stream.reset_generation != epoch:
            return False
        return stream.page_indices[begin : begin + len(pages)] == list(pages)

    def retrieve(self, rid: RequestId, published: Mapping[str, PublishedStream]) -> Refusal | None:
        """Bring every published label up to its published length; asked again, it goes on where it was."""
        for label, record in published.items():
            stream = self._table.stream_of(rid, label)
            refusal = self._why_never(stream, record) or self.settle(stream) or self._retrieve(stream, record)
            if refusal is not None:
                return refusal
        settled = (self.settle(self._table.stream_of(rid, label)) for label in published)
        return next((refusal for refusal in settled if refusal is not None), None)

    def _why_never(self, stream: CacheStream, record: PublishedStream) -> AdmitRuntimeError | None:
        pairs = {
            "world size": (record.world_size, self._world_size),
            "layout": (record.layout, self._layout),
            "root": (record.root.hex()[:16], stream.root.hex()[:16]),
        }
        for what, (theirs, ours) in pairs.items():
            if theirs != ours and theirs and ours:
                return AdmitRuntimeError(
                    stream.rid,
                    f"stream {stream.key} cannot be retrieved: {what} {theirs} was published and this side has {ours}; hand "
                    "over between deployments that are alike",
                )
        return None

    def _retrieve(self, stream: CacheStream, record: PublishedStream) -> Refusal | None:
        if stream.offloaded:
            return RequestOffloading(stream.rid)
        is_own = record.source == self.source
        if not is_own:
            self._follow(stream, record)
        self._match_locally(stream, record)
        if record.seq_len <= stream.stored_len:
            return None
        if is_own:
            log.warning(
                "%s: the own record of stream %r claims %d tokens and %d are stored; it is skipped",
                *(self._key, stream.key, record.seq_len, stream.stored_len),
            )
            return None
        return self._begin_read(stream, record)

    def _follow(self, stream: CacheStream, record: PublishedStream) -> None:
        """Take a peer's stream for what this one is: nothing generated here is keyed, and its new beginning is ours too."""
        epoch = record.source, record.reset_generation
        if stream.peer not in (None, epoch):
            self._filing.end(stream, REMOTE_REWIND, "", stream.stored_len)
            end = stream.chain_end or ChainEnd(REMOTE_REWIND, "", stream.stored_len)
            self._table.rewind_stream(stream, free=False)
            stream.chain_end = end
        stream.peer = epoch
        if stream.chain is not None:
            stream.chain.freeze()

    def _match_locally(self, stream: CacheStream, record: PublishedStream) -> None:
        """Take what is cached here, to the last whole page: all published tokens exist, so none has to be computed."""
        chain, index = stream.chain, self._pool.index
        if chain is None or index is None or not stream.is_fresh:
            return
        limit = min(record.seq_len // self._pool.page_size, chain.keyed_pages)
        self._pool.cut_lease(stream, 0, "retrieved")
        pages = index.lookup(stream.root, chain.keys)[:limit]
        if pages:
            self._pool.lease(stream, pages)
        self._pool.recall(stream, chain, index, limit)
        if stream.lease is not None:
            self._pool.convert_lease(stream)
            stream.converted, chain.cursor = False, stream.hits

    def _begin_read(self, stream: CacheStream, record: PublishedStream) -> Refusal | None:
        if self._transport is None:
            return AdmitRuntimeError(stream.rid, f"stream {stream.key} is at {record.source} and this side has no transport")
        begin, end = stream.stored_len // self._pool.page_size, self._pool.pages_for(record.seq_len)
        refusal = self._pool.grow(stream, record.seq_len, None)
        if refusal is not None:
            return refusal
        try:
            src, dst = record.pages[begin:end], stream.page_indices[begin:end]
            stream.read = self._transport.read(record.source, src, dst, epoch=record.reset_generation, begin=begin)
        except Exception as error:
            stream.read_error = _told(error)
        self._pool.set_length(stream, record.seq_len, "retrieved")
        stream.generation += 1
        return None

    # -- the end of a read

    def settle(self, stream: CacheStream) -> ReadPending | AdmitRuntimeError | None:
        """Notice a read that has ended; None when what the stream stores is there."""
        if stream.read is not None:
            if not stream.read.done():
                return ReadPending(stream.rid)
            try:
                stream.read.wait()
            except Exception as error:
                stream.read_error = _told(error)
            stream.read = None
        if not stream.read_error:
            return None
        return AdmitRuntimeError(stream.rid, f"stream {stream.key} could not be read from its peer: {stream.read_error}")

    def wait(self, rid: RequestId) -> None:
        """Wait until nothing writes into pages of ``rid`` any more; how it ended is for ``settle`` to tell."""
        for stream in list(self._table.streams_of(rid).values()):
            read = stream.read
            if read is not None:
                with contextlib.suppress(Exception):
                    read.wait()


def _is_sound(stream: CacheStream) -> bool:
    is_here = stream.stored_len > 0 and not stream.offloaded
    return is_here and stream.read is None and not stream.read_error and not stream.released


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
