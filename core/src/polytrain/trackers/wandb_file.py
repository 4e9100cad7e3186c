"""Waits until the file of an offline run of Weights & Biases is complete on disk.

wandb's own process writes it, and `finish()` returns before the last records are written. The
format is LevelDB's log: blocks of 32 KiB with chunks, each a record or a part of one.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_BLOCK = 32 * 1024
_FILE_HEADER = 7
_CHUNK_HEADER = struct.Struct("<IHB")
"""Checksum, length and kind of a chunk."""

_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

_LOOK_EVERY_S = 0.01


def wait_until_complete(file: Path, *, within_s: float) -> None:
    """Wait until a run's file is complete and synced.

    Args:
        file: `run-ID.wandb` of a finished run.
        within_s: seconds after which to stop waiting.

    Raises:
        OSError: the file can't be read.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    def ends_run(record: bytes) -> bool:
        return bool(Record.FromString(record).HasField("exit"))

    deadline = time.monotonic() + within_s
    while not _has_end(file, ends_run) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    for path in (file, file.parent):
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _has_end(file: Path, ends_run: Callable[[bytes], bool]) -> bool:
    """Return whether one of the last records is the run's end."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        # The record of the end is small, and few records follow it.
        start = max(0, size // _BLOCK - 1) * _BLOCK
        opened.seek(start)
        content = opened.read()
    return any(map(ends_run, _records(content, at_start=start == 0)))


def _records(content: bytes, *, at_start: bool) -> Iterator[bytes]:
    """Yield the complete records in some blocks.

    Args:
        content: the blocks; the last one may be incomplete.
        at_start: whether these are the file's first blocks.
    """
    position = _FILE_HEADER if at_start else 0
    record: bytes | None = None
    while position + _CHUNK_HEADER.size <= len(content):
        left_in_block = _BLOCK - position % _BLOCK
        if left_in_block < _CHUNK_HEADER.size:
            position += left_in_block
            continue
        _, length, kind = _CHUNK_HEADER.unpack_from(content, position)
        position += _CHUNK_HEADER.size
        chunk = content[position : position + length]
        position += length
        if position > len(content):
            return
        if kind in (_FULL, _FIRST):
            record = chunk
        elif record is not None and kind in (_MIDDLE, _LAST):
            record += chunk
        if record is not None and kind in (_FULL, _LAST):
            yield record
            record = None
