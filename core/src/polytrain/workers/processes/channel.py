"""Sends messages between two processes of a node.

A frame is a length of four bytes and a msgpack value. Messages hold plain values only, so a process
that reads one never imports a framework or executes code. A channel sends frames on a stream
socket. A request to a zygote brings open descriptors; a ring takes reports without a system call.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol
from zlib import crc32

import msgpack

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
        # A thread answers while the training's own thread may send.
        self._lock = threading.Lock()

    def gather_reports(self, ring: Ring, *, calls_every_s: float) -> None:
        """Start to write reports into a ring, and to call its reader at intervals.

        Args:
            calls_every_s: minimum seconds between two calls. The reader also reads again after
                this time.
        """
        self._ring, self._calls_every_s = ring, calls_every_s

    def send(self, *messages: Message) -> None:
        with self._lock:
            self._send(messages)

    def _send(self, messages: tuple[Message, ...]) -> None:
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


_LONGEST_FRAME = 16 << 10
"""Maximum bytes of a request that is sent through the socket.

The socket's buffer is small, and the zygote may be importing: so a longer request is in a memory
file, whose descriptor comes first.
"""

_MAX_DESCRIPTORS = 250
"""Maximum descriptors of one message; the kernel's limit is 253."""

_IN_MEMORY = "in memory"


class LacksDescriptorsError(Exception):
    """The receiver could not open all descriptors that came with a request."""

    def __init__(self, kind: str, details: Sequence[Any]) -> None:
        """
        Args:
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


_COUNTS = struct.Struct("QQ")
"""Total bytes written, and total bytes read."""

_HEADER = struct.Struct("IIQ")
"""A frame's length; its checksum, because counts and bytes may become visible in any order; and the
number of messages sent before it through the socket."""


def calls_every_s(rank: int) -> float:
    """Return the seconds between calls of the reader: fewer for rank 0, which users watch."""
    return 0.5 if rank == 0 else 2.0


class Ring:
    """A ring of reports in memory that a worker process shares with its agent.

    Receiving each report separately costs the agent more time than it costs the worker process to
    send, and on a busy machine training loses this time. So reports are written here without a
    system call, and the agent is called at intervals. Written reports survive the worker process.
    The writer and the reader don't wait for each other.
    """

    def __init__(self, memory: memoryview) -> None:
        """
        Args:
            memory: bytes, initially zero.
        """
        self._counts = memory[: _COUNTS.size].cast("Q")
        self._bytes = memory[_COUNTS.size :]
        self._size = len(self._bytes)

    def put(self, frame: bytes, *, after: int = 0) -> bool:
        """Write a frame, if there is room for it.

        Args:
            after: number of messages sent before it through the socket.
        """
        written, read = self._counts
        entry = _HEADER.pack(len(frame), crc32(frame), after) + frame
        if written - read + len(entry) > self._size:
            return False
        begin = written % self._size
        first = min(len(entry), self._size - begin)
        self._bytes[begin : begin + first] = entry[:first]
        self._bytes[: len(entry) - first] = entry[first:]
        self._counts[0] = written + len(entry)
        return True

    def take(self, *, received: int = 0) -> bytes:
        """Return the new frames, joined, up to the first that follows a message not yet received.

        Args:
            received: number of messages received through the socket.
        """
        taken = b""
        written, read = self._counts
        while read < written:
            length, checksum, after = _HEADER.unpack(self._read(read, _HEADER.size))
            frame = self._read(read + _HEADER.size, length)
            if crc32(frame) != checksum or after > received:
                break
            taken += frame
            read += _HEADER.size + length
        self._counts[1] = read
        return taken

    def close(self) -> None:
        """Release the memory."""
        self._counts.release()
        self._bytes.release()

    def _read(self, at: int, length: int) -> bytes:
        begin = at % self._size
        first = bytes(self._bytes[begin : min(begin + length, self._size)])
        return first + bytes(self._bytes[: length - len(first)])
