"""`model.fit` of a shard, resumed in the middle of an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.journals import journal

import polytrain
from polytrain import (
    Checkpoint,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)

BATCHES, DONE = 8, 5
"""Of an epoch, and of those before the restart."""


def run_inline(train: Callable[..., None], path: Path, **options: Any) -> Result:
    return make_trainer(
        "tensorflow",
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=path, progress=False),
        **options,
    ).fit()


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"class_weight": dict.fromkeys(range(BATCHES), 1.0)}, [3, 8, 8]),
        ({}, [3, 8, 8]),
        ({"steps_per_epoch": 3}, [3, 3, 3, 2, 3]),
    ],
)
def test_later_epochs_are_whole(tmp_path: Path, options: dict[str, Any], epochs: list[int]) -> None:
    """Every batch comes once in each pass over the rows."""

    def train() -> None:
        import keras

        seen: list[int] = []
        ends: list[int] = []

        def loss(y: Any, predicted: Any) -> Any:
            seen.extend(map(int, y.numpy().ravel()))
            return predicted - y

        class Reports(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if not resumed and len(seen) == DONE:
                    directory = tmp_path / "checkpoint"
                    directory.mkdir()
                    polytrain.report({}, checkpoint=Checkpoint.from_directory(directory))
                    raise InterruptedError

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                ends.append(len(seen))

        resumed = polytrain.get_checkpoint() is not None
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss=loss, run_eagerly=True)
        shard = polytrain.get_dataset_shard("train")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                model.fit(
                    shard.to_tf(feature_columns="x", label_columns="y", batch_size=1),
                    epochs=len(epochs),
                    **options,
                    shuffle=False,
                    verbose=0,
                    callbacks=[Reports()],
                )
            except InterruptedError:
                return
        messages = [str(each.message) for each in warned if "ran out of data" in str(each.message)]
        polytrain.report(
            {"rows": seen, "epochs": np.diff([0, *ends]).tolist(), "warnings": len(messages)}
        )

    numbers = {"x": np.zeros((BATCHES, 1)), "y": np.arange(BATCHES)}
    run = partial(run_inline, train, tmp_path, datasets={"train": numbers})

    resumed = run(restore_from=run().checkpoint).metrics
    assert resumed["epochs"] == epochs
    rows = [*range(DONE, BATCHES), *range(BATCHES), *range(BATCHES)]
    assert resumed["rows"] == rows[: sum(epochs)]
    # Keras says so where an epoch of so many steps has no more of them, restart or not.
    assert resumed["warnings"] == epochs.count(2)


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("killed_in", [1, 2])
def test_the_fit_that_saved_is_the_one_that_resumes(tmp_path: Path, killed_in: int) -> None:
    """Of two in a function. The first can't resume from what the second has saved."""

    def train() -> None:
        import keras

        from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

        class Stops(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if not resumed and number == killed_in and epoch == 2:
                    raise InterruptedError

        resumed = polytrain.get_checkpoint() is not None
        begins = checkpointed_epoch()
        model = checkpointed_model()
        if model is None:
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(optimizer="sgd", loss="mse")
        epochs = []
        for number in (1, 2):
            try:
                fitted = model.fit(
                    np.ones((4, 1)),
                    np.ones(4),
                    initial_epoch=begins if number == 1 else 0,
                    epochs=3,
                    verbose=0,
                    callbacks=[Stops(), ReportCallback()],
                )
            except InterruptedError:
                return
            epochs.append(fitted.epoch)
        polytrain.report({"epochs": epochs})

    run = partial(run_inline, train, tmp_path)

    checkpoint = run().checkpoint
    if killed_in == 1:
        assert run(restore_from=checkpoint).metrics["epochs"] == [[2], [0, 1, 2]]
    else:
        with pytest.raises(TrainingFailedError, match=r"fit\(\) number 1 .*number 2 saved"):
            run(restore_from=checkpoint)


def test_averages_are_swapped_back_after_a_restart(tmp_path: Path) -> None:
    """A checkpoint has them in the place of the weights; training goes on with the weights."""

    def train(config: Any) -> None:
        import keras

        from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

        class Stops(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if epoch == config["stops_in"]:
                    raise InterruptedError

        model = checkpointed_model()
        if model is None:
            model = keras.Sequential(
                [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]
            )
            sgd = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
            model.compile(optimizer=sgd, loss="mse")
        swaps = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        try:
            model.fit(
                np.ones((4, 1)),
                3 * np.ones(4),
                initial_epoch=checkpointed_epoch(),
                epochs=4,
                verbose=0,
                callbacks=[swaps, ReportCallback(), Stops()],
            )
        except InterruptedError:
            return
        polytrain.report({"weights": [float(each.ravel()[0]) for each in model.get_weights()]})

    def run(stops_in: int, **options: Any) -> Any:
        config = {"stops_in": stops_in}
        return run_inline(train, tmp_path, train_loop_config=config, **options)

    resumed = run(-1, restore_from=run(2).checkpoint)
    assert resumed.metrics["weights"] == pytest.approx(run(-1).metrics["weights"], rel=1e-6)


def test_a_model_is_saved_when_the_run_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        import keras

        from polytrain_tf.reporting import ReportCallback

        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
        callbacks = [ReportCallback(checkpoint_frequency=0)]
        model.fit(np.ones((4, 1)), np.ones(4), epochs=4, verbose=0, callbacks=callbacks)

    asked = iter([False, True, False])
    monkeypatch.setattr(polytrain, "checkpoint_requested", lambda: next(asked))
    saved = journal(run_inline(train, tmp_path).path, "Committed")
    assert [each["step"] for each in saved] == [2, 4]


@pytest.mark.parametrize("epochs", [2, 9])
def test_a_fit_that_is_over_leaves_its_weights(tmp_path: Path, epochs: int) -> None:
    """Those of the best epoch, whether all epochs are done or a callback has ended the fit."""

    def train() -> None:
        import keras

        from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

        model = checkpointed_model()
        if model is None:
            model = keras.Sequential(
                [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]
            )
            sgd = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
            model.compile(optimizer=sgd, loss="mse")
        ends = keras.callbacks.EarlyStopping(
            monitor="loss", min_delta=99.0, patience=2, restore_best_weights=True
        )
        fitted = model.fit(
            np.ones((4, 1)),
            3 * np.ones(4),
            initial_epoch=checkpointed_epoch(),
            epochs=epochs,
            verbose=0,
            callbacks=[ends, ReportCallback()],
        )
        weights = [float(each.ravel()[0]) for each in model.get_weights()]
        polytrain.report({"weights": weights, "epochs": len(fitted.epoch)})

    run = partial(run_inline, train, tmp_path)

    over = run()
    again = run(restore_from=over.checkpoint)
    assert over.metrics["epochs"] == min(epochs, 3)
    assert again.metrics == {"weights": over.metrics["weights"], "epochs": 0}
