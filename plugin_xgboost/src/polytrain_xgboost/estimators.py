"""scikit-learn estimators that XGBoost trains on any number of workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import xgboost
from sklearn.utils.validation import check_is_fitted
from xgboost.core import XGBoostError

from polytrain.boosting.estimators import (
    BackendClassifier,
    BackendEstimator,
    BackendRanker,
    BackendRegressor,
    Values,
)
from polytrain_xgboost.backend import XGBoost


class _XGBEstimator(BackendEstimator):
    """The attributes and methods of `xgboost.XGBModel`."""

    backend = XGBoost

    def read_model(self, path: str) -> xgboost.Booster:
        return xgboost.Booster(model_file=path)

    def model_features(self, model: xgboost.Booster) -> list[str]:
        return list(model.feature_names or (f"x{n}" for n in range(model.num_features())))

    def get_booster(self) -> xgboost.Booster:
        """The trained booster."""
        check_is_fitted(self, "model_")
        booster: xgboost.Booster = self.model_
        return booster

    @property
    def feature_importances_(self) -> Values:
        """The mean gain of each feature's splits, scaled to sum 1; shape `[features]`, float32."""
        booster = self.get_booster()
        gains = booster.get_score(importance_type="gain")
        found = np.array([gains.get(name, 0) for name in self.model_features(booster)], np.float32)
        total = found.sum()
        return found / total if total else found

    def evals_result(self) -> dict[str, dict[str, list[float]]]:
        """`"validation_0"` and so on → metric → its values, round by round."""
        if not self._evaluations:
            raise XGBoostError("There are no evaluation results. Pass eval_set to fit().")
        return self._evaluations

    @property
    def best_iteration(self) -> int:
        """Number of the best round, from 0, with early stopping."""
        return int(self.get_booster().best_iteration)

    @property
    def best_score(self) -> float:
        """The best round's value of the metric that early stopping uses."""
        return float(self.get_booster().best_score)


class PolytrainXGBRegressor(_XGBEstimator, BackendRegressor):
    """Predicts numbers, by squared error unless `objective` says otherwise."""


class PolytrainXGBClassifier(_XGBEstimator, BackendClassifier):
    """Predicts which of two or more classes."""

    def model_classes(self, model: xgboost.Booster) -> int:
        config = json.loads(model.save_config())
        return int(config["learner"]["learner_model_param"]["num_class"])

    def class_params(self, classes: int) -> Mapping[str, Any]:
        """Probabilities of the classes."""
        if classes == 2:
            return {"objective": "binary:logistic"}
        return {"objective": "multi:softprob", "num_class": classes}


class PolytrainXGBRanker(_XGBEstimator, BackendRanker):
    """Predicts an order within queries, by LambdaMART unless `objective` says otherwise."""

    def ranking_params(self) -> Mapping[str, Any]:
        """LambdaMART."""
        return {"objective": "rank:ndcg"}
