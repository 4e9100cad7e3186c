"""XGBoost's own estimators: no keyword of theirs is unknown to these."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import xgboost
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from polytrain import ScalingConfig
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


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_parameters_for_xgboost_are_those_of_its_own(ours: Any, theirs: Any) -> None:
    function = {} if theirs is xgboost.XGBRanker else {"objective": len}
    for given in ({"max_depth": 3, "missing": 0}, function, {"objective": "rank:map"}):
        expected = theirs(**given).get_xgb_params()
        expected = {name: value for name, value in expected.items() if value is not None}
        assert ours(**given).get_xgb_params() == expected
        alike = ours(**theirs(**given).get_params())
        assert alike.get_num_boosting_rounds() == theirs().get_num_boosting_rounds() == 100
        assert alike.get_xgb_params() == expected


@pytest.mark.parametrize("objective", [None, "binary:logistic", "multi:softmax"])
def test_parameters_for_several_classes_are_those_of_its_own(objective: str | None) -> None:
    rows, label = [[0.0], [1.0], [2.0]], [0, 1, 2]
    ours, theirs = (
        cls(n_estimators=1, objective=objective)
        for cls in (PolytrainXGBClassifier, xgboost.XGBClassifier)
    )
    ours.set_params(scaling_config=ScalingConfig(num_workers=0)).fit(rows, label)
    expected = theirs.fit(rows, label).get_xgb_params()["objective"]
    assert ours.get_xgb_params() == {"objective": expected, "num_class": 3}


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


class Noted(PolytrainXGBRegressor):
    """A subclass with an argument of its own, and one of XGBoost's."""

    def __init__(self, *, note: str = "", max_depth: int = 2, **params: Any) -> None:
        self.note, self.max_depth, self.max_leaves = note, max_depth, 7
        super().__init__(**params)


class Shallow(PolytrainXGBRegressor):
    """A subclass without `**params`."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(n_estimators=3, max_depth=depth)
        self.depth = depth


def sent(estimator: Any) -> Any:
    return pickle.loads(pickle.dumps(estimator))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, clone, sent])
def test_a_subclass_keeps_all_parameters(copied: Callable[[Any], Any]) -> None:
    model = Noted(note="mine", n_estimators=5, eta=0.3)
    model.set_params(max_depth=4, gamma=1)
    model.subsample = 0.5
    expected = {
        **PolytrainXGBRegressor(n_estimators=5).get_params(),
        **{"eta": 0.3, "gamma": 1, "max_depth": 4, "max_leaves": 7, "note": "mine"},
        **{"subsample": 0.5},
    }
    again = copied(model)
    assert model.get_params() == again.get_params() == expected
    assert again.set_params(eta=0.1, n_estimators=6).get_xgb_params()["eta"] == 0.1
    assert again.get_xgb_params()["max_depth"] == 4
    assert "note" not in again.get_xgb_params()
    assert (model.eta, model.n_estimators) == (0.3, 5)


@pytest.mark.parametrize("copied", [copy.deepcopy, clone, sent])
def test_a_subclass_chooses_parameters(copied: Callable[[Any], Any]) -> None:
    model = copied(Shallow(depth=4))
    assert model.get_params() == {"depth": 4}
    assert (model.n_estimators, model.max_depth) == (3, 4)
    assert model.set_params(max_depth=5).get_xgb_params()["max_depth"] == 5
    with pytest.raises(ValueError, match="Invalid parameter 'n_estimators'"):
        model.set_params(n_estimators=6)
