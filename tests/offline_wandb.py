"""Reads the file of an offline run of Weights & Biases: records in the log format of LevelDB."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_FILE_HEADER, _CHUNK_HEADER = 7, struct.Struct("<IHB")
_FULL, _LAST = 1, 4


def closed_records(path: Path) -> list[Any]:
    """Return the records of a run that was closed: wandb's own process has written the last one."""
    records = list(offline_records(path))
    assert any(each.HasField("exit") for each in records), f"{path} has no end"
    return records


def offline_records(path: Path) -> Iterator[Any]:
    """Yield the records of a file `*.wandb`."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    assert content[:4] in (b"", b":W&B")
    position, record = _FILE_HEADER, b""
    while position + _CHUNK_HEADER.size <= len(content):
        left_in_block = _BLOCK - position % _BLOCK
        if left_in_block < _CHUNK_HEADER.size:
            position += left_in_block
            continue
        _, length, kind = _CHUNK_HEADER.unpack_from(content, position)
        position += _CHUNK_HEADER.size
        record += content[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            yield Record.FromString(record)
            record = b""
