"""Keras's callback that reports, of `polytrain_tf`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytrain.ray_names.doors import door

if TYPE_CHECKING:
    from polytrain_tf.keras_callback import *

__getattr__, __dir__ = door(__name__)
