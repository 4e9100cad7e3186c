"""Rows that lie together, of which batches are parts: converted once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.formats import to_format


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
class Excerpt:
    """Rows start … stop - 1 of a region."""

    region: Region
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @classmethod
    def of(cls, table: pa.Table) -> Excerpt:
        """All rows of a table."""
        return cls(Region(table), 0, table.num_rows)


def excerpts_to_format(excerpts: Sequence[Excerpt], batch_format: str) -> Any:
    """Rows of one or more regions, one after another, in the format that is asked for."""
    if batch_format != "numpy":
        tables = [part.region.table.slice(part.start, len(part)) for part in excerpts]
        return to_format(tables[0] if len(tables) == 1 else pa.concat_tables(tables), batch_format)
    if len(excerpts) == 1:
        [part] = excerpts
        return {name: array[part.start : part.stop] for name, array in part.region.arrays.items()}
    return {
        name: np.concatenate([p.region.arrays[name][p.start : p.stop] for p in excerpts])
        for name in excerpts[0].region.arrays
    }
