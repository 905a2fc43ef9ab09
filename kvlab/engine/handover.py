"""Requests that are begun in one engine and finished in another, and the ways their pages travel.

prefill engine   handed = a.hand_over(handle)       the request rests, its pages stay
decode engine    other = b.take_over(handed)        reads the pages, then goes on as if it had begun there
prefill engine   handle.cancel()                    once ``other`` runs
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvlab.engine.request import RequestOptions
from kvlab.errors import InputError, KvlabError


@dataclass(frozen=True)
class HandedOver:
    """A request on its way to another engine. It can be pickled when its options can.

    ``published``: by resource key, what that resource published.
    """

    prompt_ids: tuple[int, ...]
    generated: tuple[int, ...]
    walk_index: int
    options: RequestOptions
    published: Mapping[str, Mapping[str, Any]]


class PagedStore(Protocol):
    """A store whose pages lie in one tensor, [layers, 2, num_pages, ...]."""

    pages: Tensor


@dataclass
class Done:
    """A read that has ended."""

    error: Exception | None = None

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class LocalPeers:
    """Pools of one process by name."""

    stores: dict[str, PagedStore] = field(default_factory=dict)

    def join(self, name: str, store: PagedStore) -> LocalTransport:
        """Make ``store`` readable under ``name``, and return the transport of that side.

        Raises:
            InputError: the name is taken.
        """
        if name in self.stores:
            raise InputError(f"a peer is called {name!r} already; every pool needs a name of its own")
        self.stores[name] = store
        return LocalTransport(self, name, store)

    def leave(self, name: str) -> None:
        """``name`` cannot be read any more."""
        self.stores.pop(name, None)


class LocalTransport:
    """Copies pages between pools of one process."""

    def __init__(self, peers: LocalPeers, source: str, store: PagedStore) -> None:
        self.source = source
        self._peers, self._store = peers, store

    def read(self, source: str, src: Sequence[int], dst: Sequence[int]) -> Done:
        peer = self._peers.stores.get(source)
        if peer is None:
            return Done(KvlabError(f"there is no peer {source!r}; known: {', '.join(sorted(self._peers.stores))}"))
        pages = _select(peer.pages, src).to(self._store.pages.device)
        _put(self._store.pages, dst, pages)
        return Done()


class DistributedTransport:
    """Copies pages between two processes over an initialised torch.distributed group (gloo).

    One thread answers what the peer asks for, another asks. Pages travel through the memory of the host. A peer that is gone
    fails the read within the time limit of the group.

    Args:
        store: the pages of this process.
        peer: rank of the other process.
        name: of this deployment, the same on both sides.
    """

    ASK, IDS, PAGES = 11, 12, 13  # tags

    def __init__(self, store: PagedStore, peer: int, *, name: str = "kv") -> None:
        import torch.distributed as dist

        self._dist, self._store, self._peer, self._name = dist, store, peer, name
        self.source = f"{name}@{dist.get_rank()}"
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="kvlab-read")
        self._server = threading.Thread(target=self._serve, name="kvlab-serve", daemon=True)
        self._server.start()

    def read(self, source: str, src: Sequence[int], dst: Sequence[int]) -> FutureRead:
        if source != f"{self._name}@{self._peer}":
            raise InputError(f"{source!r} is not the peer of this transport, {self._name}@{self._peer}")
        return FutureRead(self._reads.submit(self._fetch, list(src), list(dst)))

    def _fetch(self, src: list[int], dst: list[int]) -> None:
        self._send(torch.tensor([len(src)]), self.ASK)
        self._send(torch.tensor(src), self.IDS)
        pages = torch.empty_like(_select(self._store.pages, dst), device="cpu")
        self._dist.recv(pages.view(torch.uint8), src=self._peer, tag=self.PAGES)
        _put(self._store.pages, dst, pages.to(self._store.pages.device))

    def _serve(self) -> None:
        """Answer until the peer says goodbye or is gone."""
        try:
            while (count := int(self._receive(1, self.ASK))) > 0:
                pages = _select(self._store.pages, self._receive(count, self.IDS).tolist()).cpu()
                self._send(pages.view(torch.uint8), self.PAGES)
        except RuntimeError:
            return  # the connection is closed: nobody will ask again

    def _receive(self, count: int, tag: int) -> Tensor:
        received = torch.empty(count, dtype=torch.int64)
        self._dist.recv(received, src=self._peer, tag=tag)
        return received

    def _send(self, tensor: Tensor, tag: int) -> None:
        self._dist.send(tensor.contiguous(), dst=self._peer, tag=tag)

    def close(self) -> None:
        """Finish what is being read, say that nothing will be asked any more, and answer until the peer says so too."""
        self._reads.shutdown()
        with contextlib.suppress(RuntimeError):  # it is gone already
            self._send(torch.tensor([0]), self.ASK)
        self._server.join()


@dataclass
class FutureRead:
    """A read in another thread."""

    future: Future[None]

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        self.future.result()


def _select(pages: Tensor, ids: Sequence[int]) -> Tensor:
    """Return pages ``ids``, [layers, 2, len(ids), ...]."""
    return pages.index_select(2, torch.tensor(list(ids), dtype=torch.int64, device=pages.device))


def _put(pages: Tensor, ids: Sequence[int], new: Tensor) -> None:
    pages.index_copy_(2, torch.tensor(list(ids), dtype=torch.int64, device=pages.device), new)
