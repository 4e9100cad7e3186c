"""All uses of private names of Keras, tf_keras and TensorFlow, each with its reason.

A newer version may rename them. A function to replace is looked up only when it is replaced:
modules may move, and unchecked versions are refused before that.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import tensorflow as tf

from polytrain.extension import nested_layers


@dataclass(frozen=True, slots=True)
class Replaceable:
    """A library's function or method that can be replaced temporarily."""

    module: str
    path: str
    """Its dotted name in the module, such as `Class.method`."""

    @contextmanager
    def replaced(self, make: Callable[[Any], Any]) -> Iterator[None]:
        """Replace it in a `with` block. `make` gets it, and returns its replacement."""
        parents, _, name = self.path.rpartition(".")
        owner: Any = import_module(self.module)
        for parent in filter(None, parents.split(".")):
            owner = getattr(owner, parent)
        own = getattr(owner, name)
        setattr(owner, name, functools.wraps(own)(make(own)))
        try:
            yield
        finally:
            setattr(owner, name, own)


_TRAINER = "keras.src.backend.tensorflow.trainer"
_LOSS = "keras.src.losses.loss"
_OPTIMIZER = "keras.src.optimizers.base_optimizer"

BUILD = Replaceable(_TRAINER, "TensorFlowTrainer._maybe_symbolic_build")
"""It reduces a whole structure over the workers, which their strategy refuses."""

REDUCE_OUTPUTS = Replaceable(_TRAINER, "reduce_per_replica")
"""It averages scalars over a first dimension that they don't have."""

NEXT_ITERATOR = Replaceable(_TRAINER, "TFEpochIterator._get_iterator")
"""No public hook is called when an epoch's iterator is made."""

NEXT_BATCH = Replaceable(_TRAINER, "TFEpochIterator.__next__")
"""An epoch of which a restart has only the end left has no batch, which Keras doesn't provide."""

REDUCE_LOSS = Replaceable(_LOSS, "reduce_values")
"""It doesn't divide a scalar loss, and it knows the number of rows that a mean is over."""

DIVIDE_LOSS = Replaceable(_LOSS, "scale_loss_for_distribution")
"""A model's own step divides its loss only if it calls this."""

CLIP_GRADIENTS = Replaceable(_OPTIMIZER, "BaseOptimizer._clip_gradients")
"""It clips each worker's gradients before they are summed."""

SCALE_LOSS = Replaceable(_OPTIMIZER, "BaseOptimizer.scale_loss")
"""The last place where a loss can be weighted by rows, whatever computed it."""

NEXT_SEED = Replaceable("keras.src.random.seed_generator", "SeedGenerator.next")
"""It gives all workers the same seeds."""

SHUFFLE_ARRAYS = Replaceable(
    "keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter.get_tf_dataset"
)
"""It shuffles in a different order on each worker."""

FIND_NAMED = Replaceable("keras.src.saving.serialization_lib", "_retrieve_class_or_fn")
"""It finds what a model's file names, and in safe mode also what opens other files."""

_HEARTBEATS = Replaceable(
    "tensorflow.python.eager.context", "Context.configure_coordination_service"
)
"""A strategy calls it without the one option that matters here, which has no public name."""

_NEVER_MS = 7 * 24 * 3600 * 1000


@contextmanager
def patient_strategies() -> Iterator[None]:
    """Create strategies that wait for a worker that stands still, in a `with` block.

    TensorFlow would end the collective operations of all workers once one of them has sent no
    heartbeat for 10 s, as on a machine that is frozen or very busy. polytrain itself notices
    workers that are lost or hang.
    """

    def patient(own: Any) -> Any:
        def configure(*arguments: Any, **options: Any) -> None:
            own(*arguments, **{**options, "heartbeat_timeout_in_ms": _NEVER_MS})

        return configure

    with _HEARTBEATS.replaced(patient):
        yield


class _TempfileIn:
    """The module `tempfile`, with named files in another directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def NamedTemporaryFile(self, **options: Any) -> Any:  # the library's name
        return tempfile.NamedTemporaryFile(**{"dir": self._directory, **options})

    def __getattr__(self, name: str) -> Any:
        return getattr(tempfile, name)


@contextmanager
def generated_sources_in(directory: str) -> Iterator[None]:
    """Let AutoGraph put the modules that it writes there, in a `with` block.

    It writes each as a temporary file, which is deleted when the process exits: a process that is
    killed leaves them. There is no option for the place.
    """
    try:
        loader: Any = import_module("tensorflow.python.autograph.pyct.loader")
        own = loader.tempfile
    except (ImportError, AttributeError):
        # In another version: then they stay where they were.
        yield
        return
    loader.tempfile = _TempfileIn(directory)
    try:
        yield
    finally:
        loader.tempfile = own


FIT = Replaceable("keras", "Model.fit")
"""Public, but replaced, since training functions call it on models of their own."""

EMA_IN_MODEL = "_ema_weights_in_model"
"""The attribute of `SwapEMAWeights` that tells whether the model holds the averages. A checkpoint
saved meanwhile has the averages in place of the weights."""

BATCHES_SINCE_SAVE = "_batches_seen_since_last_saving"
"""The attribute of `ModelCheckpoint` with the count of batches that `save_freq=n` goes by."""


def optimized_by(optimizer: Any) -> list[Any]:
    """Return the weights that an optimizer was built for, for which it has no public name."""
    return list(optimizer._trainable_variables)


def undecayed_by(optimizer: Any) -> list[Any]:
    """Return the weights that an optimizer excludes from decay, which no public name tells."""
    return [each for each in optimized_by(optimizer) if not optimizer._use_weight_decay(each)]


def divided_loss(loss: Any) -> Any:
    """Return a loss divided by the number of workers, as Keras divides its own losses."""
    return import_module(_LOSS).scale_loss_for_distribution(loss)


def is_multi_worker(strategy: Any) -> bool:
    """Return whether Keras itself treats the strategy as multi-worker."""
    return bool(import_module(_TRAINER)._collective_all_reduce_multi_worker(strategy))


def build_from(model: Any, batch: Any) -> None:
    """Build a model from a batch, as `fit` does; Keras has no public function for it."""
    model._symbolic_build(data_batch=batch)


def is_built(model: Any) -> bool:
    """Return whether Keras knows all shapes of the model, its metrics and its loss.

    The compiled metrics and loss have no public name before the first step.
    """
    compiled = (model._compile_metrics, model._compile_loss)
    parts = [*nested_layers(model), *(part for part in compiled if part is not None)]
    return all(part.built for part in parts)


def take_logs_of_metrics(model: Any) -> None:
    """Have a fit take the logs of the current epoch from the model's metrics.

    It takes them only if they have the names of the last step's logs, and there was no step.
    """
    own = model._get_metrics_result_or_logs

    def logs_of_metrics(logs: Any) -> Any:
        del model._get_metrics_result_or_logs
        return own(model.get_metrics_result())

    model._get_metrics_result_or_logs = logs_of_metrics


def dataset_of(epochs: Any) -> Any:
    """Return the data that Keras's iterator over epochs reads, already distributed."""
    return epochs._distributed_dataset


def renew_length(epochs: Any) -> None:
    """Update the number of batches in Keras's iterator over epochs, which reads it only once."""
    epochs._num_batches = epochs.data_adapter.num_batches


def weighting_classes(class_weight: Any) -> Any:
    """Return the function by which `fit` adds weights to a batch, which isn't public."""
    adapter = import_module("keras.src.trainers.data_adapters.tf_dataset_adapter")
    return adapter.make_class_weight_map_fn(class_weight)


def sources_of(dataset: Any) -> Any:
    """Return the input data sets of a `tf.data.Dataset`; the public graph has no objects."""
    return dataset._inputs()


def functions_of(dataset: Any) -> Any:
    """Return the functions of a `tf.data.Dataset`; the public graph doesn't have their bodies."""
    return [each.function for each in dataset._functions()]


def shuffles_without_seed(dataset: Any) -> bool:
    """Return whether this step of a `tf.data.Dataset` shuffles without a seed."""
    is_shuffle = type(dataset).__name__ == "_ShuffleDataset"
    return is_shuffle and int(dataset._seed) == 0 and int(dataset._seed2) == 0


def patch_tf_keras() -> None:
    """Make `fit` and `evaluate` of tf_keras take a shard's batches, if this process uses tf_keras.

    tf_keras needs the number of steps of a distributed data set, and uses one iterator for all
    epochs. A shard knows its number of batches, which is smaller in a resumed epoch, and needs a
    new iterator for each epoch. There is no public way for either. Later calls change nothing.
    """
    is_wanted = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if is_wanted or "tf_keras" in sys.modules:
        _patch_tf_keras()


@functools.cache
def _patch_tf_keras() -> None:
    from tf_keras.src.engine.data_adapter import DataHandler, DatasetAdapter

    own_check, own_epochs = DatasetAdapter._validate_args, DataHandler.enumerate_epochs

    @functools.wraps(own_check)
    def check(self: Any, y: Any, sample_weights: Any, steps: Any, *others: Any) -> None:
        known = self._dataset.cardinality() if _is_shard(self._dataset) else None
        own_check(self, y, sample_weights, known if steps is None else steps, *others)

    @functools.wraps(own_epochs)
    def epochs(self: Any) -> Iterator[tuple[int, Any]]:
        if not _is_shard(self._dataset) or self._steps_per_epoch is not None:
            yield from own_epochs(self)
            return
        with self._truncate_execution_to_epoch():
            for epoch in range(self._initial_epoch, self._epochs):
                self._inferred_steps = int(self._dataset.cardinality())
                yield epoch, iter(self._dataset)
                self._adapter.on_epoch_end()

    DatasetAdapter._validate_args = check
    DataHandler.enumerate_epochs = epochs


def _is_shard(dataset: Any) -> bool:
    """Return whether `shard.to_tf` made the data set, for several workers."""
    return hasattr(dataset, "polytrain_shard") and isinstance(
        dataset, tf.distribute.DistributedDataset
    )
