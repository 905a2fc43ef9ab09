"""Eviction policies by name."""

from __future__ import annotations

from importlib import import_module

from kvlab.cache.policies.base import EvictionPolicy, IndexView
from kvlab.errors import InputError

#: Name -> where its class is. A policy of one's own is passed as an object instead.
POLICIES = {"lru": "kvlab.cache.policies.lru:LRU"}

__all__ = ["POLICIES", "EvictionPolicy", "IndexView", "make_policy"]


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return a fresh policy of that name, or ``policy`` itself if it is one.

    >>> make_policy("lru").name
    'lru'

    Raises:
        InputError: no policy has that name.
    """
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise InputError(f"no eviction policy is called {policy!r}; known: {', '.join(sorted(POLICIES))}")
    module, _, name = POLICIES[policy].partition(":")
    made: EvictionPolicy = getattr(import_module(module), name)()
    return made
