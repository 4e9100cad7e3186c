"""Warns of custom losses that TensorFlow sums over the workers; Keras averages its own losses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from polytrain_tf.agreeing import overrides
from polytrain_tf.private import DIVIDE_LOSS

logger = logging.getLogger(__name__)


class OwnLossWarning(keras.callbacks.Callback):
    """Warns after the first batch if a model's own `train_step` or `compute_loss` doesn't average.

    Call `fit` within `looking()`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        # A graph from an earlier fit has been checked already.
        self._looks = model.train_function is None and overrides(
            model, ("train_step", "compute_loss"), base=keras.Model
        )

    @contextmanager
    def looking(self) -> Iterator[None]:
        """In a `with` block, note whether the step that `fit` traces divides its loss."""

        def looked_at(own: Any) -> Any:
            def divide(value: Any) -> Any:
                # Outside of replicas, Keras calls it only to infer shapes.
                if tf.distribute.get_replica_context() is not None:
                    self._looks = False
                return own(value)

            return divide

        with DIVIDE_LOSS.replaced(looked_at):
            yield

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._looks:
            self._looks = False
            logger.warning(
                "%s: gradients of a loss that train_step or compute_loss makes itself are added up "
                "over the workers, not averaged. Divide it by "
                "tf.distribute.get_strategy().num_replicas_in_sync, or use the loss of "
                "super().compute_loss(…), which is divided. Ignore this if yours is divided.",
                type(self.model).__name__,
            )
