"""What else can be done with a request's pages: read by a peer, cut by a window, moved to the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from kvlab.cache.offloading import Offloading
from kvlab.cache.remote import Remote
from kvlab.cache.view import PoolView
from kvlab.cache.windows import Windows
from kvlab.spec import PublishedStream, Refusal, RequestId


class PoolVerbs(PoolView, ABC):
    """The verbs of KVResource that no step needs; it makes the parts they use."""

    _remote: Remote
    _windows: Windows
    _offloading: Offloading

    @abstractmethod
    def _check(self) -> None:
        """Check the pool, if it is to be checked after each change."""

    # -- from one pool to another

    def publish(self, rid: RequestId) -> Mapping[str, PublishedStream]:
        with self._lock:
            return self._remote.publish(rid)

    def admit_retrieve(self, rid: RequestId, node: str, walk: str, published: Mapping[str, PublishedStream]) -> Refusal | None:
        with self._lock:
            refusal = self._remote.retrieve(rid, published)
            self._check()
            return refusal

    def await_reads(self, rid: RequestId) -> None:
        """Wait until what the request reads from a peer has come, or has failed."""
        self._remote.wait(rid)

    # -- windows

    def protect_prefix(self, rid: RequestId, num_tokens: int, label: str = "main") -> None:
        """Keep the first ``num_tokens`` of a stream whatever its window releases; the same number again changes nothing.

        Raises:
            InputError: they are not stored, others are protected, something was released, or the stream is in use.
        """
        with self._lock:
            self._windows.protect(self.stream(rid, label), num_tokens)

    def release_oldest(self, rid: RequestId, num_tokens: int, label: str = "main") -> int:
        """Release the oldest unprotected tokens in whole pages; returns how many went, at most ``num_tokens``.

        Raises:
            InputError: a number below 1, or the stream is in a step or on the host.
        """
        with self._lock:
            released = self._windows.release_oldest(self.stream(rid, label), num_tokens)
            self._check()
            return released

    # -- host pages

    def supports_eviction(self) -> bool:
        return self._pool.host.num_pages > 0

    def is_offloaded(self, rid: RequestId) -> bool:
        with self._lock:
            return self._offloading.is_offloaded(rid)

    def get_offload_priority(self, rid: RequestId) -> int:
        with self._lock:
            return self._offloading.priority(rid)

    def offload(self, rid: RequestId) -> int:
        freed = self._offloading.offload(rid)
        with self._lock:
            self._check()
        return freed

    def reload(self, rid: RequestId) -> bool:
        with self._lock:
            is_back = self._offloading.reload(rid)
            self._check()
            return is_back
