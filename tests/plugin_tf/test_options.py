"""TensorFlow's driver half: its options, and what its workers need."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

from polytrain import InvalidJobError, ScalingConfig, make_trainer
from polytrain_plugins import Device, Job
from polytrain_tf import TensorFlow

JOB = Job(num_workers=2, use_gpu=False, cpus_per_worker=1, has_training_function=True, datasets={})
DATA = {
    "x": np.zeros((8, 3), dtype="float32"),
    "y": np.zeros(8),
    "w": np.ones(8),
}


def build() -> Any:
    return keras.Sequential([keras.layers.Dense(1)])


@pytest.mark.parametrize("timeout", [0, -1.5])
def test_a_timeout_is_a_time(timeout: float) -> None:
    [problem] = TensorFlow(timeout_s=timeout).problems(JOB)
    assert problem.field == "timeout_s"
    assert str(timeout) in problem.what


def test_usual_options_have_no_problem() -> None:
    assert list(TensorFlow().problems(JOB)) == []
    assert list(TensorFlow(timeout_s=0.5).problems(replace(JOB, use_gpu=True))) == []
    assert Device.GPU in TensorFlow.capabilities.devices


def problems(**options: Any) -> list[str]:
    """What is said of them by `make_trainer`, where the rest is right."""
    right = {"model": build, "compile": {"loss": "mse"}, "label": "y"}
    return messages_of({**right, **options}, {"train": DATA})


def messages_of(options: dict[str, Any], datasets: dict[str, Any]) -> list[str]:
    try:
        make_trainer(
            "tensorflow", **options, datasets=datasets, scaling_config=ScalingConfig(num_workers=2)
        )
    except InvalidJobError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize("option", ["label", "weight"])
def test_labels_and_weights_without_a_value(option: str) -> None:
    """The loss would be NaN, and the run a success."""
    missing = np.array([1.0, np.nan] * 4)
    columns = {"label": "y", "weight": "w"}
    column = columns[option]
    data = {"x": np.ones(8), "y": np.ones(8), "w": np.ones(8), column: missing}
    right = {"model": build, "compile": {"loss": "mse"}, **columns}
    [problem] = messages_of(right, {"train": data})
    assert problem.startswith(f"{option}: in 4 of 8 rows of 'train' the column {column!r} has no")
    masked = messages_of({**right, "compile": lambda: {"loss": build}}, {"train": data})
    assert len(masked) == (option == "weight")


def test_options_for_fit_without_a_problem() -> None:
    assert problems() == []
    assert problems(features=["x"], weight="w", batch_size=2) == []
    assert problems(compile=lambda: {"optimizer": keras.optimizers.SGD(0.1)}) == []
    assert problems(callbacks=[keras.callbacks.TerminateOnNaN()]) == []
    assert messages_of({"model": build, "label": "y"}, {"train": DATA, "valid": DATA}) == []


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"model": None}, "model", "required"),
        ({"model": "resnet"}, "model", "function that returns"),
        ({"model": keras.Sequential()}, "model", "which must create its variables"),
        ({"compile": "adam"}, "compile", "neither a dict nor a function"),
        ({"compile": {"optimiser": "adam"}}, "compile['optimiser']", "Did you mean 'optimizer'?"),
        (
            {"compile": {"optimizer": keras.optimizers.Adam()}},
            "compile['optimizer']",
            "compile=lambda: {'optimizer'",
        ),
        ({"compile": {"steps_per_execution": 8}}, "compile['steps_per_execution']", "Leave it out"),
        ({"compile": {"jit_compile": True}}, "compile['jit_compile']", "Leave it out"),
        ({"epochs": 0}, "epochs", "Give 1 or more"),
        ({"epochs": 2.5}, "epochs", "a whole number"),
        ({"batch_size": 1}, "batch_size", "can't be divided among 2 workers"),
        ({"label": None}, "label", "required"),
        ({"label": "z"}, "label", "no column 'z'"),
        ({"weight": "z"}, "weight", "no column 'z'"),
        ({"features": "x"}, "features", "Pass ['x']"),
        ({"features": ["x", "z"]}, "features", "no column 'z'"),
        ({"callbacks": keras.callbacks.TerminateOnNaN()}, "callbacks", "Pass [callback]"),
        ({"features": 3}, "features", "Pass their names"),
        ({"features": [3]}, "features", "Pass their names"),
        ({"features": ["x", "y"]}, "features", "'y' is the label or the weight"),
        ({"features": ["x", "w"], "weight": "w"}, "features", "'w' is the label or the weight"),
        ({"callbacks": 3}, "callbacks", "neither a list"),
        ({"callbacks": keras.callbacks.TerminateOnNaN}, "callbacks", "Pass [TerminateOnNaN(…)]"),
        ({"callbacks": [keras.callbacks.EarlyStopping]}, "callbacks", "Pass [EarlyStopping(…)]"),
        (
            {"callbacks": [keras.callbacks.BackupAndRestore("backup")]},
            "callbacks",
            "checkpoint_frequency=1",
        ),
        ({"callbacks": ["EarlyStopping"]}, "callbacks", "isn't a keras.callbacks.Callback"),
    ],
)
def test_bad_options_for_fit(options: dict[str, Any], field: str, words: str) -> None:
    found = problems(**options)
    assert len(found) == 1, found
    assert field in found[0]
    assert words in found[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_one_worker_has_no_checkpoints_beside_the_runs(workers: int) -> None:
    with pytest.raises(
        InvalidJobError, match="BackupAndRestore would write checkpoints of its own"
    ):
        make_trainer(
            "tensorflow",
            model=build,
            compile={"loss": "mse"},
            label="y",
            callbacks=[keras.callbacks.BackupAndRestore("backup")],
            datasets={"train": DATA},
            scaling_config=ScalingConfig(num_workers=workers),
        )


def test_features_are_numbers() -> None:
    named = {**DATA, "name": np.array(["a"] * 8)}
    [problem] = messages_of({"model": build, "label": "y"}, {"train": named})
    assert "'name'" in problem
    assert "neither a number nor a tensor" in problem
    assert messages_of({"model": build, "label": "y", "features": ["x"]}, {"train": named}) == []


def test_features_are_those_of_train_everywhere() -> None:
    two = {"a": np.zeros(8), "b": np.zeros(8), "y": np.zeros(8)}
    reordered = dict(reversed(two.items()))
    more = {**two, "name": np.array(["a"] * 8)}
    lacking = {name: values for name, values in two.items() if name != "b"}
    options = {"model": build, "label": "y"}
    assert messages_of(options, {"train": two, "valid": reordered}) == []
    assert messages_of(options, {"train": two, "valid": more}) == []
    [problem] = messages_of(options, {"train": two, "valid": lacking})
    assert problem.startswith("features: the data set 'valid' has no column 'b'")


def test_fit_validates_on_one_data_set() -> None:
    datasets = {"train": DATA, "valid": DATA, "test": DATA}
    [problem] = messages_of({"model": build, "label": "y", "features": ["x"]}, datasets)
    assert "test, valid" in problem


def test_no_training_function_and_no_model() -> None:
    [problem] = messages_of({"label": "y", "features": ["x"]}, {"train": DATA})
    assert "model" in problem
    assert "make_trainer('tensorflow', train_func)" in problem


def test_options_for_fit_do_not_go_with_a_function() -> None:
    with pytest.raises(InvalidJobError, match=r"epochs.*without a training function"):
        make_trainer("tensorflow", lambda: None, epochs=3)


@pytest.mark.parametrize("options", [{"params": {}}, {"num_boost_round": 3}])
def test_options_of_other_backends_are_unknown(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidJobError, match="tensorflow backend has no such option"):
        make_trainer("tensorflow", lambda: None, **options)


def test_trainers_find_the_framework_imported() -> None:
    assert {"tensorflow", "keras"} <= set(TensorFlow().demand(JOB).preload)


def test_it_travels() -> None:
    assert pickle.loads(pickle.dumps(TensorFlow(timeout_s=5))) == TensorFlow(timeout_s=5)
