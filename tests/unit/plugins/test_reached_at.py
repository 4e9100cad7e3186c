"""A framework that listens at all addresses is reached at one of them alone."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from polytrain_plugins import ports, reached_at

OWN, OTHER, LOOPBACK = "127.0.0.3", "127.0.0.2", "127.0.0.1"


def listening_at_all(family: socket.AddressFamily) -> socket.socket:
    listener = socket.socket(family)
    listener.bind(("", 0))
    listener.listen()
    return listener


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A socket that began to listen in the block."""
    with reached_at(OWN):
        made = listening_at_all(request.param)
    with made:
        yield made


def accepts(address: str, listener: socket.socket) -> bool:
    try:
        with socket.create_connection((address, listener.getsockname()[1]), timeout=0.3):
            return True
    except OSError:
        return False


def test_only_connections_to_one_address_are_accepted(listener: socket.socket) -> None:
    assert accepts(OWN, listener)
    assert accepts(LOOPBACK, listener), "XGBoost's ranks connect to themselves there"
    assert not accepts(OTHER, listener)
    assert not accepts("::1", listener)


def test_an_accepted_connection_carries_data_both_ways(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_connection((OWN, port)) as ours, closing(listener.accept()[0]) as theirs:
        ours.sendall(b"there")
        assert theirs.recv(10) == b"there"
        theirs.sendall(b"and back")
        assert ours.recv(10) == b"and back"


def test_earlier_connections_to_other_addresses_are_ended() -> None:
    with ExitStack() as stack:
        with reached_at(OWN):
            listener = stack.enter_context(listening_at_all(socket.AF_INET6))
            peers = []
            for address in (OWN, OTHER):
                target = (address, listener.getsockname()[1])
                peers.append(stack.enter_context(socket.create_connection(target)))
                stack.enter_context(listener.accept()[0])
        peer, stranger = peers
        assert stranger.recv(1) == b""
        peer.settimeout(0.1)
        with pytest.raises(TimeoutError):
            peer.recv(1)


def test_what_listened_before_stays_as_it_is() -> None:
    with listening_at_all(socket.AF_INET) as listener:
        with reached_at(OWN):
            pass
        assert accepts(OTHER, listener)


def test_a_kernel_that_refuses_the_filter_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(ports, "_attach", refuse)
    with caplog.at_level(logging.WARNING), reached_at(OWN):
        listener = listening_at_all(socket.AF_INET)
    with listener:
        assert accepts(OTHER, listener)
        assert f"port {listener.getsockname()[1]} at all addresses" in caplog.text
