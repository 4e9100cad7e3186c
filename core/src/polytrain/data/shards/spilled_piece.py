"""A piece that is kept decoded in a file without a name, of which any rows can be mapped."""

from __future__ import annotations

import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Iterable

import pyarrow as pa

from polytrain.data.shards.shared_memory import Extent, from_shared_memory

_ALIGNMENT = 64
"""Of Arrow's buffers, so that mapped ones are read as fast as others."""

_SPARE = 4
"""One part in so many of the disk stays free: for checkpoints, and for other programs."""


def has_room(size: int) -> bool:
    """Whether the disk with the temporary files has so many bytes to spare."""
    disk = shutil.disk_usage(tempfile.gettempdir())
    return disk.free - size >= disk.total // _SPARE


class SpilledPiece:
    """The rows of a piece on the disk. They are gone when this is, or its process.

    Each record batch is written by itself, because a single file would have to have one numbering
    of the categories in all of them.
    """

    def __init__(self, parts: Iterable[pa.Table]) -> None:
        """Write the rows.

        Args:
            parts: of the piece, in order.

        Raises:
            OSError: the disk doesn't take them.
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
        """Rows of the piece, of which there is at least one. Nothing is copied."""
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
        """Free the disk. Rows that have been read stay where they are."""
        self._file.close()

    def _append(self, batch: pa.RecordBatch) -> None:
        start = self._file.seek(-(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT)
        with pa.ipc.new_file(self._file, batch.schema) as writer:
            writer.write_batch(batch)
        self._extents.append(Extent(offset=start, size=self._file.tell() - start))
        self._ends.append(batch.num_rows + (self._ends[-1] if self._ends else 0))
