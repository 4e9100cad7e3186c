"""At which addresses a process listens."""

from __future__ import annotations

import ipaddress
import os
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

_LISTENS = "0A"


def listeners(process: int | str = "self") -> list[str]:
    """The address of each TCP socket at which a process listens."""
    return [address for address, _ in listening(process)]


def free_ports(count: int) -> range:
    """Consecutive ports that nobody uses."""
    while True:
        first = random.randrange(20000, 31000)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("", port)))
            return range(first, first + count)


def listening(process: int | str = "self") -> list[tuple[str, int]]:
    """The address and the port of each TCP socket at which a process listens.

    A process that has ended listens nowhere: frameworks start short ones, for a compiler's version
    or the linker's cache.
    """
    inodes = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # the descriptor of the listing itself
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    return [(address, port) for inode, address, port in _listening() if inode in inodes]


def _listening() -> Iterator[tuple[str, str, int]]:
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == _LISTENS:
                address, _, port = local.partition(":")
                yield inode, _address(address), int(port, 16)


def _address(text: str) -> str:
    """An address as the kernel prints it: words of four bytes in this machine's order."""
    words = [bytes.fromhex(text[at : at + 8]) for at in range(0, len(text), 8)]
    ordered = [word[::-1] if sys.byteorder == "little" else word for word in words]
    address = ipaddress.ip_address(b"".join(ordered))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
