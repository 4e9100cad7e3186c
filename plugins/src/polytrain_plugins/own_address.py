"""Has a framework that listens at all addresses of a host be reached at one of them alone."""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from polytrain_plugins.port_users import tcp_sockets

logger = logging.getLogger(__name__)

_SO_ATTACH_FILTER = 26
_IP_HEADER = 0xFFF00000
"""Where a socket's filter finds the header of IP, as `SKF_NET_OFF` of Linux says."""

_LOOPBACK = "127.0.0.1"

_LISTENS, _IS_CONNECTED = "0A", "01"


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
    descriptors = _descriptors()
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


def _descriptors() -> dict[str, int]:
    """Return a descriptor of each socket of this process, by its inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[target[len("socket:[") : -1]] = int(name)
    return found
