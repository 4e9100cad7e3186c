"""Makes Keras 3's ``model.fit`` work under ``MultiWorkerMirroredStrategy``, and after a restart.

Keras 3.15's TensorFlow trainer fails on several workers in two places, and gives wrong results in
four others. Two more are wrong after a restart:

* ``_maybe_symbolic_build`` needs one batch's shapes to build the model, and calls
  ``strategy.reduce("MEAN", batch, axis=None)`` on the whole ``(x, y)`` structure.  The multi-worker
  strategy accepts a single value there, not a structure, and raises "Attempt to convert a value
  (PerReplica...) to a Tensor".  Shapes and dtypes need no reduction: the replacement reads each
  value's first local replica.  A built model needs no batch: Keras reads one anyway, which starts
  the data twice in each ``fit`` and ``evaluate``.
* ``reduce_per_replica`` calls ``strategy.reduce("MEAN", value, axis=0)`` on every output of a step.
  ``axis=0`` averages over a replica's first dimension as well, but the outputs are scalar metric
  results without dimensions.  The replacement uses ``axis=None``, the mean over replicas alone.
* ``_clip_gradients`` clips each worker's gradients before they are summed, so the sum differs from
  the clipped sum, and may exceed the limit.  The replacement sums gradients, clips, and divides by
  the number of workers, so that the sum that follows is the clipped sum.
* ``reduce_values`` divides a loss by the number of workers, because gradients are summed, but not a
  loss that already is a scalar, such as the mean that a function passed to ``compile`` returns.
  The replacement divides such a loss too.
* ``BaseOptimizer.scale_loss`` doesn't weight a loss, so workers with different numbers of rows
  count the same. The replacement weights a mean over rows by the worker's share of all workers'
  rows. It doesn't weight a sum.
* ``SeedGenerator.next`` gives all workers the same seeds, so a Dropout layer has the same masks on
  all workers. The replacement offsets the seeds by the worker's number.
* ``TFEpochIterator`` reads the number of batches once per ``fit``. An epoch that a restart resumes
  is shorter than the following ones, so the replacement reads the number for each iterator. It may
  have no batch at all, if only its end was left: the replacement of ``__next__`` then ends it.

These eight functions are replaced (`private` names them), in Keras versions that the replacements
were checked against. With one worker, Keras's own code runs, except for the last two.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from polytrain_tf import private
from polytrain_tf.private import is_multi_worker

CHECKED_KERAS = ("3.15",)
"""The Keras versions (major.minor) whose trainer the patch was checked against."""

_is_patched = False


@contextlib.contextmanager
def keras_trainer_patched() -> Iterator[None]:
    """Patch Keras's TensorFlow trainer in a ``with`` block. Nested blocks change nothing.

    Raises:
        RuntimeError: this Keras is not one of ``CHECKED_KERAS``, or it runs on another backend.
    """
    global _is_patched
    if _is_patched:
        yield
        return
    _check_keras()
    with contextlib.ExitStack() as stack:
        for function, make in _REPLACEMENTS.items():
            stack.enter_context(function.replaced(make))
        _is_patched = True
        try:
            yield
        finally:
            _is_patched = False


def _building(own_build: Any) -> Any:
    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self.distribute_strategy
        if iterator is None or not is_multi_worker(strategy):
            own_build(self, iterator=iterator, data_batch=data_batch)
            return
        if not private.is_built(self):
            _, _, batches = next(iter(iterator))
            data_batch = keras.tree.map_structure(
                lambda value: strategy.experimental_local_results(value)[0], next(batches)
            )
        with strategy.scope():
            private.build_from(self, data_batch)

    return build


def _reducing_outputs(own_reduce: Any) -> Any:
    def reduce(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction not in ("auto", "mean") or not is_multi_worker(strategy):
            return own_reduce(values, strategy, reduction)
        return keras.tree.map_structure(
            lambda value: strategy.reduce("MEAN", value, axis=None), values
        )

    return reduce


def _clipping(own_clip: Any) -> Any:
    def clip(self: Any, grads: Any) -> Any:
        limits = self.clipnorm, self.global_clipnorm, self.clipvalue
        replica = tf.distribute.get_replica_context()
        if not any(limits) or replica is None or not is_multi_worker(replica.strategy):
            return own_clip(self, grads)
        present = [grad for grad in grads if grad is not None]
        summed = iter(replica.all_reduce(tf.distribute.ReduceOp.SUM, present))
        whole = [None if grad is None else next(summed) for grad in grads]
        return [_part(grad, replica.num_replicas_in_sync) for grad in own_clip(self, whole)]

    return clip


def _reducing_loss(own_reduce: Any) -> Any:
    def reduce(
        values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        reduced = own_reduce(values, sample_weight, reduction)
        is_mean = reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight")
        is_whole = not is_mean or tuple(values.shape) != ()
        _traced.rows = None
        if is_mean and is_whole:
            is_by_weight = reduction == "mean_with_sample_weight" and sample_weight is not None
            _traced.rows = tf.reduce_sum(sample_weight) if is_by_weight else tf.shape(values)[0]
        return reduced if is_whole else private.divided_loss(reduced)

    return reduce


def _scaling_loss(own_scale: Any) -> Any:
    return lambda self, loss: _weighted_by_rows(own_scale(self, loss))


def _drawing_seeds(own_next: Any) -> Any:
    def next_seed(self: Any, *args: Any, **kwargs: Any) -> Any:
        seed = own_next(self, *args, **kwargs)
        replica = tf.distribute.get_replica_context()
        if replica is None or not is_multi_worker(replica.strategy):
            return seed
        number = tf.cast(replica.replica_id_in_sync_group, seed.dtype)
        # The second number counts seeds from 0, and never reaches 2**32.
        return seed + tf.stack([tf.zeros_like(number), number * 2**32])

    return next_seed


def _making_iterators(own_iterator: Any) -> Any:
    def get_iterator(self: Any) -> Any:
        if hasattr(private.dataset_of(self), "polytrain_shard"):
            private.renew_length(self)
        return own_iterator(self)

    return get_iterator


def _ending_epochs(own_next: Any) -> Any:
    def next_batch(self: Any) -> Any:
        data = private.dataset_of(self)
        if getattr(data, "polytrain_ends_epoch", False):
            data.polytrain_ends_epoch = False
            raise StopIteration
        return own_next(self)

    return next_batch


_REPLACEMENTS = {
    private.BUILD: _building,
    private.REDUCE_OUTPUTS: _reducing_outputs,
    private.CLIP_GRADIENTS: _clipping,
    private.REDUCE_LOSS: _reducing_loss,
    private.SCALE_LOSS: _scaling_loss,
    private.NEXT_SEED: _drawing_seeds,
    private.NEXT_ITERATOR: _making_iterators,
    private.NEXT_BATCH: _ending_epochs,
}


def weigh_rows(enabled: bool = True) -> None:
    """Set whether ``model.fit`` weights workers' losses by their numbers of rows.

    By default it does so for a shard's batches. Call this with False before ``fit`` if the loss
    isn't a mean over rows: all workers then count the same. All workers must make the same call.
    """
    global _may_weigh
    _may_weigh = enabled


@contextlib.contextmanager
def rows_weighted(model: Any, *, is_shard: bool) -> Iterator[None]:
    """In a ``with`` block around a model's ``fit``, weight losses of a shard's batches by rows."""
    global _weighs
    _weighs = is_shard and _may_weigh
    if _traced_with.setdefault(model, _weighs) != _weighs:
        # Trace again: the graph of an earlier fit weights losses differently.
        model.train_function = None
        _traced_with[model] = _weighs
    try:
        yield
    finally:
        _weighs = False


_may_weigh = True
_weighs = False
"""Whether steps that are traced now weight their losses by rows."""

_traced_with: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class _Traced(threading.local):
    """State of the step that this thread is tracing."""

    rows: Any = None
    """The divisor of its last loss, if that is a mean: number of rows, or their total weight."""


_traced = _Traced()


def _weighted_by_rows(loss: Any) -> Any:
    """Return the loss times this worker's share of all workers' rows, times the world size."""
    rows, _traced.rows = _traced.rows, None
    replica = tf.distribute.get_replica_context()
    if not _weighs or replica is None or not is_multi_worker(replica.strategy):
        return loss
    if rows is None or getattr(rows, "graph", None) is not getattr(loss, "graph", None):
        return loss
    mine = tf.cast(rows, loss.dtype)
    all_rows = replica.all_reduce(tf.distribute.ReduceOp.SUM, mine)
    return loss * (mine * replica.num_replicas_in_sync / all_rows)


def _part(grad: Any, replicas: int) -> Any:
    """Return one replica's part of a summed gradient."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / replicas, grad.indices, grad.dense_shape)
    return None if grad is None else grad / replicas


def _check_keras() -> None:
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"Keras runs on the {keras.backend.backend()!r} backend; training over several "
            "TensorFlow workers, or from the middle of an epoch, needs KERAS_BACKEND=tensorflow."
        )
    if ".".join(keras.__version__.split(".")[:2]) not in CHECKED_KERAS:
        raise RuntimeError(
            "model.fit over several workers, or from the middle of an epoch, needs a fix that was "
            f"checked against Keras {', '.join(CHECKED_KERAS)} only, and this is "
            f"Keras {keras.__version__}. Install one: "
            "pip install 'keras>=3.15,<3.16'. Or use tf_keras, or a loop with strategy.run, which "
            "need no fix."
        )
