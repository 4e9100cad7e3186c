"""Keras's callback that reports, of `polytrain_tf`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain.ray_names.doors import Door

if TYPE_CHECKING:
    from polytrain_tf.keras_callback import ReportCheckpointCallback as ReportCheckpointCallback

_DOOR = Door(
    module=__name__,
    plugin="polytrain_tf.keras_callback",
    backend="tensorflow",
)


def __getattr__(name: str) -> Any:
    return _DOOR.get(name)


def __dir__() -> list[str]:
    return _DOOR.names()
