"""What every test gets: one thread, invariants checked, no network, and ``check()`` on whatever it built."""

from __future__ import annotations

import os

# Before torch is first imported: two xdist workers with one thread each beat two that fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["KVLAB_CHECK"] = "1"

import signal
import socket
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

LOOPBACK = ("127.", "::1", "localhost")


class Checkable(Protocol):
    """Anything with invariants: an engine, a KV resource, an index."""

    def check(self) -> None: ...


class NetworkBlocked(AssertionError):
    """A test tried to leave this machine."""


def is_local(address: Any) -> bool:
    """True for unix sockets and for loopback (host, port) pairs."""
    return not isinstance(address, tuple) or str(address[0]).startswith(LOOPBACK)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that would leave this machine, name look-ups included."""
    connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def refuse(address: Any) -> None:
        if not is_local(address):
            raise NetworkBlocked(f"a test reached for {address}; tests run offline")

    def guarded_connect(self: socket.socket, address: Any) -> None:
        refuse(address)
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        refuse(address)
        return connect_ex(self, address)

    def guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host:  # None and "" mean this machine
            refuse((host.decode() if isinstance(host, bytes) else host,))
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def checked() -> Iterator[list[Checkable]]:
    """A list to put engines and resources into; each one's ``check()`` runs after the test."""
    things: list[Checkable] = []
    yield things
    for thing in things:
        thing.check()


@pytest.fixture
def engine_over(checked: list[Checkable]) -> Iterator[Any]:
    """``engine_over(model, **settings)`` makes an engine; it is checked and closed after the test."""
    from kvlab.assemble import build_engine

    engines = []

    def make(model: Any, **settings: Any) -> Any:
        engine = build_engine(model, **settings)
        engines.append(engine)
        checked.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def tracer(engine_over: Any) -> Any:
    """``tracer(**settings)`` makes an engine over the tracer model; it is checked and closed after the test.

    ``media=True`` makes it over the tracer of pictures.
    """
    from kvlab.models.tracer import ToyProcessor, TracerAttention, TracerModel
    from kvlab.models.tracer_media import MediaTracer

    def make(*, declares: bool = True, media: bool = False, max_seq_len: int = 4096, **settings: Any) -> Any:
        model = MediaTracer(max_seq_len=max_seq_len) if media else TracerModel(ToyProcessor(64), max_seq_len=max_seq_len)
        if not declares:
            model.prefix_key_streams = dict  # type: ignore[method-assign]
        defaults = {"num_pages": 128, "attention": TracerAttention, "prefix_cache_salt": "test"}
        return engine_over(model, **(defaults | settings))

    return make
