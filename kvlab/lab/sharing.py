"""Sharing without a model: page numbers alone, moved through the same lifecycle that an engine moves them through."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.cache.keys import chain_ids
from kvlab.cache.kv import KVResource
from kvlab.errors import InputError
from kvlab.events import RequestSubmitted
from kvlab.recorder import Recorder
from kvlab.spec import (
    KeyedPrompt,
    KVLayout,
    Match,
    PrefixStream,
    RequestConfig,
    RequestId,
    Segment,
    Step,
    StepContext,
    WalkInputs,
)

NODE, WALK = "LLM", "prefill"


def share_pages(
    num_requests: int, *, shared_tokens: int, own_tokens: int, page_size: int = 16, num_pages: int = 64
) -> Recorder:
    """Let requests that begin alike arrive one after the other and stay; return the log of their pages.

    Args:
        shared_tokens: first tokens of every prompt.
        own_tokens: last tokens, different in every prompt.

    Raises:
        InputError: a prompt without tokens, or a pool too small for all.

    >>> pool = share_pages(3, shared_tokens=40, own_tokens=10, page_size=16).replay()
    >>> [pages for pages in pool.streams.values()]
    [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8]]
    """
    if min(num_requests, shared_tokens + own_tokens) < 1 or min(shared_tokens, own_tokens) < 0:
        raise InputError(
            f"{num_requests} requests of {shared_tokens} shared and {own_tokens} own tokens; "
            "give at least one request, and prompts of at least one token"
        )
    record = Recorder(clock=lambda: 0.0)  # no model, so nothing takes time
    kv = KVResource(KVLayout(1, 1, 1, page_size), num_pages, record=record)
    kv.enable_prefix_cache(b"no model", {"main": PrefixStream("tokens", walk=WALK)})
    shared = list(range(shared_tokens))
    for number in range(1, num_requests + 1):
        record.step = number
        own = range(number * 1_000_000, number * 1_000_000 + own_tokens)
        record(RequestSubmitted(number, shared_tokens + own_tokens, 0))
        prefill(kv, number, [*shared, *own])
    return record


def prefill(kv: KVResource, rid: RequestId, ids: Sequence[int]) -> int:
    """Bring a request in, let it take what is cached, and store the rest; returns the tokens that came from the cache.

    Raises:
        InputError: the pool has no pages left for it.
    """
    size = kv.page_size
    prompt = KeyedPrompt(ids, chain_ids(ids, size), ids[len(ids) // size * size :], len(ids))
    inputs = WalkInputs({"main": ids})
    kv.ingest_request(rid, RequestConfig({"main": prompt}))
    matches = kv.resolve_cached_prefix(rid, NODE, WALK, inputs) or {}
    kv.apply_cached_prefix(rid, NODE, WALK, inputs, matches)
    cached = matches.get("main", Match(0, 0)).slots
    step, context = Step(0, NODE, WALK, (Segment(rid, "main", len(ids) - cached),)), StepContext(frozenset({rid}))
    if kv.admit(step, context) is not None:
        raise InputError(f"the pool of {kv.usable_pages} usable pages has no room for request {rid}; give more num_pages")
    kv.commit(step, context)
    return cached
