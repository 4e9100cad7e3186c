"""The engine: sets TF_CONFIG from all ranks' addresses, and creates the strategy."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import tensorflow as tf

from polytrain_plugins import (
    Engine,
    Member,
    Offer,
    Predictions,
    Session,
    Shard,
    World,
    changed_environment,
    held_port,
    nccl_variables,
    reached_at,
)
from polytrain_tf.backend import TensorFlow
from polytrain_tf.callback_state import save_callbacks
from polytrain_tf.data import TensorFlowShard
from polytrain_tf.local_variables import by_one_rank
from polytrain_tf.numpy_batches import with_arrays_copied
from polytrain_tf.one_strategy import made_without_cluster, returned_by_its_class
from polytrain_tf.private import generated_sources_in, patient_strategies
from polytrain_tf.saved import Progress, load, save, variables_of
from polytrain_tf.summing import summing
from polytrain_tf.watched_fit import fit_watched

_strategy: tf.distribute.Strategy | None = None


def current_strategy() -> tf.distribute.Strategy:
    """Return the strategy of the attempt that this process is in.

    Raises:
        RuntimeError: outside a training function of this backend.
    """
    if _strategy is None:
        raise RuntimeError("strategy() works only inside a training function that fit() runs.")
    return _strategy


class TensorFlowEngine(Engine[Any]):
    """One rank of a TensorFlow cluster."""

    def __init__(self, options: TensorFlow) -> None:
        self._options = options
        self._progress = Progress()
        self._callbacks: Sequence[Any] = ()
        self._has_shards = False

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        # TensorFlow's server binds the shared port while it is held: no other process can take it.
        with held_port(me.ports, shared=True) as port:
            yield Offer(host=me.listen_host, port=port.number)

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        global _strategy
        with ExitStack() as stack:
            unfit = _patched_keras(stack)
            # A worker's is removed however its process ends.
            sources = stack.enter_context(tempfile.TemporaryDirectory(prefix="polytrain-tf-"))
            stack.enter_context(generated_sources_in(sources))
            stack.enter_context(changed_environment(_variables(world)))
            if world.size > 1:
                # TensorFlow's server takes no address to listen at.
                with reached_at(world.me.listen_host), patient_strategies():
                    _strategy = tf.distribute.MultiWorkerMirroredStrategy(
                        communication_options=tf.distribute.experimental.CommunicationOptions(
                            timeout_seconds=self._options.timeout_s
                        )
                    )
                _strategy.experimental_distribute_dataset = with_arrays_copied(
                    _strategy.experimental_distribute_dataset
                )
                stack.enter_context(returned_by_its_class(_strategy))
            else:
                # The default strategy leaves nothing in the process, so inline runs can repeat.
                _strategy = tf.distribute.get_strategy()
                stack.enter_context(made_without_cluster())
            stack.enter_context(
                fit_watched(
                    _strategy,
                    rank=world.me.rank,
                    has_shards=lambda: self._has_shards,
                    unfit=unfit,
                )
            )
            try:
                yield
            finally:
                _strategy = None

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        if world.size == 1:
            return list(values)
        return summing(current_strategy())(values)

    def adapt(self, shard: Shard) -> TensorFlowShard:
        self._has_shards = True
        return TensorFlowShard(shard, current_strategy())

    def train(self, shards: Mapping[str, Shard], session: Session) -> Any:
        from polytrain_tf.fitting import Fitting

        fitting = Fitting(self._options, shards, session.checkpoint, current_strategy())
        self._progress, self._callbacks = fitting.start, fitting.callbacks

        def report(progress: Progress, metrics: Mapping[str, Any]) -> None:
            self._progress = progress
            session.report(step=progress.epochs, metrics=metrics, model=fitting.model)

        fitting.fit(report)
        return fitting.model

    def save(self, model: Any, directory: Path) -> None:
        with by_one_rank(_strategy):
            save(model, directory, self._progress)
            save_callbacks(self._callbacks, directory)

    def digests(self, model: Any) -> Mapping[str, str]:
        # Keras writes the time into its files.
        if model is None:
            return {}
        return {
            f"{number}: {each.path}": hashlib.sha256(each.numpy().tobytes()).hexdigest()[:16]
            for number, each in enumerate(variables_of(model))
        }

    def load(self, directory: Path) -> Any:
        """Return the Keras model in `model.keras`."""
        return load(directory)

    def model_columns(
        self, directory: Path, columns: Sequence[str], **options: Any
    ) -> Sequence[str] | None:
        from polytrain_tf.predicting import feature_columns

        return feature_columns(self._options, directory, columns, options)

    def predictor(self, directory: Path, **options: Any) -> Callable[[pa.Table], Predictions]:
        from polytrain_tf.predicting import KerasPredictor

        return KerasPredictor(directory, **options)


def _patched_keras(stack: ExitStack) -> RuntimeError | None:
    """Patch Keras, or return the error if that isn't possible.

    The error is only raised by `fit`: a loop under `strategy.run` needs no patch.
    """
    from polytrain_tf.keras_fit import keras_trainer_patched

    try:
        stack.enter_context(keras_trainer_patched())
    except RuntimeError as error:
        return error
    return None


def _variables(world: World) -> dict[str, str]:
    config = {
        "cluster": {"worker": [offer.address for offer in world.offers]},
        "task": {"type": "worker", "index": world.me.rank},
    }
    return {"TF_CONFIG": json.dumps(config), **nccl_variables(world.me)}
