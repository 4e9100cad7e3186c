"""Says what uses TCP ports of this host, as far as the kernel tells."""

from __future__ import annotations

import ipaddress
import os
import pwd
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")

_CLOSING = frozenset({"04", "05", "06", "09", "0B"})
"""States of connections that end by themselves: FIN_WAIT1, FIN_WAIT2, TIME_WAIT, LAST_ACK,
CLOSING."""

_MOST_NAMED = 8


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
            for inode in _sockets_of(process).intersection(inodes):
                with suppress(OSError):  # gone meanwhile
                    # Not its command line, which may hold a secret.
                    name = (process / "comm").read_text().strip()
                    found[inode] = f"process {process.name} ({name})"
    return found


def _sockets_of(process: Path) -> set[str]:
    inodes = set()
    with suppress(OSError):  # another user's, or gone meanwhile
        for descriptor in os.listdir(process / "fd"):
            with suppress(OSError):  # closed meanwhile
                target = os.readlink(process / "fd" / descriptor)
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes
