"""What each request is told about its prompt: one line when it is admitted, and a cause for every token it computed."""

from __future__ import annotations

import logging

from kvlab import events
from kvlab.cache.chain import PrefixChain
from kvlab.cache.counters import KVCounters
from kvlab.cache.filing import Filing
from kvlab.cache.misses import MissExplainer
from kvlab.cache.pool import PagePool
from kvlab.cache.stream import CacheStream
from kvlab.cache.table import KVRequest
from kvlab.spec import Miss

log = logging.getLogger("kvlab.cache")


class MissLedger:
    """Settles the causes of a request's misses and reports its match.

    Args:
        key: name of the KV resource, for log lines.
    """

    def __init__(self, pool: PagePool, filing: Filing, key: str) -> None:
        self._pool, self._filing, self._key = pool, filing, key
        self.shut_because = "the prefix cache was never opened"

    # -- notes, taken when a walk is about to run

    def note(self, request: KVRequest, stream: CacheStream, num_tokens: int, cause: str, evidence: str) -> None:
        """The next ``num_tokens`` slots of ``stream`` will be computed because of ``cause``; past its prompt none is due."""
        start, notes = stream.begins_at, request.notes.setdefault(stream.label, {})
        prompt = request.config.prompts.get(stream.label)
        is_past = prompt is not None and start >= prompt.prompt_slots
        is_explained = start not in notes and any(m.start <= start < m.stop for causes in notes.values() for m in causes)
        if num_tokens and not is_past and not (is_explained and stream.laid is not None and stream.laid.spans):
            notes[start] = (Miss(stream.label, start, start + num_tokens, cause, evidence),)
        if not notes:
            del request.notes[stream.label]

    def note_unkeyed(self, request: KVRequest, stream: CacheStream, walk: str, num_tokens: int) -> None:
        """A walk of a stream without a chain will run."""
        declared = self._filing.declared.get(stream.label)
        if declared is None or walk != declared.decode_walk:
            self.note(request, stream, num_tokens, *self._why_unkeyed(request, stream))

    def _why_unkeyed(self, request: KVRequest, stream: CacheStream) -> tuple[str, str]:
        if self._pool.index is None:
            return "opted_out", self.shut_because
        if not request.config.prefix_cache:
            return "opted_out", "the request asked for no prefix cache"
        if stream.chain_end is not None:
            why, walk, slot = stream.chain_end
            return "chain_ended", f"by walk {walk!r} at slot {slot}: {why}"
        if not self._filing.is_keyed(stream.label):
            return "walk_not_keyed", f"the model declares no keyed stream {stream.label!r}"
        return "no_keys", "the request brought no page keys for this stream"

    # -- when a stream is admitted

    def admitted(self, request: KVRequest, stream: CacheStream, counters: KVCounters) -> None:
        """A step of ``stream`` was admitted; the first one settles its misses, and counts, logs and emits its match."""
        if stream.converted or stream.is_fresh:
            if stream.label not in request.notes and (misses := self._explain(request, stream, self._held(stream))):
                request.notes[stream.label] = {misses[0].start: misses}
            if request.config.prompt_logprobs:  # every row was asked for: what is cached was not looked for, and not missed
                pass
            elif stream.chain is not None and stream.label not in request.reported:
                request.reported.add(stream.label)
                self._report(stream, stream.chain, counters)
            elif stream.converted:
                counters.resumed_tokens += self._held(stream)
        self._tell(request, stream)

    def _report(self, stream: CacheStream, chain: PrefixChain, counters: KVCounters) -> None:
        keyed, matched_tokens = chain.prompt_slots // self._pool.page_size, self._held(stream)
        matched_pages = matched_tokens // self._pool.page_size
        counters.prompts_admitted += 1
        counters.hits += matched_tokens > 0
        counters.matched_pages += matched_pages
        counters.matched_tokens += matched_tokens
        from_host = 0 if stream.recalled_from is None else max(0, matched_pages - stream.recalled_from)
        counters.host_hits += from_host > 0
        counters.host_matched_pages += from_host
        if self._pool.record is not None:
            self._pool.record(
                events.PrefixMatched(stream.rid, stream.label, matched_pages, keyed, matched_tokens, chain.prompt_slots)
            )
        is_whole = matched_pages == chain.lendable_pages > 0
        log.info(
            "%s: request %r, stream %r: matched %d of its %d keyed pages%s",
            *(self._key, stream.rid, stream.label, matched_pages, keyed),
            ", the whole prompt but its last page" if is_whole else "",
        )

    def _held(self, stream: CacheStream) -> int:
        """Slots the index lent: leased, or turned into pages and not written behind yet."""
        if stream.lease is not None:
            return self._pool.leased_slots(stream)
        return stream.stored_len if stream.converted else 0

    def _tell(self, request: KVRequest, stream: CacheStream) -> None:
        """Emit what was noted of ``stream``, each range once a request."""
        if self._pool.record is None:
            return
        for start, misses in request.notes.get(stream.label, {}).items():
            if (stream.label, start) not in request.told:
                request.told.add((stream.label, start))
                for m in misses:
                    self._pool.record(events.TokensMissed(request.rid, m.label, m.start, m.stop, m.cause, m.evidence))

    def _explain(self, request: KVRequest, stream: CacheStream, matched_tokens: int) -> tuple[Miss, ...]:
        chain, index = stream.chain, self._pool.index
        if chain is not None and index is not None:
            explainer = MissExplainer(chain, index, stream.root, stream.root_name, self._pool.miss_log)
            return explainer.explain(matched_tokens, stream.cut_from)
        prompt = request.config.prompts.get(stream.label)
        if prompt is None or matched_tokens >= prompt.prompt_slots:
            return ()
        return (Miss(stream.label, matched_tokens, prompt.prompt_slots, *self._why_unkeyed(request, stream)),)

    def misses(self, request: KVRequest) -> tuple[Miss, ...]:
        """Every cause settled so far, in slot order label by label."""
        by_label = [request.notes[label] for label in sorted(request.notes)]
        return tuple(miss for notes in by_label for start in sorted(notes) for miss in notes[start])
