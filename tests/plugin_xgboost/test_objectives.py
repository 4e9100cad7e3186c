"""The names of objectives and metrics are those that the installed XGBoost knows."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import xgboost
from tests.plugin_xgboost.test_options import problems

from polytrain_xgboost.labels import labels
from polytrain_xgboost.parameters import _METRICS, _OBJECTIVES


def matrix() -> xgboost.DMatrix:
    matrix = xgboost.DMatrix(np.arange(8.0).reshape(8, 1), label=[0, 1] * 4)
    for bound in ("lower", "upper"):
        matrix.set_float_info(f"label_{bound}_bound", np.ones(8))
    return matrix


def test_all_objectives_are_known() -> None:
    with pytest.raises(xgboost.core.XGBoostError) as raised:
        xgboost.train({"objective": "nosuch"}, matrix(), 1)
    candidates = set(re.findall(r"Objective candidate: (\S+)", str(raised.value)))
    assert candidates == set(_OBJECTIVES)


@pytest.mark.parametrize("name", _METRICS)
def test_every_metric_exists(name: str) -> None:
    needed = {
        "merror": {"objective": "multi:softprob", "num_class": 2},
        "mlogloss": {"objective": "multi:softprob", "num_class": 2},
        "quantile": {"objective": "reg:quantileerror", "quantile_alpha": 0.5},
    }
    parameter = {"tweedie-nloglik": "@1.5", "ams": "@0.5"}.get(name, "")
    data = matrix()
    booster = xgboost.Booster({"eval_metric": name + parameter, **needed.get(name, {})}, [data])
    booster.update(data, 0)
    assert name in booster.eval_set([(data, "train")])


@pytest.mark.parametrize("given", ["auk", ["logloss", "auk"]])
def test_a_metric_that_is_none_is_refused(given: Any) -> None:
    [problem] = problems(label="y", params={"eval_metric": given}).values()
    assert "Did you mean 'auc'" in problem.remedy


@pytest.mark.parametrize(
    "given", ["auc", ["ndcg@10-", "map-"], ("error@0.7", "tweedie-nloglik@1.2")]
)
def test_metrics_have_parameters(given: Any) -> None:
    assert problems(label="y", params={"eval_metric": given}) == {}


def test_what_an_objective_cannot_do_without() -> None:
    classes = {"objective": "multi:softprob"}
    assert list(problems(label="y", params=classes)) == ["params['num_class']"]
    assert problems(label="y", params={**classes, "num_class": np.int64(3)}) == {}
    ranking = {"objective": "rank:ndcg"}
    assert list(problems(label="y", params=ranking)) == ["qid"]
    assert problems(label="y", params=ranking, qid="w") == {}


def test_bounds_are_of_one_objective_which_has_no_label() -> None:
    bounds = {"label_lower_bound": "x", "label_upper_bound": "w"}
    aft = {"objective": "survival:aft"}
    assert problems(params=aft, **bounds) == {}
    assert list(problems(params=aft)) == list(bounds)
    assert "takes two bounds instead" in problems(params=aft, label="y", **bounds)["label"].what
    assert bounds.keys() <= problems(params={}, label="y", **bounds).keys()
    missing = {**bounds, "label_upper_bound": "none"}
    assert list(problems(params=aft, **missing)) == ["label_upper_bound"]


@pytest.mark.parametrize(
    ("params", "taken"),
    [
        ({}, None),
        ({"objective": "binary:logistic"}, "numbers from 0 to 1"),
        ({"objective": "binary:hinge"}, "0 and 1"),
        ({"objective": "multi:softmax", "num_class": "4"}, "whole numbers from 0 to 3"),
        ({"objective": "count:poisson"}, "numbers from 0"),
        ({"objective": "survival:cox"}, None),
        ({"objective": "survival:aft"}, "numbers from 0"),
    ],
)
def test_labels_of_objectives(params: dict[str, Any], taken: str | None) -> None:
    found = labels(params)
    assert (None if found is None else str(found)) == taken
