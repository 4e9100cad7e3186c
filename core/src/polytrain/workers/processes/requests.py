"""Sends and receives requests to a zygote: a message with open descriptors.

The socket's buffer is small, and the zygote may be importing: so a long message is in a memory
file, whose descriptor comes first.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from polytrain.workers.processes.channel import pack, receive_exactly, unpack

_LONGEST_FRAME = 16 << 10
"""Maximum bytes of a request that is sent through the socket."""

_MAX_DESCRIPTORS = 250
"""Maximum descriptors of one message; the kernel's limit is 253."""

_IN_MEMORY = "in memory"


class LacksDescriptorsError(Exception):
    """The receiver could not open all descriptors that came with a request."""

    def __init__(self, kind: str, details: Sequence[Any]) -> None:
        """
        Args:
            kind: kind of the request.
            details: its other fields; the first field of a "fork" is its id.
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
        LacksDescriptorsError: this process has no descriptors left. Received ones are closed.
        EOFError: the client is gone.
        IndexError, OSError, ValueError: the client violates the protocol.
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
    # Send the descriptors with the first bytes; the rest may need several messages.
    socket.send_fds(connection, [frame[:4]], list(descriptors))
    connection.sendall(frame[4:])


def _content(descriptor: int) -> bytes:
    """Return the content of a memory file, and close it."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()
