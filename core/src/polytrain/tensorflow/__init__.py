"""TensorFlow: what `polytrain_tf` has, and the trainer with Ray Train's signature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytrain.ray_names.doors import door

if TYPE_CHECKING:
    from polytrain.ray_names.trainers import TensorflowConfig as TensorflowConfig
    from polytrain.ray_names.trainers import TensorflowTrainer as TensorflowTrainer
    from polytrain_tf import *

__getattr__, __dir__ = door(__name__)
