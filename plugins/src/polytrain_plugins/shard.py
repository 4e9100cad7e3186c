"""One rank's part of a data set, as Arrow record batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow as pa

BatchFormat = Literal["numpy", "pandas", "arrow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """What is known of a data set before any of its rows is read for training."""

    name: str
    columns: tuple[str, ...] = ()
    """Empty if the data set can't be read, which is a problem of its own."""

    num_rows: int = 0

    def lacks(self, column: str) -> bool:
        """Whether there certainly is no such column."""
        return bool(self.columns) and column not in self.columns


class Shard(ABC):
    """The rows of one data set that belong to one rank.

    Every row of the data set is in exactly one rank's shard, unless the backend asked for the
    whole set on every rank (`Demand.whole_datasets`).
    """

    name: str
    """The data set's name, as in `datasets={name: …}`."""

    total_rows: int
    """Rows of the whole data set, over all ranks."""

    @abstractmethod
    def __len__(self) -> int:
        """Rows of this shard."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""

    @abstractmethod
    def to_arrow(self) -> pa.Table:
        """The whole shard as an Arrow table. Nothing is copied."""

    @abstractmethod
    def to_pandas(self) -> Any:
        """The whole shard as a `pandas.DataFrame`."""

    @abstractmethod
    def iter_batches(
        self,
        *,
        batch_size: int = 256,
        batch_format: BatchFormat = "numpy",
        drop_last: bool = False,
    ) -> Iterator[Any]:
        """Iterate over the shard once.

        Every rank gets the same number of batches, so that ranks that synchronise once a batch
        never wait for one another in vain.

        Args:
            batch_size: Rows in a batch, at most. Without `drop_last` the rows are spread evenly
                over the batches, so batches of different ranks differ by at most one row.
            batch_format: "numpy" (dict of column name to array of shape `(rows,)` or
                `(rows, …)`), "pandas" (DataFrame) or "arrow" (Table).
            drop_last: Give full batches only and leave the rest of the rows out.

        Raises:
            ValueError: if `batch_size` is not positive or `batch_format` is unknown.
        """


class ShardView(Shard):
    """Another shard, for a subclass to add ways of reading it: what `Engine.adapt` returns."""

    def __init__(self, shard: Shard) -> None:
        self.name = shard.name
        self.total_rows = shard.total_rows
        self._shard = shard

    def __len__(self) -> int:
        return len(self._shard)

    @property
    def schema(self) -> pa.Schema:
        return self._shard.schema

    def to_arrow(self) -> pa.Table:
        return self._shard.to_arrow()

    def to_pandas(self) -> Any:
        return self._shard.to_pandas()

    def iter_batches(
        self,
        *,
        batch_size: int = 256,
        batch_format: BatchFormat = "numpy",
        drop_last: bool = False,
    ) -> Iterator[Any]:
        return self._shard.iter_batches(
            batch_size=batch_size, batch_format=batch_format, drop_last=drop_last
        )
