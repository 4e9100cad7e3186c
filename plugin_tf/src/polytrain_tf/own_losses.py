"""Warns of losses that TensorFlow adds up over the workers, where Keras averages its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from polytrain_tf.private import DIVIDE_LOSS

logger = logging.getLogger(__name__)


class OwnLossWarning(keras.callbacks.Callback):
    """Warns after the first batch if a model's own `train_step` or `compute_loss` doesn't average.

    The fit is in its `looking()`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        # A graph from an earlier fit has been looked at.
        self._looks = model.train_function is None and any(
            getattr(type(model), name) is not getattr(keras.Model, name)
            for name in ("train_step", "compute_loss")
        )

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at what the fit in this `with` block traces."""

        def looked_at(own: Any) -> Any:
            def divide(value: Any) -> Any:
                # Keras also calls it to find out shapes, outside of replicas.
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
