"""Pieces that are kept decoded while small windows of them are read.

A row group can only be read from its start. So small windows would decode it once for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import pyarrow as pa

from polytrain.data.sources.pieces import Piece

MOST_KEPT_BYTES = 1 << 27
"""Of all pieces that a pass over a data set keeps."""


class KeptPieces:
    """Reads parts of pieces. A piece that fits is decoded as a whole when it is read again.

    Nothing is dropped before the pass ends: windows come in random order, so any other piece is as
    likely to be read next. Pieces that don't fit are read from their start for each part.
    """

    def __init__(
        self, pieces: Sequence[Piece], columns: list[str], most_bytes: int = MOST_KEPT_BYTES
    ) -> None:
        self._pieces = pieces
        self._columns = columns
        self._left = most_bytes
        self._row_bytes: dict[int, float] = {}
        self._kept: dict[int, pa.Table] = {}
        self._lock = Lock()

    def read(self, number: int, part: range) -> pa.Table:
        """Rows of a piece, counted within it."""
        # One thread at a time: two windows of a piece must not both decode it.
        with self._lock:
            kept = self._kept.get(number)
            if kept is None and self._fits(number):
                kept = self._kept[number] = self._decoded(number, range(self._pieces[number].rows))
                self._left -= kept.nbytes
        if kept is not None:
            return kept.slice(part.start, len(part))
        table = self._decoded(number, part)
        self._row_bytes[number] = table.nbytes / len(part)
        return table

    def _fits(self, number: int) -> bool:
        row_bytes = self._row_bytes.get(number)
        return row_bytes is not None and row_bytes * self._pieces[number].rows <= self._left

    def _decoded(self, number: int, part: range) -> pa.Table:
        return self._pieces[number].read(part.start, part.stop, self._columns)
