"""Before a step: how much of a walk the cache holds, and the lease that keeps it there until the step is admitted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvlab.cache.chain import OUTSIDE_LAYOUT, PictureEnd, PrefixChain
from kvlab.cache.counters import KVCounters
from kvlab.cache.endings import EndCopies
from kvlab.cache.filing import Filing
from kvlab.cache.index import PrefixIndex
from kvlab.cache.ledger import MissLedger
from kvlab.cache.pool import PagePool
from kvlab.cache.stream import CacheStream
from kvlab.cache.table import KVRequest, StreamTable
from kvlab.errors import InputError
from kvlab.spec import Match, RequestId

log = logging.getLogger("kvlab.cache")


class Prober:
    """Answers probes and takes leases. Callers hold the lock, so that look-up and retain are one hold.

    Args:
        key: name of the KV resource, for log lines.
    """

    def __init__(
        self,
        key: str,
        pool: PagePool,
        filing: Filing,
        table: StreamTable,
        ledger: MissLedger,
        ends: EndCopies,
        counters: KVCounters,
    ) -> None:
        self._key, self._pool, self._filing, self._table = key, pool, filing, table
        self._ledger, self._ends, self._counters = ledger, ends, counters
        self._warned_nodes: set[str] = set()

    def probe(self, request: KVRequest, node: str, walk: str, label: str, num_slots: int) -> Match | None:
        """How much of the ``num_slots`` that ``walk`` would write is cached; None = no opinion."""
        stream, index = self._table.stream_of(request.rid, label), self._pool.index
        if stream.converted and not stream.offloaded:
            return self._answer(stream, num_slots)  # a refused batch admit asks again: same answer
        if stream.chain is None or index is None:
            self._warn_unkeyed(request, node, walk, label)
            self._ledger.note_unkeyed(request, stream, walk, num_slots)
            return None
        stream.lease_agreed = False  # each try is cut anew
        if stream.offloaded:
            self._ledger.note(request, stream, num_slots, "not_fresh", "what the stream stores is on the host")
            return None
        if stream.chain.layout and self._disagrees(request, stream, stream.chain, walk, num_slots):
            return None
        if stream.lease is not None:
            return self._answer(stream, num_slots)
        if why := self._why_unprobed(request, stream, walk):
            self._ledger.note(request, stream, num_slots, *why)
            return None
        request.notes.pop(label, None)
        self._look_up(stream, stream.chain, index, num_slots)
        return self._answer(stream, num_slots)

    def _answer(self, stream: CacheStream, num_slots: int) -> Match:
        """The part of the walk's slots that lies under the lease, and the rope id after it."""
        slots = max(0, min(self._held(stream) - stream.walked, num_slots))
        end = stream.walked + slots
        return Match(slots, end if stream.laid is None else stream.laid.positions(end))

    def _held(self, stream: CacheStream) -> int:
        """Slots that the cache lent and nobody wrote behind yet."""
        return stream.stored_len if stream.converted else self._pool.leased_slots(stream)

    def _why_unprobed(self, request: KVRequest, stream: CacheStream, walk: str) -> tuple[str, str] | None:
        if not self._filing.is_probed(stream, walk):
            return "walk_not_keyed", f"walk {walk!r} is not the one that writes the keyed text of {stream.label!r}"
        if request.config.prompt_logprobs:
            return "opted_out", "prompt logprobs need every row"
        if not stream.is_fresh:
            return "not_fresh", f"the stream held {stream.stored_len} slots already"
        return None

    def _look_up(self, stream: CacheStream, chain: PrefixChain, index: PrefixIndex, num_slots: int) -> None:
        """Match all but the last page and lease it. The look-up restamps the page that the cut then leaves out: harmless.

        A laid-out prompt is matched whole, whatever its first walk writes.
        """
        limit = chain.lendable_pages if chain.layout else min(chain.match_limit(num_slots), chain.lendable_pages)
        keys = chain.keys[: chain.keyed_pages] if chain.layout else chain.keys  # a picture's end has the key of a last page
        pages = index.lookup(stream.root, keys)[:limit]
        self._counters.probes += 1
        if pages:
            self._pool.lease(stream, pages)
        self._pool.recall(stream, chain, index, limit)
        if chain.layout:
            self._end_well(stream, chain)

    # -- a match that ends inside a picture

    def _end_well(self, stream: CacheStream, chain: PrefixChain) -> None:
        """Lengthen the lease to the end of a picture by a kept copy, or cut it back to whole pages before the picture."""
        matched = len(stream.lease or ())
        keep, end = self._whole_end(stream, chain, matched, self._ends.has)
        self._pool.cut_lease(stream, keep, "image_cut")
        if end is not None and not self._ends.lend(stream, end):
            keep, _ = self._whole_end(stream, chain, keep, lambda *_: False)
            self._pool.cut_lease(stream, keep, "image_cut")
        stream.cut_from = matched * self._pool.page_size if keep < matched else 0

    def _whole_end(
        self, stream: CacheStream, chain: PrefixChain, num_pages: int, has: Callable[[CacheStream, PictureEnd], bool]
    ) -> tuple[int, PictureEnd | None]:
        """Of ``num_pages`` that match, how many can be lent, and the picture's end up to which a copy lends the next one."""
        while True:
            for end in chain.ends_on(num_pages):
                if has(stream, end):
                    return num_pages, end
            around = chain.laid.medium_around(num_pages * self._pool.page_size)
            if around is None:
                return num_pages, None
            num_pages = around[0] // self._pool.page_size

    # -- before the first walk

    def peek(self, stream: CacheStream) -> list[int]:
        """Pages of the index that a look-up would lease for a stream that has not begun."""
        chain, index = stream.chain, self._pool.index
        if chain is None or index is None or not self._may_lend(stream):
            return []
        pages = index.peek(stream.root, chain.keys)[: chain.lendable_pages]
        return pages[: self._whole_end(stream, chain, len(pages), self._ends.has)[0]] if chain.layout else pages

    def lease(self, stream: CacheStream) -> int:
        """Lease them, and what follows them on the host; returns the number of the former.

        The probe of the first step finds the lease and takes no second one.
        """
        chain, index = stream.chain, self._pool.index
        if chain is None or index is None or not self._may_lend(stream):
            return 0
        num_pages = len(self.peek(stream))
        if num_pages or self._is_on_host(stream, chain) or any(self._ends.has(stream, end) for end in chain.ends_on(0)):
            self._look_up(stream, chain, index, chain.prompt_slots)
        return num_pages

    def _may_lend(self, stream: CacheStream) -> bool:
        needs_every_row = self._table.requests[stream.rid].config.prompt_logprobs
        return stream.is_fresh and stream.lease is None and not needs_every_row

    def _is_on_host(self, stream: CacheStream, chain: PrefixChain) -> bool:
        return self._pool.tier is not None and (stream.root, chain.keys[0]) in self._pool.tier

    # -- what was agreed on

    def agree(self, request: KVRequest, slots: Mapping[str, int], matches: Mapping[str, Match]) -> None:
        """The walk, which would write ``slots`` of each label, is cut to ``matches``: keep the leased pages that cover them.

        A walk of which nothing is left is over at once; of one that runs for some labels only, the others are served when it
        has run.
        """
        for label, match in matches.items():
            stream, count = request.streams.get(label), slots.get(label, 0)
            if stream is None:
                continue
            if stream.lease is not None and stream.is_fresh:
                self._trim(stream, count, match.slots)
                stream.lease_agreed = stream.lease is not None
            if 0 < count <= match.slots and (stream.lease is not None or stream.converted):
                request.served[label] = count
        if all(label in request.served for label, count in slots.items() if count):
            request.end_walk()

    def _trim(self, stream: CacheStream, num_slots: int, agreed: int) -> None:
        size = self._pool.page_size
        if stream.chain is None or not stream.chain.layout:
            self._pool.cut_lease(stream, self._pool.pages_for(agreed), "trimmed")
            return
        if agreed >= min(self._pool.leased_slots(stream) - stream.walked, num_slots):
            return
        target = stream.walked + agreed
        if target % size or stream.chain.laid.medium_around(target):
            raise InputError(
                f"request {stream.rid!r}: {target} cached slots of stream {stream.label!r} are agreed on, which end inside a "
                f"page of {size} or inside a picture; another resource of the node holds less than the cache"
            )
        self._pool.cut_lease(stream, target // size, "trimmed")

    # -- a walk that is not what the layout says

    def _disagrees(self, request: KVRequest, stream: CacheStream, chain: PrefixChain, walk: str, num_slots: int) -> bool:
        """End the chain where ``walk`` does not write the span that the layout has next; True when it did."""
        start = stream.begins_at
        if stream.label not in self._filing.declared or not num_slots or start >= chain.prompt_slots:
            return False
        at = chain.laid.index_at(start)
        span = None if at is None else chain.laid.spans[at]
        if span is not None and (span.walk, span.length) == (walk, num_slots):
            return False
        expected = f"span {at} of its layout has {span.length} by {span.walk!r}" if span is not None else "no span begins there"
        self._end_layout(request, stream, walk, num_slots, start, expected, "chain_ended")
        return True

    def _end_layout(
        self, request: KVRequest, stream: CacheStream, walk: str, num_slots: int, start: int, expected: str, cause: str
    ) -> None:
        """The layout is not what is written: nothing more is filed. Served text stays if it ends with a page."""
        what = f"walk {walk!r} writes {num_slots} slots of stream {stream.label!r} at slot {start}, and {expected}"
        log.warning("%s: request %r: %s; nothing it computes from here on is cached", self._key, request.rid, what)
        self._ledger.note(request, stream, num_slots, cause, what)
        self._filing.end(stream, OUTSIDE_LAYOUT, walk, start)
        is_held_longer = self._held(stream) > start
        if is_held_longer and (stream.converted or start % self._pool.page_size):
            raise InputError(
                f"request {request.rid!r}: {what}; the {start} slots before it were served from the cache and end "
                "inside a page, on which nothing else can be written; make the layout say what the walks write, or set "
                "prefix_cache=False"
            )
        if is_held_longer:
            self._pool.cut_lease(stream, start // self._pool.page_size, "layout")
        stream.lease_agreed = stream.lease is not None

    def note_unprobed(self, rid: RequestId, node: str, walk: str, label: str, num_slots: int, cause: str) -> None:
        """A walk runs and nobody was asked."""
        request, stream = self._table.requests[rid], self._table.stream_of(rid, label)
        start = stream.begins_at
        if stream.chain is not None and stream.chain.layout and start < stream.chain.prompt_slots:
            at = stream.chain.laid.index_at(start)
            expected = f"span {at} of its layout was not probed ({cause}, node {node!r})"
            self._end_layout(request, stream, walk, num_slots, start, expected, cause)
            return
        self._ledger.note(request, stream, num_slots, cause, f"walk {walk!r} of node {node!r}")

    def _warn_unkeyed(self, request: KVRequest, node: str, walk: str, label: str) -> None:
        """Nothing else would reveal a cache that stays empty because no request brings keys."""
        declared: Mapping[str, object] = self._filing.declared
        is_keyed_walk = label in declared and walk == self._filing.declared[label].walk
        if self._pool.index is None or not is_keyed_walk or not request.config.prefix_cache:
            return
        if node in self._warned_nodes or request.brought_keys(label):
            return
        self._warned_nodes.add(node)
        log.warning(
            "%s: request %r reached node %s, walk %s, with no page keys for %r, so it can neither hit nor be cached; "
            "this is said once a node",
            *(self._key, request.rid, node, walk, label),
        )
