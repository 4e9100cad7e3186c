"""A Keras fit that loses a process within an epoch continues there, to the last bit."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.e2e.journals import journal
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    make_trainer,
)
from polytrain_tf import reporting

BATCHES, EPOCHS = 6, 3
STEPS = BATCHES * EPOCHS
LOSS = "sparse_categorical_crossentropy"


def network() -> Any:
    """With moving statistics and random numbers."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )


@dataclasses.dataclass(frozen=True)
class Death:
    """Where a process is lost: each attempt has one."""

    rank: int
    step: int
    """The optimizer's steps so far."""

    place: str = "step"


Deaths = tuple[Death, ...]


def taken(model: Any) -> int:
    """Return the steps of a model's optimizer, of which each rank has its own count."""
    # `iterations` doesn't count those that only add up gradients.
    steps = model.optimizer.variables[0].value
    return int(model.distribute_strategy.experimental_local_results(steps)[0].numpy())


def die_at(place: str, step: int, deaths: Deaths) -> None:
    context = polytrain.get_context()
    attempt = context.get_attempt()
    here = Death(context.get_world_rank(), step, place)
    if attempt < len(deaths) and deaths[attempt] == here:
        os.kill(os.getpid(), signal.SIGKILL)


def watched(model: Any, log: Path, deaths: Deaths) -> Any:
    """Have a model note the attempt and the number of each step that a rank has taken."""
    own = model.make_train_function

    def make(force: bool = False) -> None:
        own(force)
        step = model.train_function

        def train(iterator: Any) -> Any:
            outputs, steps = step(iterator), taken(model)
            with log.open("a") as file:
                file.write(f"{polytrain.get_context().get_attempt()} {steps}\n")
            die_at("step", steps, deaths)
            return outputs

        model.train_function = train

    model.make_train_function = make
    return model


def waiting_after(together: Callable[..., Any]) -> Callable[..., None]:
    """Wait for ever after what all ranks do together."""

    def wait(*args: Any) -> None:
        together(*args)
        threading.Event().wait()

    return wait


class Dies(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Is lost between steps. If that is where an epoch begins, others haven't reported the last."""

    def __init__(self, deaths: Deaths) -> None:
        super().__init__()
        self.deaths = deaths

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        die_at("validation", taken(self.model), self.deaths)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        die_at("epoch", taken(self.model), self.deaths)
        context = polytrain.get_context()
        for death in self.deaths[context.get_attempt() :][:1]:
            is_other = death.rank != context.get_world_rank()
            if is_other and (death.step, death.place) == (taken(self.model), "begin"):
                module: Any = reporting
                module.broadcast_from_rank_zero = waiting_after(module.broadcast_from_rank_zero)

    def on_train_end(self, logs: Any = None) -> None:
        die_at("end", taken(self.model), self.deaths)


def callbacks(deaths: Deaths) -> list[Any]:
    """Each changes the training by a state, or when an epoch begins."""

    def rate_of(epoch: int, rate: float) -> float:
        die_at("begin", epoch * BATCHES, deaths)
        return rate * 0.75

    return [
        Dies(deaths),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, min_delta=1.0),
        keras.callbacks.LearningRateScheduler(rate_of),
        keras.callbacks.EarlyStopping(monitor="loss", patience=9, restore_best_weights=True),
    ]


def from_options(log: Path, deaths: Deaths) -> dict[str, Any]:
    return {
        "model": lambda: watched(network(), log, deaths),
        "compile": {"optimizer": "adam", "loss": LOSS, "metrics": ["accuracy"]},
        "epochs": EPOCHS,
        "label": "y",
        "callbacks": lambda: callbacks(deaths),
    }


def accumulating(log: Path, deaths: Deaths) -> dict[str, Any]:
    def compiled() -> dict[str, Any]:
        adam = keras.optimizers.Adam(gradient_accumulation_steps=4)
        return {"optimizer": adam, "loss": LOSS, "metrics": ["accuracy"]}

    return from_options(log, deaths) | {"compile": compiled}


def by_function(log: Path, deaths: Deaths) -> dict[str, Any]:
    def train() -> None:
        import polytrain_tf
        from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

        with polytrain_tf.strategy().scope():
            model = checkpointed_model()
            if model is None:
                model = network()
                model.compile(optimizer="adam", loss=LOSS, metrics=["accuracy"])
        data = {
            name: polytrain.get_dataset_shard(name).to_tf(
                feature_columns="x", label_columns="y", global_batch_size=32
            )
            for name in ("train", "valid")
        }
        # A look at a batch, for which TensorFlow reads ahead: also to the end of an epoch's rest.
        next(iter(data["train"]))
        watched(model, log, deaths).fit(
            data["train"],
            validation_data=data["valid"],
            initial_epoch=checkpointed_epoch(),
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[ReportCallback(checkpoint_frequency=0), *callbacks(deaths)],
        )

    return {"train_loop_per_worker": train}


def fit(
    quiet: RunConfig, name: str, workers: int = 1, memory: Any = None, **options: Any
) -> Result:
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(32 * BATCHES, 8)).astype("float32")
    y = numbers.integers(0, 4, 32 * BATCHES)
    return make_trainer(
        "tensorflow",
        **options,
        datasets={"train": {"x": x, "y": y}, "valid": {"x": x[:40], "y": y[:40]}},
        dataset_config={"train": DataConfig(shuffle=True)},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=dataclasses.replace(
            quiet,
            name=name,
            failure_config=FailureConfig(max_failures=8),
            checkpoint_config=CheckpointConfig(memory=memory),
        ),
    ).fit()


def state(result: Result) -> list[bytes]:
    model = result.load_model()
    return [np.asarray(each).tobytes() for each in (*model.variables, *model.optimizer.variables)]


Made = Callable[[Path, Deaths], dict[str, Any]]
Undisturbed = Callable[[Made, int], Result]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Runs a way to make a model, once for each number of workers, in which nobody dies."""

    @cache
    def run(made: Made, workers: int) -> Result:
        path = tmp_path_factory.mktemp("undisturbed")
        quiet = RunConfig(storage_path=path, progress=False)
        return fit(quiet, "undisturbed", workers, **made(path / "steps", ()))

    return run


def steps_in(log: Path) -> list[tuple[int, int]]:
    """The attempt and the number of each step that a rank has taken."""
    lines = log.read_text().splitlines()
    return [(int(attempt), int(step)) for attempt, step in map(str.split, lines)]


ALONE = (1, 1, (Death(0, 4), Death(0, 12), Death(0, 15)))
TOGETHER = (
    2,
    None,
    (
        Death(1, 4),
        Death(0, 6),
        Death(0, 12, "validation"),
        Death(1, 12, "epoch"),
        Death(1, 15),
        Death(0, STEPS, "end"),
    ),
)


# In `make test` each way to make a model once, and each way to keep its state once: two workers are
# lost in the next test.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("made", "workers", "memory", "deaths"),
    [
        # Gradients are added up over the kill.
        (accumulating, 1, 1, (Death(0, 15),)),
        only_in_sweep(from_options, *ALONE),
        only_in_sweep(from_options, *TOGETHER),
        only_in_sweep(by_function, *ALONE),
        only_in_sweep(by_function, *TOGETHER),
    ],
)
def test_a_fit_continues_within_an_epoch(
    quiet: RunConfig,
    tmp_path: Path,
    undisturbed: Undisturbed,
    made: Made,
    workers: int,
    memory: int | None,
    deaths: Deaths,
) -> None:
    """From a copy, or from the state of a peer: then no step is repeated."""
    log, expected = tmp_path / "steps", undisturbed(made, workers)
    result = fit(quiet, "killed", workers, memory, **made(log, deaths))
    assert result.restarts == len(deaths)
    steps = {*steps_in(log)}
    assert {step for _, step in steps} == {*range(1, STEPS + 1)}
    again = {step for _, step in steps if len([each for _, each in steps if each == step]) > 1}
    assert again <= ({each.step for each in deaths} if memory else set())
    assert state(result) == state(expected)
    assert result.history == expected.history


def test_an_epoch_that_only_the_lost_rank_has_reported_is_reported_again(
    quiet: RunConfig, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The report has no checkpoint, and the other rank has the state before it.

    So it has in the middle of an epoch.
    """
    log, expected = tmp_path / "steps", undisturbed(by_function, 2)
    deaths = (Death(1, 4), Death(0, 2 * BATCHES, "begin"))
    result = fit(quiet, "killed", 2, **by_function(log, deaths))
    assert result.restarts == len(deaths)
    asked = journal(result.path, "SurvivorsAsked")
    assert [(each["reason"], each["rank"]) for each in asked] == [("", 0), ("", 1)]
    # A rank that is left may have ended a step, and be killed before it notes that.
    assert sorted(step for _, step in {*steps_in(log)}) == [*range(1, STEPS + 1)]
    assert state(result) == state(expected)
    assert result.history == expected.history


@pytest.mark.only_in_sweep
def test_a_callback_that_may_keep_a_sum_within_epochs_is_named(
    quiet: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its run continues from its last checkpoint. `test_kept_batches` has such callbacks."""

    class Sums(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
        total = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.total += 1

    steps = tmp_path / "steps"
    options = from_options(steps, (Death(0, BATCHES + 4),)) | {"callbacks": lambda: [Sums()]}
    result = fit(quiet, "sums", memory=1, **options)
    assert result.restarts == 1
    [_, again] = journal(result.path, "Launched")
    assert again["step"] == 0
    assert "the callback Sums may keep something from batch to batch" in capfd.readouterr().err


@pytest.mark.only_in_sweep
def test_a_loss_in_a_later_fit_doesnt_repeat_the_first(quiet: RunConfig, tmp_path: Path) -> None:
    """Only the first fit of a function keeps its state: the run continues at its end.

    `test_kept_batches` shows the former, `test_resumed_fit` the latter.
    """

    def by_two_fits(log: Path, deaths: Deaths) -> dict[str, Any]:
        def train() -> None:
            import polytrain_tf
            from polytrain_tf.reporting import (
                ReportCallback,
                checkpointed_epoch,
                checkpointed_model,
            )

            with polytrain_tf.strategy().scope():
                model = checkpointed_model()
                if model is None:
                    model = network()
                    model.compile(optimizer="adam", loss=LOSS)
            watched(model, log, deaths)
            data = polytrain.get_dataset_shard("train").to_tf(
                feature_columns="x", label_columns="y", global_batch_size=32
            )
            for begins in (checkpointed_epoch(), 0):
                model.fit(
                    data,
                    initial_epoch=begins,
                    epochs=1,
                    shuffle=False,
                    verbose=0,
                    callbacks=[ReportCallback()],
                )

        return {"train_loop_per_worker": train}

    killed, undisturbed = tmp_path / "killed-steps", tmp_path / "steps"
    result = fit(quiet, "killed", 2, **by_two_fits(killed, (Death(1, BATCHES + 3),)))
    expected = fit(quiet, "undisturbed", 2, **by_two_fits(undisturbed, ()))
    assert result.restarts == 1
    assert [each["epoch"] for each in result.history] == [1, 1]
    assert result.history == expected.history
    assert state(result) == state(expected)
