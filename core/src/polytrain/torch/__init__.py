"""PyTorch: what `polytrain_torch` has, and the trainer with Ray Train's signature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytrain.ray_names.doors import door

if TYPE_CHECKING:
    from polytrain.ray_names.trainers import TorchConfig as TorchConfig
    from polytrain.ray_names.trainers import TorchTrainer as TorchTrainer
    from polytrain_torch import *

__getattr__, __dir__ = door(__name__)
