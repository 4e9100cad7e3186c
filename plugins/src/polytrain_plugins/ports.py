"""TCP ports at which ranks listen: in the range that the user allows, at one address alone."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import logging
import os
import pwd
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

# Below Linux's default ephemeral range (32768–60999): the kernel never gives such a port to an
# outgoing connection, so no process takes it between the release and the framework's bind.
_FIRST, _LAST = 20000, 32000

_FREE_WITHIN_S = 5.0
_LOOKS_EVERY_S = 0.001
"""Seconds between looks at a port: nothing announces that it is free."""

_CLOSED_WITHIN_S = 65.0
"""Linux keeps the port of a connection that this side has closed for 60 s (TIME_WAIT)."""

_TRIES_AGAIN_EVERY_S = 0.25

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")

_CLOSING = frozenset({"04", "05", "06", "09", "0B"})
"""States of connections that end by themselves: FIN_WAIT1, FIN_WAIT2, TIME_WAIT, LAST_ACK,
CLOSING."""

_MOST_NAMED = 8

_SO_ATTACH_FILTER = 26
_IP_HEADER = 0xFFF00000
"""Where a socket's filter finds the header of IP, as `SKF_NET_OFF` of Linux says."""

_LOOPBACK = "127.0.0.1"

_LISTENS, _IS_CONNECTED = "0A", "01"


@dataclass(slots=True)
class HeldPort:
    """A bound port. `release` it immediately before the framework binds it."""

    number: int
    _socket: socket.socket

    def release(self) -> None:
        """Free the port. May be called more than once.

        A child process that this one has just forked holds the port, too, until it executes its
        program. So this waits until the port is free, for a few seconds at most.
        """
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        end = time.monotonic() + _FREE_WITHIN_S
        while not _is_free(self.number) and time.monotonic() < end:
            time.sleep(_LOOKS_EVERY_S)


@contextmanager
def held_port(ports: range | None = None, *, shared: bool = False) -> Iterator[HeldPort]:
    """Choose a free TCP port and hold it while the block runs.

    Args:
        ports: those to choose from, `Member.ports`; None for any. If earlier connections keep all
            of them, this waits until the system frees one, for about a minute at most.
        shared: hold it with `SO_REUSEADDR`. A framework that sets that option too (gRPC does) can
            bind the port while it is held, so that the port is never free.

    Raises:
        OSError: no port is free; the message says what uses those of a range.
    """
    with _bound(ports) as holder:
        if shared:
            # Not before: two holders with this option could bind the same port.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield HeldPort(number=holder.getsockname()[1], _socket=holder)


def listening_socket(host: str, ports: range | None = None) -> socket.socket:
    """Return a TCP socket that listens at an address, and at no other.

    Args:
        host: the address, `Member.listen_host`.
        ports: those to choose from, `Member.ports`; None for any.

    Raises:
        OSError: no port is free; the message says what uses those of a range.
    """
    if ports is None:
        return socket.create_server((host, 0))
    order = _in_random_order(ports)
    found = _first_free(order, lambda port: socket.create_server((host, port)))
    if found is None:
        raise _none_is_free(ports)
    return found


def _bound(ports: range | None) -> socket.socket:
    if ports is None:
        some = random.SystemRandom().sample(range(_FIRST, _LAST), k=200)
        bound = _first_free(some, _holder)
        if bound is None:
            raise OSError(f"no free TCP port found between {_FIRST} and {_LAST}")
        return bound
    end = time.monotonic() + _CLOSED_WITHIN_S
    while (bound := _first_free(_in_random_order(ports), _holder)) is None:
        # Frameworks that don't share ports can't bind that of a connection closed a moment ago.
        if time.monotonic() >= end or not are_closing(ports):
            raise _none_is_free(ports)
        time.sleep(_TRIES_AGAIN_EVERY_S)
    return bound


def _in_random_order(ports: range) -> list[int]:
    # The system's generator: forked worker processes inherit the state of the global one, and
    # would all try the same ports in the same order.
    return random.SystemRandom().sample(ports, k=len(ports))


def _first_free(ports: list[int], bind: Callable[[int], socket.socket]) -> socket.socket | None:
    for port in ports:
        try:
            return bind(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return None


def _none_is_free(ports: range) -> OSError:
    which = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else f"{ports[0]}"
    return OSError(
        f"no port of RunConfig(ports=…), {which}, is free: {'; '.join(port_users(ports))}. Allow "
        "more ports, or end what uses these"
    )


def _holder(port: int) -> socket.socket:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.bind(("", port))
    except BaseException:
        holder.close()
        raise
    return holder


def _is_free(number: int) -> bool:
    try:
        _holder(number).close()
    except OSError:
        return False
    return True


@contextmanager
def reached_at(host: str) -> Iterator[None]:
    """Have what the block begins to listen at be reached at one address alone, and at 127.0.0.1.

    A framework that takes no address binds all of them. When the block ends, a packet filter on its
    listening sockets does what binding the address would have done, and connections to other
    addresses that were made meanwhile are ended. It needs no privilege. 127.0.0.1 stays open:
    XGBoost connects to itself there.

    Args:
        host: the IPv4 address that peers connect to: `Member.listen_host`.
    """
    before = {each.inode for each in tcp_sockets() if each.state == _LISTENS}
    yield
    descriptors = sockets_of(Path("/proc/self"))
    found = [each for each in tcp_sockets() if each.inode in descriptors]
    new = [each for each in found if each.state == _LISTENS and each.inode not in before]
    if not new:
        return
    try:
        address = socket.gethostbyname(host)
        for each in new:
            with _opened(descriptors[each.inode]) as listener:
                _attach(listener, _filter(address))
    except OSError as error:  # a kernel or a sandbox without filters, or an address of IPv6
        ports = ", ".join(sorted({str(each.port) for each in new}))
        logger.warning("Others can connect to port %s at all addresses: %s", ports, error)
        return
    for each in found:
        is_of_new = each.port in {listener.port for listener in new}
        if each.state == _IS_CONNECTED and is_of_new and each.address not in (address, _LOOPBACK):
            with suppress(OSError), _opened(descriptors[each.inode]) as stranger:
                stranger.shutdown(socket.SHUT_RDWR)


def _filter(address: str) -> list[tuple[int, int, int, int]]:
    """Return a program that keeps IPv4 packets to two addresses alone: code, jumps, operand."""
    return [
        (0x30, 0, 0, _IP_HEADER),  # the first byte
        (0x74, 0, 0, 4),  # its upper half is the version
        (0x15, 0, 4, 4),
        (0x20, 0, 0, _IP_HEADER + 16),  # the destination
        (0x15, 1, 0, int(ipaddress.IPv4Address(address))),
        (0x15, 0, 1, int(ipaddress.IPv4Address(_LOOPBACK))),
        (0x06, 0, 0, 0xFFFFFFFF),  # keep it
        (0x06, 0, 0, 0),  # drop it
    ]


def _attach(listener: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    given = struct.pack("HP", len(program), ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, given)


@contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket]:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        yield copy


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSocket:
    """A socket of this host's, or a connection that the kernel still keeps."""

    address: str
    port: int
    state: str
    """As the kernel writes it: `0A` listens, `01` is connected."""

    user: int
    inode: str


def are_closing(ports: Collection[int]) -> bool:
    """Return whether some of these ports are kept by connections that are being closed alone."""
    states: dict[int, set[str]] = {}
    for each in _of_ports(ports):
        states.setdefault(each.port, set()).add(each.state)
    return any(found <= _CLOSING for found in states.values())


def port_users(ports: Collection[int]) -> list[str]:
    """Return a description of what uses each of these ports, none of which is free.

    Only of the first few, if there are many.
    """
    by_port: dict[int, TcpSocket] = {}
    for each in _of_ports(ports):
        if each.port not in by_port or each.state not in _CLOSING:
            by_port[each.port] = each
    named = sorted(ports)[:_MOST_NAMED]
    processes = _processes({by_port[port].inode for port in named if port in by_port})
    users = [f"{port} is used by {_user_of(by_port.get(port), processes)}" for port in named]
    return [*users, *(["…"] if len(ports) > len(named) else [])]


def _user_of(each: TcpSocket | None, processes: Mapping[str, str]) -> str:
    if each is None:
        return "a process that doesn't listen yet"
    if each.state in _CLOSING:
        return "a connection that is being closed"
    if each.inode in processes:
        return processes[each.inode]
    try:
        name = pwd.getpwuid(each.user).pw_name
    except KeyError:
        name = str(each.user)
    return f"a process of the user {name}"


def _of_ports(ports: Collection[int]) -> Iterator[TcpSocket]:
    return (each for each in tcp_sockets() if each.port in ports)


def tcp_sockets() -> Iterator[TcpSocket]:
    """Yield the TCP sockets of this host that listen or are connected, of all processes."""
    for table in _TABLES:
        with suppress(OSError):  # a kernel without IPv6
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, user, _, inode, *_ = line.split()
                address, _, port = local.partition(":")
                yield TcpSocket(
                    address=_address(address),
                    port=int(port, 16),
                    state=state,
                    user=int(user),
                    inode=inode,
                )


def _address(text: str) -> str:
    """Return an address from the kernel's words of four bytes, each in this machine's order."""
    words = [bytes.fromhex(text[at : at + 8]) for at in range(0, len(text), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)


def _processes(inodes: Collection[str]) -> dict[str, str]:
    """Return the process of each socket, of those that this process may look at."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for inode in sockets_of(process).keys() & {*inodes}:
                with suppress(OSError):  # gone meanwhile
                    # Not its command line, which may hold a secret.
                    name = (process / "comm").read_text(errors="replace").strip()
                    found[inode] = f"process {process.name} ({name})"
    return found


def sockets_of(process: Path) -> dict[str, int]:
    """Return a descriptor of each socket of a process, by its inode; none of another user's."""
    found = {}
    with suppress(OSError):  # another user's, or gone meanwhile
        for descriptor in os.listdir(process / "fd"):
            with suppress(OSError):  # closed meanwhile
                target = os.readlink(process / "fd" / descriptor)
                if target.startswith("socket:["):
                    found[target[len("socket:[") : -1]] = int(descriptor)
    return found
