"""What is wrong with a training function, or with its config, before it travels to workers."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import pytest

import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer

TREES = ["xgboost", "lightgbm"]


def test_a_function_is_needed_where_there_is_no_loop(problems: Any) -> None:
    problem = problems.of(lambda: make_trainer("torch")).only("train_loop_per_worker")
    assert "make_trainer('torch', train_func)" in problem.remedy


def test_what_is_not_callable_is_no_function(problems: Any) -> None:
    problem = problems(function="train.py").only("train_loop_per_worker")
    assert "'train.py' is not callable" in problem.what


def takes_nothing() -> None: ...


def takes_two(config: Any, more: Any) -> None: ...


class TakesTwo:
    """A callable without a name."""

    def __call__(self, config: Any, more: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "config"),
    [
        (takes_nothing, {}),
        (takes_two, None),
        (takes_two, {}),
        (TakesTwo(), {}),
    ],
)
def test_a_function_takes_its_config_and_nothing_else(
    problems: Any, function: Any, config: Any
) -> None:
    found = problems(function=function, train_loop_config=config)
    problem = found.only("train_loop_per_worker")
    assert "argument" in problem.what
    # Its signature is shown, without annotations.
    assert "(" in problem.what
    assert "Any" not in problem.what


@pytest.mark.parametrize("config", [None, {}, {"lr": 1}])
def test_any_callable_that_fits_is_fine(config: Any) -> None:
    for bound in [(1,), (1, 2)] if config is None else [(1,)]:
        make_trainer("reference", functools.partial(takes_two, *bound), train_loop_config=config)


@pytest.mark.parametrize(
    ("function", "config", "called_with"),
    [
        (lambda config: polytrain.report({"with": config}), None, {}),
        (lambda config: polytrain.report({"with": config}), {"lr": 1}, {"lr": 1}),
        (lambda config={"lr": 2}: polytrain.report({"with": config}), None, {"lr": 2}),
        (lambda config={"lr": 2}: polytrain.report({"with": config}), {}, {}),
        (lambda: polytrain.report({"with": "nothing"}), None, "nothing"),
    ],
    ids=["needs one", "is given one", "has a default", "is given an empty one", "takes none"],
)
def test_a_function_that_needs_a_config_is_called_with_one(
    tmp_path: Path, function: Any, config: Any, called_with: Any
) -> None:
    result = make_trainer(
        "reference",
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, progress=False),
    ).fit()
    assert result.metrics == {"with": called_with}


def test_a_function_that_cannot_travel_names_the_culprit(problems: Any) -> None:
    connection = threading.Lock()
    harmless = [1, 2]

    def train() -> None:
        print(connection, harmless)

    problem = problems(function=train).only("train_loop_per_worker")
    assert "`connection` is a lock" in problem.what
    assert "harmless" not in problem.what
    assert "inside the training function" in problem.remedy


def test_a_config_that_cannot_travel_names_the_culprit(problems: Any) -> None:
    found = problems(
        function=lambda config: None, train_loop_config={"lr": 0.1, "guard": threading.Lock()}
    )
    problem = found.only("train_loop_config")
    assert "`train_loop_config['guard']` is a lock" in problem.what
    assert "'lr'" not in problem.what


@pytest.mark.parametrize("field", ["train_loop_per_worker", "train_loop_config"])
def test_what_is_too_large_to_be_sent_is_named(
    problems: Any, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polytrain.functions.function_checks._MOST_BYTES", 2**20)
    weights, harmless = bytes(3 * 2**20), "small"

    def train() -> None:
        print(weights, harmless)

    if field == "train_loop_per_worker":
        found = problems(function=train)
    else:
        config = {"weights": weights, "lr": 0.1}
        found = problems(function=lambda config: None, train_loop_config=config)
    problem = found.only(field)
    assert "it has 3 MiB when it is pickled, of which 'weights' has 3" in problem.what
    assert "datasets={…}" in problem.remedy


def test_a_config_is_a_dict(problems: Any) -> None:
    problems(function=lambda config: None, train_loop_config=[1]).only("train_loop_config")


def test_a_config_without_a_function_is_refused(problems: Any) -> None:
    problems(train_loop_config={"lr": 1}).only("train_loop_config")


@pytest.mark.parametrize("backend", TREES)
def test_a_function_and_declarative_options_do_not_mix(problems: Any, backend: str) -> None:
    found = problems(
        backend, lambda: None, params={"max_depth": 3}, num_boost_round=7, label="label"
    )
    assert sorted(found) == ["label", "num_boost_round", "params"]
    assert "leave the function out" in found["params"].remedy


OF_A_SCRIPT = """
def train():
    def step():
        return LOCK
    step()
"""


def test_a_variable_of_a_function_inside_the_function_is_named(problems: Any) -> None:
    script = {"__name__": "__main__", "LOCK": threading.Lock()}
    exec(OF_A_SCRIPT, script)
    problem = problems(function=script["train"]).only("train_loop_per_worker")
    assert "`LOCK` is a lock" in problem.what
