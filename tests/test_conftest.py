"""The guards of conftest do guard."""

from __future__ import annotations

import os
import socket
import urllib.request

import pytest


def test_a_connection_that_leaves_the_machine_is_refused() -> None:
    with socket.socket() as s, pytest.raises(AssertionError, match="tests run offline"):
        s.connect(("192.0.2.1", 80))


def test_a_name_lookup_is_refused() -> None:
    with pytest.raises(AssertionError, match="tests run offline"):
        urllib.request.urlopen("http://example.invalid/", timeout=1)


def test_a_loopback_connection_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        with peer:
            client.sendall(b"x")
            assert peer.recv(1) == b"x"


def test_invariants_are_checked_in_tests() -> None:
    assert os.environ["KVLAB_CHECK"] == "1"
