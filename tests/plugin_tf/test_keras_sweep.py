"""Every argument of Keras's `fit` and every callback: two workers against one process."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import pyarrow as pa
import pytest
from tests import keras_cases
from tests.e2e.torch_tables import table
from tests.keras_cases import (
    BATCH,
    EPOCHS,
    EXACT,
    REFUSED,
    ROWS,
    Part,
    X,
    Y,
    built,
    outcome,
    shown,
    written,
)
from tests.plugin_tf import keras_rows
from tests.plugin_tf.keras_rows import ARGUMENTS, CASES
from tests.sweeps import Selected, only_in_sweep

import polytrain
import polytrain_tf
from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer
from polytrain.testing.local_world import run_world
from polytrain_tf import TensorFlow
from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

# Workers can't import the tests.
cloudpickle.register_pickle_by_value(keras_cases)
cloudpickle.register_pickle_by_value(keras_rows)


def train(config: dict[str, Any]) -> None:
    path = Path(config["path"], str(polytrain.get_context().get_world_rank()))
    path.mkdir()
    found = {}
    for number, name in enumerate(config["names"]):
        with polytrain_tf.strategy().scope():
            found[name] = outcome(CASES[name], Part(path=path / str(number)))
    polytrain.report({"found": found})


TOLERANCE = {"relative": 1e-3, "absolute": 1e-5}

PARTS = 12
"""Each has every twelfth case: one run of all of them would take too long for a test. `make test`
has a third of one part."""


@pytest.mark.sweep
@pytest.mark.parametrize("part", [0, *map(only_in_sweep, range(1, PARTS))])
def test_two_workers_end_where_one_process_ends(
    tmp_path: Path, part: int, selected: Selected
) -> None:
    runs = [name for name in CASES if name != "`TensorBoard`" or find_spec("tensorboard")]
    names = selected(runs[part::PARTS], one_in=3)
    record = run_world(
        TensorFlow(timeout_s=60),
        data=pa.table({"x": [1.0, 2.0]}),
        path=tmp_path / "world",
        training_function=train,
        training_config={"names": names, "path": str(tmp_path)},
        seconds=600,
    )
    failures = [str(rank.failure) for rank in record.ranks if rank.failure]
    assert not failures, "\n".join(failures)
    first, second = (rank.reports[0].metrics["found"] for rank in record.ranks)
    wrong = {}
    for number, name in enumerate(names):
        case, ours = CASES[name], first[name] | written(tmp_path / "0" / str(number))
        alone = {} if case.verdict == REFUSED else outcome_alone(name, tmp_path / f"alone{number}")
        verdict = shown(ours, alone, **TOLERANCE)
        if verdict != case.verdict or written(tmp_path / "1" / str(number)):
            wrong[name] = verdict, ours, alone
    assert not wrong
    assert [set(each) for each in second.values()] == [set(each) for each in first.values()]


def outcome_alone(name: str, path: Path) -> dict[str, Any]:
    """What a case ends in in one process."""
    return outcome(CASES[name], Part(path=path)) | written(path)


class Dies(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Rank 1 in its first attempt, in the middle of the second epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        context = polytrain.get_context()
        is_second = int(self.model.optimizer.iterations.numpy()) > ROWS // BATCH
        if (
            context.get_world_rank() == 1
            and context.get_attempt() == 0
            and is_second
            and batch == 2
        ):
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_be_killed(config: dict[str, Any]) -> None:
    case = CASES[config["name"]]
    options = case.fit(Part(path=Path(config["path"])))
    with polytrain_tf.strategy().scope():
        model = checkpointed_model() or built(case)
    fitted = model.fit(
        **{"x": X, "y": Y, "batch_size": BATCH, "shuffle": False, "verbose": 0},
        initial_epoch=checkpointed_epoch(),
        epochs=EPOCHS,
        callbacks=[*options["callbacks"], ReportCallback(), Dies()],
    )
    weights = [float(each) for array in model.get_weights() for each in array.ravel()]
    polytrain.report({"weights": weights, "epoch": fitted.epoch})


@pytest.mark.parametrize(
    "name",
    [
        only_in_sweep(f"`{name}`", id=name)
        for name in (
            *("EarlyStopping", "LearningRateScheduler", "ModelCheckpoint", "ReduceLROnPlateau"),
            *("SwapEMAWeights", "TerminateOnNaN"),
        )
    ],
)
def test_a_restart_ends_where_one_process_ends(tmp_path: Path, name: str) -> None:
    result = make_trainer(
        "tensorflow",
        train_and_be_killed,
        train_loop_config={"name": name, "path": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=tmp_path, progress=False, failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert result.restarts == 1
    alone = outcome_alone(name, tmp_path / "alone")
    reported = [report["loss"] for report in result.history if "loss" in report]
    ours = {"weights": result.metrics["weights"], "loss": reported} | written(tmp_path)
    theirs = {each: alone[each] for each in alone if each in ("weights", "loss", "best")}
    assert shown(ours, theirs, **TOLERANCE) == EXACT


def test_the_table_tells_what_the_sweep_shows() -> None:
    rows = table("keras.md", "argument, option or callback", column=1)
    found = {name.replace("`", ""): case.verdict for name, case in CASES.items()}
    assert {name.replace("`", ""): verdict for name, verdict in rows.items()} == found


def test_nothing_is_left_out() -> None:
    keras_cases.assert_nothing_is_left_out(ARGUMENTS)
