"""External memory: keeps rows and bins on the node's disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import xgboost

from polytrain_plugins import Shard

_BYTES_AT_ONCE = 1 << 26


def spooled(shard: Shard, directory: Path) -> pa.Table:
    """Write a shard to a file, and return it as a memory-mapped table.

    Args:
        shard: the shard, read in parts.
        directory: directory for the file.
    """
    path = directory / f"{shard.name}.arrow"
    at_once = _rows_at_once(shard.schema())
    with pa.ipc.new_file(path, shard.schema()) as file:
        for start in range(0, len(shard), at_once):
            file.write_table(shard.read(range(start, min(start + at_once, len(shard)))))
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


class Pages(xgboost.DataIter):
    """Gives XGBoost a table in parts, which XGBoost bins and keeps on disk."""

    def __init__(self, table: pa.Table, facts: Mapping[str, Any], directory: Path) -> None:
        """
        Args:
            table: the features.
            facts: argument of `xgboost.DMatrix`, such as "label" → its array, shape `[rows]`.
            directory: directory for XGBoost's files.
        """
        self._table = table
        self._facts = facts
        self._at_once = _rows_at_once(table.schema)
        self._start = 0
        super().__init__(cache_prefix=str(directory / "bins"))

    def next(self, input_data: Callable[..., None]) -> bool:
        """Pass the next part to XGBoost, which calls this. Return whether there was one."""
        rows = slice(self._start, self._start + self._at_once)
        if rows.start >= len(self._table):
            return False
        input_data(
            data=self._table.slice(rows.start, self._at_once),
            **{name: values[rows] for name, values in self._facts.items()},
        )
        self._start = rows.stop
        return True

    def reset(self) -> None:
        """Start again with the first part. XGBoost calls this."""
        self._start = 0


def _rows_at_once(schema: pa.Schema) -> int:
    """Return the number of rows in about 64 MiB, at 8 bytes per value."""
    return max(1, _BYTES_AT_ONCE // (8 * len(schema)))
