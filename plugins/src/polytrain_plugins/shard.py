"""One rank's part of a data set, as Arrow record batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow as pa

BatchFormat = Literal["numpy", "pandas", "arrow"]
"""A batch as a dict of column name to array, a `pandas.DataFrame` or a `pyarrow.Table`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """A data set, as it is known before any of its rows is read for training."""

    name: str
    columns: tuple[str, ...] = ()
    """Empty if the data set can't be read, which is a separate problem."""

    num_rows: int | None = 0
    """None if it is not known: a Ray dataset whose pipeline runs while workers train."""

    schema: pa.Schema | None = None
    """Names and types of the columns; None if the types are not known."""

    def lacks(self, column: str) -> bool:
        """Whether the column is known to be missing."""
        return bool(self.columns) and column not in self.columns

    def type_of(self, column: str) -> pa.DataType | None:
        """A column's type; None if it is unknown, or the column doesn't exist."""
        if self.schema is None or self.schema.get_field_index(column) < 0:
            return None
        return self.schema.field(column).type


_OF_TORCH = "it is a method of the torch backend's shards"
_OF_TENSORFLOW = "it is a method of the tensorflow backend's shards"

ABSENT_IN_SHARDS: Mapping[str, str] = {
    "get_context": "a data set is read as DataConfig says: pass dataset_config=… to the trainer",
    "iter_jax_batches": "pass the arrays of iter_batches() to jax.numpy.asarray",
    "iter_tf_batches": _OF_TENSORFLOW,
    "iter_torch_batches": _OF_TORCH,
    "stats": "Result.ledger says where a run's time went",
    "to_tf": _OF_TENSORFLOW,
    "to_torch": "Ray has deprecated it; iterate over iter_torch_batches()",
}
"""Methods of Ray's `DataIterator` that a shard may lack, each with what to use instead."""


class Shard(ABC):
    """The rows of one data set that belong to one rank.

    Every row of the data set is in exactly one rank's shard, unless the backend requests the whole
    data set on every rank (`Demand.whole_datasets`).

    A shard is read as a whole (`to_arrow`, `to_pandas`) or in batches. If the number of ranks has
    changed since the run began, the two divide the data set among the ranks in slightly different
    ways. Iterating has a position, which every checkpoint records.
    """

    name: str
    """The data set's name, as in `datasets={name: …}`."""

    total_rows: int | None
    """Rows of the whole data set, over all ranks; None for a stream of unknown length."""

    gradient_weight: float = 1.0
    """This rank's share of the latest global batch, times the number of ranks. Multiply the mean
    loss over the rank's rows by it: the average over the ranks is then the mean over the global
    batch. On torch, prepared models do so unless it is read."""

    def __getattr__(self, name: str) -> Any:
        instead = ABSENT_IN_SHARDS.get(name)
        what = f"{type(self).__name__} has no {name}"
        raise AttributeError(f"{what}: {instead}." if instead else what, name=name, obj=self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name!r}, a data set of {self.total_rows} rows>"

    @abstractmethod
    def __len__(self) -> int:
        """Rows of this shard as a whole.

        Raises:
            TypeError: for a stream of unknown length.
        """

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Names and types of the columns: `schema().names`, `schema().types`."""

    @abstractmethod
    def to_arrow(self) -> pa.Table:
        """The whole shard as an Arrow table."""

    def read(self, rows: range) -> pa.Table:
        """Some of the whole shard's rows, by their positions in it. If the rows are in files that
        can be read from anywhere, the other rows aren't loaded.
        """
        return self.to_arrow().slice(rows.start, len(rows))

    def padding_row(self) -> pa.Table:
        """A row for an empty batch: the first of this shard, or one beside it if it has none."""
        return self.read(range(1))

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
        batch_format: BatchFormat | Literal["default"] | None = "numpy",
        drop_last: bool = False,
        prefetch_batches: int = 0,
        convert: Callable[[Any], Any] | None = None,
        allow_empty: bool = False,
        local_shuffle_buffer_size: None = None,
        local_shuffle_seed: None = None,
    ) -> Batches:
        """Batches to iterate over, once for each epoch.

        Each iteration is the next epoch, with a new order if the data set is shuffled. Call this
        once before the loop over epochs, or in every epoch: there is no difference. After a
        restart, the first iteration resumes the epoch of the checkpoint, at the first row that
        hadn't been given then. Leaving the loop early ends the epoch.

        Every rank gets the same number of batches, so that no rank waits forever for the others
        if they synchronise once per batch.

        Args:
            batch_size: Rows in a rank's batch, at most; 256 if neither is given.
            global_batch_size: Rows in the batches of all ranks together, at most. They hold the
                same rows at any number of ranks.
            format: "numpy" (dict of column name to array of shape `(rows,)` or `(rows, …)`),
                "pandas" (DataFrame) or "arrow" (Table).
            batch_format: The same as `format`; Ray's name for it. "default" and None are "numpy".
            drop_last: Give full batches only, regardless of the data set's `remainder`.
            prefetch_batches: Prepare this many batches ahead, on a thread.
            convert: Applied to each batch before it is given, on that thread.
            allow_empty: Give some ranks an empty batch if the last global batch has fewer rows than
                there are ranks. Otherwise the one before it leaves it some rows, so that only
                batches of a `global_batch_size`, or of one row, may be empty.
            local_shuffle_buffer_size: Refused; the data set's `DataConfig` has its order.
            local_shuffle_seed: Refused too.

        Raises:
            ValueError: if an argument has a different value.
        """

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        """The rows of the next epoch, one by one, as dicts of column name to value.

        A row counts when it is given. Batches are much faster.
        """
        for batch in self.iter_batches(batch_size=1):
            count = len(next(iter(batch.values()), ()))
            for row in range(count):
                yield {name: _value(array[row]) for name, array in batch.items()}

    def count(self) -> int | None:
        """Rows of this shard as a whole; None for a stream of unknown length."""
        return None if self.total_rows is None else len(self)

    def materialize(self) -> Shard:
        """This shard. It can be read as a whole, also several times, without this call."""
        return self

    @abstractmethod
    def iter_ahead(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
    ) -> BatchesAhead:
        """Batches of NumPy arrays for a framework that takes them long before it trains on them.

        A batch counts when `BatchesAhead.used` is called. If no batch of an epoch was used, the
        next iteration is that epoch again.
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


def refuse_local_shuffle(size: Any, seed: Any) -> None:
    """Raise an error for the arguments of `iter_batches` that shuffle in Ray's way.

    Raises:
        ValueError: one is given.
    """
    given = {"local_shuffle_buffer_size": size, "local_shuffle_seed": seed}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r}: a data set is shuffled as a whole, in an order that a resumed "
                'run repeats. Use DataConfig(shuffle="window", window_rows=…, seed=…), or '
                "shuffle=True."
            )


def _value(cell: Any) -> Any:
    """A number or truth value of NumPy as Python's; anything else as it is."""
    kind = getattr(getattr(cell, "dtype", None), "kind", "")
    return cell.item() if kind in ("b", "i", "u", "f") and cell.shape == () else cell


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
        """Count the next `count` of the taken batches as trained on."""

    @abstractmethod
    def all_used(self) -> None:
        """Count all taken batches as trained on, and end the epoch.

        The rest of an epoch that a restart has resumed may have been taken at a look at its first
        batch: it counts once the training function reports.
        """


class ShardView(Shard):
    """A wrapper around a shard, whose subclasses add ways to read it, for `Engine.adapt`."""

    def __init__(self, shard: Shard) -> None:
        self.name = shard.name
        self.total_rows = shard.total_rows
        self._shard = shard

    @property
    def gradient_weight(self) -> float:  # type: ignore[override]  # derived here, stored elsewhere
        return self._shard.gradient_weight

    def __len__(self) -> int:
        return len(self._shard)

    def schema(self) -> pa.Schema:
        return self._shard.schema()

    def to_arrow(self) -> pa.Table:
        return self._shard.to_arrow()

    def read(self, rows: range) -> pa.Table:
        return self._shard.read(rows)

    def padding_row(self) -> pa.Table:
        return self._shard.padding_row()

    def to_pandas(self) -> Any:
        return self._shard.to_pandas()

    def iter_batches(self, **arguments: Any) -> Batches:
        return self._shard.iter_batches(**arguments)

    def iter_ahead(self, **arguments: Any) -> BatchesAhead:
        return self._shard.iter_ahead(**arguments)

    def num_batches(self, **arguments: Any) -> int:
        return self._shard.num_batches(**arguments)
