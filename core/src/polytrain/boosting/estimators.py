"""scikit-learn estimators that a booster trains on any number of workers.

A booster's own estimators name the backend that trains, and read its models.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import pyarrow as pa

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        check_consistent_length,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError as error:
    raise ImportError("Estimators need scikit-learn: pip install 'scikit-learn>=1.6'") from error

from polytrain import satellites
from polytrain.api.trainer import make_trainer
from polytrain.boosting.booster import Booster
from polytrain.boosting.columns import with_columns
from polytrain.boosting.estimator_rows import (
    LABEL,
    QUERY,
    SCORE,
    WEIGHT,
    Rows,
    Values,
    numbers,
    renamed,
    scores_of,
    table_of,
    weights_of,
    without,
)
from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.config.configs import DataConfig, RunConfig, ScalingConfig
from polytrain.functions.users_code import user_frames_only as user_frames_only
from polytrain_plugins import Backend, InvalidJobError, Problem
from polytrain_plugins.close_names import ALMOST_THE_SAME, did_you_mean

PART_ROWS = 100_000
"""Up to this many rows are predicted in this process, as `Result.predict` does."""


class BackendEstimator(BaseEstimator, ABC):
    """The base class of all boosters' estimators."""

    def __init__(
        self,
        *,
        n_estimators: int | None = 100,
        early_stopping_rounds: int | None = None,
        categorical: Sequence[str] = (),
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        **params: Any,
    ) -> None:
        """
        Args:
            n_estimators: boosting rounds; None: 100, as in XGBoost.
            early_stopping_rounds: stop when the last of `eval_set` hasn't improved for this many
                rounds.
            categorical: numeric columns to treat as categories; strings always are.
            scaling_config: the number of workers and their resources; one worker by default.
                Several workers also predict, if there are more than 100,000 rows.
            run_config: where to store the run; by default only the model is kept.
            params: parameters of the framework, and of its own estimators. `fit` refuses any other
                name.
        """
        self.n_estimators = n_estimators
        self.early_stopping_rounds = early_stopping_rounds
        self.categorical = categorical
        self.scaling_config = scaling_config
        self.run_config = run_config
        # A subclass may have set some before.
        self._params = {**vars(self).get("_params", {}), **params}
        for name in params:
            self.__dict__.pop(name, None)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters of the estimator and of the framework."""
        found: dict[str, Any] = super().get_params(deep)
        passed_on = _arguments(type(self))
        if passed_on >= _arguments(BackendEstimator):
            found |= {name: getattr(self, name) for name in passed_on} | self._params
        return found

    def set_params(self, **params: Any) -> Self:
        """Set parameters of the estimator, or of the framework."""
        own = _arguments(BackendEstimator).union(self.get_params()) - {*self._params}
        super().set_params(**{name: value for name, value in params.items() if name in own})
        further = {name: value for name, value in params.items() if name not in own}
        self._params = {**self._params, **further}
        return self

    def __getattr__(self, name: str) -> Any:
        given = vars(self).get("_params", {})
        # The second raises the error of a property that failed.
        return given[name] if name in given else object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        given = vars(self).get("_params", {})
        if name in given or name in self._attribute_names:
            # Not in place: a shallow copy has the same.
            name, value = "_params", {**given, name: value}
        super().__setattr__(name, value)

    def save_model(self, fname: str | os.PathLike[str]) -> None:
        """Write the model to a file, in the framework's own format."""
        check_is_fitted(self, "model_")
        self.model_.save_model(fname)

    def load_model(self, fname: str | os.PathLike[str]) -> Self:
        """Load the model from a file that `save_model` or the framework wrote.

        As with the framework's own estimators, the file doesn't hold class names: the classes of a
        loaded classifier are 0, 1, ….
        """
        self.model_ = self.read_model(os.fspath(fname))
        for name in ("result_", "feature_names_in_", "objective_"):
            # Of an earlier fit.
            self.__dict__.pop(name, None)
        self._feature_names: Sequence[str] | None = None
        self.n_features_in_ = len(self.model_features(self.model_))
        return self

    _parameter_names: ClassVar[Collection[str]] = ()
    """The framework's parameters, and the other names that its checks handle."""

    _attribute_names: ClassVar[Collection[str]] = ()
    """The framework's parameters that attributes set, even if no argument has named them.

    They are fewer: a subclass may have an attribute of an alias's name, such as `label`.
    """

    _estimator_names: ClassVar[Collection[str]] = ()
    """Further parameters of the framework's own estimators that these accept too."""

    _refused_names: ClassVar[Mapping[str, str]] = {}
    """A parameter that these estimators refuse → what to do instead."""

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

    def _translated(
        self, params: dict[str, Any], features: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Translate the estimator's parameters to the framework's, and to options of the backend.

        Args:
            params: the parameters of the estimator and of this call of `fit`.
        """
        for name in self._estimator_names:
            params.pop(name, None)
        state = params.get("random_state")
        if isinstance(state, np.random.RandomState):
            params["random_state"] = int(state.randint(np.iinfo(np.int32).max))
        elif isinstance(state, np.random.Generator):
            params["random_state"] = int(state.integers(np.iinfo(np.int32).max))
        if isinstance(params.get("n_jobs"), int) and params["n_jobs"] <= 0:
            # It means all CPUs: by default, training uses all CPUs of a worker.
            del params["n_jobs"]
        return params, {}

    @property
    def _given(self) -> dict[str, Any]:
        """The parameters that aren't None; None stands for the framework's default."""
        return {name: value for name, value in self._params.items() if value is not None}

    @property
    def _rounds(self) -> int:
        return 100 if self.n_estimators is None else self.n_estimators

    @property
    def evals_result_(self) -> dict[str, dict[str, list[float]]]:
        """Evaluation set, such as "validation_0" → metric → its value after each round."""
        check_is_fitted(self, "result_")
        found: dict[str, dict[str, list[float]]] = {}
        # The longest first: one name may begin with another.
        datasets = sorted(self._eval_names, key=len, reverse=True)
        for round_ in self.result_.history:
            for name, value in round_.items():
                for dataset in datasets:
                    if name.startswith(f"{dataset}-"):
                        metric = name.removeprefix(f"{dataset}-")
                        found.setdefault(dataset, {}).setdefault(metric, []).append(value)
                        break
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _labels(self, y: Any) -> Values:
        """Return the labels to train on, float64, shape `[rows]`."""
        return numbers(y)

    def _evaluated_labels(self, y: Any) -> Values:
        return numbers(y)

    @abstractmethod
    def _default_params(self) -> Mapping[str, Any]:
        """Return the framework's parameters for this kind of prediction."""

    def _fit(
        self,
        rows: Rows,
        evaluated: Sequence[Rows] = (),
        *,
        params: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
        **options: Any,
    ) -> Self:
        """Train.

        Args:
            params: parameters of this call.
            feature_names: the names of the features, in place of those of `X`.
        """
        self._refuse_unknown_names()
        self._feature_names = feature_names
        features, label = self._table(rows.X, reset=True), self._labels(rows.y)
        check_consistent_length(rows.X, label)
        together = {**self._default_params(), **self._given, **(params or {})}
        together, more = self._translated(together, features.column_names)
        options = {**more, **options}
        options["categorical"] = [*self.categorical, *options.get("categorical", ())]
        self._eval_names = list(names or (f"validation_{i}" for i in range(len(evaluated))))
        others = {
            name: (
                self._table(each.X, reset=False, names=features.column_names),
                self._evaluated_labels(each.y),
                each,
            )
            for name, each in zip(self._eval_names, evaluated, strict=True)
        }
        sets = {"train": (features, label, rows), **others}
        columns = self._columns_besides([each for *_, each in sets.values()])
        datasets = {
            name: _with_facts(table, its_label, each, columns.values())
            for name, (table, its_label, each) in sets.items()
        }
        with ExitStack() as stack:
            config = self.run_config
            if config is None:
                place = stack.enter_context(tempfile.TemporaryDirectory(prefix="polytrain-"))
                config = RunConfig(storage_path=place, progress=False)
            self.result_ = make_trainer(
                self.backend.name,
                params=together,
                num_boost_round=self._rounds,
                label=LABEL,
                early_stopping_rounds=self.early_stopping_rounds,
                **{**columns, **options},
                datasets=datasets,
                # As in scikit-learn, every column of X is a feature.
                dataset_config={
                    name: DataConfig(columns=table.column_names) for name, table in datasets.items()
                },
                scaling_config=self.scaling_config or ScalingConfig(num_workers=1),
                run_config=config,
            ).fit(resume="never")  # an earlier run of this name had other data
            self.model_ = self.result_.load_model()
        return self

    def _columns_besides(self, sets: Sequence[Rows]) -> dict[str, str]:
        """Return the backend's options that name the columns besides features and labels."""
        found = {}
        if any(each.weight is not None for each in sets):
            found["weight"] = WEIGHT
        if any(each.query is not None for each in sets):
            found[self.backend.query_option] = QUERY
        scored = [each.score is not None for each in sets]
        if any(scored):
            if not all(scored):
                raise ValueError(
                    f"Some data sets have initial scores ({self.backend.score_option}), and some "
                    "have none. Give them for the training rows and for each of eval_set"
                )
            found[self.backend.score_option] = SCORE
        return found

    def _refuse_unknown_names(self) -> None:
        known = {*self._parameter_names, *self._estimator_names}
        problems = []
        for name in self._params:
            remedy = self._refused_names.get(name)
            if remedy is None and name not in known:
                meant = did_you_mean(name, known, cutoff=ALMOST_THE_SAME)
                remedy = meant.strip() or "Leave it out"
            if remedy is not None:
                what = f"{type(self).__name__} has no parameter of this name"
                problems.append(Problem(field=name, what=what, remedy=remedy))
        if problems:
            raise InvalidJobError(tuple(problems))

    def _predicted(
        self, X: Any, *, validate_features: bool = True, score: Any = None, **options: Any
    ) -> Values:
        """Return the framework's predictions.

        Args:
            validate_features: match columns by name; otherwise, by position.
            score: the initial score of each row.
            options: arguments of the framework's own `predict`.
        """
        check_is_fitted(self, "model_")
        names = self.model_features(self.model_)
        table = self._table(X, reset=False, by_name=validate_features, names=names)
        backend = self.result_.backend if hasattr(self, "result_") else None
        if not isinstance(backend, Booster):
            backend = self.backend()
        if score is not None:
            option = {self.backend.score_option: SCORE}
            table = with_columns(table, {SCORE: scores_of(score, X, *option)})
            backend = replace(backend, **cast(Any, option))
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
            request = satellites.prediction.PredictionRequest(
                backend=backend,
                checkpoint=Checkpoint(directory),
                data=table,
                num_workers=self._workers,
                options=options,
            )
            return np.asarray(satellites.prediction.predict(request))

    def _table(
        self, rows: Any, *, reset: bool, by_name: bool = True, names: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the features as a table; columns of a frame keep their names and types.

        Args:
            names: the names for an array's columns; x0, x1, … by default.
        """
        # Look at the class: a LazyFrame's own `columns` would be computed.
        if hasattr(type(rows), "columns"):
            table = table_of(rows)
            # A loaded model's names may differ; then the framework reports missing columns.
            if reset or (by_name and hasattr(self, "result_")):
                validate_data(self, rows, skip_check_array=True, reset=reset)
        else:
            values = validate_data(
                self,
                rows,
                reset=reset,
                dtype=[np.float64, np.float32],
                ensure_all_finite="allow-nan",
                ensure_min_samples=2 if reset else 1,
            )
            names = names or [f"x{index}" for index in range(values.shape[1])]
            table = pa.table(list(values.T), names=list(names))
        if (names := getattr(self, "_feature_names", None)) is not None:
            table = renamed(table, names, "feature_name")
        elif not by_name:
            table = renamed(table, self.model_features(self.model_), "The model")
        return without(table, self._params.get("missing"))


def _arguments(cls: type) -> set[str]:
    """Return the names of a class's arguments, with those of the bases that get its `**params`."""
    names: set[str] = set()
    for each in cls.__mro__:
        if "__init__" in vars(each):
            *_, last = arguments = signature(vars(each)["__init__"]).parameters.values()
            stars = (last.VAR_POSITIONAL, last.VAR_KEYWORD)
            names |= {one.name for one in arguments if one.kind not in stars}
            if each is BackendEstimator or last.kind is not last.VAR_KEYWORD:
                break
    return names - {"self"}


class BackendRegressor(RegressorMixin, BackendEstimator):
    """Predicts numbers."""


class BackendClassifier(ClassifierMixin, BackendEstimator):
    """Predicts classes."""

    @abstractmethod
    def class_params(self, classes: int) -> Mapping[str, Any]:
        """Return the framework's parameters for this number of classes, 2 or more."""

    @abstractmethod
    def model_classes(self, model: Any) -> int:
        """Return the number of a model's classes; 0 or 1 if it has one score for two classes."""

    def load_model(self, fname: str | os.PathLike[str]) -> Self:
        super().load_model(fname)
        self.n_classes_ = max(2, self.model_classes(self.model_))
        self.classes_ = np.arange(self.n_classes_)
        return self

    def _default_params(self) -> Mapping[str, Any]:
        return self.class_params(vars(self).get("n_classes_", 2))

    def _labels(self, y: Any) -> Values:
        label = column_or_1d(y, warn=True)
        check_classification_targets(label)
        self.classes_, codes = np.unique(label, return_inverse=True)
        self.n_classes_ = len(self.classes_)
        if self.n_classes_ < 2:
            raise ValueError(
                f"y has one class, {self.classes_.tolist()[0]!r}. Pass rows of two or more classes"
            )
        return codes.astype(float)

    def _evaluated_labels(self, y: Any) -> Values:
        names = column_or_1d(y)
        unknown = sorted({*names.tolist()} - {*self.classes_.tolist()})
        if unknown:
            raise ValueError(f"eval_set has a class that y doesn't have: {unknown[0]!r}.")
        codes: Values = np.searchsorted(self.classes_, names).astype(float)
        return codes

    def _chosen(self, probabilities: Values) -> Values:
        """Return the most probable classes, shape `[rows]`."""
        classes: Values = self.classes_[np.argmax(probabilities, axis=1)]
        return classes


def by_class(predicted: Values) -> Values:
    """Return probabilities, shape `[rows, classes]`, also from class 1's alone, shape `[rows]`."""
    return np.column_stack([1 - predicted, predicted]) if predicted.ndim == 1 else predicted


class BackendRanker(BackendEstimator):
    """Predicts an order within queries."""

    @abstractmethod
    def ranking_params(self) -> Mapping[str, Any]:
        """Return the framework's parameters for ranking."""

    def _default_params(self) -> Mapping[str, Any]:
        return self.ranking_params()


def _with_facts(table: pa.Table, label: Values, rows: Rows, wanted: Collection[str]) -> pa.Table:
    """Return the features with the label, weight, query and score columns that are wanted."""
    check_consistent_length(table, label)
    columns = {LABEL: label}
    if WEIGHT in wanted:
        weight = rows.weight
        columns[WEIGHT] = np.ones(len(table)) if weight is None else weights_of(weight, table)
    if QUERY in wanted:
        if rows.query is None:
            raise ValueError(
                "A data set of eval_set has no queries. Give them for each of its rows"
            )
        check_consistent_length(table, rows.query)
        columns[QUERY] = column_or_1d(rows.query)
    if SCORE in wanted:
        columns[SCORE] = scores_of(rows.score, table, "The initial score")
    return with_columns(table, columns)
