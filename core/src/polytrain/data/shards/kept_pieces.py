"""Pieces that stay decoded, in memory or on the disk, while small windows of them are read.

A row group can only be read from its start. So small windows would decode it once for each of them.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from threading import Lock

import pyarrow as pa

from polytrain.data.read.pieces import Piece
from polytrain.data.shards.shared_memory import Extent, from_shared_memory

logger = logging.getLogger(__name__)

_MOST_KEPT_BYTES = 1 << 27
"""Maximum memory for the pieces of one pass. Other pieces are kept on the disk."""

_SPARE_DISK = 4
"""1 / 4 of the disk stays free: for checkpoints, and for other programs."""

_ALIGNMENT = 64
"""Alignment of Arrow's buffers, so that mapped ones are read as fast as others."""


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
        self._spilled: dict[int, _SpilledPiece] = {}
        self._spills = True
        self._lock = Lock()

    def read(self, number: int, part: range) -> pa.Table:
        """Read rows of a piece, counted within it, at least one."""
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
        disk = shutil.disk_usage(tempfile.gettempdir())
        why = "less than a quarter of it would stay free"
        if disk.free - size >= disk.total // _SPARE_DISK:
            try:
                self._spilled[number] = _SpilledPiece(piece.scan(0, piece.rows, self._columns))
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


class _SpilledPiece:
    """The decoded rows of a piece in a file without a name, which ends with the process.

    Each record batch is written as an Arrow file of its own: a single one would need the same
    numbers of categories in all batches.
    """

    def __init__(self, parts: Iterable[pa.Table]) -> None:
        """
        Raises:
            OSError: the disk has no room for them.
        """
        self._extents: list[Extent] = []
        self._ends: list[int] = []
        self._file = tempfile.TemporaryFile(prefix="polytrain-rows-")  # noqa: SIM115  # see close
        try:
            for part in parts:
                for batch in part.to_batches():
                    self._append(batch)
            self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def read(self, part: range) -> pa.Table:
        """Map rows of the piece, at least one."""
        tables = []
        for number in range(bisect_right(self._ends, part.start), len(self._ends)):
            table = from_shared_memory(self._file.fileno(), self._extents[number])
            first = self._ends[number] - table.num_rows
            start = max(part.start - first, 0)
            tables.append(table.slice(start, min(part.stop - first, table.num_rows) - start))
            if part.stop <= self._ends[number]:
                break
        return pa.concat_tables(tables)

    def close(self) -> None:
        """Free the disk. Tables that `read` returned stay valid."""
        self._file.close()

    def _append(self, batch: pa.RecordBatch) -> None:
        start = self._file.seek(-(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT)
        with pa.ipc.new_file(self._file, batch.schema) as writer:
            writer.write_batch(batch)
        self._extents.append(Extent(offset=start, size=self._file.tell() - start))
        self._ends.append(batch.num_rows + (self._ends[-1] if self._ends else 0))
