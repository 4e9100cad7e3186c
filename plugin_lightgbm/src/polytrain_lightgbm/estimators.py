"""LightGBM as scikit-learn's estimators, trained on any number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightgbm
from sklearn.utils.validation import check_is_fitted

from polytrain.boosting.estimators import (
    BackendClassifier,
    BackendEstimator,
    BackendRanker,
    BackendRegressor,
    Values,
)
from polytrain_lightgbm.backend import LightGBM


class _LGBMEstimator(BackendEstimator):
    """The attributes and methods of `lightgbm.LGBMModel`."""

    backend = LightGBM

    def read_model(self, path: str) -> lightgbm.Booster:
        return lightgbm.Booster(model_file=path)

    def model_features(self, model: lightgbm.Booster) -> list[str]:
        names: list[str] = model.feature_name()
        return names

    @property
    def booster_(self) -> lightgbm.Booster:
        """The trained booster."""
        check_is_fitted(self, "model_")
        booster: lightgbm.Booster = self.model_
        return booster

    @property
    def feature_importances_(self) -> Values:
        """How often each feature is split on; shape `[features]`, whole numbers."""
        found: Values = self.booster_.feature_importance(importance_type="split")
        return found

    @property
    def feature_name_(self) -> list[str]:
        """The names of the features."""
        return self.model_features(self.booster_)

    @property
    def evals_result_(self) -> dict[str, dict[str, list[float]]]:
        """`"validation_0"` and so on → metric → its values, round by round."""
        return self._evaluations

    @property
    def best_iteration_(self) -> int:
        """Number of the best round, from 1; 0 without early stopping."""
        return int(self.booster_.best_iteration) if self.early_stopping_rounds is not None else 0

    @property
    def best_score_(self) -> dict[str, dict[str, float]]:
        """Set of `eval_set` → metric → its value after the best, or last, round."""
        best = self.best_iteration_
        return {
            name: {metric: values[best - 1] for metric, values in metrics.items()}
            for name, metrics in self._evaluations.items()
        }


class PolytrainLGBMRegressor(_LGBMEstimator, BackendRegressor):
    """Predicts numbers, by squared error unless `objective` says otherwise."""


class PolytrainLGBMClassifier(_LGBMEstimator, BackendClassifier):
    """Predicts which of two or more classes."""

    def model_classes(self, model: lightgbm.Booster) -> int:
        return int(model.num_model_per_iteration())

    def class_params(self, classes: int) -> Mapping[str, Any]:
        """Probabilities of the classes."""
        if classes == 2:
            return {"objective": "binary"}
        return {"objective": "multiclass", "num_class": classes}


class PolytrainLGBMRanker(_LGBMEstimator, BackendRanker):
    """Predicts an order within queries, by LambdaMART unless `objective` says otherwise."""

    def ranking_params(self) -> Mapping[str, Any]:
        """LambdaMART."""
        return {"objective": "lambdarank"}
