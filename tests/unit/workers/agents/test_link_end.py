"""Ends of trial connections, which reach each other, or say why not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from tests.listeners import free_ports

from polytrain.workers.ray.links import LinkEnd, Listening

HOST = "127.0.0.1"


@pytest.fixture
def other() -> Iterator[LinkEnd]:
    end = LinkEnd(HOST)
    yield end
    end.stop_listening()


def test_an_end_reaches_others_that_listen(other: LinkEnd) -> None:
    listening = other.listen()
    assert LinkEnd(HOST).reach([listening, listening], 5.0) == ["", ""]
    assert LinkEnd(HOST).reach([], 5.0) == []


def test_an_end_listens_at_the_ports_of_ranks() -> None:
    ports = free_ports(1)
    end = LinkEnd(HOST, ports)
    assert end.listen().port in ports
    end.stop_listening()


def test_a_port_is_closed_again(other: LinkEnd) -> None:
    listening = other.listen()
    other.stop_listening()
    [reason] = LinkEnd(HOST).reach([listening], 5.0)
    assert reason == f"port {listening.port}: Connection refused"


def test_whoever_else_answers_is_another_machine(other: LinkEnd) -> None:
    """Of two machines that have the same address."""
    listening = replace(other.listen(), word=bytes(16))
    [reason] = LinkEnd(HOST).reach([listening], 5.0)
    assert reason == f"port {listening.port} is another machine's"


@contextmanager
def not_accepting(backlog: int) -> Iterator[Listening]:
    with closing(socket.create_server((HOST, 0), backlog=backlog)) as listener:
        yield Listening(host=HOST, port=listener.getsockname()[1], word=b"")


def test_a_port_behind_a_firewall_that_drops_packets() -> None:
    with (
        not_accepting(backlog=0) as listening,
        # Its queue takes one connection, and drops what comes after that.
        socket.create_connection((HOST, listening.port)),
    ):
        [reason] = LinkEnd(HOST).reach([listening], 0.1)
    assert reason == f"port {listening.port} doesn't answer within 0.1 s"


def test_a_busy_process_has_been_reached() -> None:
    with not_accepting(backlog=5) as listening:
        assert LinkEnd(HOST).reach([listening], 0.1) == [""]


def test_an_address_of_another_machine_can_not_be_listened_at() -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        LinkEnd("192.0.2.1").listen()
