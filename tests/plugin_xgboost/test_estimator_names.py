"""XGBoost's own estimators: no keyword of theirs is unknown to these."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import xgboost
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from polytrain_plugins import InvalidJobError
from polytrain_xgboost.estimators import (
    PolytrainXGBClassifier,
    PolytrainXGBRanker,
    PolytrainXGBRegressor,
)

PAIRS = [
    (PolytrainXGBRegressor, xgboost.XGBRegressor),
    (PolytrainXGBClassifier, xgboost.XGBClassifier),
    (PolytrainXGBRanker, xgboost.XGBRanker),
]
METHODS = ("fit", "predict", "predict_proba", "score", "apply", "save_model", "load_model")


def keywords(function: Any) -> set[str]:
    return {*signature(function).parameters} - {"self", "kwargs"}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("method", METHODS)
def test_methods_have_every_keyword_of_xgboosts_own(ours: Any, theirs: Any, method: str) -> None:
    if hasattr(theirs, method):
        assert keywords(getattr(theirs, method)) <= keywords(getattr(ours, method))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_constructors_know_every_keyword_of_xgboosts_own(ours: Any, theirs: Any) -> None:
    wanted = keywords(theirs.__init__) | keywords(xgboost.XGBModel.__init__)
    known = {*ours._parameter_names, *ours._estimator_names, *ours._refused_names}
    assert wanted <= known | keywords(ours.__init__)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("class_weight", "compute_sample_weight"),
        ("missin", "Did you mean 'missing'"),
        ("no_such_thing", "Leave it out"),
    ],
)
def test_other_names_are_refused(ours: Any, theirs: Any, name: str, remedy: str) -> None:
    rows = [[0.0], [1.0]]
    beside = {"qid": [0, 1]} if ours is PolytrainXGBRanker else {}
    with pytest.raises(InvalidJobError) as raised:
        ours(**{name: 1}).fit(rows, [0, 1], **beside)
    [problem] = raised.value.problems
    assert problem.field == name
    assert remedy in problem.remedy


def test_a_parameter_is_an_attribute_too() -> None:
    model = PolytrainXGBRegressor(eta=0.3)
    model.max_depth, model.n_estimators, model.note = 3, 5, "mine"
    assert (model.eta, model.max_depth) == (0.3, 3)
    assert model.get_params() == {
        **PolytrainXGBRegressor().get_params(),
        **{"eta": 0.3, "max_depth": 3, "n_estimators": 5},
    }
    with pytest.raises(AttributeError, match="gamma"):
        _ = model.gamma
    with pytest.raises(NotFittedError):
        _ = model.intercept_


class Shallow(PolytrainXGBRegressor):
    """It passes on whatever it doesn't name, and sets a parameter before that."""

    def __init__(self, max_depth: int = 3, **params: Any) -> None:
        self.max_depth = max_depth
        super().__init__(**params)


def test_a_subclass_may_name_only_some_parameters() -> None:
    model = Shallow(eta=0.3).set_params(n_estimators=5, max_leaves=7)
    assert model.n_estimators == 5
    assert model._given == {"max_depth": 3, "eta": 0.3, "max_leaves": 7}
    assert clone(model).set_params(max_depth=4)._given == {**model._given, "max_depth": 4}
