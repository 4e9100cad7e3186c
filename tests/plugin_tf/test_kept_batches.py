"""Which fits can be continued within an epoch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from polytrain_tf.kept_batches import (
    has_own_logs,
    may_keep_within_epochs,
    step_replaced,
    unsuitable,
)


class AtEpochs(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        pass


class Begins(keras.callbacks.Callback):  # type: ignore[misc]  # as above
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        pass


class Patient(keras.callbacks.EarlyStopping):  # type: ignore[misc]  # as above
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)


class Schedules(keras.callbacks.LearningRateScheduler):  # type: ignore[misc]  # as above
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)


@pytest.mark.parametrize(
    "callback",
    [
        AtEpochs(),
        Patient(),
        keras.callbacks.EarlyStopping(),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ],
)
def test_callbacks_that_act_between_epochs(callback: Any) -> None:
    assert not may_keep_within_epochs(callback)


@pytest.mark.parametrize(
    "callback",
    [
        Begins(),
        Schedules(lambda epoch: 0.1),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None),
    ],
)
def test_callbacks_with_a_state_within_epochs(callback: Any) -> None:
    assert may_keep_within_epochs(callback)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"steps_per_epoch": 5}, "steps_per_epoch"),
        ({"run_eagerly": True}, "run_eagerly"),
        ({"steps_per_execution": 4}, "steps_per_execution=4"),
        ({"callbacks": [Begins()]}, "the callback Begins"),
    ],
)
def test_a_fit_that_begins_its_epoch_anew_is_refused(
    changed: dict[str, Any], why: str | None
) -> None:
    model = SimpleNamespace(
        run_eagerly=changed.get("run_eagerly", False),
        steps_per_execution=changed.get("steps_per_execution", 1),
    )
    given = {"self": model, "steps_per_epoch": changed.get("steps_per_epoch")}
    found = unsuitable(given, changed.get("callbacks", []))
    assert found is None if why is None else why in str(found)


class Steps(keras.Sequential):  # type: ignore[misc]  # as above
    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "one": 1.0}


class Computes(keras.Sequential):  # type: ignore[misc]  # as above
    def compute_metrics(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().compute_metrics(*args, **kwargs), "one": 1.0}


@pytest.mark.parametrize("kind", [Steps, Computes])
def test_logs_of_a_class_of_ones_own_may_be_no_metrics(kind: Any) -> None:
    assert has_own_logs(kind([keras.Input((1,)), keras.layers.Dense(1)]))


def test_logs_of_a_step_that_a_user_has_set_may_be_no_metrics() -> None:
    model = network()
    assert not has_own_logs(model)
    model.train_step = lambda data: {"one": 1.0}
    assert has_own_logs(model)


def network() -> Any:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return model


def fit(model: Any) -> Any:
    x = np.ones((2, 1), "float32")
    return model.fit(x, x, batch_size=1, verbose=0).history


def noting(seen: list[str]) -> Any:
    """Return what makes a step that notes each time that it runs."""

    def make(own: Any) -> Any:
        def step(data: Any) -> Any:
            outputs = own(data)
            tf.py_function(lambda: seen.append("step"), [], [])
            return outputs

        return step

    return make


def test_steps_keep_the_state_of_the_one_fit_only() -> None:
    """The graph of the fit before doesn't keep it yet, and that of the fit after no more."""
    model, seen = network(), list[str]()
    fit(model)
    with step_replaced(model, noting(seen)):
        fit(model)
    assert len(seen) == 2
    fit(model)
    assert len(seen) == 2


def test_a_step_that_a_user_has_set_stays() -> None:
    model, seen = network(), list[str]()
    own = model.train_step
    model.train_step = lambda data: {**own(data), "one": 1.0}
    with step_replaced(model, noting(seen)):
        assert fit(model)["one"] == [1.0]
    assert len(seen) == 2
    assert fit(model)["one"] == [1.0]
    assert len(seen) == 2
