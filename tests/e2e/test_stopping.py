"""A run that is asked to stop: it makes a checkpoint, says so, and is resumed later."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.driver import WITH_RAY, run_driver
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    CheckpointConfig,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    make_trainer,
)
from polytrain.backends.reference import Reference, ReferenceEngine
from polytrain.testing.contract import kit_table
from polytrain.testing.processes import eventually
from polytrain_plugins import Report, hookimpl

ROUNDS = 4000


class StopAt:
    """An observer that sends this process a signal when a step is reported."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT) -> None:
        self._step, self._number = step, number

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        if report.step == self._step:
            os.kill(os.getpid(), self._number)


def stoppable(while_there_is: Path) -> Reference:
    """A backend whose run can't be over before it is stopped, while a file is there."""

    class Engine(ReferenceEngine):
        def train(self, shards: Any, session: Any) -> Any:
            waits = while_there_is.exists()
            return super().train(shards, _WaitsHalfway(session) if waits else session)

    class Stoppable(Reference):
        def engine(self) -> ReferenceEngine:
            return Engine(self)

    return Stoppable(rounds=ROUNDS, label="label")


class _WaitsHalfway:
    """A session whose reports wait, at half of the rounds, for the request to stop."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def report(self, *, step: int, **arguments: Any) -> None:
        if step == ROUNDS // 2:
            assert eventually(self._session.is_checkpoint_wanted)
        self._session.report(step=step, **arguments)


def fit(path: Path, *, observers: tuple[Any, ...] = (), workers: int = 2) -> Result:
    return Trainer(
        stoppable(path.parent / "is stopped"),
        datasets={"train": kit_table()},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="run",
            storage_path=path,
            progress=False,
            checkpoint_config=CheckpointConfig(checkpoint_frequency=0),
            observers=observers,
        ),
    ).fit()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, 2),
        only_in_sweep(signal.SIGINT, 2),
        only_in_sweep(signal.SIGTERM, 0),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_end(
    tmp_path: Path, number: signal.Signals, workers: int
) -> None:
    straight = fit(tmp_path / "straight", workers=workers)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    (tmp_path / "is stopped").touch()
    expected = KeyboardInterrupt if number is signal.SIGINT else SystemExit
    with pytest.raises(expected):
        fit(tmp_path / "stopped", observers=(StopAt(5, number),), workers=workers)
    stopped = Result.from_path(tmp_path / "stopped" / "run")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert not stopped.finished
    assert stopped.error is None
    # It made no checkpoint of its own accord: this one was asked for.
    assert stopped.checkpoint is not None
    steps = len(stopped.history)
    assert 5 <= steps < ROUNDS

    (tmp_path / "is stopped").unlink()
    result = fit(tmp_path / "stopped", workers=workers)
    assert result.finished
    assert result.history[:steps] == stopped.history
    assert len(result.history) == ROUNDS
    assert (result.load_model() == straight.load_model()).all()


def test_a_function_is_reported_and_its_next_checkpoint_is_its_last(tmp_path: Path) -> None:
    script = """
    import tempfile
    import polytrain_plugins
    from polytrain import Checkpoint

    def train():
        rank = polytrain.get_context().get_world_rank()
        step = 0
        while True:
            step += 1
            with tempfile.TemporaryDirectory() as directory:
                # Only when somebody asks: no step makes one of its own accord.
                wanted = rank == 0 and polytrain.checkpoint_requested()
                kept = Checkpoint.from_directory(directory) if wanted else None
                open(directory + "/step", "w").write(str(step))
                polytrain.report({"step": step}, checkpoint=kept)
                assert kept is None, "what comes after the last checkpoint would be lost"

    class Stop:
        @polytrain_plugins.hookimpl
        def polytrain_reported(self, report):
            if report.step == 100:
                os.kill(os.getpid(), signal.SIGINT)

    trainer = make_trainer(
        "reference", train, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path="runs", name="run", progress=False, observers=(Stop(),)
        ),
    )
    try:
        trainer.fit()
    except KeyboardInterrupt:
        result = polytrain.Result.from_path("runs/run")
    with result.checkpoint.as_directory() as directory:
        kept = int(open(directory + "/step").read())
    print(result.finished, result.metrics["step"] == kept >= 100, flush=True)
    """
    code, output, errors = run_driver(tmp_path, script)
    assert output.endswith("False True\n"), errors
    assert code == 0


@pytest.mark.parametrize("reports", [True, False])
def test_a_function_without_checkpoints_is_stopped_at_once(tmp_path: Path, reports: bool) -> None:
    script = f"""
    import pathlib, threading

    def train(config):
        pathlib.Path(config["path"]).touch()
        while {reports}:
            polytrain.report({{"loss": 1.0}})
        threading.Event().wait()

    def interrupt():
        while not pathlib.Path("trains").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    make_trainer(
        "reference", train, train_loop_config={{"path": os.path.abspath("trains")}},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path="runs", name="run", progress=False),
    ).fit()
    print("goes on", flush=True)
    """
    code, output, errors = run_driver(tmp_path, script)
    assert (code, output) == (-signal.SIGINT, ""), errors
    assert "stopped by SIGINT. To start over, run the same script or cell again" in errors
    result = Result.from_path(tmp_path / "runs" / "run")
    assert (result.finished, result.checkpoint) == (False, None)


def test_a_signal_that_does_not_interrupt_the_driver_stops_the_run(tmp_path: Path) -> None:
    """As one that comes just before the driver begins to wait. Here another thread receives it."""
    script = """
    import pathlib, threading

    def train(config):
        pathlib.Path(config["path"]).touch()
        threading.Event().wait()

    def interrupt():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while not pathlib.Path("trains").exists():
            time.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=interrupt).start()
    make_trainer(
        "reference", train, train_loop_config={"path": os.path.abspath("trains")},
        scaling_config=ScalingConfig(num_workers=2, cluster="local"),
        run_config=RunConfig(storage_path="runs", name="run", progress=False),
    ).fit()
    """
    code, _, errors = run_driver(tmp_path, script, seconds=60)
    # Python can't die of a signal that its main thread blocks.
    assert code == 128 + signal.SIGINT, errors
    assert str(Result.from_path(tmp_path / "runs/run").stopped) == "stopped by a signal: SIGINT"


def test_an_inline_function_without_checkpoints_is_interrupted(quiet: RunConfig) -> None:
    class Interrupt:
        @hookimpl
        def polytrain_reported(self, report: Report) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    def train() -> None:
        while True:
            polytrain.report({})

    run = dataclasses.replace(quiet, observers=(Interrupt(),))
    with pytest.raises(KeyboardInterrupt):
        make_trainer(
            "reference", train, scaling_config=ScalingConfig(num_workers=0), run_config=run
        ).fit()


def test_stopping_while_workers_are_waited_for_is_at_once(tmp_path: Path) -> None:
    script = """
    import pathlib, threading
    taken = ray.util.placement_group([{"CPU": 4}])
    ray.get(taken.ready())

    def interrupt():
        journal = pathlib.Path("runs/run/journal.jsonl")
        while not (journal.exists() and "placing 2 workers" in journal.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    def train():
        polytrain.report({})

    threading.Thread(target=interrupt).start()
    make_trainer(
        "reference", train, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path="runs", name="run", progress=False),
    ).fit()
    """
    code, _, errors = run_driver(tmp_path, script, preamble=WITH_RAY)
    # Ray's hook for exceptions makes Python exit with 1 after any KeyboardInterrupt.
    assert code == 1, errors
    assert errors.endswith("KeyboardInterrupt\n")
    result = Result.from_path(tmp_path / "runs" / "run")
    assert (result.finished, result.checkpoint) == (False, None)
    lines = (tmp_path / "runs/run/journal.jsonl").read_text().splitlines()
    assert json.loads(lines[-2])["stopped"]
