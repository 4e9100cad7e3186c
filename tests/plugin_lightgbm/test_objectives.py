"""The names of objectives and metrics are those that the installed LightGBM knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightgbm
import numpy as np
import pytest
from tests.plugin_lightgbm.test_options import JOB, TRAIN, problems

from polytrain_lightgbm.labels import labels
from polytrain_lightgbm.objectives import _METRICS, _NAMES, MULTICLASS, RANKING, objective_of

BESIDES = ("custom", "na", "none", "null")


def booster(**params: Any) -> lightgbm.Booster:
    classes = {"num_class": 2} if objective_of(params) in MULTICLASS else {}
    common = {"verbosity": -1, "num_leaves": 2, "min_data_in_leaf": 1, "min_data_in_bin": 1}
    found = {objective_of(params), params.get("metric")}
    data = lightgbm.Dataset(
        np.arange(8.0).reshape(8, 1),
        label=[1, 2] * 4 if found & {"gamma", "gamma_deviance"} else [0, 1] * 4,
        group=[8] if found & {*RANKING, "ndcg"} else None,
    )
    return lightgbm.Booster({**common, **classes, **params}, data)


@pytest.mark.parametrize("name", _NAMES)
def test_every_objective_exists(name: str) -> None:
    found = booster(objective=name).model_to_string()
    assert f"\n[objective: {_NAMES[name]}]" in found


@pytest.mark.parametrize("name", sorted({*_METRICS, *_NAMES} - set(BESIDES)))
def test_every_metric_exists(name: str) -> None:
    objective = "regression" if name.startswith("gamma") else "binary"
    if _NAMES.get(name) in RANKING or name in ("map", "mean_average_precision", "ndcg"):
        objective = "lambdarank"
    elif _NAMES.get(name) in MULTICLASS or name in ("auc_mu", "multi_error", "multi_logloss"):
        objective = "multiclass"
    assert booster(objective=objective, metric=name).eval_train(), "LightGBM knows of no such one"


@pytest.mark.parametrize("given", ["nosuch", ["l2", "nosuch"], "l2,nosuch"])
def test_a_metric_that_lightgbm_would_leave_out_is_refused(given: Any) -> None:
    [problem] = problems(params={"metrics": given}).values()
    assert problem.field == "params['metric']"
    assert "'nosuch'" in problem.what


@pytest.mark.parametrize("given", ["", "None", "AUC", ["l1", "l2"], "l1, l2", {"auc"}, None])
def test_metrics_are_given_in_many_ways(given: Any) -> None:
    assert problems(params={"metric": given}) == {}


def test_an_objective_that_is_none_is_refused() -> None:
    [problem] = problems(params={"app": "multiclas", "num_class": 3}).values()
    assert "Did you mean 'multiclass'" in problem.remedy
    assert problems(params={"objective": lambda scores, data: None}) == {}


def test_what_an_objective_cannot_do_without() -> None:
    assert list(problems(params={"objective": "ova"})) == ["params['num_class']"]
    assert problems(params={"objective": "ova", "num_classes": "3"}) == {}
    for known in ("binary", "regression"):
        params = {"objective": known, "num_class": 2}
        assert list(problems(params=params)) == ["params['num_class']"]
        assert problems(params={**params, "num_class": 1}) == {}
    assert list(problems(params={"objective": "lambdarank"})) == ["group"]
    assert problems(params={"objective": "lambdarank"}, group="w") == {}


@pytest.mark.parametrize(
    ("params", "taken"),
    [
        ({}, None),
        ({"objective": "Binary"}, "0 and 1"),
        ({"objective": "softmax", "num_classes": 3}, "whole numbers from 0 to 2"),
        ({"app": "xentropy"}, "numbers from 0 to 1"),
        ({"objective": "poisson"}, "numbers from 0"),
        ({"objective": "xendcg"}, "whole numbers from 0"),
        ({"objective": len}, None),
    ],
)
def test_labels_of_objectives(params: dict[str, Any], taken: str | None) -> None:
    found = labels(params)
    assert (None if found is None else str(found)) == taken


def with_columns(*names: str) -> Any:
    return replace(JOB, datasets={"train": replace(TRAIN, columns=(*names, "y"))})


def test_names_that_are_the_same_to_lightgbm_are_refused() -> None:
    [problem] = problems(with_columns("a b", "a_b")).values()
    assert "'a b' and 'a_b'" in problem.what
    assert problems(with_columns("a b", "a c")) == {}
    assert "no name" in problems(with_columns("", "a"))["datasets['train']"].what


@pytest.mark.parametrize("character", '",:[]{}\n\t')
def test_names_that_lightgbm_refuses(character: str) -> None:
    name = f"a{character}b"
    [problem] = problems(with_columns(name)).values()
    assert repr(name) in problem.what
