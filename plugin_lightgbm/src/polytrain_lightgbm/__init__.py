"""LightGBM on polytrain: one model, trained by all workers on all rows.

Importing this package imports no lightgbm; calling `network_params` neither.
"""

from polytrain_lightgbm.backend import LightGBM, network_params
from polytrain_plugins import Backend, hookimpl

__all__ = ["LightGBM", "network_params"]


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """What the entry point of this module provides."""
    return [LightGBM]
