"""Which fits can be continued within an epoch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import pytest

from polytrain_tf.kept_batches import may_keep_within_epochs, unsuitable


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
