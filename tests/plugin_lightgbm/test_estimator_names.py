"""LightGBM's own estimators: no keyword of theirs is unknown to these."""

from __future__ import annotations

from inspect import signature
from typing import Any

import lightgbm
import pytest
from sklearn.base import clone

from polytrain_lightgbm.estimators import (
    PolytrainLGBMClassifier,
    PolytrainLGBMRanker,
    PolytrainLGBMRegressor,
)
from polytrain_plugins import InvalidJobError

PAIRS = [
    (PolytrainLGBMRegressor, lightgbm.LGBMRegressor),
    (PolytrainLGBMClassifier, lightgbm.LGBMClassifier),
    (PolytrainLGBMRanker, lightgbm.LGBMRanker),
]
METHODS = ("fit", "predict", "predict_proba", "decision_function", "score")


def keywords(function: Any) -> set[str]:
    return {*signature(function).parameters} - {"self"}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("method", METHODS)
def test_methods_have_every_keyword_of_lightgbms_own(ours: Any, theirs: Any, method: str) -> None:
    if hasattr(theirs, method):
        assert keywords(getattr(theirs, method)) <= keywords(getattr(ours, method))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_constructors_know_every_keyword_of_lightgbms_own(ours: Any, theirs: Any) -> None:
    known = {*ours._parameter_names, *ours._estimator_names, *ours._refused_names}
    wanted = keywords(theirs.__init__) - {"kwargs"}
    assert wanted <= known | keywords(ours.__init__)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("callbacks", "fit(callbacks="),
        ("eval_metric", "fit(eval_metric="),
        ("missing", "zero_as_missing"),
        ("class_weigh", "Did you mean 'class_weight'"),
        ("no_such_thing", "Leave it out"),
    ],
)
def test_other_names_are_refused(ours: Any, theirs: Any, name: str, remedy: str) -> None:
    rows = [[0.0], [1.0]]
    beside = {"qid": [0, 1]} if ours is PolytrainLGBMRanker else {}
    with pytest.raises(InvalidJobError) as raised:
        ours(**{name: 1}).fit(rows, [0, 1], **beside)
    [problem] = raised.value.problems
    assert problem.field == name
    assert remedy in problem.remedy


def test_a_subclass_may_have_attributes_that_are_aliases_or_of_the_command_line() -> None:
    class Noted(PolytrainLGBMRegressor):
        def __init__(self, *, config: Any = None, sub_row: float = 1, **params: Any) -> None:
            self.sub_row = sub_row
            super().__init__(sub_row=sub_row, **params)
            self.config, self.data, self.label, self.metrics = config, "x", "y", ["l2"]

    model = Noted(n_estimators=5).set_params(sub_row=0.5)
    model.subsample_freq, model.bagging_seed, model.reg_alpha = 1, 2, 3.0
    given = {"sub_row": 0.5, "subsample_freq": 1, "bagging_seed": 2, "reg_alpha": 3.0}
    expected = {**PolytrainLGBMRegressor(n_estimators=5).get_params(), **given, "config": None}
    assert clone(model).get_params() == model.get_params() == expected
    assert model._params == given
