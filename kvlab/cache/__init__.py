"""The prefix cache: page numbers, keys and owners. Pure Python, no tensors.

>>> from kvlab.cache import PageArena, PrefixIndex
>>> arena = PageArena(num_pages=8)
>>> index = PrefixIndex(arena)
>>> index.lookup(b"root", [b"key"])
[]
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "PageArena": "arena",
    "PrefixIndex": "index",
    "KVResource": "kv",
    "NaiveKV": "naive",
    "CacheStream": "stream",
    "PrefixChain": "chain",
    "MissLog": "misses",
    "KeyMemo": "memo",
    "chain_ids": "keys",
    "cut_layout": "keys",
    "end_key": "keys",
    "id_bytes": "keys",
    "page_key": "keys",
    "base_root": "roots",
    "checkpoint_identity": "roots",
    "fingerprint": "roots",
    "stream_root": "roots",
    "make_policy": "policies",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__
