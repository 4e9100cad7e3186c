"""TensorFlow on polytrain: MultiWorkerMirroredStrategy over all workers, with the installed Keras.

Importing this package imports no tensorflow; calling `strategy` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain_plugins import Backend, hookimpl
from polytrain_tf.backend import TensorFlow

if TYPE_CHECKING:
    from polytrain_tf.data import TensorFlowShard
    from polytrain_tf.keras_fit import weigh_rows

__all__ = ["TensorFlow", "TensorFlowShard", "strategy", "weigh_rows"]

_HOMES = {"TensorFlowShard": "data", "weigh_rows": "keras_fit"}


def strategy() -> Any:
    """Return this run's `tf.distribute.Strategy`: multi-worker, or the default with one worker.

    Raises:
        RuntimeError: outside a training function of this backend.
    """
    from polytrain_tf.engine import current_strategy

    return current_strategy()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """Provide the backends of this module's entry point."""
    return [TensorFlow]
