"""Gives a shard's batches to TensorFlow, which reads ahead: used batches are counted separately."""

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
"""The name of one column, or a list of names."""

TypeSpecs = Any
"""A `tf.TensorSpec` for one column, or a dict of column name to spec; None for the default."""


class TensorFlowShard(ShardView):
    """A shard that gives its batches as `tf.data.Dataset` or as tensors."""

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
        """Return a data set of (features, labels) pairs, for `model.fit` or a custom loop.

        Each iteration is an epoch of this worker's rows. Every worker gets the same number of
        batches. TensorFlow doesn't split the data set again. After a restart, `model.fit` resumes
        at the first batch that it hasn't trained on. `take(1)` gives the first batch for
        inspection, and doesn't count. In a custom loop, call `used()` after each step; otherwise a
        restart resumes at the start of the epoch.

        Args:
            feature_columns: one column, which becomes a tensor of shape `(rows, …)`, or a list,
                which becomes a dict of column name to tensor. Columns become float32, except
                integers of 32 and 64 bits.
            label_columns: one column with labels, or a list; they become float32.
            additional_columns: the third element of each batch, such as the rows' weights; one
                column or a list, which become float32.
            prefetch_batches: prepare this many batches ahead; TensorFlow may do so itself.
            batch_size: maximum number of rows in a worker's batch; see `Shard.iter_batches`.
            global_batch_size: maximum number of rows in the batches of all workers together.
            drop_last: give full batches only.
            local_shuffle_buffer_size: refused; the data set's `DataConfig` sets the order.
            local_shuffle_seed: refused too.
            feature_type_spec: a `tf.TensorSpec` with the type of the features; for several columns,
                a dict of column name to spec.
            label_type_spec: like `feature_type_spec`, for the labels.
            additional_type_spec: like `feature_type_spec`, for the third element.
            weight_column: another name of `additional_columns`.
            as_matrix: join the feature columns into one float32 matrix `(rows, columns)`.

        Raises:
            KeyError: there is no such column.
            ValueError: a refused argument is given, or both names of the third element.
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

        def batches(*, are_looked_at: bool = False) -> Iterator[tuple[Any, ...]]:
            self._taken = taken = self.iter_ahead(**sizes)
            yield from map(parts, taken)
            if not (self._reported or are_looked_at):
                # A loop that never calls `used` counts all batches as used now.
                taken.all_used()

        signature = tf.nest.map_structure(_batches_like, parts(_no_rows(self)))
        local = tf.data.Dataset.from_generator(batches, output_signature=signature)
        if prefetch_batches > 1:
            local = local.prefetch(prefetch_batches)

        def take(count: int, name: str | None = None) -> Any:
            # TensorFlow reads ahead: a look may take all batches of the epoch.
            looked_at = functools.partial(batches, are_looked_at=True)
            some = tf.data.Dataset.from_generator(looked_at, output_signature=signature)
            taken = some.take(count, name=name)
            if self._strategy.num_replicas_in_sync > 1:
                # These are this worker's own batches; `fit` refuses them.
                taken.polytrain_is_taken = True
            return taken

        def ready(dataset: Any) -> Any:
            return _with_length(
                self._distributed(dataset),
                self,
                functools.partial(self.num_batches, **sizes),
                whole=functools.partial(len, self.iter_batches(**sizes)),
                take=take,
                mapped=lambda function: ready(local.map(function)),
            )

        return ready(local)

    def _expect_columns(self, columns: Columns) -> None:
        for name in [columns] if isinstance(columns, str) else columns:
            if name not in self.schema().names:
                raise KeyError(
                    f"No column {name!r} in {self.name!r}. "
                    f"{column_remedy(name, self.schema().names)}."
                )

    def _distributed(self, dataset: Any) -> Any:
        """Return the data set for this run's strategy, which doesn't split it again."""
        if self._strategy.num_replicas_in_sync == 1:
            return dataset
        patch_tf_keras()
        return self._strategy.distribute_datasets_from_function(lambda _: dataset)

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
        """Return batches as dicts of column name to tensor, for custom loops.

        Each iteration is an epoch; see `Shard.iter_batches`.

        Args:
            batch_size: maximum number of rows in a worker's batch.
            global_batch_size: maximum number of rows in the batches of all workers together.
            drop_last: give full batches only.
            prefetch_batches: prepare this many batches ahead, on a thread.
            dtypes: type of all columns, or a dict of column name to type; by default, the data's.
            local_shuffle_buffer_size: refused; the data set's `DataConfig` sets the order.
            local_shuffle_seed: refused too.

        Raises:
            ValueError: a refused argument is given, `dtypes` names an unknown column, or an integer
                type can't hold the values.
            TypeError: a column can't become a tensor, such as lists that differ in shape.
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
        """In a `with` block, let `fit` count the used batches: it calls `used`."""
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
    """Return the `tf.TensorSpec` of the features in batches of `to_tf(as_matrix=True)`."""
    return _batches_like(matrix_of(_no_rows(shard), feature_columns))


def matrix_of(batch: Any, columns: Columns) -> Any:
    """Return columns of a batch as a float32 matrix `(rows, columns)`."""
    names = [columns] if isinstance(columns, str) else columns
    return np.column_stack([batch[name].astype(np.float32) for name in names])


def columns_of(batch: Any, columns: Columns, specs: TypeSpecs, *, keeps_integers: bool) -> Any:
    """Return one column's array, or a dict of column name to array."""
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
    # Ids may be too large for float32, which has exact integers up to 2**24 only.
    is_exact = column.dtype.kind not in "iu" or np.can_cast(column.dtype, np.float32)
    return column.astype(np.float32) if is_exact or not keeps_integers else column


def _no_rows(shard: Shard) -> dict[str, Any]:
    """Return a batch without rows, with the columns' shapes and types."""
    from polytrain.extension import empty_table, to_format

    batch: dict[str, Any] = to_format(empty_table(shard.schema()), "numpy")
    return batch


def _batches_like(batch: Any) -> tf.TensorSpec:
    """Return the `tf.TensorSpec` of batches like this array, with any number of rows."""
    return tf.TensorSpec(shape=(None, *batch.shape[1:]), dtype=tf.as_dtype(batch.dtype))


def _with_length(
    dataset: Any,
    shard: TensorFlowShard,
    length: Callable[[], int],
    *,
    whole: Callable[[], int],
    take: Callable[..., Any],
    mapped: Callable[[Callable[..., Any]], Any],
) -> Any:
    """Give the data set a `cardinality()`: the number of batches in its next iteration.

    After a restart, the first epoch is shorter than the following ones. tf_keras, and Keras with
    the patch in `keras_fit`, ask for the length in every epoch. If it were unknown, both would
    think that the data set has ended too early. A data set that `map` makes of it has no length;
    `mapped` makes one that has.
    """
    kind = type(dataset)
    known = {
        "cardinality": lambda _: tf.constant(length(), tf.int64),
        "polytrain_shard": shard,
        "polytrain_whole": staticmethod(whole),
        "polytrain_mapped": staticmethod(mapped),
        "take": staticmethod(take),
    }
    if not isinstance(dataset, tf.data.Dataset):
        known["__getattr__"] = _absent
    dataset.__class__ = type(kind.__name__, (kind,), known)
    return dataset


def _absent(dataset: Any, name: str) -> Any:
    """Say what to use in place of a method of `tf.data.Dataset`."""
    what = f"{type(dataset).__name__!r} object has no attribute {name!r}"
    if hasattr(tf.data.Dataset, name):
        what = (
            f"A shard's batches for several workers have no {name}(). Each iteration is an epoch, "
            "so fit(…, epochs=…) needs no repeat(). The rows' order, transforms and number are "
            "those of DataConfig and to_tf(…)"
        )
    raise AttributeError(what, name=name, obj=dataset)
