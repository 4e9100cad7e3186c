"""Compressed files: which they are, and what is in them."""

from __future__ import annotations

import os
from typing import Any

from polytrain.storage.filesystems import ResolvedPath

_CODECS = {
    **{".gz": "gzip", ".gzip": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd"},
    **{".lz4": "lz4", ".br": "brotli", ".brotli": "brotli"},
}


def without_compression(name: str) -> str:
    """A file's name without the ending of a compression, if it has one."""
    stem, ending = os.path.splitext(name)
    return stem if ending.lower() in _CODECS else name


def open_decompressed(where: ResolvedPath) -> Any:
    """What is in a file, from its start; its name tells whether it is compressed."""
    ending = os.path.splitext(where.path)[1].lower()
    # Arrow itself doesn't know all of these endings.
    return where.filesystem.open_input_stream(where.path, compression=_CODECS.get(ending))
