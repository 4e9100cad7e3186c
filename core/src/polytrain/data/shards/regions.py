"""Rows that lie together, of which batches are parts: converted once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.shards.formats import batch_of, to_format


class Region:
    """A table, and its columns as arrays as soon as somebody wants them."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @cached_property
    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The columns; where they have no gaps, nothing is copied."""
        arrays: Mapping[str, np.ndarray[Any, Any]] = to_format(self.table, "numpy")
        return arrays


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows start … stop - 1 of a region."""

    region: Region
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @classmethod
    def of(cls, table: pa.Table) -> RowSlice:
        """All rows of a table."""
        return cls(Region(table), 0, table.num_rows)


def excerpts_to_format(excerpts: Sequence[RowSlice], batch_format: str) -> Any:
    """Rows of one or more regions, one after another, in the format that is asked for.

    Arrays may be written to.
    """
    if batch_format != "numpy":
        tables = [part.region.table.slice(part.start, len(part)) for part in excerpts]
        return to_format(tables[0] if len(tables) == 1 else pa.concat_tables(tables), batch_format)
    return {
        field.name: batch_of(
            [part.region.arrays[field.name][part.start : part.stop] for part in excerpts],
            field.type,
        )
        for field in excerpts[0].region.table.schema
    }
