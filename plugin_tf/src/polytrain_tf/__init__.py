"""TensorFlow on polytrain: MultiWorkerMirroredStrategy over all workers, with the installed Keras.

Importing this package imports no tensorflow; calling `strategy` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain_plugins import Backend, hookimpl
from polytrain_tf.backend import TensorFlow

if TYPE_CHECKING:
    from polytrain_tf.data import TensorFlowShard

__all__ = ["TensorFlow", "TensorFlowShard", "strategy"]


def strategy() -> Any:
    """The `tf.distribute.Strategy` of this run: multi-worker, or the default one with one worker.

    Raises:
        RuntimeError: outside a training function of this backend.
    """
    from polytrain_tf.engine import current_strategy

    return current_strategy()


def __getattr__(name: str) -> Any:
    if name != "TensorFlowShard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polytrain_tf.data import TensorFlowShard

    return TensorFlowShard


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """What the entry point of this module provides."""
    return [TensorFlow]
