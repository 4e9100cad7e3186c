"""Requests to a zygote: a message with open descriptors, on both ends of its socket.

The socket takes little, and the zygote may be importing: so a long message is in a file in memory,
and the descriptor of that file comes first.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from polytrain.workers.processes.channel import pack, receive_exactly, unpack

_LONGEST_FRAME = 16 << 10
"""Bytes of a request that are sent through the socket."""

_MAX_DESCRIPTORS = 250
"""Descriptors that one message can carry; the kernel's limit is 253."""

_IN_MEMORY = "in memory"


class LacksDescriptorsError(Exception):
    """The receiver could not open all descriptors that came with a request."""

    def __init__(self, kind: str, details: Sequence[Any]) -> None:
        """
        Args:
            kind: the request's.
            details: what else is known of it; of a "fork" its id comes first.
        """
        super().__init__(kind, details)
        self.kind = kind
        self.details = details


def send_request(
    connection: socket.socket, message: Sequence[Any], descriptors: Sequence[int]
) -> None:
    """Send a request, without waiting for the zygote."""
    frame = pack(message)
    if len(frame) <= _LONGEST_FRAME:
        _send(connection, frame, descriptors)
        return
    content = os.memfd_create("polytrain-request")
    try:
        with os.fdopen(content, "wb", closefd=False) as file:
            file.write(frame)
        kind, *others = message
        header = [kind, *others[:1]] if kind == "fork" else [kind]
        _send(connection, pack([_IN_MEMORY, *header]), [content, *descriptors])
    finally:
        os.close(content)


def receive_request(connection: socket.socket) -> tuple[list[Any], list[int]]:
    """Receive a request and its descriptors.

    Raises:
        LacksDescriptorsError: there were no descriptors left for it. Those that came are closed.
        EOFError: the client is gone.
        IndexError, OSError, ValueError: it doesn't keep to the protocol.
    """
    header, descriptors, flags, _ = socket.recv_fds(connection, 4, _MAX_DESCRIPTORS)
    try:
        header += receive_exactly(connection, 4 - len(header))
        message = unpack(receive_exactly(connection, int.from_bytes(header, "big")))
        if flags & socket.MSG_CTRUNC:
            kind, *details = message[1:] if message[0] == _IN_MEMORY else message
            raise LacksDescriptorsError(kind, details)
        if message[0] == _IN_MEMORY:
            message = unpack(_content(descriptors.pop(0))[4:])
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message, descriptors


def _send(connection: socket.socket, frame: bytes, descriptors: Sequence[int]) -> None:
    # The descriptors are sent with the first bytes; the rest may need several messages.
    socket.send_fds(connection, [frame[:4]], list(descriptors))
    connection.sendall(frame[4:])


def _content(descriptor: int) -> bytes:
    """Return the content of a file in memory, which is closed."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()
