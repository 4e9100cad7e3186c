"""Hugging Face's `Trainer`: what `polytrain_torch.transformers` has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytrain.ray_names.doors import door

if TYPE_CHECKING:
    from polytrain_torch.transformers import *

__getattr__, __dir__ = door(__name__)
