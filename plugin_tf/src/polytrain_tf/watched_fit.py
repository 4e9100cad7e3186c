"""Wraps Keras's `fit`: checks its arguments, and counts the used batches of a shard."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from polytrain.extension import adapted_digests, unequal_layers
from polytrain_tf.agreeing import AverageStatistics, StopsTogether
from polytrain_tf.data import TensorFlowShard
from polytrain_tf.epochs import EpochCallback, arrange_callbacks
from polytrain_tf.kept_batches import KeptBatches
from polytrain_tf.keras_fit import rows_weighted
from polytrain_tf.own_losses import OwnLossWarning
from polytrain_tf.private import FIT, weighting_classes
from polytrain_tf.rank_files import written_by_rank_0
from polytrain_tf.shared_shuffle import check_order, shuffled_alike
from polytrain_tf.summing import summing

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def fit_watched(
    strategy: tf.distribute.Strategy,
    *,
    rank: int,
    has_shards: Callable[[], bool],
    unfit: RuntimeError | None,
) -> Iterator[None]:
    """Replace `model.fit` by one that rejects unsuitable arguments and counts used batches.

    Enter this before the training function runs, because `model.fit(shard.to_tf(…))` looks up `fit`
    before it calls `to_tf`.

    Args:
        strategy: the run's strategy. Most checks apply to several workers only.
        rank: this worker's rank.
        has_shards: returns whether the training function has asked for a shard.
        unfit: the error to raise if `fit` would need a patched Keras, which is needed on several
            workers and to resume within an epoch; None if Keras is patched.
    """
    is_alone = strategy.num_replicas_in_sync == 1
    signature = inspect.signature(keras.Model.fit)

    def watched(own_fit: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        _check_not_taken(given)
        shard = getattr(given["x"], "polytrain_shard", None)
        if unfit is not None and (not is_alone or _is_under_way(given["x"])):
            raise unfit
        if not is_alone:
            _check_model(given["self"], strategy)
            if has_shards() and any(map(_is_split, (given["x"], given["validation_data"]))):
                _warn_of_splitting()
            for name in ("x", "validation_data"):
                check_order(name, given[name])
        if shard is not None and given["class_weight"] is not None:
            # Keras would make a data set without a length, and take a resumed epoch's for all.
            weighting = weighting_classes(given["class_weight"])
            given["x"], given["class_weight"] = given["x"].polytrain_mapped(weighting), None
        averages = AverageStatistics(strategy)
        with contextlib.ExitStack() as stack:
            if not is_alone and shard is None and given["shuffle"]:
                stack.enter_context(shuffled_alike(strategy, rank))
            arrange_callbacks(given)
            callbacks = given["callbacks"]
            listed = stack.enter_context(written_by_rank_0(callbacks, is_alone=is_alone, rank=rank))
            if not is_alone:
                _check_reports(callbacks, strategy)
                stack.enter_context(rows_weighted(given["self"], is_shard=shard is not None))
                warns = OwnLossWarning(given["self"])
                stack.enter_context(warns.looking())
                stops = StopsTogether(strategy, callbacks)
                listed = [averages, warns, *listed, stops]
            if shard is not None:
                stack.enter_context(shard.counted_by_fit())
                reports = [each for each in callbacks if isinstance(each, EpochCallback)]
                used = _Used(shard)
                kept = [
                    KeptBatches(each, given, used=used.up_to, trained=averages.trained)
                    for each in reports[:1]
                ]
                for each in kept:
                    stack.enter_context(each.keeping())
                listed = [used, *listed, *kept]
            given["callbacks"] = listed
            return own_fit(*bound.args, **bound.kwargs)

    # A lambda becomes a method of the class; a `partial` wouldn't get the model.
    with FIT.replaced(lambda own: lambda *args, **kwargs: watched(own, *args, **kwargs)):
        yield


class _Used(keras.callbacks.Callback):
    """Counts the used batches of a shard, before the user's callbacks run."""

    def __init__(self, shard: TensorFlowShard) -> None:
        super().__init__()
        self._shard = shard
        self._seen = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._seen = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.up_to(batch)

    def up_to(self, batch: int) -> None:
        """Count the epoch's batches up to this one, if they aren't counted yet."""
        if batch >= self._seen:
            self._shard.used(batch + 1 - self._seen)
            self._seen = batch + 1


def _check_not_taken(given: Mapping[str, Any]) -> None:
    """Raise an error if a fit would train on, or validate with, some batches of a shard only."""
    for name, steps in (("x", "steps_per_epoch"), ("validation_data", "validation_steps")):
        if hasattr(given[name], "polytrain_is_taken"):
            raise ValueError(
                f"{name}: take(…) of a shard's batches is for looking at them. Pass "
                f"shard.to_tf(…) itself, and {steps} for fewer batches."
            )


def _check_model(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Raise an error unless several workers can train this model together.

    Raises:
        ValueError: it was built outside the strategy's scope, its optimizer may skip a step that
            other workers take, a call of its train function isn't one step of the optimizer or
            can't be compiled, or workers have adapted a layer to different rows.
    """
    if model.distribute_strategy is not strategy:
        raise ValueError(
            "The model was built outside the scope of the run's strategy: every worker would train "
            "its own model. Build and compile it in `with polytrain_tf.strategy().scope():`."
        )
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "mixed_float16: its LossScaleOptimizer skips a step on each worker whose gradients "
            "overflow, and the other workers wait forever. Use the policy 'mixed_bfloat16', which "
            "doesn't scale the loss."
        )
    if model.steps_per_execution > 1:
        raise ValueError(
            f"steps_per_execution={model.steps_per_execution}: Keras can't take several steps per "
            "call on several TensorFlow workers. Leave it out of compile(…)."
        )
    if model.jit_compile and not tf.config.list_logical_devices("GPU"):
        raise ValueError(
            "jit_compile=True: Keras can't have XLA compile what several TensorFlow workers do "
            "together on CPUs. Leave it out of compile(…)."
        )
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if steps is not None:
        raise ValueError(
            f"gradient_accumulation_steps={steps}: Keras can't "
            "accumulate gradients on several TensorFlow workers. Leave it out, and use larger "
            "batches: those of all workers make a step together."
        )
    # A layer's statistics or vocabulary, which its `adapt` has computed from rows.
    digests = adapted_digests(model)
    if digests:
        sums = summing(strategy)(list(digests.values()))
        workers = strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)
        mine = zip(digests.items(), sums, strict=True)
        unequal = [name for (name, digest), total in mine if total != digest * workers]
        if unequal:
            raise unequal_layers(unequal)


def _check_reports(callbacks: Sequence[Any], strategy: tf.distribute.Strategy) -> None:
    """Raise an error unless all workers or none have a callback that reports epochs.

    Raises:
        ValueError: only some have one.
    """
    reports = any(isinstance(each, EpochCallback) for each in callbacks)
    have, workers = summing(strategy)([int(reports), 1])
    if 0 < have < workers:
        raise ValueError(
            f"callbacks: {have} of {workers} ranks have a ReportCallback. Pass one on each: after "
            "a restart it restores the rank's other callbacks. Only rank 0's files are kept."
        )


def _is_under_way(data: Any) -> bool:
    """Return whether these are batches of a shard that resumes in the middle of an epoch."""
    return hasattr(data, "polytrain_shard") and int(data.cardinality()) < data.polytrain_whole()


def _is_split(data: Any) -> bool:
    return data is not None and not hasattr(data, "polytrain_shard")


@functools.cache
def _warn_of_splitting() -> None:
    logger.warning(
        "TensorFlow splits the data of this model.fit over the workers. That is right if every "
        "worker has the whole data. But a worker's shard is split already, so only a part of it "
        "would be used: pass shard.to_tf(…)."
    )
