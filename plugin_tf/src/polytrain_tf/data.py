"""A shard as `tf.data`, which reads ahead, so used batches are counted separately."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from polytrain.extension import check_named, check_range
from polytrain_plugins import Batches, BatchesAhead, Shard, ShardView, column_remedy
from polytrain_plugins.shard import refuse_local_shuffle
from polytrain_tf.private import patch_tf_keras

Columns = Sequence[str] | str
"""One column, or a list of several."""

TypeSpecs = Any
"""A `tf.TensorSpec` of one column, or of each by name; None for the default."""


class TensorFlowShard(ShardView):
    """A shard that is also a `tf.data.Dataset`."""

    def __init__(self, shard: Shard, strategy: tf.distribute.Strategy) -> None:
        super().__init__(shard)
        self._strategy = strategy
        self._taken: BatchesAhead | None = None
        self._reported = False

    def to_tf(
        self,
        feature_columns: Columns,
        label_columns: Columns,
        *,
        additional_columns: Columns | None = None,
        prefetch_batches: int = 1,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: None = None,
        local_shuffle_seed: None = None,
        feature_type_spec: TypeSpecs = None,
        label_type_spec: TypeSpecs = None,
        additional_type_spec: TypeSpecs = None,
        weight_column: str | None = None,
        as_matrix: bool = False,
    ) -> Any:
        """A data set of (features, labels) pairs, for `model.fit` or a custom loop.

        Each iteration is an epoch of this worker's rows. Every worker gets the same number of
        batches. TensorFlow doesn't split the data set again. After a restart `model.fit` resumes at
        the first batch that it hasn't trained on. `take(1)` gives the first one, to look at.
        In a custom loop call `used()` after each step;
        otherwise a restart resumes at the start of the epoch.

        Args:
            feature_columns: one column, which becomes a tensor of shape `(rows, …)`, or a list,
                which becomes a dict of column name to tensor. Columns become float32, except
                integers of 32 and 64 bits.
            label_columns: one column with labels, or a list; they become float32.
            additional_columns: the third element of each batch, such as the rows' weights; as
                `label_columns`.
            prefetch_batches: prepare this many batches ahead; TensorFlow may do so itself.
            batch_size: rows in a worker's batch, at most; see `Shard.iter_batches`.
            global_batch_size: rows in the batches of all workers together, at most.
            drop_last: give full batches only.
            local_shuffle_buffer_size: refused; the data set's `DataConfig` has its order.
            local_shuffle_seed: refused too.
            feature_type_spec: a `tf.TensorSpec` with the type of the features; of several columns
                a dict of one for each.
            label_type_spec: the same for the labels.
            additional_type_spec: the same for the third element.
            weight_column: the same as `additional_columns`.
            as_matrix: several feature columns become one float32 matrix `(rows, columns)`.

        Raises:
            KeyError: if there is no such column.
            ValueError: if a refused argument is given, or both names of the third element.
        """
        refuse_local_shuffle(local_shuffle_buffer_size, local_shuffle_seed)
        if weight_column is not None and additional_columns is not None:
            raise ValueError(
                "to_tf() got both weight_column and additional_columns, which are the same: pass "
                "one of them."
            )
        third = weight_column if additional_columns is None else additional_columns
        chosen = [(label_columns, label_type_spec)]
        if third is not None:
            chosen.append((third, additional_type_spec))
        for columns in (feature_columns, *(columns for columns, _ in chosen)):
            self._expect_columns(columns)
        sizes: dict[str, Any] = {
            "batch_size": batch_size,
            "global_batch_size": global_batch_size,
            "drop_last": drop_last,
        }

        def parts(batch: Any) -> tuple[Any, ...]:
            features = (
                matrix_of(batch, feature_columns)
                if as_matrix
                else columns_of(batch, feature_columns, feature_type_spec, keeps_integers=True)
            )
            return features, *(
                columns_of(batch, columns, specs, keeps_integers=False) for columns, specs in chosen
            )

        def batches() -> Iterator[tuple[Any, ...]]:
            self._taken = taken = self.iter_ahead(**sizes)
            yield from map(parts, taken)
            if not self._reported:
                # A loop that never calls `used` has used all batches.
                taken.all_used()

        signature = tf.nest.map_structure(_batches_like, parts(_no_rows(self)))
        local = tf.data.Dataset.from_generator(batches, output_signature=signature)
        if prefetch_batches > 1:
            local = local.prefetch(prefetch_batches)
        dataset = self._distributed(local)
        whole = functools.partial(len, self.iter_batches(**sizes))
        return _with_length(dataset, self, functools.partial(self.num_batches, **sizes), whole)

    def _expect_columns(self, columns: Columns) -> None:
        for name in [columns] if isinstance(columns, str) else columns:
            if name not in self.schema().names:
                raise KeyError(
                    f"No column {name!r} in {self.name!r}. "
                    f"{column_remedy(name, self.schema().names)}."
                )

    def _distributed(self, dataset: Any) -> Any:
        """The data set for this run's strategy, which doesn't split it."""
        if self._strategy.num_replicas_in_sync == 1:
            return dataset
        patch_tf_keras()

        def take(count: int) -> Any:
            taken = dataset.take(count)
            taken.polytrain_is_taken = True
            return taken

        distributed = self._strategy.distribute_datasets_from_function(lambda _: dataset)
        # This worker's own batches, to look at; `fit` refuses them.
        distributed.take = take
        return distributed

    def iter_tf_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
        prefetch_batches: int = 1,
        dtypes: tf.DType | Mapping[str, tf.DType] | None = None,
        local_shuffle_buffer_size: None = None,
        local_shuffle_seed: None = None,
    ) -> Batches:
        """Batches as dicts of column name to tensor, for custom loops.

        Each iteration is an epoch; see `Shard.iter_batches`.

        Args:
            batch_size: rows in a worker's batch, at most.
            global_batch_size: rows in the batches of all workers together, at most.
            drop_last: give full batches only.
            prefetch_batches: prepare this many batches ahead, on a thread.
            dtypes: type of all columns, or of each by name; otherwise that of the data.
            local_shuffle_buffer_size: refused; the data set's `DataConfig` has its order.
            local_shuffle_seed: refused too.

        Raises:
            ValueError: if a refused argument is given, `dtypes` names no column, or a type of
                whole numbers doesn't hold the values.
            TypeError: if a column can't become a tensor, such as lists that differ in shape.
        """
        check_named(dtypes, self.schema().names)

        def tensors(batch: dict[str, Any]) -> dict[str, tf.Tensor]:
            return {name: _tensor(name, array, dtypes) for name, array in batch.items()}

        return self.iter_batches(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
            prefetch_batches=prefetch_batches,
            convert=tensors,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )

    def used(self, batches: int = 1) -> None:
        """Count the next `batches` batches of `to_tf` as trained on."""
        self._reported = True
        if self._taken is not None:
            self._taken.used(batches)

    @contextlib.contextmanager
    def counted_by_fit(self) -> Iterator[None]:
        """Let `fit` count the batches in a `with` block: it calls `used`."""
        before, self._reported = self._reported, True
        try:
            yield
        finally:
            self._reported = before


def _tensor(name: str, array: Any, dtypes: Any) -> tf.Tensor:
    dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
    try:
        tensor = tf.convert_to_tensor(array)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The column {name!r} of type {array.dtype} can't become a tensor ({error}). Leave it "
            "out with DataConfig(columns=[…]), or convert it in DataConfig(transform=…)."
        ) from error
    if dtype is None:
        return tensor
    if (wanted := tf.as_dtype(dtype)).is_integer:
        check_range(name, array, wanted.min, wanted.max)
    return tf.cast(tensor, wanted)


def matrix_like(shard: Shard, feature_columns: Sequence[str]) -> tf.TensorSpec:
    """The specification of the features in batches of `to_tf(as_matrix=True)`."""
    return _batches_like(matrix_of(_no_rows(shard), feature_columns))


def matrix_of(batch: Any, columns: Columns) -> Any:
    """The columns of a batch as a float32 matrix `(rows, columns)`."""
    names = [columns] if isinstance(columns, str) else columns
    return np.column_stack([batch[name].astype(np.float32) for name in names])


def columns_of(batch: Any, columns: Columns, specs: TypeSpecs, *, keeps_integers: bool) -> Any:
    """A column's array, or a dict of arrays of several columns."""
    if isinstance(columns, str):
        return _typed(columns, batch[columns], specs, keeps_integers=keeps_integers)
    return {
        name: _typed(
            name,
            batch[name],
            specs.get(name) if isinstance(specs, Mapping) else specs,
            keeps_integers=keeps_integers,
        )
        for name in columns
    }


def _typed(name: str, column: Any, spec: Any, *, keeps_integers: bool) -> Any:
    if spec is not None:
        if spec.dtype.is_integer:
            check_range(name, column, spec.dtype.min, spec.dtype.max)
        return column.astype(spec.dtype.as_numpy_dtype)
    # Ids may be larger than the whole numbers that float32 has.
    is_exact = column.dtype.kind not in "iu" or np.can_cast(column.dtype, np.float32)
    return column.astype(np.float32) if is_exact or not keeps_integers else column


def _no_rows(shard: Shard) -> dict[str, Any]:
    """A batch without rows, with the columns' shapes and types."""
    from polytrain.extension import empty_table, to_format

    batch: dict[str, Any] = to_format(empty_table(shard.schema()), "numpy")
    return batch


def _batches_like(batch: Any) -> tf.TensorSpec:
    """The specification of batches like this one, with any number of rows."""
    return tf.TensorSpec(shape=(None, *batch.shape[1:]), dtype=tf.as_dtype(batch.dtype))


def _with_length(
    dataset: Any, shard: TensorFlowShard, length: Callable[[], int], whole: Callable[[], int]
) -> Any:
    """The data set, which knows how many batches its next iteration gives.

    After a restart the first epoch is shorter than those that follow. tf_keras asks anew for every
    epoch, Keras by the patch in `keras_fit`; both take a data set of unknown length for one that
    has ended too early.
    """
    kind = type(dataset)
    known = {
        "cardinality": lambda _: tf.constant(length(), tf.int64),
        "polytrain_shard": shard,
        "polytrain_whole": staticmethod(whole),
    }
    dataset.__class__ = type(kind.__name__, (kind,), known)
    return dataset
