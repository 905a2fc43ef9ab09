"""Requests that are begun in one engine and finished in another, and the ways their pages travel.

prefill engine   handed = a.hand_over(handle)       the request rests, its pages stay
decode engine    other = b.take_over(handed)        reads the pages, then goes on as if it had begun there
prefill engine   handle.cancel()                    once ``other`` has a token more, or has ended

The pages are read when the decode engine has room and lets the request in, not by ``take_over``. Cancelled before that, they
are gone: ``other`` ends with an error that says so.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from kvlab.engine.request import RequestOptions
from kvlab.engine.sampler import Sampled
from kvlab.errors import InputError, KvlabError
from kvlab.spec import Prompt


@dataclass(frozen=True)
class HandedOver:
    """A request on its way to another engine. It can be pickled when its options can.

    ``prompt`` is what was asked, for the result and its follow-up; ``prompt_ids`` are what is gone on from, and it is never
    tokenised again. ``logprobs``: one entry for each of ``generated``, or
    none where none were asked for. ``published``: by resource key, what that resource published.
    """

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    generated: tuple[int, ...]
    walk_index: int
    options: RequestOptions
    published: Mapping[str, Mapping[str, Any]]
    logprobs: tuple[Mapping[str, Any], ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()

    def sampled(self) -> list[Sampled]:
        """What was generated, with its logprobs."""
        if not self.logprobs:
            return [Sampled(token) for token in self.generated]
        return [Sampled(one["token"], one["logprob"], tuple(one["top"].items())) for one in self.logprobs]


class PagedStore(Protocol):
    """A store whose pages lie in one tensor, [layers, 2, num_pages, ...]."""

    pages: Tensor


#: Says whether a pool still holds what it published: (reset_generation, place of the first page in the stream, pages).
Holds: TypeAlias = Callable[[int, int, Sequence[int]], bool]


def _holds_nothing(epoch: int, begin: int, pages: Sequence[int]) -> bool:
    """What a side that no pool serves yet holds."""
    return False


def _gone(source: str) -> KvlabError:
    return KvlabError(
        f"peer {source!r} has let go of the pages that it published; a request that is handed over must rest there until they "
        "are read: cancel it there only after the engine that took it over has a token more"
    )


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

    sides: dict[str, LocalTransport] = field(default_factory=dict)

    def join(self, name: str, store: PagedStore) -> LocalTransport:
        """Make ``store`` readable under ``name``, and return the transport of that side.

        Raises:
            InputError: the name is taken.
        """
        if name in self.sides:
            raise InputError(f"a peer is called {name!r} already; every pool needs a name of its own")
        self.sides[name] = LocalTransport(self, name, store)
        return self.sides[name]

    def leave(self, name: str) -> None:
        """``name`` cannot be read any more."""
        self.sides.pop(name, None)


class LocalTransport:
    """Copies pages between pools of one process."""

    def __init__(self, peers: LocalPeers, source: str, store: PagedStore) -> None:
        self.source = source
        self._peers, self._store = peers, store
        self._holds: Holds = _holds_nothing

    def serve(self, holds: Holds) -> None:
        self._holds = holds

    def read(self, source: str, src: Sequence[int], dst: Sequence[int], *, epoch: int, begin: int) -> Done:
        peer = self._peers.sides.get(source)
        if peer is None:
            return Done(KvlabError(f"there is no peer {source!r}; known: {', '.join(sorted(self._peers.sides))}"))
        pages = peer.lend(src, epoch=epoch, begin=begin)
        if pages is None:
            return Done(_gone(source))
        _put(self._store.pages, dst, pages.to(self._store.pages.device))
        return Done()

    def lend(self, src: Sequence[int], *, epoch: int, begin: int) -> Tensor | None:
        """Return a copy of pages of this side; None when their stream let go of them."""
        pages = _select(self._store.pages, src)
        # asked after the copy: an engine in another thread may have let go during it
        return pages if self._holds(epoch, begin, src) else None


class DistributedTransport:
    """Copies pages between two processes over an initialised torch.distributed group (gloo).

    One thread answers what the peer asks for, another asks. Pages travel through the memory of the host. A peer that is gone
    fails the read within the time limit of the group.

    Args:
        store: the pages of this process.
        peer: rank of the other process.
        name: of this deployment, the same on both sides.
    """

    ASK, IDS, PAGES, HELD = 11, 12, 13, 14  # tags

    def __init__(self, store: PagedStore, peer: int, *, name: str = "kv") -> None:
        import torch.distributed as dist

        self._dist, self._store, self._peer, self._name = dist, store, peer, name
        self.source = f"{name}@{dist.get_rank()}"
        self._holds: Holds = _holds_nothing
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="kvlab-read")
        self._server = threading.Thread(target=self._serve, name="kvlab-serve", daemon=True)
        self._server.start()

    def serve(self, holds: Holds) -> None:
        self._holds = holds

    def read(self, source: str, src: Sequence[int], dst: Sequence[int], *, epoch: int, begin: int) -> FutureRead:
        if source != f"{self._name}@{self._peer}":
            raise InputError(f"{source!r} is not the peer of this transport, {self._name}@{self._peer}")
        return FutureRead(self._reads.submit(self._fetch, list(src), list(dst), epoch, begin))

    def _fetch(self, src: list[int], dst: list[int], epoch: int, begin: int) -> None:
        self._send(torch.tensor([len(src), epoch, begin]), self.ASK)
        self._send(torch.tensor(src), self.IDS)
        if not int(self._receive(1, self.HELD)):
            raise _gone(f"{self._name}@{self._peer}")
        pages = torch.empty_like(_select(self._store.pages, dst), device="cpu")
        self._dist.recv(pages.view(torch.uint8), src=self._peer, tag=self.PAGES)
        _put(self._store.pages, dst, pages.to(self._store.pages.device))

    def _serve(self) -> None:
        """Answer until the peer says goodbye or is gone."""
        try:
            while True:
                count, epoch, begin = self._receive(3, self.ASK).tolist()
                if count == 0:
                    return
                self._answer(epoch, begin, self._receive(count, self.IDS).tolist())
        except RuntimeError:
            return  # the connection is closed: nobody will ask again

    def _answer(self, epoch: int, begin: int, ids: list[int]) -> None:
        pages = _select(self._store.pages, ids).cpu()
        is_held = self._holds(epoch, begin, ids)  # after the copy: the engine may have let go during it
        self._send(torch.tensor([int(is_held)]), self.HELD)
        if is_held:
            self._send(pages.view(torch.uint8), self.PAGES)

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
            self._send(torch.tensor([0, 0, 0]), self.ASK)
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
