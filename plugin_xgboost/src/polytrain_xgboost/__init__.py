"""XGBoost on polytrain: one model, trained by all workers on all rows.

Importing this package imports no xgboost.
"""

from polytrain_plugins import Backend, hookimpl
from polytrain_xgboost.backend import XGBoost

__all__ = ["XGBoost"]


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """What the entry point of this module provides."""
    return [XGBoost]
