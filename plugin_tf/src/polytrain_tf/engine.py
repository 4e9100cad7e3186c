"""The trainer half: TF_CONFIG from all ranks' addresses, and the strategy that it configures."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from polytrain_plugins import (
    Engine,
    Member,
    Offer,
    Shard,
    ShardView,
    World,
    changed_environment,
    held_port,
)
from polytrain_tf.backend import TensorFlow

MODEL_FILE = "model.keras"

logger = logging.getLogger(__name__)

_strategy: tf.distribute.Strategy | None = None


def current_strategy() -> tf.distribute.Strategy:
    """The strategy of the generation that this process is in."""
    if _strategy is None:
        raise RuntimeError("strategy() works only inside a training function that fit() runs.")
    return _strategy


class TensorFlowEngine(Engine[Any]):
    """One rank of TensorFlow's collective."""

    def __init__(self, options: TensorFlow) -> None:
        self._options = options

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        # TensorFlow's server binds the port while it is held: nobody else can take it before.
        with held_port(shared=True) as port:
            yield Offer(host=me.host, port=port.number)

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        global _strategy
        with ExitStack() as stack:
            if world.size > 1:
                stack.enter_context(changed_environment(_variables(world)))
                _patch_keras()
                _strategy = tf.distribute.MultiWorkerMirroredStrategy(
                    communication_options=tf.distribute.experimental.CommunicationOptions(
                        timeout_seconds=self._options.timeout_s
                    )
                )
            else:
                # It leaves no trace in the process, so an inline run can be repeated.
                _strategy = tf.distribute.get_strategy()
            try:
                yield
            finally:
                _strategy = None

    def count_ranks(self, world: World) -> int:
        strategy = current_strategy()
        if world.size == 1:
            return 1

        @tf.function
        def total() -> Any:
            return strategy.run(
                lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))
            )

        replicas = float(strategy.experimental_local_results(total())[0])
        return round(replicas / len(strategy.extended.worker_devices))

    def adapt(self, shard: Shard) -> TensorFlowShard:
        return TensorFlowShard(shard)

    def save(self, model: Any, directory: Path) -> None:
        model.save(directory / MODEL_FILE)

    def load(self, directory: Path) -> Any:
        """The Keras model in `model.keras`."""
        import keras

        return keras.models.load_model(directory / MODEL_FILE)


class TensorFlowShard(ShardView):
    """A shard that is also a `tf.data.Dataset`."""

    def to_tf(
        self, *, feature_columns: Sequence[str] | str, label_columns: str, batch_size: int = 256
    ) -> Any:
        """A data set of (features, label) pairs, for `model.fit` or a loop of one's own.

        It gives this worker's rows, in batches of `batch_size` for this worker, the same number of
        them on every worker. TensorFlow doesn't split it once more.

        Args:
            feature_columns: one column, or several that become a float32 matrix `(rows, columns)`.
            label_columns: the column with the labels; they become float32.
            batch_size: rows in a batch, at most; see `Shard.iter_batches`.

        Raises:
            KeyError: if there is no such column.
        """
        names = [feature_columns] if isinstance(feature_columns, str) else list(feature_columns)
        for name in (*names, label_columns):
            if name not in self.schema.names:
                raise KeyError(f"No column {name!r} in {self.name!r}; it has {self.schema.names}.")

        def pairs() -> Iterator[tuple[Any, Any]]:
            for batch in self.iter_batches(batch_size=batch_size):
                columns = [batch[name].astype(np.float32) for name in names]
                single = isinstance(feature_columns, str)
                features = columns[0] if single else np.column_stack(columns)
                yield features, batch[label_columns].astype(np.float32)

        features, label = next(pairs())
        dataset = tf.data.Dataset.from_generator(
            pairs, output_signature=(_batches_like(features), _batches_like(label))
        )
        batches = sum(1 for _ in self.iter_batches(batch_size=batch_size, batch_format="arrow"))
        # Keras takes a data set of unknown length for one that has ended too early.
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(batches))
        strategy = current_strategy()
        if strategy.num_replicas_in_sync == 1:
            return dataset
        return strategy.distribute_datasets_from_function(lambda _: dataset)


def _batches_like(batch: Any) -> tf.TensorSpec:
    """Batches of any number of rows, otherwise shaped like this one."""
    return tf.TensorSpec(shape=(None, *batch.shape[1:]), dtype=tf.as_dtype(batch.dtype))


def _patch_keras() -> None:
    from polytrain_tf.keras_fit import patch_keras_trainer

    try:
        patch_keras_trainer()
    except RuntimeError as error:
        # A loop under `strategy.run` needs no patch.
        logger.warning("%s", error)


def _variables(world: World) -> dict[str, str]:
    config = {
        "cluster": {"worker": [offer.address for offer in world.offers]},
        "task": {"type": "worker", "index": world.me.rank},
    }
    return {"TF_CONFIG": json.dumps(config)}
