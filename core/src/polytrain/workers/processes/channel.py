"""Sends framed messages between two processes on a stream socket.

A frame is a length of four bytes and a msgpack value. Messages hold plain values only, so a process
that reads one never imports a framework or executes code.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from typing import Any, Protocol

import msgpack

from polytrain.workers.processes.report_ring import Ring

Message = list[Any]
"""A message's kind, then its fields."""

_LENGTH = struct.Struct(">I")

_LONGEST_READ = 1 << 20

# Texts may contain file names that aren't valid UTF-8, as lone surrogates.
_UNDECODABLE = "surrogatepass"


class ConnectionClosedError(EOFError):
    """The other end is gone. Training may raise plain EOFError itself."""


class Channel(Protocol):
    """A worker process's channel to its agent."""

    def send(self, *messages: Message) -> None:
        """Send messages, which then survive this process."""

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            ConnectionClosedError: the other end is gone.
        """

    def poll(self) -> Message | None:
        """Return the next message, if there is one.

        Raises:
            ConnectionClosedError: the other end is gone.
        """


class SocketChannel:
    """A channel over a stream socket. `send` returns once the kernel has the message."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._ring: Ring | None = None
        self._calls_every_s = 0.0
        self._called = -math.inf
        self._sent = 0

    def gather_reports(self, ring: Ring, *, calls_every_s: float) -> None:
        """Start to write reports into a ring, and to call its reader at intervals.

        Args:
            ring: the ring to write to.
            calls_every_s: minimum seconds between two calls. The reader also reads again after
                this time.
        """
        self._ring, self._calls_every_s = ring, calls_every_s

    def send(self, *messages: Message) -> None:
        if self._ring is not None and messages[0][0] == "report":
            # `after` orders the report among the socket's messages. If the ring is full, the report
            # goes through the socket.
            report, *others = messages
            if self._ring.put(pack(report), after=self._sent):
                if not others and not self._may_call():
                    return
                messages = tuple(others) or (_CALL,)
        self._sent += len(messages)
        self._socket.sendall(b"".join(map(pack, messages)))

    def _may_call(self) -> bool:
        """Return whether to call the ring's reader now, and note the call."""
        now = time.monotonic()
        if now - self._called < self._calls_every_s:
            return False
        self._called = now
        return True

    def receive(self) -> Message:
        (length,) = _LENGTH.unpack(receive_exactly(self._socket, _LENGTH.size))
        message: Message = unpack(receive_exactly(self._socket, length))
        return message

    def poll(self) -> Message | None:
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        # Messages to worker processes are short and arrive in one piece.
        return self.receive()


class FrameBuffer:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add received bytes; return the messages that are now complete."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(unpack(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


class ReportReader:
    """Reads a ring's reports, in order with the messages of the socket."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._frames = FrameBuffer()
        self._received = 0

    def take(self) -> list[Message]:
        """Return the new reports, up to the first that follows a message not yet received."""
        return self._frames.feed(self._ring.take(received=self._received))

    def before_message(self) -> list[Message]:
        """Return the new reports before the socket's next message. Call it for each message."""
        reports = self.take()
        self._received += 1
        return reports

    def close(self) -> None:
        """Release the ring's memory."""
        self._ring.close()


def pack(message: Any) -> bytes:
    """Return the frame of a message."""
    body: bytes = msgpack.packb(message, unicode_errors=_UNDECODABLE)
    return _LENGTH.pack(len(body)) + body


_CALL: Message = ["reports"]


def unpack(body: bytes) -> Any:
    """Return the message in a frame's body."""
    return msgpack.unpackb(body, strict_map_key=False, unicode_errors=_UNDECODABLE)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Read this many bytes.

    Raises:
        ConnectionClosedError: the other end closed the connection first.
    """
    parts = bytearray()
    while len(parts) < size:
        data = connection.recv(min(size - len(parts), _LONGEST_READ))
        if not data:
            raise ConnectionClosedError("the other end of the connection is gone")
        parts += data
    return bytes(parts)
