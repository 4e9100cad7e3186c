"""LightGBM as scikit-learn's estimators, trained on any number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from polytrain.boosting.estimators import (
    BackendClassifier,
    BackendEstimator,
    BackendRanker,
    BackendRegressor,
)


class _LGBMEstimator(BackendEstimator):
    backend_name = "lightgbm"
    query_option = "group"


class PolytrainLGBMRegressor(_LGBMEstimator, BackendRegressor):
    """Predicts numbers, by squared error unless `objective` says otherwise."""


class PolytrainLGBMClassifier(_LGBMEstimator, BackendClassifier):
    """Predicts which of two or more classes."""

    def class_params(self, classes: int) -> Mapping[str, Any]:
        """Probabilities of the classes."""
        if classes == 2:
            return {"objective": "binary"}
        return {"objective": "multiclass", "num_class": classes}


class PolytrainLGBMRanker(_LGBMEstimator, BackendRanker):
    """Predicts an order within queries, by LambdaMART unless `objective` says otherwise."""

    ranking_params: ClassVar[Mapping[str, Any]] = {"objective": "lambdarank"}
