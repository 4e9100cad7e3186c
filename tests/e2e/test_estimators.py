"""Boosters as scikit-learn's estimators."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import is_classifier
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from tests.e2e.boosters import a_table

from polytrain import RunConfig, ScalingConfig
from polytrain_lightgbm.estimators import (
    PolytrainLGBMClassifier,
    PolytrainLGBMRanker,
    PolytrainLGBMRegressor,
)
from polytrain_xgboost.estimators import (
    PolytrainXGBClassifier,
    PolytrainXGBRanker,
    PolytrainXGBRegressor,
)

HERE = ScalingConfig(num_workers=0)
CLASSIFIERS = (PolytrainXGBClassifier, PolytrainLGBMClassifier)
WEIGHTS_ARE_NO_ROWS = {
    "check_sample_weight_equivalence_on_dense_data": "a row of weight 2 counts once where bins and "
    "leaves have a least number of rows; so it does in XGBoost's and LightGBM's own estimators"
}
FEW = {"min_data_in_leaf": 1, "min_data_in_bin": 1}


@parametrize_with_checks(
    [
        PolytrainXGBClassifier(n_estimators=5, scaling_config=HERE),
        PolytrainXGBRegressor(n_estimators=5, scaling_config=HERE),
        PolytrainLGBMClassifier(n_estimators=5, scaling_config=HERE, **FEW),
        PolytrainLGBMRegressor(n_estimators=5, scaling_config=HERE, **FEW),
    ],
    expected_failed_checks=lambda estimator: (
        WEIGHTS_ARE_NO_ROWS if is_classifier(estimator) else {}
    ),
)
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_classes_of_any_name_are_predicted(cls: Any) -> None:
    iris = load_iris(as_frame=True)
    names = np.array(iris.target_names)[iris.target]
    model = cls(n_estimators=20, scaling_config=ScalingConfig(num_workers=2), max_depth=3)
    model.fit(iris.data, names, eval_set=[(iris.data[::2], names[::2])])
    assert list(model.classes_) == sorted(set(names))
    assert model.score(iris.data, names) > 0.95
    assert model.predict_proba(iris.data).sum(axis=1) == pytest.approx(1)
    assert any(name.startswith("validation_0-") for name in model.result_.metrics)
    assert model.feature_names_in_.tolist() == list(iris.data.columns)


@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_searches_and_pipelines_take_the_frameworks_parameters(cls: Any) -> None:
    x, y = load_iris(return_X_y=True)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), cls(n_estimators=5, scaling_config=HERE)),
        {f"{cls.__name__.lower()}__max_depth": [1, 4]},
        cv=2,
    )
    search.fit(x, y)
    assert search.best_score_ > 0.8
    assert cross_val_score(cls(n_estimators=5, scaling_config=HERE), x, y, cv=3).min() > 0.8


@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_strings_of_a_frame_are_categories(cls: Any) -> None:
    frame = a_table().to_pandas()
    label = frame.pop("y")
    model = cls(n_estimators=10, scaling_config=HERE).fit(frame, label)
    without = cls(n_estimators=10, scaling_config=HERE).fit(frame.drop(columns="kind"), label)
    assert model.score(frame, label) > without.score(frame.drop(columns="kind"), label)


@pytest.mark.parametrize("cls", [PolytrainXGBRanker, PolytrainLGBMRanker])
def test_a_ranker_orders_within_queries(cls: Any) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, 4))
    relevance = np.clip(np.round(x[:, 0] + 1), 0, 3)
    queries = np.repeat(np.arange(60), 10)
    model = cls(n_estimators=10, scaling_config=ScalingConfig(num_workers=2))
    model.fit(x, relevance, qid=queries, eval_set=[(x[:50], relevance[:50], queries[:50])])
    assert np.corrcoef(model.predict(x), relevance)[0, 1] > 0.7


@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_weights_count(cls: Any) -> None:
    x = pd.DataFrame({"x": [0.0, 0.0, 1.0, 1.0] * 25})
    y = np.array([0, 1, 0, 1] * 25)
    heavy = np.where(y == (x["x"] > 0.5), 10.0, 1.0)
    few = FEW if cls is PolytrainLGBMClassifier else {}
    model = cls(n_estimators=10, scaling_config=HERE, **few).fit(x, y, sample_weight=heavy)
    assert model.predict(pd.DataFrame({"x": [0.0, 1.0]})).tolist() == [0, 1]


@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_every_fit_trains_whatever_a_run_of_this_name_has_learned(
    quiet: RunConfig, cls: Any
) -> None:
    x, y = load_iris(return_X_y=True)
    named = dataclasses.replace(quiet, name="one")
    model = cls(n_estimators=10, scaling_config=HERE, run_config=named).fit(x, y)
    assert (model.predict(x) == y).mean() > 0.9
    others = (y + 1) % 3
    assert (model.fit(x, others).predict(x) == others).mean() > 0.9


def test_a_run_is_kept_where_one_is_wanted(quiet: RunConfig) -> None:
    x, y = load_iris(return_X_y=True)
    model = PolytrainXGBClassifier(n_estimators=3, scaling_config=HERE, run_config=quiet).fit(x, y)
    assert model.result_.checkpoint is not None
    assert model.result_.predict({f"x{i}": x[:, i] for i in range(4)}).shape == (150, 3)
