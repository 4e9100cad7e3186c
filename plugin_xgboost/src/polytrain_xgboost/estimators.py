"""XGBoost as scikit-learn's estimators, trained on any number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from polytrain.boosting.estimators import (
    BackendClassifier,
    BackendEstimator,
    BackendRanker,
    BackendRegressor,
)


class _XGBEstimator(BackendEstimator):
    backend_name = "xgboost"
    query_option = "qid"


class PolytrainXGBRegressor(_XGBEstimator, BackendRegressor):
    """Predicts numbers, by squared error unless `objective` says otherwise."""


class PolytrainXGBClassifier(_XGBEstimator, BackendClassifier):
    """Predicts which of two or more classes."""

    def class_params(self, classes: int) -> Mapping[str, Any]:
        """Probabilities of the classes."""
        if classes == 2:
            return {"objective": "binary:logistic"}
        return {"objective": "multi:softprob", "num_class": classes}


class PolytrainXGBRanker(_XGBEstimator, BackendRanker):
    """Predicts an order within queries, by LambdaMART unless `objective` says otherwise."""

    ranking_params: ClassVar[Mapping[str, Any]] = {"objective": "rank:ndcg"}
