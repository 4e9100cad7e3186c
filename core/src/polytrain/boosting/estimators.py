"""scikit-learn estimators that a booster trains on any number of workers.

The estimators of a booster define which backend trains, and how to read its models.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import pyarrow as pa

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        check_array,
        check_consistent_length,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError as error:
    raise ImportError("Estimators need scikit-learn: pip install 'scikit-learn>=1.6'") from error

from polytrain.api.trainer import make_trainer
from polytrain.boosting.booster import Booster
from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.common.config import DataConfig, RunConfig, ScalingConfig
from polytrain.prediction.parts import PART_ROWS
from polytrain.prediction.predict import PredictionRequest, predict
from polytrain_plugins import Backend

LABEL, WEIGHT, QUERY = "polytrain label", "polytrain weight", "polytrain query"
"""Columns beside the features."""

Values = np.ndarray[Any, Any]
EvalSet = tuple[Any, ...]


class BackendEstimator(BaseEstimator, ABC):
    """The base class of all boosters' estimators."""

    def __init__(
        self,
        *,
        n_estimators: int = 100,
        early_stopping_rounds: int | None = None,
        categorical: Sequence[str] = (),
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        **params: Any,
    ) -> None:
        """
        Args:
            n_estimators: boosting rounds.
            early_stopping_rounds: stop when the last of `eval_set` hasn't improved for this many
                rounds.
            categorical: numeric columns to treat as categories; strings always are.
            scaling_config: the number of workers and their resources; one worker by default.
                More of them predict, too, if there are more than 100,000 rows.
            run_config: where to store the run; by default only the model is kept.
            params: the framework's own parameters, as in its native interface.
        """
        self.n_estimators = n_estimators
        self.early_stopping_rounds = early_stopping_rounds
        self.categorical = categorical
        self.scaling_config = scaling_config
        self.run_config = run_config
        self._params = params

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters of the estimator and of the framework."""
        return {**super().get_params(deep), **self._params}

    def set_params(self, **params: Any) -> Self:
        """Set parameters of the estimator, or of the framework."""
        own = super().get_params(deep=False)
        super().set_params(**{name: value for name, value in params.items() if name in own})
        self._params |= {name: value for name, value in params.items() if name not in own}
        return self

    def save_model(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file, in the framework's own format."""
        check_is_fitted(self, "model_")
        self.model_.save_model(path)

    def load_model(self, path: str | os.PathLike[str]) -> Self:
        """Load the model from a file that `save_model` or the framework wrote.

        As with the framework's own estimators, the file doesn't hold class names: the classes of a
        loaded classifier are 0, 1, ….
        """
        self.model_ = self.read_model(os.fspath(path))
        self.n_features_in_ = len(self.model_features(self.model_))
        return self

    @property
    @abstractmethod
    def backend(self) -> type[Booster]:
        """The backend that trains."""

    @abstractmethod
    def read_model(self, path: str) -> Any:
        """Read the framework's model from a file."""

    @abstractmethod
    def model_features(self, model: Any) -> list[str]:
        """Return the names of a model's features, in their order."""

    def apply(self, X: Any) -> Values:
        """Return the leaf of each row in each tree; shape `[rows, trees]`."""
        return self._predicted(X, pred_leaf=True)

    @property
    def _evaluations(self) -> dict[str, dict[str, list[float]]]:
        """Set of `eval_set` → metric → its values, round by round."""
        check_is_fitted(self, "result_")
        found: dict[str, dict[str, list[float]]] = {}
        for round_ in self.result_.history:
            for name, value in round_.items():
                dataset, _, metric = name.partition("-")
                if dataset.startswith("validation_"):
                    found.setdefault(dataset, {}).setdefault(metric, []).append(value)
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _fit(
        self,
        features: pa.Table,
        label: Values,
        *,
        params: Mapping[str, Any],
        sample_weight: Any,
        eval_sets: Iterable[EvalSet],
        query: Any = None,
    ) -> Self:
        columns = {LABEL: label}
        options: dict[str, Any] = {}
        if sample_weight is not None:
            columns[WEIGHT] = _weights(sample_weight, features)
            options["weight"] = WEIGHT
        if query is not None:
            columns[QUERY] = column_or_1d(query)
            options[self.backend.query_option] = QUERY
        datasets = {"train": _with_columns(features, columns)}
        for number, (others, *beside) in enumerate(eval_sets):
            table = self._table(others, reset=False)
            columns = dict(zip((LABEL, QUERY), beside, strict=False))
            if sample_weight is not None:
                columns[WEIGHT] = np.ones(len(table))
            datasets[f"validation_{number}"] = _with_columns(table, columns)
        with ExitStack() as stack:
            config = self.run_config
            if config is None:
                place = stack.enter_context(tempfile.TemporaryDirectory(prefix="polytrain-"))
                config = RunConfig(storage_path=place, progress=False)
            self.result_ = make_trainer(
                self.backend.name,
                params={**params, **self._params},
                num_boost_round=self.n_estimators,
                label=LABEL,
                categorical=list(self.categorical),
                early_stopping_rounds=self.early_stopping_rounds,
                **options,
                datasets=datasets,
                # Exactly these: as scikit-learn's, an estimator takes every column of X.
                dataset_config={
                    name: DataConfig(columns=table.column_names) for name, table in datasets.items()
                },
                scaling_config=self.scaling_config or ScalingConfig(num_workers=1),
                run_config=config,
            ).fit(resume="never")  # an earlier run of this name had other data
            self.model_ = self.result_.load_model()
        return self

    def _predicted(self, rows: Any, **options: Any) -> Values:
        check_is_fitted(self, "model_")
        table = self._table(rows, reset=False)
        trained_by = self.result_.backend if hasattr(self, "result_") else None
        backend = trained_by or self.backend()
        if self._workers > 1 and table.num_rows > PART_ROWS:
            return self._predicted_by_workers(backend, table, options)
        return np.asarray(backend.engine().predict(self.model_, table, **options))

    @property
    def _workers(self) -> int:
        config = self.scaling_config or ScalingConfig(num_workers=1)
        return config.num_workers if isinstance(config.num_workers, int) else config.num_workers[1]

    def _predicted_by_workers(
        self, backend: Backend, table: pa.Table, options: Mapping[str, Any]
    ) -> Values:
        with tempfile.TemporaryDirectory(prefix="polytrain-") as directory:
            backend.engine().save(self.model_, Path(directory))
            request = PredictionRequest(
                backend=backend,
                checkpoint=Checkpoint(directory),
                data=table,
                num_workers=self._workers,
                options=options,
            )
            return np.asarray(predict(request))

    def _table(self, rows: Any, *, reset: bool) -> pa.Table:
        """Return the features as a table; columns of a frame keep their names and types."""
        # Asks the class: a LazyFrame would compute its columns.
        if hasattr(type(rows), "columns"):
            table = _table_of(rows)
            # A loaded model may have changed names: the framework reports what is missing.
            if reset or hasattr(self, "result_"):
                validate_data(self, rows, skip_check_array=True, reset=reset)
            return table
        values = validate_data(
            self,
            rows,
            reset=reset,
            dtype=[np.float64, np.float32],
            ensure_all_finite="allow-nan",
            ensure_min_samples=2 if reset else 1,
        )
        return pa.table({f"x{index}": values[:, index] for index in range(values.shape[1])})


class BackendRegressor(RegressorMixin, BackendEstimator):
    """Predicts numbers."""

    def fit(
        self, X: Any, y: Any, *, sample_weight: Any = None, eval_set: Sequence[EvalSet] = ()
    ) -> Self:
        """Train.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            y: the numbers to predict, shape `[rows]`.
            sample_weight: the weight of each row, shape `[rows]`.
            eval_set: pairs of rows and numbers to evaluate on.
        """
        features, label = self._table(X, reset=True), _numbers(y)
        check_consistent_length(X, label)
        pairs = [(others, _numbers(numbers)) for others, numbers in eval_set]
        return self._fit(features, label, params={}, sample_weight=sample_weight, eval_sets=pairs)

    def predict(self, X: Any) -> Values:
        """Return the predicted numbers, shape `[rows]`."""
        return self._predicted(X)


class BackendClassifier(ClassifierMixin, BackendEstimator):
    """Predicts classes."""

    @abstractmethod
    def class_params(self, classes: int) -> Mapping[str, Any]:
        """Return the framework's parameters for this number of classes, 2 or more."""

    def fit(
        self, X: Any, y: Any, *, sample_weight: Any = None, eval_set: Sequence[EvalSet] = ()
    ) -> Self:
        """Train.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            y: the classes, of any type, shape `[rows]`.
            sample_weight: the weight of each row, shape `[rows]`.
            eval_set: pairs of rows and classes to evaluate on.
        """
        features, label = self._table(X, reset=True), column_or_1d(y, warn=True)
        check_consistent_length(X, label)
        check_classification_targets(label)
        self.classes_, codes = np.unique(label, return_inverse=True)
        self.n_classes_ = len(self.classes_)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has one class, {self.classes_[0]!r}. Pass rows of two or more classes"
            )
        pairs = [(others, self._codes(names)) for others, names in eval_set]
        params = self.class_params(len(self.classes_))
        return self._fit(
            features,
            codes.astype(float),
            params=params,
            sample_weight=sample_weight,
            eval_sets=pairs,
        )

    def load_model(self, path: str | os.PathLike[str]) -> Self:
        super().load_model(path)
        self.n_classes_ = max(2, self.model_classes(self.model_))
        self.classes_ = np.arange(self.n_classes_)
        return self

    @abstractmethod
    def model_classes(self, model: Any) -> int:
        """Return the number of a model's classes; 0 or 1 if it has one score for two classes."""

    def _codes(self, names: Any) -> Values:
        unknown = sorted({*names} - {*self.classes_})
        if unknown:
            raise ValueError(f"eval_set has a class that y doesn't have: {unknown[0]!r}.")
        codes: Values = np.searchsorted(self.classes_, names).astype(float)
        return codes

    def predict_proba(self, X: Any) -> Values:
        """Return class probabilities, shape `[rows, classes]`, in the order of `classes_`."""
        chances = self._predicted(X)
        return np.column_stack([1 - chances, chances]) if chances.ndim == 1 else chances

    def predict(self, X: Any) -> Values:
        """Return the most probable classes, shape `[rows]`."""
        chosen = np.argmax(self.predict_proba(X), axis=1)
        classes: Values = self.classes_[chosen]
        return classes


class BackendRanker(BackendEstimator):
    """Predicts an order within queries."""

    @abstractmethod
    def ranking_params(self) -> Mapping[str, Any]:
        """Return the framework's parameters for ranking."""

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        qid: Any,
        sample_weight: Any = None,
        eval_set: Sequence[EvalSet] = (),
    ) -> Self:
        """Train.

        Args:
            X: a frame, or an array of shape `[rows, features]`.
            y: the relevance of each row to its query, shape `[rows]`.
            qid: the query of each row, shape `[rows]`; rows of a query must be consecutive.
            sample_weight: the weight of each row, shape `[rows]`.
            eval_set: triples of rows, relevances and queries to evaluate on.
        """
        features, label = self._table(X, reset=True), _numbers(y)
        check_consistent_length(X, label, qid)
        triples = [(rows, _numbers(relevances), ids) for rows, relevances, ids in eval_set]
        return self._fit(
            features,
            label,
            params=self.ranking_params(),
            sample_weight=sample_weight,
            eval_sets=triples,
            query=qid,
        )

    def predict(self, X: Any) -> Values:
        """Return scores, shape `[rows]`: higher scores come first in their query."""
        return self._predicted(X)


def _table_of(frame: Any) -> pa.Table:
    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, pd.DataFrame):
        return pa.Table.from_pandas(frame, preserve_index=False)
    if hasattr(frame, "__arrow_c_stream__"):
        # For example polars.
        return pa.table(frame)
    raise TypeError(
        f"X is a {type(frame).__module__}.{type(frame).__qualname__}, which isn't a table in "
        "memory. Pass a DataFrame of pandas or polars, an Arrow table or an array (of a "
        "LazyFrame, frame.collect())."
    )


def _numbers(values: Any) -> Values:
    numbers: Values = check_array(
        column_or_1d(values, warn=True), dtype=np.float64, ensure_2d=False, input_name="y"
    )
    return numbers


def _weights(weights: Any, features: pa.Table) -> Values:
    checked = _numbers(weights)
    check_consistent_length(features, checked)
    if not checked.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return checked


def _with_columns(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    return table
