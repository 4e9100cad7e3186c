"""Pieces that stay decoded, in memory or on the disk, while small windows of them are read.

A row group can only be read from its start. So small windows would decode it once for each of them.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from itertools import chain
from threading import Lock

import pyarrow as pa

from polytrain.data.read.pieces import Piece
from polytrain.data.shards.shared_memory import mapped

logger = logging.getLogger(__name__)

_MOST_KEPT_BYTES = 1 << 27
"""Maximum memory for the pieces of one pass. Other pieces are kept on the disk."""

_SPARE_DISK = 4
"""1 / 4 of the disk stays free: for checkpoints, and for other programs."""


class KeptPieces:
    """Reads parts of pieces. A piece is decoded as a whole when it is read for the second time.

    Pieces are kept until the pass ends: windows come in random order, so any piece is as likely as
    another to be read next. If the disk has no room for a piece, each part is read from its start.
    """

    def __init__(
        self, pieces: Sequence[Piece], columns: list[str], most_bytes: int = _MOST_KEPT_BYTES
    ) -> None:
        self._pieces = pieces
        self._columns = columns
        self._left = most_bytes
        self._row_bytes: dict[int, float] = {}
        self._kept: dict[int, pa.Table] = {}
        self._spills = True
        self._lock = Lock()

    def read(self, number: int, part: range) -> pa.Table:
        """Read rows of a piece, counted within it, at least one."""
        # One thread at a time: two windows of a piece must not both decode it.
        with self._lock:
            if number in self._row_bytes:
                self._keep(number, round(self._row_bytes[number] * self._pieces[number].rows))
            kept = self._kept.get(number)
        if kept is not None:
            return kept.slice(part.start, len(part))
        table = self._pieces[number].read(part.start, part.stop, self._columns)
        self._row_bytes[number] = table.nbytes / len(part)
        return table

    def close(self) -> None:
        """Free the memory and the disk. Tables that `read` returned stay valid."""
        self._kept.clear()

    def _keep(self, number: int, size: int) -> None:
        if number in self._kept:
            return
        piece = self._pieces[number]
        if size <= self._left:
            kept = self._kept[number] = piece.read(0, piece.rows, self._columns)
            self._left -= kept.nbytes
        elif self._spills:
            self._spill(number, size)

    def _spill(self, number: int, size: int) -> None:
        piece = self._pieces[number]
        disk = shutil.disk_usage(tempfile.gettempdir())
        why = "less than a quarter of it would stay free"
        if disk.free - size >= disk.total // _SPARE_DISK:
            try:
                self._kept[number] = _on_disk(piece.scan(0, piece.rows, self._columns))
            except OSError as error:
                why = str(error)
            else:
                return
        self._spills = False
        logger.warning(
            "%s is read in small windows, and the disk with the temporary files has no room for "
            "its %d MB of decoded rows (%s). So it is read from its start for each window, which "
            "is slow. Set TMPDIR to a larger disk, leave window_rows out, or write smaller row "
            "groups.",
            piece.where,
            size >> 20,
            why,
        )


def _on_disk(parts: Iterable[pa.Table]) -> pa.Table:
    """Rows in a file without a name, which is mapped, and is gone with the last table of it.

    Raises:
        OSError: the disk has no room for them.
    """
    parts = iter(parts)
    first = next(parts)
    with tempfile.TemporaryFile(prefix="polytrain-rows-") as file:
        # A stream: each of its record batches may have categories of its own.
        with pa.ipc.new_stream(file, first.schema) as writer:
            for part in chain([first], parts):
                writer.write_table(part)
        file.flush()
        return pa.ipc.open_stream(pa.py_buffer(mapped(file.fileno()))).read_all()
