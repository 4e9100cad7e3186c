"""A held port is ours until it is released, and free from then on."""

from __future__ import annotations

import errno
import os
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.listeners import free_ports

from polytrain_plugins import held_port, listening_socket, ports


def can_listen(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("", port))
            other.listen()
        except OSError:
            return False
        return True


def test_nobody_else_can_listen_on_a_held_port() -> None:
    with held_port() as port:
        assert not can_listen(port.number)


def test_a_released_port_can_be_bound_at_once() -> None:
    with held_port() as port:
        port.release()
        assert can_listen(port.number)
        port.release()


def test_a_process_that_is_being_started_does_not_hold_a_released_port() -> None:
    """A forked process has a copy of everything that is open, until it executes its program."""
    with held_port() as port:
        its_end, ours = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            os.read(its_end, 1)
            os._exit(0)
        threading.Timer(0.2, os.close, [ours]).start()
        port.release()
        assert can_listen(port.number)
    os.close(its_end)
    os.waitpid(child, 0)


def test_the_end_of_the_block_frees_the_port() -> None:
    with held_port() as port:
        pass
    assert can_listen(port.number)


def test_an_exception_frees_the_port() -> None:
    with pytest.raises(RuntimeError), held_port() as port:
        raise RuntimeError
    assert can_listen(port.number)


def test_held_ports_differ() -> None:
    with ExitStack() as stack:
        numbers = [stack.enter_context(held_port()).number for _ in range(20)]
    assert len(set(numbers)) == 20


def test_a_shared_port_is_held_once_and_can_be_bound_by_its_framework(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two worlds with one port would connect to each other's ranks."""
    with held_port() as free:
        number = free.number
    monkeypatch.setattr(ports, "_FIRST", number)
    monkeypatch.setattr(ports, "_LAST", number + 200)
    with ExitStack() as stack:
        held = [stack.enter_context(held_port(shared=True)).number for _ in range(100)]
        assert len(set(held)) == 100
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", held[0]))
            server.listen()


def test_no_outgoing_connection_is_ever_given_such_a_port() -> None:
    """The kernel takes those from its own range, in the instant between release and bind too."""
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with ExitStack() as stack:
        numbers = [stack.enter_context(held_port()).number for _ in range(20)]
    assert min(numbers) >= 1024
    assert max(numbers) < min(first, 32768)


def test_without_a_free_port_the_error_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(errno.EADDRINUSE, "address in use")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(OSError, match=r"no free TCP port found between \d+ and \d+"), held_port():
        pass


@pytest.fixture
def three_ports() -> range:
    return free_ports(3)


def test_of_a_range_all_ports_are_used_and_no_other(three_ports: range) -> None:
    with ExitStack() as stack:
        stack.enter_context(listening_socket("127.0.0.1", three_ports))
        held = {stack.enter_context(held_port(three_ports)).number for _ in range(2)}
        assert held < set(three_ports)
        with pytest.raises(OSError, match=r"no port of RunConfig\(ports=…\)"):
            listening_socket("127.0.0.1", three_ports)
        with pytest.raises(OSError, match="doesn't listen yet"), held_port(three_ports):
            pass


def test_who_has_all_ports_of_a_range_is_named(three_ports: range) -> None:
    [port, *_] = three_ports
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(OSError, match="is free") as raised,
    ):
        listening_socket("127.0.0.1", range(port, port + 1))
    name = Path("/proc/self/comm").read_text().strip()
    assert f"{port} is used by process {os.getpid()} ({name})" in str(raised.value)
    assert f"RunConfig(ports=…), {port}, is free" in str(raised.value)


def test_an_address_that_this_host_does_not_have_is_not_called_used(three_ports: range) -> None:
    with pytest.raises(OSError, match="assign requested address"):
        listening_socket("192.0.2.1", three_ports)


def closed_by_this_side(port: int) -> None:
    """Leave a connection at a port that the kernel keeps for a minute."""
    with socket.create_server(("127.0.0.1", port)) as server:
        ours = socket.create_connection(("127.0.0.1", port))
        theirs, _ = server.accept()
        theirs.close()
        ours.close()


def test_a_restarted_rank_listens_at_the_port_that_it_had(three_ports: range) -> None:
    port = three_ports[0]
    closed_by_this_side(port)
    with listening_socket("127.0.0.1", range(port, port + 1)) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)


def test_a_closed_connections_port_is_waited_for(
    three_ports: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel frees it in a minute; here, other ports are free after the first look."""
    port = three_ports[0]
    closed_by_this_side(port)
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        allowed.append(True)

    allowed: list[bool] = []
    in_order = ports._in_random_order
    monkeypatch.setattr(ports.time, "sleep", look)
    monkeypatch.setattr(
        ports, "_in_random_order", lambda given: in_order(three_ports if allowed else given)
    )
    with held_port(range(port, port + 1)) as held:
        assert held.number in three_ports[1:]
    assert len(looks) == 1
