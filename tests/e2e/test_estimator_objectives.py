"""With every objective an estimator predicts what the library's own estimator does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightgbm
import numpy as np
import pytest
import xgboost
from lightgbm.basic import LightGBMError
from tests.sweeps import only_in_sweep
from xgboost.core import XGBoostError

from polytrain import ScalingConfig, TrainingFailedError
from polytrain_lightgbm.estimators import (
    PolytrainLGBMClassifier,
    PolytrainLGBMRanker,
    PolytrainLGBMRegressor,
)
from polytrain_lightgbm.objectives import _OBJECTIVES as LIGHTGBMS
from polytrain_plugins import InvalidJobError
from polytrain_xgboost.estimators import (
    PolytrainXGBClassifier,
    PolytrainXGBRanker,
    PolytrainXGBRegressor,
)
from polytrain_xgboost.parameters import _OBJECTIVES as XGBOOSTS

ROWS, ROUNDS = 240, 6
DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(ROWS, 4))
SCORES = np.exp(X[:, 0] + 0.1 * DRAWS.normal(size=ROWS))
TWO = (X[:, 0] + X[:, 1] ** 2 > 0.6).astype(int)
THREE = np.digitize(X[:, 0] + 0.3 * X[:, 1], [-0.5, 0.5])
QUERIES = np.repeat(np.arange(ROWS // 8), 8)

OF_CLASSES = {"multi:softmax", "multi:softprob"}
OF_CLASSES |= {"multiclass", "softmax", "multiclassova", "multiclass_ova", "ova", "ovr"}
OF_CHANCES = {"binary:logistic", "binary:logitraw", "reg:logistic", "cross_entropy"}
OF_CHANCES |= {"cross_entropy_lambda", "xentropy", "xentlambda"}
RANKING = {"lambdarank", "rank_xendcg", "xendcg", "xe_ndcg", "xe_ndcg_mart", "xendcg_mart"}


def squared(labels: Any, scores: Any) -> Any:
    return scores - labels, np.ones_like(scores)


def one_against_others(labels: Any, scores: Any) -> Any:
    is_this = np.asarray(labels).astype(int)[:, None] == np.arange(3)
    chances = 1 / (1 + np.exp(-scores))
    return chances - is_this, chances * (1 - chances)


def name_of(objective: Any) -> str:
    return objective if isinstance(objective, str) else objective.__name__


XGB_KINDS: dict[str, tuple[Any, Any]] = {
    "numbers": (PolytrainXGBRegressor, xgboost.XGBRegressor),
    "two": (PolytrainXGBClassifier, xgboost.XGBClassifier),
    "three": (PolytrainXGBClassifier, xgboost.XGBClassifier),
    "ranks": (PolytrainXGBRanker, xgboost.XGBRanker),
}
LGBM_KINDS: dict[str, tuple[Any, Any]] = {
    "numbers": (PolytrainLGBMRegressor, lightgbm.LGBMRegressor),
    "two": (PolytrainLGBMClassifier, lightgbm.LGBMClassifier),
    "three": (PolytrainLGBMClassifier, lightgbm.LGBMClassifier),
    "ranks": (PolytrainLGBMRanker, lightgbm.LGBMRanker),
}
EVERY_TIME = {
    ("numbers", "multi:softmax"),
    ("numbers", "reg:quantileerror"),
    ("numbers", "survival:cox"),
    ("numbers", "squared"),
    ("two", "binary:logitraw"),
    ("two", "reg:squarederror"),
    ("three", "binary:logistic"),
    ("three", "multi:softmax"),
    ("three", "one_against_others"),
    ("ranks", "rank:pairwise"),
    ("numbers", "poisson"),
    ("two", "cross_entropy_lambda"),
    ("two", "squared"),
    ("three", "ova"),
    ("ranks", "rank_xendcg"),
}


def cases(objectives: Any) -> Iterator[Any]:
    for kind in XGB_KINDS:
        if kind == "ranks":
            objectives = [
                name for name in objectives if name.startswith("rank:") or name in RANKING
            ]
        functions = {"numbers": [squared], "two": [squared], "three": [one_against_others]}
        for objective in [*objectives, *functions.get(kind, [])]:
            name = name_of(objective)
            if (kind, name) in EVERY_TIME:
                yield pytest.param(kind, objective, id=f"{kind}-{name}")
            else:
                yield only_in_sweep(kind, objective, id=f"{kind}-{name}")


def labels_for(kind: str, objective: Any) -> Any:
    if kind != "numbers":
        return TWO if kind == "two" else THREE
    if objective in OF_CLASSES:
        return THREE
    if objective in OF_CHANCES:
        return 1 / (1 + SCORES)
    return TWO if objective in ("binary", "binary:hinge") else SCORES


def params_for(kind: str, objective: Any) -> dict[str, Any]:
    params = {"n_estimators": ROUNDS, "max_depth": 3, "objective": objective}
    if kind == "numbers" and objective in OF_CLASSES:
        params["num_class"] = 3
    if objective == "reg:quantileerror":
        params["quantile_alpha"] = 0.7
    return params


def predictions(model: Any, **options: Any) -> dict[str, Any]:
    methods = [
        name for name in ("predict", "predict_proba", "decision_function") if hasattr(model, name)
    ]
    return {name: getattr(model, name)(X, **options) for name in methods}


def fits(model: Any, label: Any, refusals: tuple[type[Exception], ...], **options: Any) -> bool:
    """Train, and return whether the objective takes these labels."""
    try:
        model.fit(X, label, **options)
    except refusals:
        return False
    return True


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(("kind", "objective"), cases(XGBOOSTS))
def test_predictions_are_those_of_xgboosts_own_estimator(kind: str, objective: Any) -> None:
    ours, theirs = XGB_KINDS[kind]
    params, label = params_for(kind, objective), labels_for(kind, objective)
    beside = {"qid": QUERIES} if kind == "ranks" else {}
    mine = ours(scaling_config=ScalingConfig(num_workers=0), **params)
    works = fits(mine, label, (InvalidJobError, TrainingFailedError), **beside)
    own = theirs(**params)
    if not fits(own, label, (XGBoostError,), **beside):
        assert not works
        return
    if name_of(objective).startswith("rank:") and kind in ("numbers", "two"):
        # XGBoost takes all rows as one query.
        assert not works
        return
    assert works
    for method, expected in predictions(own).items():
        found = getattr(mine, method)(X)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(one_in=3)
@pytest.mark.filterwarnings("ignore:LightGBM knows no probabilities")
@pytest.mark.parametrize(
    ("kind", "objective"),
    cases([name for first, others in LIGHTGBMS.items() for name in (first, *others)]),
)
def test_predictions_are_those_of_lightgbms_own_estimator(kind: str, objective: Any) -> None:
    """With the same trees: the last digits of LightGBM's leaves depend on its machines."""
    ours, theirs = LGBM_KINDS[kind]
    params, label = params_for(kind, objective), labels_for(kind, objective)
    mine = ours(scaling_config=ScalingConfig(num_workers=0), **params)
    beside = {"qid": QUERIES} if kind == "ranks" else {}
    works = fits(mine, label, (InvalidJobError, TrainingFailedError), **beside)
    own = theirs(**{**params, "n_estimators": 1}, verbose=-1)
    beside = {"group": [8] * (ROWS // 8)} if kind == "ranks" else {}
    trees = {"init_model": mine.booster_} if works else {}
    assert fits(own, label, (LightGBMError,), **beside, **trees) == works
    if not works:
        return
    for method, expected in predictions(own, num_iteration=ROUNDS).items():
        np.testing.assert_array_equal(getattr(mine, method)(X), expected)


def test_three_classes_are_told_apart_by_softmax() -> None:
    model = PolytrainXGBClassifier(
        n_estimators=10, objective="multi:softmax", scaling_config=ScalingConfig(num_workers=0)
    )
    names = np.array(["a", "b", "c"])[THREE]
    model.fit(X, names)
    assert model.score(X, names) > 0.95
    chances = model.predict_proba(X)
    assert chances.shape == (ROWS, 3)
    assert chances.min() >= 0
    assert chances.sum(axis=1) == pytest.approx(1)


def test_a_loaded_classifier_knows_its_objective(tmp_path: Any) -> None:
    model = PolytrainXGBClassifier(
        n_estimators=3, objective="multi:softmax", scaling_config=ScalingConfig(num_workers=0)
    )
    model.fit(X, THREE).save_model(tmp_path / "model.ubj")
    again = PolytrainXGBClassifier().load_model(tmp_path / "model.ubj")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


def test_raw_scores_are_said_to_be_such() -> None:
    model = PolytrainLGBMClassifier(
        n_estimators=3, objective=squared, scaling_config=ScalingConfig(num_workers=0)
    )
    model.fit(X, TWO)
    with pytest.warns(UserWarning, match="raw scores"):
        found = model.predict(X)
    np.testing.assert_array_equal(found, model.booster_.predict(X, raw_score=True))
