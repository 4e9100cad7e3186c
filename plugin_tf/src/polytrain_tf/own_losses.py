"""Tells of losses that TensorFlow adds up over the workers, where Keras averages its own."""

from __future__ import annotations

import functools
import logging
from typing import Any

import keras
import tensorflow as tf

logger = logging.getLogger(__name__)


class TellOfOwnLoss(keras.callbacks.Callback):
    """Warns after the first batch if a model's own `train_step` or `compute_loss` doesn't average.

    Use it in a `with` block around the fit.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        # A graph from an earlier fit has been looked at.
        self._looks = model.train_function is None and any(
            getattr(type(model), name) is not getattr(keras.Model, name)
            for name in ("train_step", "compute_loss")
        )

    def __enter__(self) -> TellOfOwnLoss:
        from keras.src.losses import loss

        own = self._own_scale = loss.scale_loss_for_distribution

        @functools.wraps(own)
        def scale(value: Any) -> Any:
            # Keras also calls it to find out shapes, outside of replicas.
            if tf.distribute.get_replica_context() is not None:
                self._looks = False
            return own(value)

        loss.scale_loss_for_distribution = scale
        return self

    def __exit__(self, *_: Any) -> None:
        from keras.src.losses import loss

        loss.scale_loss_for_distribution = self._own_scale

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
