"""scikit-learn estimators that XGBoost trains on any number of workers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
import pyarrow as pa
import xgboost
from sklearn.utils.validation import check_is_fitted
from xgboost.core import XGBoostError

from polytrain.boosting.estimator_rows import (
    EvalSet,
    Rows,
    Values,
    evaluation_sets,
    numbers,
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
from polytrain.extension import group_sizes
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.matrices import prediction_matrix
from polytrain_xgboost.of_rows import metric_of_rows, objective_of_rows
from polytrain_xgboost.parameters import PARAMETERS

Range = tuple[int, int]


class _XGBEstimator(BackendEstimator):
    """The attributes and methods of `xgboost.XGBModel`."""

    backend = XGBoost
    _parameter_names = PARAMETERS.names
    _estimator_names = (
        *("callbacks", "enable_categorical", "feature_types", "feature_weights"),
        *("importance_type", "missing"),
    )
    _attribute_names = (*PARAMETERS.known, *_estimator_names)
    _refused_names: ClassVar[Mapping[str, str]] = {
        "class_weight": "Pass fit(sample_weight=compute_sample_weight(class_weight, y)), from "
        "sklearn.utils.class_weight; for two classes, scale_pos_weight does it too",
    }

    @user_frames_only
    def fit(
        self,
        X: Any,
        y: Any,
        *,
        sample_weight: Any = None,
        base_margin: Any = None,
        eval_set: Sequence[EvalSet] | None = None,
        verbose: bool | int | None = False,
        xgb_model: Any = None,
        sample_weight_eval_set: Sequence[Any] | None = None,
        base_margin_eval_set: Sequence[Any] | None = None,
        feature_weights: Any = None,
    ) -> Self:
        """Train.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            y: the labels, shape `[rows]`; for a classifier, of any type.
            sample_weight: the weight of each row, shape `[rows]`.
            base_margin: the initial score of each row, shape `[rows]`.
            eval_set: pairs of rows and labels to evaluate on.
            verbose: print metrics of `eval_set` every this many rounds; True: every round.
            xgb_model: a model to continue: a booster, the path of its file, or an estimator.
            sample_weight_eval_set: the weights for each of `eval_set`.
            base_margin_eval_set: the initial scores for each of `eval_set`.
            feature_weights: like the estimator's parameter `feature_weights`, for this call.
        """
        return self._fit_by_xgboost(
            Rows(X=X, y=y, weight=sample_weight, score=base_margin),
            evaluation_sets(
                eval_set,
                sample_weight_eval_set=sample_weight_eval_set,
                base_margin_eval_set=base_margin_eval_set,
            ),
            verbose=verbose,
            xgb_model=xgb_model,
            feature_weights=feature_weights,
        )

    def _fit_by_xgboost(
        self,
        rows: Rows,
        evaluated: Sequence[Rows],
        *,
        verbose: bool | int | None,
        xgb_model: Any,
        feature_weights: Any,
    ) -> Self:
        callbacks = list(self._given.get("callbacks", ()))
        if verbose and evaluated:
            callbacks.append(xgboost.callback.EvaluationMonitor(period=int(verbose)))
        if isinstance(xgb_model, xgboost.XGBModel | _XGBEstimator):
            xgb_model = xgb_model.get_booster()
        if isinstance(xgb_model, str | os.PathLike):
            xgb_model = self.read_model(os.fspath(xgb_model))
        if isinstance(xgb_model, xgboost.Booster):
            xgb_model = _with_names(xgb_model)
        if feature_weights is not None:
            if "feature_weights" in self._given:
                raise ValueError("feature_weights is given to the estimator and to fit: leave one")
        else:
            feature_weights = self._given.get("feature_weights")
        weights = None if feature_weights is None else np.asarray(feature_weights, float).tolist()
        return self._fit(
            rows,
            evaluated,
            callbacks=callbacks,
            xgb_model=xgb_model,
            feature_weights=weights,
        )

    def _translated(
        self, params: dict[str, Any], features: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        options: dict[str, Any] = {}
        if (types := params.get("feature_types")) is not None:
            options["categorical"] = _categories(types, features)
        params, more = super()._translated(params, features)
        options |= more
        if callable(params.get("objective")):
            options["obj"] = objective_of_rows(params["objective"])
            # This objective decides how XGBoost converts scores to predictions.
            params["objective"] = self._default_params()["objective"]
        metrics = params.pop("eval_metric", ())
        metrics = [metrics] if isinstance(metrics, str) or callable(metrics) else list(metrics)
        functions = [each for each in metrics if callable(each)]
        if names := [each for each in metrics if not callable(each)]:
            params["eval_metric"] = names
        if len(functions) > 1 or (functions and isinstance(self, BackendRanker)):
            raise ValueError(
                f"eval_metric has {len(functions)} function(s). One is possible, and for ranking "
                "none: give the names of XGBoost's own, such as 'ndcg@8'"
            )
        if functions:
            options["custom_metric"] = metric_of_rows(functions[0])
        return params, options

    def _table(
        self, rows: Any, *, reset: bool, by_name: bool = True, names: Sequence[str] | None = None
    ) -> pa.Table:
        table = super()._table(rows, reset=reset, by_name=by_name, names=names)
        if reset and self._params.get("enable_categorical") is False:
            kinds = (pa.types.is_dictionary, pa.types.is_string, pa.types.is_large_string)
            texts = [
                field.name for field in table.schema if any(kind(field.type) for kind in kinds)
            ]
            if texts:
                raise ValueError(
                    f"enable_categorical is False, and {texts[0]!r} has categories. Leave "
                    "enable_categorical out, or turn the column into numbers"
                )
        return table

    def predict(
        self,
        X: Any,
        *,
        output_margin: bool = False,
        validate_features: bool = True,
        base_margin: Any = None,
        iteration_range: Range | None = None,
    ) -> Values:
        """Return the predictions, shape `[rows]`; a classifier predicts classes.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            output_margin: return scores before the objective converts them.
            validate_features: match columns by name; otherwise, by position.
            base_margin: the initial score of each row, shape `[rows]`.
            iteration_range: the first round to use, and the one after the last.
        """
        return self._by_xgboost(
            X,
            output_margin=output_margin,
            validate_features=validate_features,
            base_margin=base_margin,
            iteration_range=iteration_range,
        )

    def apply(self, X: Any, iteration_range: Range | None = None) -> Values:
        """Return the leaf of each row in each tree; shape `[rows, trees]`.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            iteration_range: the first round to use, and the one after the last.
        """
        return self._by_xgboost(X, iteration_range=iteration_range, pred_leaf=True)

    def _by_xgboost(
        self,
        X: Any,
        *,
        base_margin: Any = None,
        iteration_range: Range | None = None,
        **options: Any,
    ) -> Values:
        if iteration_range is not None and iteration_range[1] != 0:
            first, last = iteration_range
            options["iteration_range"] = (int(first), int(last))
        return self._predicted(X, score=base_margin, **options)

    def read_model(self, path: str) -> xgboost.Booster:
        return _with_names(xgboost.Booster(model_file=path))

    def model_features(self, model: xgboost.Booster) -> list[str]:
        return list(model.feature_names)

    def get_booster(self) -> xgboost.Booster:
        """Return the trained booster."""
        check_is_fitted(self, "model_")
        booster: xgboost.Booster = self.model_
        return booster

    def get_xgb_params(self) -> dict[str, Any]:
        """Return the parameters for `xgboost.train`, except functions and None."""
        together = {**self._default_params(), **self._given}
        return {
            name: value
            for name, value in together.items()
            if name not in self._estimator_names and not callable(value)
        }

    def get_num_boosting_rounds(self) -> int:
        """Return the number of rounds to train."""
        return self._rounds

    @property
    def intercept_(self) -> Values:
        """The score before the first tree: `base_score`, float32, shape `[scores]`."""
        score = _learner(self.get_booster())["learner_model_param"]["base_score"]
        return np.array(json.loads(score), np.float32)

    @property
    def feature_importances_(self) -> Values:
        """Each feature's importance, float32, shape `[features]`, scaled to a sum of 1.

        The parameter `importance_type` chooses the measure; by default, the mean gain of splits.
        """
        booster = self.get_booster()
        scores = booster.get_score(importance_type=self._given.get("importance_type", "gain"))
        found = np.array([scores.get(name, 0) for name in self.model_features(booster)], np.float32)
        total = found.sum()
        return found / total if total else found

    def evals_result(self) -> dict[str, dict[str, list[float]]]:
        """Return evaluation set, such as "validation_0" → metric → its value after each round."""
        if not self.evals_result_:
            raise XGBoostError("There are no evaluation results. Pass eval_set to fit().")
        return self.evals_result_

    @property
    def best_iteration(self) -> int:
        """Number of the best round, from 0, with early stopping."""
        return int(self.get_booster().best_iteration)

    @property
    def best_score(self) -> float:
        """The best round's value of the metric that early stopping uses."""
        return float(self.get_booster().best_score)


class PolytrainXGBRegressor(_XGBEstimator, BackendRegressor):
    """Predicts numbers; minimizes the squared error unless `objective` is set."""

    def _default_params(self) -> Mapping[str, Any]:
        return {"objective": "reg:squarederror"}


class PolytrainXGBClassifier(_XGBEstimator, BackendClassifier):
    """Predicts one of two or more classes."""

    def model_classes(self, model: xgboost.Booster) -> int:
        return int(_learner(model)["learner_model_param"]["num_class"])

    def class_params(self, classes: int) -> Mapping[str, Any]:
        """Return the parameters for an objective that predicts class probabilities."""
        if classes == 2:
            return {"objective": "binary:logistic"}
        return {"objective": "multi:softprob", "num_class": classes}

    def _translated(
        self, params: dict[str, Any], features: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        params, options = super()._translated(params, features)
        return self._of_classes(params), options

    def get_xgb_params(self) -> dict[str, Any]:
        """Return the parameters for `xgboost.train`, except functions and None.

        After `fit`, they are for the number of its classes.
        """
        return self._of_classes(super().get_xgb_params())

    def _of_classes(self, params: dict[str, Any]) -> dict[str, Any]:
        """Choose an objective for several classes, as XGBoost's classifier does.

        Only the "multi:" objectives score them.
        """
        default = self._default_params()
        several, chosen = "num_class" in default, params.get("objective")
        return {**params, **default} if several and chosen != "multi:softmax" else params

    def predict(
        self,
        X: Any,
        *,
        output_margin: bool = False,
        validate_features: bool = True,
        base_margin: Any = None,
        iteration_range: Range | None = None,
    ) -> Values:
        """Return the most probable classes, shape `[rows]`.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            output_margin: return scores instead, shape `[rows]` or `[rows, classes]`.
            validate_features: match columns by name; otherwise, by position.
            base_margin: the initial score of each row, shape `[rows]`.
            iteration_range: the first round to use, and the one after the last.
        """
        if output_margin:
            return super().predict(
                X,
                output_margin=True,
                validate_features=validate_features,
                base_margin=base_margin,
                iteration_range=iteration_range,
            )
        found = self.predict_proba(X, validate_features, base_margin, iteration_range)
        return self._chosen(found)

    def predict_proba(
        self,
        X: Any,
        validate_features: bool = True,
        base_margin: Any = None,
        iteration_range: Range | None = None,
    ) -> Values:
        """Return class probabilities, shape `[rows, classes]`, in the order of `classes_`.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            validate_features: match columns by name; otherwise, by position.
            base_margin: the initial score of each row, shape `[rows]`.
            iteration_range: the first round to use, and the one after the last.
        """
        # With "multi:softmax", XGBoost itself predicts classes, not probabilities.
        chooses = _learner(self.get_booster())["objective"]["name"] == "multi:softmax"
        found = self._by_xgboost(
            X,
            output_margin=chooses,
            validate_features=validate_features,
            base_margin=base_margin,
            iteration_range=iteration_range,
        )
        return _softmax(found) if chooses else by_class(found)


class PolytrainXGBRanker(_XGBEstimator, BackendRanker):
    """Predicts an order within queries; uses LambdaMART unless `objective` is set."""

    def ranking_params(self) -> Mapping[str, Any]:
        """Return the parameters for LambdaMART."""
        return {"objective": "rank:ndcg"}

    @user_frames_only
    def fit(
        self,
        X: Any,
        y: Any,
        *,
        group: Any = None,
        qid: Any = None,
        sample_weight: Any = None,
        base_margin: Any = None,
        eval_set: Sequence[EvalSet] | None = None,
        eval_group: Sequence[Any] | None = None,
        eval_qid: Sequence[Any] | None = None,
        verbose: bool | int | None = False,
        xgb_model: Any = None,
        sample_weight_eval_set: Sequence[Any] | None = None,
        base_margin_eval_set: Sequence[Any] | None = None,
        feature_weights: Any = None,
    ) -> Self:
        """Train.

        Args:
            X: a frame, or an array of shape `[rows, features]`. If a pandas frame has the column
                `qid`, it holds the queries.
            y: the relevance of each row to its query, shape `[rows]`.
            group: the number of rows of each query, shape `[queries]`.
            qid: the query of each row, shape `[rows]`; rows of a query must be consecutive.
            sample_weight: the weight of each query, or of each row.
            base_margin: the initial score of each row, shape `[rows]`.
            eval_set: pairs of rows and relevances to evaluate on; or triples, with queries.
            eval_group: like `group`, for each of `eval_set`.
            eval_qid: like `qid`, for each of `eval_set`.
            verbose: print metrics of `eval_set` every this many rounds; True: every round.
            xgb_model: a model to continue: a booster, the path of its file, or an estimator.
            sample_weight_eval_set: the weights for each of `eval_set`.
            base_margin_eval_set: the initial scores for each of `eval_set`.
            feature_weights: like the estimator's parameter `feature_weights`, for this call.
        """
        if group is not None:
            qid = queries_of(group)
        rows = Rows(X=X, y=y, weight=sample_weight, score=base_margin, query=qid)
        evaluated = evaluation_sets(
            eval_set,
            eval_group=eval_group,
            eval_qid=eval_qid,
            sample_weight_eval_set=sample_weight_eval_set,
            base_margin_eval_set=base_margin_eval_set,
        )
        return self._fit_by_xgboost(
            _of_queries(rows),
            [_of_queries(each) for each in evaluated],
            verbose=verbose,
            xgb_model=xgb_model,
            feature_weights=feature_weights,
        )

    def score(self, X: Any, y: Any) -> float:
        """Return the last of `eval_metric` on these rows, or the objective's default metric.

        Args:
            X: a pandas frame, whose column `qid` holds the queries.
            y: the relevance of each row to its query, shape `[rows]`.
        """
        rows = _of_queries(Rows(X=X, y=y))
        matrix = prediction_matrix(
            self._table(rows.X, reset=False), self.get_booster(), base_margin=None
        )
        matrix.set_info(label=numbers(y), qid=np.unique(rows.query, return_inverse=True)[1])
        booster = self.get_booster().copy()
        metrics = self._given.get("eval_metric", ())
        for metric in [metrics] if isinstance(metrics, str) else metrics:
            booster.set_param("eval_metric", metric)
        return float(booster.eval(matrix).rpartition(":")[2])

    def _table(
        self, rows: Any, *, reset: bool, by_name: bool = True, names: Sequence[str] | None = None
    ) -> pa.Table:
        rows = _with_query(rows)[0]
        return super()._table(rows, reset=reset, by_name=by_name, names=names)


def _with_query(X: Any) -> tuple[Any, Any]:
    """Return the features, and the column `qid` of a pandas frame or None."""
    if isinstance(X, pd.DataFrame) and "qid" in X.columns:
        return X.drop(columns="qid"), X["qid"]
    return X, None


def _of_queries(rows: Rows) -> Rows:
    """Return the rows with their queries, and with a weight for each row.

    Raises:
        ValueError: queries are missing or given twice, or the number of weights is wrong.
    """
    X, query = _with_query(rows.X)
    if (query is None) == (rows.query is None):
        problem = "There are no queries" if query is None else "The queries are given twice"
        raise ValueError(
            f"{problem}. Pass qid=… with the query of each row, or group=… with the number of "
            "rows of each query, or a pandas frame with the column 'qid'; for eval_set, eval_qid "
            "or eval_group"
        )
    query = np.asarray(rows.query if query is None else query)
    weight = rows.weight
    if weight is not None and len(weight) != len(query):
        sizes = group_sizes(pa.chunked_array([pa.array(query)]))
        if len(weight) != len(sizes):
            raise ValueError(
                f"There are {len(weight)} weights for {len(sizes)} queries and {len(query)} rows. "
                "Give one for each query, or one for each row"
            )
        weight = np.repeat(np.asarray(weight), sizes)
    return Rows(X=X, y=rows.y, weight=weight, score=rows.score, query=query)


def _with_names(model: xgboost.Booster) -> xgboost.Booster:
    """Return the model, or a copy with names for the features of an array."""
    if model.feature_names is None:
        model = model.copy()
        model.feature_names = [f"x{number}" for number in range(model.num_features())]
    return model


def _learner(model: xgboost.Booster) -> dict[str, Any]:
    learner: dict[str, Any] = json.loads(model.save_config())["learner"]
    return learner


def _softmax(scores: Values) -> Values:
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: Values = raised / raised.sum(axis=1, keepdims=True)
    return found


def _categories(types: Sequence[str], features: Sequence[str]) -> list[str]:
    """Return the features whose type is "c"."""
    if len(types) != len(features) or {*types} - {"q", "float", "int", "i", "c"}:
        raise ValueError(
            f"feature_types must have 'q', 'float', 'int', 'i' or 'c' for each of the "
            f"{len(features)} features; got {list(types)!r}"
        )
    return [name for name, kind in zip(features, types, strict=True) if kind == "c"]
