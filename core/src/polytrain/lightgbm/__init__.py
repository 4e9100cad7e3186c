"""LightGBM: what `polytrain_lightgbm` has, and the trainer with Ray Train's signature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytrain.ray_names.doors import door

if TYPE_CHECKING:
    from polytrain.ray_names.trainers import LightGBMConfig as LightGBMConfig
    from polytrain.ray_names.trainers import LightGBMTrainer as LightGBMTrainer
    from polytrain_lightgbm import *

__getattr__, __dir__ = door(__name__)
