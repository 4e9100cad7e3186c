"""Reports on their way to the agent: a ring in memory that both have mapped.

To be told of every report at once costs an agent more than the report costs the worker: on a
machine whose cores are all in use, that time is taken from training. So reports are written here,
without a system call, and the agent is called when it hasn't been for a while. What is written
survives its writer.
"""

from __future__ import annotations

import struct
from zlib import crc32

_COUNTS = struct.Struct("QQ")
"""Bytes that were ever written, and ever read."""

_HEADER = struct.Struct("II")
"""Of a frame: its length, and its checksum: counts and bytes may become visible in any order."""


def calls_every_s(rank: int) -> float:
    """Seconds between two calls of the reader. Rank 0's reports are what people look at."""
    return 0.5 if rank == 0 else 2.0


class Ring:
    """One writer, one reader. Neither waits for the other."""

    def __init__(self, memory: memoryview) -> None:
        """
        Args:
            memory: of bytes, zero at first.
        """
        self._counts = memory[: _COUNTS.size].cast("Q")
        self._bytes = memory[_COUNTS.size :]
        self._size = len(self._bytes)

    def put(self, frame: bytes) -> bool:
        """Write a frame, if there is room for it."""
        written, read = self._counts
        entry = _HEADER.pack(len(frame), crc32(frame)) + frame
        if written - read + len(entry) > self._size:
            return False
        begin = written % self._size
        first = min(len(entry), self._size - begin)
        self._bytes[begin : begin + first] = entry[:first]
        self._bytes[: len(entry) - first] = entry[first:]
        self._counts[0] = written + len(entry)
        return True

    def take(self) -> bytes:
        """All frames that were written since, one after another."""
        taken = b""
        written, read = self._counts
        while read < written:
            length, checksum = _HEADER.unpack(self._read(read, _HEADER.size))
            frame = self._read(read + _HEADER.size, length)
            if crc32(frame) != checksum:
                break
            taken += frame
            read += _HEADER.size + length
        self._counts[1] = read
        return taken

    def close(self) -> None:
        """Let go of the memory."""
        self._counts.release()
        self._bytes.release()

    def _read(self, at: int, length: int) -> bytes:
        begin = at % self._size
        first = bytes(self._bytes[begin : min(begin + length, self._size)])
        return first + bytes(self._bytes[: length - len(first)])
