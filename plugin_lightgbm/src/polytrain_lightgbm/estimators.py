"""scikit-learn estimators that LightGBM trains on any number of workers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import lightgbm
import numpy as np
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.validation import check_is_fitted

from polytrain.boosting.estimator_rows import (
    EvalSet,
    Rows,
    Values,
    evaluation_sets,
    queries_of,
)
from polytrain.boosting.estimators import (
    BackendClassifier,
    BackendEstimator,
    BackendRanker,
    BackendRegressor,
    by_class,
    user_frames_only,
)
from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.known_parameters import ALIASES, COMMAND_LINE
from polytrain_lightgbm.of_rows import OfRows
from polytrain_lightgbm.parameters import OF_PREDICTIONS, PARAMETERS, value, without
from polytrain_lightgbm.private import is_recording

Names = Sequence[str] | str

_METRIC_OF_SEVERAL = {
    **dict.fromkeys(("logloss", "binary_logloss", "multi_logloss"), "logloss"),
    **dict.fromkeys(("error", "binary_error", "multi_error"), "error"),
}
"""Name in `eval_metric` → metric, to follow "binary_" or "multi_" by the number of classes."""

_EVAL_AT = ("eval_at", "ndcg_eval_at", "ndcg_at", "map_eval_at", "map_at")


class _LGBMEstimator(BackendEstimator):
    """The attributes and methods of `lightgbm.LGBMModel`."""

    backend = LightGBM
    _parameter_names = PARAMETERS.names
    _estimator_names = ("class_weight", "importance_type")
    _attribute_names = {*ALIASES, *lightgbm.LGBMModel().get_params()} - {
        *COMMAND_LINE,
        "n_estimators",
    }
    _refused_names: ClassVar[Mapping[str, str]] = {
        "callbacks": "Pass fit(callbacks=…)",
        "eval_metric": "Pass fit(eval_metric=…), or the parameter 'metric'",
        "missing": "Replace the value by NaN in X; zero_as_missing=True does it for 0",
    }

    @property
    def _default_metric(self) -> str:
        """The default metric if the objective is a function."""
        return "l2"

    @user_frames_only
    def fit(
        self,
        X: Any,
        y: Any,
        *,
        sample_weight: Any = None,
        init_score: Any = None,
        eval_set: Sequence[EvalSet] | None = None,
        eval_names: Sequence[str] | None = None,
        eval_sample_weight: Sequence[Any] | None = None,
        eval_init_score: Sequence[Any] | None = None,
        eval_metric: Any = None,
        feature_name: Names = "auto",
        categorical_feature: Sequence[str | int] | str = "auto",
        callbacks: Sequence[Any] | None = None,
        init_model: Any = None,
        eval_X: Any = None,
        eval_y: Any = None,
    ) -> Self:
        """Train.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            y: the numbers to predict, shape `[rows]`.
            sample_weight: the weight of each row, shape `[rows]`.
            init_score: the initial score of each row, shape `[rows]`.
            eval_set: pairs of rows and labels to evaluate on.
            eval_names: their names; by default "validation_0" and so on.
            eval_sample_weight: the weights for each of `eval_set`.
            eval_init_score: the initial scores for each of `eval_set`.
            eval_metric: a metric, or several: names, and functions of labels and predictions.
            feature_name: the features' names; "auto" takes those of `X`.
            categorical_feature: features to treat as categories, by name or number; "auto" takes
                the parameter `categorical`.
            callbacks: LightGBM's callbacks.
            init_model: a model to continue: a booster, the path of its file, or an estimator.
            eval_X: rows to evaluate on, or a tuple with those of several sets; replaces `eval_set`.
            eval_y: labels to evaluate on, or a tuple with those of several sets.
        """
        evaluated = evaluation_sets(
            _pairs(eval_set, eval_X, eval_y),
            eval_sample_weight=eval_sample_weight,
            eval_init_score=eval_init_score,
        )
        return self._fit_by_lightgbm(
            Rows(X=X, y=y, weight=sample_weight, score=init_score),
            evaluated,
            eval_names=eval_names,
            eval_metric=eval_metric,
            feature_name=feature_name,
            categorical_feature=categorical_feature,
            callbacks=callbacks,
            init_model=init_model,
        )

    def _fit_by_lightgbm(
        self,
        rows: Rows,
        evaluated: Sequence[Rows],
        *,
        eval_names: Sequence[str] | None,
        eval_metric: Any,
        feature_name: Names,
        categorical_feature: Sequence[str | int] | str,
        callbacks: Sequence[Any] | None,
        init_model: Any,
        params: Mapping[str, Any] | None = None,
    ) -> Self:
        if eval_names is not None and len({*eval_names} - {"train"}) != len(evaluated):
            raise ValueError(
                f"eval_names must have a name for each of the {len(evaluated)} data sets, all "
                f"different and none 'train'; got {list(eval_names)!r}"
            )
        for callback in callbacks or ():
            if is_recording(callback):
                raise ValueError(
                    "lightgbm.record_evaluation would fill a dict of a worker process. Leave it "
                    "out, and read evals_result_ after fit"
                )
        if isinstance(init_model, lightgbm.LGBMModel | _LGBMEstimator):
            init_model = init_model.booster_
        if isinstance(init_model, str | os.PathLike):
            init_model = self.read_model(os.fspath(init_model))
        feature_names = None if feature_name == "auto" else list(feature_name)
        if init_model is not None and not hasattr(type(rows.X), "columns"):
            # An array has no names of its own.
            feature_names = feature_names or self.model_features(init_model)
        if (class_weight := self._given.get("class_weight")) is not None:
            rows = _weighed_by_class(rows, class_weight)
        self._categorical_feature = categorical_feature
        return self._fit(
            rows,
            evaluated,
            params={**(params or {}), "eval_metric": eval_metric},
            names=eval_names,
            feature_names=feature_names,
            callbacks=list(callbacks or ()),
            init_model=init_model,
        )

    def _translated(
        self, params: dict[str, Any], features: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        params, options = super()._translated(params, features)
        chosen = self._categorical_feature
        if not isinstance(chosen, str):
            options["categorical"] = [
                each if isinstance(each, str) else features[each] for each in chosen
            ]
        for name in ("bin_construct_sample_cnt", "subsample_for_bin"):
            if name in params:
                options["bin_sample_rows"] = params.pop(name)
        # The user's objective, under any alias, has precedence over the default.
        objective = value(self._given, "objective", params["objective"])
        params = {**without(params, ["objective"]), "objective": objective}
        self.objective_ = objective
        given = params.pop("eval_metric")
        given = given if isinstance(given, list | tuple) else [given]
        if functions := [OfRows(each) for each in given if callable(each)]:
            options["feval"] = functions
        names = [self._metric(each) for each in given if isinstance(each, str)]
        if callable(objective):
            params["objective"] = OfRows(objective)
        if names or callable(objective):
            default = self._default_metric if callable(objective) else objective
            metrics = value(params, "metric", default)
            metrics = metrics.split(",") if isinstance(metrics, str) else list(metrics)
            names = [*(name for name in names if name not in metrics), *metrics]
            params = {**without(params, ["metric"]), "metric": names}
        return params, options

    def _metric(self, name: str) -> str:
        return name

    def predict(
        self,
        X: Any,
        raw_score: bool = False,
        start_iteration: int = 0,
        num_iteration: int | None = None,
        pred_leaf: bool = False,
        pred_contrib: bool = False,
        validate_features: bool = True,
        **kwargs: Any,
    ) -> Values:
        """Return the predictions, shape `[rows]`; a classifier predicts classes.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            raw_score: return scores before the objective converts them.
            start_iteration: the first round to use.
            num_iteration: number of rounds to use; by default up to the best, or the last.
            pred_leaf: return the leaf of each row in each tree, shape `[rows, trees]`.
            pred_contrib: return each feature's contribution, shape `[rows, features + 1]`.
            validate_features: match columns by name; otherwise, by position.
            kwargs: LightGBM's parameters for predictions.
        """
        unknown = sorted({*kwargs} - {*OF_PREDICTIONS})
        if unknown:
            raise TypeError(
                f"predict() has no argument {unknown[0]!r}, and LightGBM no such parameter for "
                f"predictions, where it would be ignored. There are: {', '.join(OF_PREDICTIONS)}"
            )
        return self._predicted(
            X,
            raw_score=raw_score,
            start_iteration=start_iteration,
            num_iteration=num_iteration,
            pred_leaf=pred_leaf,
            pred_contrib=pred_contrib,
            validate_features=validate_features,
            **kwargs,
        )

    def apply(self, X: Any) -> Values:
        """Return the leaf of each row in each tree; shape `[rows, trees]`."""
        return self._predicted(X, pred_leaf=True)

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
        """The number of splits on each feature, integers, shape `[features]`.

        With the parameter `importance_type="gain"`, the total gain of these splits.
        """
        kind = self._given.get("importance_type", "split")
        found: Values = self.booster_.feature_importance(importance_type=kind)
        return found

    @property
    def n_estimators_(self) -> int:
        """Number of rounds up to the best, or the last, with those of `init_model`."""
        return self.best_iteration_ or int(self.booster_.current_iteration())

    n_iter_ = n_estimators_

    @property
    def n_features_(self) -> int:
        """Number of features."""
        return int(self.booster_.num_feature())

    @property
    def feature_name_(self) -> list[str]:
        """The names of the features."""
        return self.model_features(self.booster_)

    @property
    def best_iteration_(self) -> int:
        """Number of the best round, from 1; 0 without early stopping."""
        return int(self.booster_.best_iteration) if self.early_stopping_rounds is not None else 0

    @property
    def best_score_(self) -> dict[str, dict[str, float]]:
        """Evaluation set → metric → its value after the best, or last, round."""
        rounds = self.booster_.current_iteration()
        # The best iteration counts those of `init_model`, which have no values.
        given = rounds - len(self.result_.history)
        best = (self.best_iteration_ or rounds) - given
        return {
            name: {metric: values[best - 1] for metric, values in metrics.items()}
            for name, metrics in self.evals_result_.items()
        }


class PolytrainLGBMRegressor(_LGBMEstimator, BackendRegressor):
    """Predicts numbers; minimizes the squared error unless `objective` is set."""

    def _default_params(self) -> Mapping[str, Any]:
        return {"objective": "regression"}


class PolytrainLGBMClassifier(_LGBMEstimator, BackendClassifier):
    """Predicts one of two or more classes."""

    def model_classes(self, model: lightgbm.Booster) -> int:
        return int(model.num_model_per_iteration())

    def class_params(self, classes: int) -> Mapping[str, Any]:
        """Return the parameters for an objective that predicts class probabilities."""
        if classes == 2:
            return {"objective": "binary"}
        return {"objective": "multiclass", "num_class": classes}

    @property
    def _default_metric(self) -> str:
        return "multi_logloss" if self.n_classes_ > 2 else "binary_logloss"

    def _metric(self, name: str) -> str:
        kind = "multi" if self.n_classes_ > 2 else "binary"
        known_as = _METRIC_OF_SEVERAL.get(name)
        return name if known_as is None else f"{kind}_{known_as}"

    def _translated(
        self, params: dict[str, Any], features: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.n_classes_ > 2:
            params = {**without(params, ["num_class"]), "num_class": self.n_classes_}
        return super()._translated(params, features)

    @user_frames_only
    def fit(
        self,
        X: Any,
        y: Any,
        *,
        sample_weight: Any = None,
        init_score: Any = None,
        eval_set: Sequence[EvalSet] | None = None,
        eval_names: Sequence[str] | None = None,
        eval_sample_weight: Sequence[Any] | None = None,
        eval_class_weight: Sequence[Any] | None = None,
        eval_init_score: Sequence[Any] | None = None,
        eval_metric: Any = None,
        feature_name: Names = "auto",
        categorical_feature: Sequence[str | int] | str = "auto",
        callbacks: Sequence[Any] | None = None,
        init_model: Any = None,
        eval_X: Any = None,
        eval_y: Any = None,
    ) -> Self:
        """Train.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            y: the classes, of any type, shape `[rows]`.
            sample_weight: the weight of each row, shape `[rows]`.
            init_score: the initial score of each row, shape `[rows]`.
            eval_set: pairs of rows and classes to evaluate on.
            eval_names: their names; by default "validation_0" and so on.
            eval_sample_weight: the weights for each of `eval_set`.
            eval_class_weight: the weights of classes for each of `eval_set`, or "balanced".
            eval_init_score: the initial scores for each of `eval_set`.
            eval_metric: a metric, or several: names, and functions of labels and predictions.
            feature_name: the features' names; "auto" takes those of `X`.
            categorical_feature: features to treat as categories, by name or number; "auto" takes
                the parameter `categorical`.
            callbacks: LightGBM's callbacks.
            init_model: a model to continue: a booster, the path of its file, or an estimator.
            eval_X: rows to evaluate on, or a tuple with those of several sets; replaces `eval_set`.
            eval_y: classes to evaluate on, or a tuple with those of several sets.
        """
        evaluated = evaluation_sets(
            _pairs(eval_set, eval_X, eval_y),
            eval_sample_weight=eval_sample_weight,
            eval_init_score=eval_init_score,
        )
        if eval_class_weight is not None:
            if len(eval_class_weight) != len(evaluated):
                raise ValueError(
                    f"eval_class_weight has {len(eval_class_weight)} entries, and there are "
                    f"{len(evaluated)} data sets to evaluate on. Give one for each, None for none"
                )
            evaluated = [
                _weighed_by_class(each, weight)
                for each, weight in zip(evaluated, eval_class_weight, strict=True)
            ]
        return self._fit_by_lightgbm(
            Rows(X=X, y=y, weight=sample_weight, score=init_score),
            evaluated,
            eval_names=eval_names,
            eval_metric=eval_metric,
            feature_name=feature_name,
            categorical_feature=categorical_feature,
            callbacks=callbacks,
            init_model=init_model,
        )

    def predict(
        self,
        X: Any,
        raw_score: bool = False,
        start_iteration: int = 0,
        num_iteration: int | None = None,
        pred_leaf: bool = False,
        pred_contrib: bool = False,
        validate_features: bool = True,
        **kwargs: Any,
    ) -> Values:
        found = self.predict_proba(
            X,
            raw_score=raw_score,
            start_iteration=start_iteration,
            num_iteration=num_iteration,
            pred_leaf=pred_leaf,
            pred_contrib=pred_contrib,
            validate_features=validate_features,
            **kwargs,
        )
        plain = raw_score or pred_leaf or pred_contrib or self._has_own_objective
        return found if plain else self._chosen(found)

    def predict_proba(
        self,
        X: Any,
        raw_score: bool = False,
        start_iteration: int = 0,
        num_iteration: int | None = None,
        pred_leaf: bool = False,
        pred_contrib: bool = False,
        validate_features: bool = True,
        **kwargs: Any,
    ) -> Values:
        """Return class probabilities, shape `[rows, classes]`, in the order of `classes_`.

        If the objective is a function, LightGBM has no probabilities: as with its own estimator,
        this method and `predict` then return raw scores.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            raw_score: return scores before the objective converts them.
            start_iteration: the first round to use.
            num_iteration: number of rounds to use; by default up to the best, or the last.
            pred_leaf: return the leaf of each row in each tree, shape `[rows, trees]`.
            pred_contrib: return each feature's contribution, shape `[rows, features + 1]`.
            validate_features: match columns by name; otherwise, by position.
            kwargs: LightGBM's parameters for predictions.
        """
        found = super().predict(
            X,
            raw_score=raw_score,
            start_iteration=start_iteration,
            num_iteration=num_iteration,
            pred_leaf=pred_leaf,
            pred_contrib=pred_contrib,
            validate_features=validate_features,
            **kwargs,
        )
        if raw_score or pred_leaf or pred_contrib:
            return found
        if self._has_own_objective:
            warnings.warn(
                "LightGBM knows no probabilities, and no classes, with a function as objective: "
                "these are raw scores.",
                stacklevel=2,
            )
            return found
        return by_class(found)

    def decision_function(
        self,
        X: Any,
        *,
        start_iteration: int = 0,
        num_iteration: int | None = None,
        validate_features: bool = True,
        **kwargs: Any,
    ) -> Values:
        """Return raw scores, shape `[rows]` for two classes, otherwise `[rows, classes]`.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            start_iteration: the first round to use.
            num_iteration: number of rounds to use; by default up to the best, or the last.
            validate_features: match columns by name; otherwise, by position.
            kwargs: LightGBM's parameters for predictions.
        """
        return super().predict(
            X,
            raw_score=True,
            start_iteration=start_iteration,
            num_iteration=num_iteration,
            validate_features=validate_features,
            **kwargs,
        )

    @property
    def _has_own_objective(self) -> bool:
        """Whether the objective was a function, so that scores aren't converted."""
        return "\nobjective=" not in self.booster_.model_to_string(num_iteration=1)


class PolytrainLGBMRanker(_LGBMEstimator, BackendRanker):
    """Predicts an order within queries; uses LambdaMART unless `objective` is set."""

    @property
    def _default_metric(self) -> str:
        return "ndcg"

    def ranking_params(self) -> Mapping[str, Any]:
        """Return the parameters for LambdaMART."""
        return {"objective": "lambdarank"}

    @user_frames_only
    def fit(
        self,
        X: Any,
        y: Any,
        *,
        group: Any = None,
        qid: Any = None,
        sample_weight: Any = None,
        init_score: Any = None,
        eval_set: Sequence[EvalSet] | None = None,
        eval_names: Sequence[str] | None = None,
        eval_sample_weight: Sequence[Any] | None = None,
        eval_init_score: Sequence[Any] | None = None,
        eval_group: Sequence[Any] | None = None,
        eval_qid: Sequence[Any] | None = None,
        eval_metric: Any = None,
        eval_at: Iterable[int] = (1, 2, 3, 4, 5),
        feature_name: Names = "auto",
        categorical_feature: Sequence[str | int] | str = "auto",
        callbacks: Sequence[Any] | None = None,
        init_model: Any = None,
        eval_X: Any = None,
        eval_y: Any = None,
    ) -> Self:
        """Train.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            y: the relevance of each row to its query, shape `[rows]`.
            group: the number of rows of each query, shape `[queries]`.
            qid: the query of each row, shape `[rows]`; rows of a query must be consecutive.
            sample_weight: the weight of each row, shape `[rows]`.
            init_score: the initial score of each row, shape `[rows]`.
            eval_set: pairs of rows and relevances to evaluate on; or triples, with queries.
            eval_names: their names; by default "validation_0" and so on.
            eval_sample_weight: the weights for each of `eval_set`.
            eval_init_score: the initial scores for each of `eval_set`.
            eval_group: like `group`, for each of `eval_set`.
            eval_qid: like `qid`, for each of `eval_set`.
            eval_metric: a metric, or several: names, and functions of relevances and scores.
            eval_at: the positions k of ranking metrics such as NDCG@k.
            feature_name: the features' names; "auto" takes those of `X`.
            categorical_feature: features to treat as categories, by name or number; "auto" takes
                the parameter `categorical`.
            callbacks: LightGBM's callbacks.
            init_model: a model to continue: a booster, the path of its file, or an estimator.
            eval_X: rows to evaluate on, or a tuple with those of several sets; replaces `eval_set`.
            eval_y: relevances to evaluate on, or a tuple with those of several sets.
        """
        if (group is None) == (qid is None):
            raise ValueError(
                "Pass either group=… with the number of rows of each query, or qid=… with the "
                "query of each row"
            )
        evaluated = evaluation_sets(
            _pairs(eval_set, eval_X, eval_y),
            eval_group=eval_group,
            eval_qid=eval_qid,
            eval_sample_weight=eval_sample_weight,
            eval_init_score=eval_init_score,
        )
        query = qid if group is None else queries_of(group)
        ranks_given = any(name in self._given for name in _EVAL_AT)
        return self._fit_by_lightgbm(
            Rows(X=X, y=y, weight=sample_weight, score=init_score, query=query),
            evaluated,
            eval_names=eval_names,
            eval_metric=eval_metric,
            feature_name=feature_name,
            categorical_feature=categorical_feature,
            callbacks=callbacks,
            init_model=init_model,
            params={} if ranks_given else {"eval_at": list(eval_at)},
        )


def _pairs(eval_set: Any, rows: Any, labels: Any) -> Any:
    """Return the evaluation sets as pairs, from `eval_set` or from `eval_X` and `eval_y`."""
    if rows is None and labels is None:
        return eval_set
    if eval_set is not None or rows is None or labels is None:
        raise ValueError("Pass eval_X and eval_y, both, or eval_set")
    if not isinstance(rows, tuple):
        rows, labels = (rows,), (labels,)
    return list(zip(rows, labels, strict=True))


def _weighed_by_class(rows: Rows, class_weight: Any) -> Rows:
    if class_weight is None:
        return rows
    weight = compute_sample_weight(class_weight, rows.y)
    return replace(rows, weight=weight if rows.weight is None else np.multiply(rows.weight, weight))
