"""One rank's part of a data set, as Arrow record batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
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

    num_rows: int | None = 0
    """None if it is not known: a Ray dataset whose pipeline runs while workers train."""

    schema: pa.Schema | None = None
    """Names and types of the columns; None if the types are not known."""

    def lacks(self, column: str) -> bool:
        """Whether there certainly is no such column."""
        return bool(self.columns) and column not in self.columns


class Shard(ABC):
    """The rows of one data set that belong to one rank.

    Every row of the data set is in exactly one rank's shard, unless the backend asked for the
    whole set on every rank (`Demand.whole_datasets`).

    There are two ways to read it, which divide the data set among the ranks in slightly different
    ways when their number has changed since the run began: as a whole (`to_arrow`, `to_pandas`), or
    in batches. Iterating has a position, which every checkpoint records.
    """

    name: str
    """The data set's name, as in `datasets={name: …}`."""

    total_rows: int | None
    """Rows of the whole data set, over all ranks; None for a stream of unknown length."""

    gradient_weight: float = 1.0
    """Of the batch that was given last: this rank's part of the global batch, times the number of
    ranks. A loss that is a mean over the batch's rows, times this, averages over the ranks to the
    mean over the global batch."""

    @abstractmethod
    def __len__(self) -> int:
        """Rows of this shard as a whole.

        Raises:
            TypeError: for a stream of unknown length.
        """

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""

    @abstractmethod
    def to_arrow(self) -> pa.Table:
        """The whole shard as an Arrow table."""

    def read(self, rows: range) -> pa.Table:
        """Some of the whole shard's rows, by their places in it: without the others in memory,
        where these lie in files that can be read from anywhere.
        """
        return self.to_arrow().slice(rows.start, len(rows))

    @abstractmethod
    def to_pandas(self) -> Any:
        """The whole shard as a `pandas.DataFrame`."""

    @abstractmethod
    def iter_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        format: BatchFormat | None = None,
        batch_format: BatchFormat = "numpy",
        drop_last: bool = False,
        prefetch_batches: int = 0,
        convert: Callable[[Any], Any] | None = None,
    ) -> Batches:
        """Batches to iterate over, as often as there are epochs.

        Each iteration is the next epoch, with an order of its own if the data set is shuffled. It
        makes no difference whether this is called once, before the loop over epochs, or in every
        epoch. After a restart, the first iteration resumes the epoch that the checkpoint was made
        in, at the row after the last one given by then. Leaving the loop early ends the epoch.

        Every rank gets the same number of batches, so that ranks that synchronise once a batch
        never wait for one another in vain.

        Args:
            batch_size: Rows in a rank's batch, at most; 256 if neither is given.
            global_batch_size: Rows in the batches of all ranks together, at most. They hold the
                same rows whatever the number of ranks.
            format: "numpy" (dict of column name to array of shape `(rows,)` or `(rows, …)`),
                "pandas" (DataFrame) or "arrow" (Table).
            batch_format: The same, by the name that Ray has for it.
            drop_last: Give full batches only, whatever the data set's remainder policy is.
            prefetch_batches: Prepare this many batches ahead, on a thread.
            convert: Applied to each batch before it is given, on that thread.

        Raises:
            ValueError: if an argument has none of these values.
        """

    @abstractmethod
    def iter_ahead(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
    ) -> BatchesAhead:
        """The same for a framework that takes batches long before it trains on them.

        In NumPy's format. Nothing counts before `BatchesAhead.used` says so; an epoch of which
        nothing was used is the next one's still.
        """

    @abstractmethod
    def num_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
    ) -> int:
        """How many batches the next `iter_batches` with these arguments gives.

        Raises:
            TypeError: for a stream of unknown length.
        """


class Batches(Iterable[Any]):
    """A shard's batches: each iteration is the next epoch."""

    def __init__(self, epoch: Callable[[], Iterator[Any]], length: Callable[[], int]) -> None:
        """
        Args:
            epoch: starts the next epoch.
            length: how many batches a whole epoch has.
        """
        self._epoch = epoch
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        return self._epoch()

    def __len__(self) -> int:
        """How many batches a whole epoch has.

        The iteration that resumes an epoch after a restart gives fewer: see `Shard.num_batches`.

        Raises:
            TypeError: for a stream of unknown length.
        """
        return self._length()


class BatchesAhead(Iterator[Any]):
    """The batches of one epoch, taken ahead of their use."""

    @abstractmethod
    def used(self, count: int = 1) -> None:
        """So many batches more, of those that were taken, have been trained on."""

    @abstractmethod
    def all_used(self) -> None:
        """All batches that were taken have been trained on, and no more will be."""


class ShardView(Shard):
    """Another shard, for a subclass to add ways of reading it: what `Engine.adapt` returns."""

    def __init__(self, shard: Shard) -> None:
        self.name = shard.name
        self.total_rows = shard.total_rows
        self._shard = shard

    @property
    def gradient_weight(self) -> float:  # type: ignore[override]  # derived here, stored elsewhere
        return self._shard.gradient_weight

    def __len__(self) -> int:
        return len(self._shard)

    @property
    def schema(self) -> pa.Schema:
        return self._shard.schema

    def to_arrow(self) -> pa.Table:
        return self._shard.to_arrow()

    def read(self, rows: range) -> pa.Table:
        return self._shard.read(rows)

    def to_pandas(self) -> Any:
        return self._shard.to_pandas()

    def iter_batches(self, **arguments: Any) -> Batches:
        return self._shard.iter_batches(**arguments)

    def iter_ahead(self, **arguments: Any) -> BatchesAhead:
        return self._shard.iter_ahead(**arguments)

    def num_batches(self, **arguments: Any) -> int:
        return self._shard.num_batches(**arguments)
