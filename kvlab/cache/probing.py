"""Before a step: how much of a walk the cache holds, and the lease that keeps it there until the step is admitted."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvlab.cache.chain import PrefixChain
from kvlab.cache.counters import KVCounters
from kvlab.cache.filing import Filing
from kvlab.cache.index import PrefixIndex
from kvlab.cache.ledger import MissLedger
from kvlab.cache.pool import PagePool
from kvlab.cache.stream import CacheStream
from kvlab.cache.table import KVRequest, StreamTable
from kvlab.spec import Match

log = logging.getLogger("kvlab.cache")


class Prober:
    """Answers probes and takes leases. Callers hold the lock, so that look-up and retain are one hold.

    Args:
        key: name of the KV resource, for log lines.
    """

    def __init__(
        self, key: str, pool: PagePool, filing: Filing, table: StreamTable, ledger: MissLedger, counters: KVCounters
    ) -> None:
        self._key, self._pool, self._filing, self._table = key, pool, filing, table
        self._ledger, self._counters = ledger, counters
        self._warned_nodes: set[str] = set()

    def probe(self, request: KVRequest, node: str, walk: str, label: str, num_tokens: int) -> Match | None:
        """How much of the ``num_tokens`` that ``walk`` would write is cached; None = no opinion."""
        stream, index = self._table.stream_of(request.rid, label), self._pool.index
        if stream.converted and not stream.offloaded:
            # a refused batch admit asks again: same answer, also when a reset has ended the chain meanwhile
            return Match(stream.stored_len, stream.stored_len)
        if stream.chain is None or index is None:
            self._warn_unkeyed(request, node, walk, label)
            self._ledger.note_unkeyed(request, stream, walk, num_tokens)
            return None
        stream.lease_agreed = False  # each try is cut anew
        if stream.offloaded:
            self._ledger.note(request, stream, num_tokens, "not_fresh", "what the stream stores is on the host")
            return None
        if stream.lease is not None:
            return self._match(stream.lease)
        if why := self._why_unprobed(request, stream, walk):
            self._ledger.note(request, stream, num_tokens, *why)
            return None
        request.notes.pop(label, None)
        return self._look_up(stream, stream.chain, index, num_tokens)

    def _match(self, pages: list[int]) -> Match:
        slots = len(pages) * self._pool.page_size
        return Match(slots, slots)

    def _why_unprobed(self, request: KVRequest, stream: CacheStream, walk: str) -> tuple[str, str] | None:
        if not self._filing.is_probed(stream, walk):
            return "walk_not_keyed", f"walk {walk!r} is not the one that writes the keyed text of {stream.label!r}"
        if not stream.is_fresh:
            return "not_fresh", f"the stream held {stream.stored_len} slots already"
        if request.config.prompt_logprobs:
            return "opted_out", "prompt logprobs need every row"
        return None

    def _look_up(self, stream: CacheStream, chain: PrefixChain, index: PrefixIndex, num_tokens: int) -> Match:
        """Match all but the last page and lease it. The look-up restamps the page that the cut then leaves out: harmless."""
        limit = min(chain.match_limit(num_tokens), chain.match_limit(chain.first_span_slots))
        pages = index.lookup(stream.root, chain.keys)[:limit]
        self._counters.probes += 1
        if pages:
            self._pool.lease(stream, pages)
        self._pool.recall(stream, chain, index, limit)
        return self._match(stream.lease or [])

    def peek(self, stream: CacheStream) -> list[int]:
        """Pages that a look-up would lease for a stream that has not begun."""
        chain, index = stream.chain, self._pool.index
        needs_every_row = self._table.requests[stream.rid].config.prompt_logprobs
        if chain is None or index is None or not stream.is_fresh or stream.lease is not None or needs_every_row:
            return []
        return index.peek(stream.root, chain.keys)[: chain.match_limit(chain.first_span_slots)]

    def lease(self, stream: CacheStream) -> int:
        """Lease them, and what follows them on the host; returns the number of the former.

        The probe of the first step finds the lease and takes no second one.
        """
        num_pages, index, tier = len(self.peek(stream)), self._pool.index, self._pool.tier
        if stream.chain is None or index is None:
            return 0
        is_on_host = tier is not None and (stream.root, stream.chain.keys[num_pages]) in tier
        if stream.is_fresh and stream.lease is None and (num_pages or is_on_host):
            self._look_up(stream, stream.chain, index, stream.chain.first_span_slots)
        return num_pages

    def agree(self, stream: CacheStream, slots: int) -> None:
        """The step is cut to ``slots``: keep the leased pages that cover them."""
        if stream.lease is not None and stream.is_fresh:
            self._pool.cut_lease(stream, self._pool.pages_for(slots), "trimmed")
            stream.lease_agreed = stream.lease is not None

    def note_unprobed(self, rid: str | int, node: str, walk: str, label: str, num_tokens: int, cause: str) -> None:
        """A walk runs and nobody was asked."""
        stream = self._table.stream_of(rid, label)
        self._ledger.note(self._table.requests[rid], stream, num_tokens, cause, f"walk {walk!r} of node {node!r}")

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
