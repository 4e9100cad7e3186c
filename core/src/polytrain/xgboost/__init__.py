"""XGBoost: what `polytrain_xgboost` has, and the trainer with Ray Train's signature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytrain.ray_names.doors import door

if TYPE_CHECKING:
    from polytrain.ray_names.trainers import XGBoostConfig as XGBoostConfig
    from polytrain.ray_names.trainers import XGBoostTrainer as XGBoostTrainer
    from polytrain_xgboost import *

__getattr__, __dir__ = door(__name__)
