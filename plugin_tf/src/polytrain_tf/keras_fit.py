"""Makes Keras 3's ``model.fit`` work under ``MultiWorkerMirroredStrategy``, and after a restart.

Keras 3.15's TensorFlow trainer breaks on more than one worker in two places, and means something
else in four others. In a seventh it expects what a restart doesn't give:

* ``_maybe_symbolic_build`` wants one batch's shapes to build the model from and calls
  ``strategy.reduce("MEAN", batch, axis=None)`` on the whole ``(x, y)`` structure.  The multi-worker
  strategy accepts a single value there, not a structure, and raises "Attempt to convert a value
  (PerReplica...) to a Tensor".  Shapes and dtypes need no reduction, let alone a collective: each
  value's first local replica has them.  A model that is built needs no batch: reading one anyway,
  as Keras does, begins the data twice in each ``fit`` and ``evaluate``.
* ``reduce_per_replica`` calls ``strategy.reduce("MEAN", value, axis=0)`` on every output of a step.
  ``axis=0`` averages over a replica's first dimension as well, and the outputs are scalar metric
  results that have none.  The mean over replicas alone is ``axis=None``.
* ``_clip_gradients`` clips what each worker has, before it is summed: the sum is another one than
  that of a clipped whole, and may be larger than the limit.  Summed first, and divided by the
  number of workers afterwards, gradients make the clipped whole in the sum that follows.
* ``reduce_values`` divides a loss by the number of workers, whose gradients are summed, but not one
  that is a scalar already: a function passed to ``compile`` that returns its mean. Such a loss is
  divided too.
* ``BaseOptimizer.scale_loss`` leaves a loss as it is, so that workers with different numbers of
  rows count the same. A mean over a worker's rows is weighted by its share of all workers' rows; a
  sum isn't.
* ``SeedGenerator.next`` gives all workers the same seeds, so that their rows get the same masks of
  a Dropout layer. Each worker's differ by its number.
* ``TFEpochIterator`` reads the number of batches once per ``fit``. The epoch that a restart resumes
  in its middle is shorter than those that follow, so a shard is asked for each iterator.

These seven are replaced (`private` names them), in a Keras that the replacements were checked
against. In a world of one Keras's own code runs, except for the last.
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
    """Patch Keras's TensorFlow trainer in a ``with`` block; one inside it changes nothing.

    Raises:
        RuntimeError: This Keras is not one of ``CHECKED_KERAS``, or it runs on another backend.
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
        # The second number counts the seeds: never as far as this.
        return seed + tf.stack([tf.zeros_like(number), number * 2**32])

    return next_seed


def _making_iterators(own_iterator: Any) -> Any:
    def get_iterator(self: Any) -> Any:
        if hasattr(private.dataset_of(self), "polytrain_shard"):
            private.renew_length(self)
        return own_iterator(self)

    return get_iterator


_REPLACEMENTS = {
    private.BUILD: _building,
    private.REDUCE_OUTPUTS: _reducing_outputs,
    private.CLIP_GRADIENTS: _clipping,
    private.REDUCE_LOSS: _reducing_loss,
    private.SCALE_LOSS: _scaling_loss,
    private.NEXT_SEED: _drawing_seeds,
    private.NEXT_ITERATOR: _making_iterators,
}


def weigh_rows(enabled: bool = True) -> None:
    """Set whether ``model.fit`` weighs the losses of several workers by their numbers of rows.

    It does, for a shard's batches, unless this is called with False before: for losses that aren't
    a mean over rows. All workers then count the same. All workers call this alike.
    """
    global _may_weigh
    _may_weigh = enabled


@contextlib.contextmanager
def rows_weighted(model: Any, *, is_shard: bool) -> Iterator[None]:
    """For a ``with`` block around a model's ``fit``: weigh losses of a shard's batches by rows."""
    global _weighs
    _weighs = is_shard and _may_weigh
    if _traced_with.setdefault(model, _weighs) != _weighs:
        # The graph of an earlier fit weighs otherwise.
        model.train_function = None
        _traced_with[model] = _weighs
    try:
        yield
    finally:
        _weighs = False


_may_weigh = True
_weighs = False
"""Whether the steps that are traced now weigh."""

_traced_with: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class _Traced(threading.local):
    """What was seen last of the step that is being traced."""

    rows: Any = None
    """What its loss is divided by, if that is a mean: the number of rows, or their weights."""


_traced = _Traced()


def _weighted_by_rows(loss: Any) -> Any:
    """The loss, times this worker's share of all workers' rows and their number."""
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
    """One replica's part of a summed gradient."""
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
