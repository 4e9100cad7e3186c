"""A ring of reports in memory that a worker process shares with its agent.

Receiving each report separately costs the agent more time than it costs the worker process to send,
and on a busy machine training loses this time. So reports are written here without a system call,
and the agent is called at intervals. Written reports survive the worker process.
"""

from __future__ import annotations

import struct
from zlib import crc32

_COUNTS = struct.Struct("QQ")
"""Total bytes written, and total bytes read."""

_HEADER = struct.Struct("IIQ")
"""A frame's length; its checksum, because counts and bytes may become visible in any order; and the
number of messages sent before it through the socket."""


def calls_every_s(rank: int) -> float:
    """Return the seconds between calls of the reader: fewer for rank 0, which users watch."""
    return 0.5 if rank == 0 else 2.0


class Ring:
    """A ring for one writer and one reader, which don't wait for each other."""

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
            frame: the frame.
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
