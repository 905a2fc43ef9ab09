"""Eviction policies by name."""

from __future__ import annotations

from importlib import import_module

from kvlab.cache.policies.base import EvictionPolicy, IndexView, RetentionPolicy
from kvlab.errors import InputError

#: Name -> where its class is. A policy of one's own, or one with other parameters, is passed as an object instead.
POLICIES = {
    "arc": "kvlab.cache.policies.arc:ARC",
    "belady": "kvlab.cache.policies.belady:Belady",
    "fifo": "kvlab.cache.policies.fifo:FIFO",
    "lfu": "kvlab.cache.policies.lfu:LFU",
    "lru": "kvlab.cache.policies.lru:LRU",
    "priority": "kvlab.cache.policies.priority:Priority",
    "random": "kvlab.cache.policies.random:Random",
    "s3fifo": "kvlab.cache.policies.s3fifo:S3FIFO",
    "sieve": "kvlab.cache.policies.sieve:SIEVE",
    "slru": "kvlab.cache.policies.slru:SLRU",
}
_VERBS = ("attach", "inserted", "touched", "became_leaf", "removed", "candidates")

__all__ = ["POLICIES", "EvictionPolicy", "IndexView", "RetentionPolicy", "make_policy"]


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return a fresh policy of that name, or ``policy`` itself if it is one.

    >>> make_policy("lru").name
    'lru'

    Raises:
        InputError: no policy has that name, it cannot be made without parameters, or the object is no policy.
    """
    if not isinstance(policy, str):
        if missing := [verb for verb in _VERBS if not callable(getattr(policy, verb, None))]:
            raise InputError(f"{policy!r} is no eviction policy: it lacks {', '.join(missing)}; see EvictionPolicy")
        return policy
    if policy not in POLICIES:
        raise InputError(f"no eviction policy is called {policy!r}; known: {', '.join(sorted(POLICIES))}")
    module, _, name = POLICIES[policy].partition(":")
    made: EvictionPolicy = getattr(import_module(module), name)()
    return made
