"""Boosters as scikit-learn's estimators."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import polars
import pytest
import xgboost
from sklearn.base import is_classifier
from sklearn.datasets import load_iris
from sklearn.feature_selection import SelectFromModel
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from tests.e2e.boosters import a_table

from polytrain import RunConfig, ScalingConfig
from polytrain.boosting.estimators import BackendClassifier, BackendRanker, BackendRegressor
from polytrain.prediction.predict import PredictionRequest, predict
from polytrain_lightgbm.estimators import (
    PolytrainLGBMClassifier,
    PolytrainLGBMRanker,
    PolytrainLGBMRegressor,
)
from polytrain_plugins import Report, hookimpl
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


def checks_of(*estimators: Any) -> pytest.MarkDecorator:
    return parametrize_with_checks(
        list(estimators),
        expected_failed_checks=lambda estimator: (
            WEIGHTS_ARE_NO_ROWS if is_classifier(estimator) else {}
        ),
    )


# In `make test` each framework once and each kind of estimator once, the others in the sweep.
@pytest.mark.sweep(one_in=4)
@checks_of(
    PolytrainXGBClassifier(n_estimators=5, scaling_config=HERE),
    PolytrainLGBMRegressor(n_estimators=5, scaling_config=HERE, **FEW),
)
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.only_in_sweep
@checks_of(
    PolytrainXGBRegressor(n_estimators=5, scaling_config=HERE),
    PolytrainLGBMClassifier(n_estimators=5, scaling_config=HERE, **FEW),
)
def test_scikit_learns_own_checks_of_the_others(estimator: Any, check: Any) -> None:
    check(estimator)


def test_an_estimator_that_lacks_what_its_framework_has_to_say_is_not_made() -> None:
    lacking = {
        BackendRegressor: ("backend", "model_features", "read_model"),
        BackendClassifier: ("class_params", "model_classes"),
        BackendRanker: ("ranking_params",),
    }
    for cls, names in lacking.items():
        with pytest.raises(TypeError) as raised:
            cls()
        assert all(name in str(raised.value) for name in names)


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


@pytest.mark.sweep(one_in=2)
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


class Interrupts:
    """An observer that presses Ctrl-C at the first report of each run."""

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        if report.step == 1:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_a_search_that_is_interrupted_counts_no_failed_fit(cls: Any, tmp_path: Path) -> None:
    x, y = load_iris(return_X_y=True)
    config = RunConfig(storage_path=tmp_path, progress=False, observers=(Interrupts(),))
    model = cls(n_estimators=5, scaling_config=HERE, run_config=config)
    with pytest.raises(KeyboardInterrupt):
        GridSearchCV(model, {"max_depth": [1, 4]}, cv=2, error_score=0.0).fit(x, y)
    assert len(list(tmp_path.iterdir())) == 1


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


XGB = (PolytrainXGBClassifier, PolytrainXGBRegressor)
LGBM = (PolytrainLGBMClassifier, PolytrainLGBMRegressor)
THEIRS = {
    PolytrainXGBClassifier: xgboost.XGBClassifier,
    PolytrainXGBRegressor: xgboost.XGBRegressor,
    PolytrainLGBMClassifier: lightgbm.LGBMClassifier,
    PolytrainLGBMRegressor: lightgbm.LGBMRegressor,
}


def fitted(cls: Any, **arguments: Any) -> Any:
    """Trained on three classes by name, or their numbers, with a set to evaluate on."""
    iris = load_iris(as_frame=True)
    target = iris.target if cls in (XGB[1], LGBM[1]) else np.array(iris.target_names)[iris.target]
    estimator = cls(n_estimators=12, scaling_config=HERE, max_depth=3, **arguments)
    return estimator.fit(iris.data[::2], target[::2], eval_set=[(iris.data[1::2], target[1::2])])


@pytest.mark.parametrize("cls", THEIRS)
def test_it_has_what_the_frameworks_own_estimator_has_after_fit(cls: Any) -> None:
    iris = load_iris(as_frame=True)
    theirs = THEIRS[cls](n_estimators=3, verbosity=0 if cls in XGB else -1)
    theirs.fit(iris.data, iris.target, eval_set=[(iris.data, iris.target)])
    ours = fitted(cls, early_stopping_rounds=3)
    wanted = {name for name in dir(theirs) if not name.startswith("_")} - {*theirs.get_params()}
    # A linear model's, and what scikit-learn's check of a fit looks at.
    lacking = {name for name in wanted if not hasattr(ours, name)} - {"coef_", "fitted_"}
    assert lacking == set()
    assert ours.get_params() == {name: getattr(ours, name) for name in ours.get_params()}
    if cls in XGB:
        assert ours.intercept_.shape == theirs.intercept_.shape
        classes = {"num_class": 3} if cls in CLASSIFIERS else {}
        objective = theirs.get_xgb_params()["objective"]
        assert ours.get_xgb_params() == {"max_depth": 3, "objective": objective, **classes}
    else:
        assert ours.objective_ == theirs.objective_
        assert ours.n_iter_ == ours.n_estimators_ == ours.best_iteration_ > 0
        assert fitted(cls).n_iter_ == 12
        assert ours.n_features_ == 4


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("cls", THEIRS)
def test_importances_select_features(cls: Any) -> None:
    iris = load_iris(as_frame=True)
    ours = fitted(cls)
    assert ours.feature_importances_.shape == (4,)
    chosen = SelectFromModel(ours, prefit=True).transform(iris.data)
    assert 1 <= chosen.shape[1] < 4


@pytest.mark.parametrize("cls", XGB)
def test_a_saved_model_is_one_of_xgboosts_own_estimators(cls: Any, tmp_path: Path) -> None:
    iris = load_iris(as_frame=True)
    ours, theirs = fitted(cls), THEIRS[cls]()
    ours.save_model(tmp_path / "model.ubj")
    theirs.load_model(tmp_path / "model.ubj")
    again = cls(n_estimators=1, scaling_config=HERE).fit(
        iris.data[["petal width (cm)"]], iris.target
    )
    again.load_model(tmp_path / "model.ubj")
    for estimator in (ours, again):
        np.testing.assert_array_equal(estimator.feature_importances_, theirs.feature_importances_)
        np.testing.assert_array_equal(estimator.apply(iris.data), theirs.apply(iris.data))
        assert estimator.get_booster().num_boosted_rounds() == 12
    if cls in CLASSIFIERS:
        np.testing.assert_array_equal(
            ours.predict_proba(iris.data), theirs.predict_proba(iris.data)
        )
        assert list(ours.classes_) == sorted(iris.target_names)
        assert list(again.classes_) == [0, 1, 2]
        assert (ours.n_classes_, again.n_classes_) == (3, 3)


def test_a_model_that_xgboost_has_trained_on_an_array_is_loaded_and_continued(
    tmp_path: Path,
) -> None:
    features, target = load_iris(return_X_y=True)
    theirs = xgboost.XGBRegressor(n_estimators=3).fit(features, target)
    theirs.save_model(tmp_path / "model.ubj")
    ours = PolytrainXGBRegressor(n_estimators=2, scaling_config=HERE)
    ours.load_model(tmp_path / "model.ubj")
    np.testing.assert_array_equal(ours.predict(features), theirs.predict(features))
    np.testing.assert_array_equal(ours.feature_importances_, theirs.feature_importances_)
    ours.fit(features, target, xgb_model=tmp_path / "model.ubj")
    assert ours.get_booster().num_boosted_rounds() == 5


def test_lightgbms_numbers_of_categories_are_what_a_model_without_lists_knows(
    tmp_path: Path,
) -> None:
    features, target = load_iris(return_X_y=True)
    features[:, 3] = np.floor(features[:, 3])
    data = lightgbm.Dataset(features, target, categorical_feature=[3])
    theirs = lightgbm.train({"verbosity": -1, "min_data_per_group": 1}, data, 3)
    theirs.save_model(tmp_path / "model.txt")
    ours = PolytrainLGBMRegressor().load_model(tmp_path / "model.txt")
    np.testing.assert_array_equal(ours.predict(features), theirs.predict(features))


@pytest.mark.parametrize("cls", LGBM)
def test_a_saved_model_is_lightgbms_own(cls: Any, tmp_path: Path) -> None:
    iris = load_iris(as_frame=True)
    ours = fitted(cls)
    ours.save_model(tmp_path / "model.txt")
    theirs = lightgbm.Booster(model_file=tmp_path / "model.txt")
    again = cls(n_estimators=1, scaling_config=HERE).fit(
        iris.data[["petal width (cm)"]], iris.target
    )
    again.load_model(tmp_path / "model.txt")
    for estimator in (ours, again):
        np.testing.assert_array_equal(estimator.feature_importances_, theirs.feature_importance())
        leaves = theirs.predict(iris.data, pred_leaf=True)
        np.testing.assert_array_equal(estimator.apply(iris.data), leaves)
        assert estimator.feature_name_ == theirs.feature_name()
        assert estimator.booster_.num_trees() == theirs.num_trees()
    if cls in CLASSIFIERS:
        np.testing.assert_array_equal(again.predict_proba(iris.data), theirs.predict(iris.data))
        assert (ours.n_classes_, again.n_classes_) == (3, 3)


def test_what_was_evaluated_is_kept_as_xgboost_has_it() -> None:
    ours = fitted(PolytrainXGBClassifier, early_stopping_rounds=2)
    [values] = ours.evals_result()["validation_0"].values()
    assert list(ours.evals_result()) == ["validation_0"]
    assert ours.best_score == min(values)
    assert ours.best_iteration == int(np.argmin(values))


def test_what_was_evaluated_is_kept_as_lightgbm_has_it() -> None:
    ours = fitted(PolytrainLGBMRegressor, early_stopping_rounds=2)
    assert list(ours.evals_result_) == ["validation_0"]
    values = ours.evals_result_["validation_0"]["l2"]
    assert ours.best_iteration_ == int(np.argmin(values)) + 1
    assert ours.best_score_ == {"validation_0": {"l2": min(values)}}


def test_the_best_round_of_a_continued_model_has_its_score() -> None:
    """It counts the rounds before, which have no values; and one name begins with another."""
    iris = load_iris(as_frame=True)
    half = iris.data[1::2], iris.target[1::2]
    begun = fitted(PolytrainLGBMRegressor)
    ours = PolytrainLGBMRegressor(n_estimators=30, early_stopping_rounds=2, scaling_config=HERE)
    ours.fit(
        iris.data[::2],
        iris.target[::2],
        eval_set=[half, half],
        eval_names=["half", "half-again"],
        init_model=begun,
    )
    values = ours.evals_result_["half"]["l2"]
    assert ours.evals_result_["half-again"] == {"l2": values}
    assert ours.best_iteration_ == 12 + int(np.argmin(values)) + 1
    assert ours.best_score_["half"] == {"l2": min(values)}


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_frames_of_polars_are_taken(cls: Any) -> None:
    iris = load_iris(as_frame=True)
    frame = polars.from_pandas(iris.data)
    ours = cls(n_estimators=5, scaling_config=HERE).fit(frame, iris.target)
    plain = cls(n_estimators=5, scaling_config=HERE).fit(iris.data, iris.target)
    np.testing.assert_array_equal(ours.predict_proba(frame), plain.predict_proba(iris.data))
    assert list(ours.feature_names_in_) == list(iris.data.columns)
    with pytest.raises(TypeError, match=r"collect\(\)"):
        ours.predict(frame.lazy())


@pytest.mark.parametrize("cls", CLASSIFIERS)
def test_categories_of_polars_are_taken(cls: Any) -> None:
    names = [*"aaabbbccc"] * 5
    label = [name != "b" for name in names]
    model = cls(n_estimators=5, scaling_config=HERE).fit(pd.DataFrame({"name": names}), label)
    expected = model.predict_proba(pd.DataFrame({"name": names}))
    for kind in (polars.String, polars.Categorical, polars.Enum([*"cba"])):
        frame = polars.DataFrame({"name": names}, schema={"name": kind})
        np.testing.assert_array_equal(model.predict_proba(frame), expected)
        np.testing.assert_array_equal(model.predict_proba(frame.to_arrow()), expected)


@pytest.mark.parametrize("cls", [PolytrainXGBClassifier, PolytrainLGBMClassifier])
def test_many_rows_are_predicted_by_the_workers(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    features, label = load_iris(return_X_y=True, as_frame=True)
    model = cls(
        n_estimators=60, early_stopping_rounds=2, scaling_config=ScalingConfig(num_workers=2)
    )
    wrong = np.random.default_rng(0).permutation(label)
    model.fit(features, label, eval_set=[(features, wrong)])
    assert len(model.result_.history) < 60
    expected = model.predict_proba(features)
    for module in ("boosting.estimators", "prediction.predict"):
        monkeypatch.setattr(f"polytrain.{module}.PART_ROWS", 40)
    asked: list[int | None] = []

    def noted(request: PredictionRequest) -> Any:
        asked.append(request.num_workers)
        return predict(request)

    monkeypatch.setattr("polytrain.prediction.predict.predict", noted)
    assert model.predict_proba(features).tolist() == expected.tolist()
    assert asked == [2]
