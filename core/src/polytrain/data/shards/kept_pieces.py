"""Pieces that are kept decoded while small windows of them are read.

A row group can only be read from its start. So small windows would decode it once for each of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Lock

import pyarrow as pa

from polytrain.data.read.pieces import Piece
from polytrain.data.shards.spilled_piece import SpilledPiece, has_room

logger = logging.getLogger(__name__)

_MOST_KEPT_BYTES = 1 << 27
"""Of all pieces that a pass over a data set keeps in memory. The others are kept on the disk."""


class KeptPieces:
    """Reads parts of pieces. A piece is decoded as a whole when it is read again.

    Nothing is dropped before the pass ends: windows come in random order, so any other piece is as
    likely to be read next. Pieces for which the disk has no room are read from their start for each
    part.
    """

    def __init__(
        self, pieces: Sequence[Piece], columns: list[str], most_bytes: int = _MOST_KEPT_BYTES
    ) -> None:
        self._pieces = pieces
        self._columns = columns
        self._left = most_bytes
        self._row_bytes: dict[int, float] = {}
        self._kept: dict[int, pa.Table] = {}
        self._spilled: dict[int, SpilledPiece] = {}
        self._spills = True
        self._lock = Lock()

    def read(self, number: int, part: range) -> pa.Table:
        """Rows of a piece, counted within it, of which there is at least one."""
        # One thread at a time: two windows of a piece must not both decode it.
        with self._lock:
            if number in self._row_bytes:
                self._keep(number, round(self._row_bytes[number] * self._pieces[number].rows))
            kept, spilled = self._kept.get(number), self._spilled.get(number)
        if kept is not None:
            return kept.slice(part.start, len(part))
        if spilled is not None:
            return spilled.read(part)
        table = self._pieces[number].read(part.start, part.stop, self._columns)
        self._row_bytes[number] = table.nbytes / len(part)
        return table

    def close(self) -> None:
        """Free the disk."""
        for spilled in self._spilled.values():
            spilled.close()

    def _keep(self, number: int, size: int) -> None:
        if number in self._kept or number in self._spilled:
            return
        piece = self._pieces[number]
        if size <= self._left:
            kept = self._kept[number] = piece.read(0, piece.rows, self._columns)
            self._left -= kept.nbytes
        elif self._spills:
            self._spill(number, size)

    def _spill(self, number: int, size: int) -> None:
        piece = self._pieces[number]
        why = "less than a quarter of it would stay free"
        if has_room(size):
            try:
                self._spilled[number] = SpilledPiece(piece.parts(self._columns))
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
