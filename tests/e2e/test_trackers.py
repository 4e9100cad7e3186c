"""Every tracker has every step exactly once, whoever was killed: read back from its own store."""

from __future__ import annotations

import csv
import json
import random
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from tests.e2e.driver import start_driver
from tests.offline_wandb import closed_records

from polytrain.record.history import JOURNAL, read_history
from polytrain.storage.location import Location
from polytrain.text.metrics import flat
from polytrain.view.cli.sync import command

STEPS, SAVES_EVERY = 40, 4

SCRIPT = """
import json, random, tempfile
from pathlib import Path
from polytrain import Checkpoint
from polytrain_plugins import hookimpl
import polytrain.trackers.tracking

# As often as it can: what it is about is what was sent when a process dies.
polytrain.trackers.tracking._SEND_EVERY_S = 0.001
os.environ["WANDB_MODE"] = "offline"
plan = json.loads(Path("plan.json").read_text())

def train(config):
    checkpoint, done = polytrain.get_checkpoint(), 0
    if checkpoint is not None:
        done = int(Path(checkpoint.path, "step").read_text())
    for step in range(done + 1, config["steps"] + 1):
        # No two reports are equal, not even of the same step.
        metrics = {"step": step, "noise": random.random(), "eval": {"top": {"1": step / 8}}}
        if step % 3 == 0:
            metrics["loss"] = float("nan")
        if polytrain.get_context().get_attempt() == 0 and step == config["worker_dies_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as directory:
            kept = None
            if step % config["saves_every"] == 0:
                Path(directory, "step").write_text(str(step))
                kept = Checkpoint.from_directory(directory)
            polytrain.report(metrics, checkpoint=kept)
        time.sleep(0.005)

class Killer:
    @hookimpl
    def polytrain_reported(self, report):
        if report.step == plan["driver_dies_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    make_trainer(
        "reference",
        train,
        # What differs between two drivers isn't a part of the run.
        train_loop_config={**plan["training"], "worker_dies_at": plan["worker_dies_at"]},
        run_config=RunConfig(
            name="run",
            storage_path="runs",
            progress=False,
            track=plan["track"],
            observers=(Killer(),),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
"""


@dataclass(frozen=True)
class TrackedRun:
    directory: Path
    history: list[Mapping[str, Any]]
    restarts: int

    @property
    def path(self) -> Path:
        return self.directory / "runs/run"


def read_csv(run: TrackedRun) -> dict[int, dict[str, Any]]:
    with (run.path / "metrics.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    rows: dict[int, dict[str, Any]] = {}
    for step, _, *cells in lines:
        assert int(step) not in rows
        named = zip(header[2:], cells, strict=True)
        values = {name: json.loads(cell) for name, cell in named if cell}
        # The column `step` is the report's.
        values["step"] = values.pop("xstep")
        rows[int(step)] = values
    return rows


def read_tensorboard(run: TrackedRun) -> dict[int, dict[str, Any]]:
    # With this module, TensorBoard reads without TensorFlow, which takes long to import.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    rows: dict[int, dict[str, Any]] = {}
    for tag in events.Tags()["scalars"]:
        for scalar in events.Scalars(tag):
            row = rows.setdefault(scalar.step, {})
            assert tag not in row
            row[tag] = scalar.value
    return rows


def read_mlflow(run: TrackedRun) -> dict[int, dict[str, Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run.directory}/mlflow.db")
    (found,) = client.search_runs(["0"])
    assert found.info.status == "FINISHED"
    assert found.data.params["backend"] == "reference"
    assert found.data.tags["polytrain.restarts"] == str(run.restarts)
    assert Path(found.data.tags["polytrain.checkpoint"], "step").is_file()
    rows: dict[int, dict[str, Any]] = {}
    for name in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, name):
            row = rows.setdefault(metric.step, {})
            assert name not in row
            row[name] = metric.value
    return rows


def read_wandb(run: TrackedRun) -> dict[int, dict[str, Any]]:
    # Each driver replaces the offline run of the one before: what is sent is complete.
    (path,) = run.path.glob("wandb/offline-run-*/*.wandb")
    rows: dict[int, dict[str, Any]] = {}
    summary: dict[str, Any] = {}
    for record in closed_records(path):
        for item in record.summary.update:
            summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        if record.HasField("history"):
            found = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            row = {name: json.loads(value) for name, value in found.items()}
            step = row.pop("_step")
            assert step not in rows
            rows[step] = {name: float(v) for name, v in row.items() if not name.startswith("_")}
    assert summary["polytrain/restarts"] == run.restarts
    assert summary["polytrain/state"] == "finished"
    return rows


READERS: dict[str, Callable[[TrackedRun], dict[int, dict[str, Any]]]] = {
    "csv": read_csv,
    "mlflow": read_mlflow,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
}


@pytest.fixture(scope="module")
def tracked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrackedRun:
    """A run whose drivers and workers are killed at random steps, with all trackers."""
    directory = tmp_path_factory.mktemp("tracked")
    dice = random.Random(27)
    training = {"steps": STEPS, "saves_every": SAVES_EVERY}
    # The first driver loses a worker before it dies. In a sweep the second dies too.
    deaths = sorted(dice.sample(range(6, STEPS), 3))
    plans = [(deaths[0], deaths[1]), (None, None)]
    if request.config.getoption("--sweep"):
        plans.insert(1, (None, deaths[2]))
    for worker, driver in plans:
        plan = {"training": training, "track": list(READERS)}
        plan |= {"worker_dies_at": worker, "driver_dies_at": driver}
        (directory / "plan.json").write_text(json.dumps(plan))
        process = start_driver(directory, SCRIPT)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == (0 if driver is None else -signal.SIGKILL), errors
    history = read_history(Location.of(directory / "runs/run").open().read_log(JOURNAL))
    assert history is not None
    assert history.ledger.launches == len(plans) + 1
    return TrackedRun(directory, [flat(metrics) for metrics in history.reports], len(plans))


def assert_same(found: Mapping[int, Mapping[str, Any]], run: TrackedRun) -> None:
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, wanted in enumerate(run.history, 1):
        assert found[step].keys() == wanted.keys()
        assert all(found[step][name] == pytest.approx(wanted[name], nan_ok=True) for name in wanted)


@pytest.mark.sweep
@pytest.mark.parametrize("name", READERS)
def test_every_step_is_there_once(tracked: TrackedRun, name: str) -> None:
    assert_same(READERS[name](tracked), tracked)


@pytest.mark.sweep
def test_sync_sends_nothing_twice(tracked: TrackedRun) -> None:
    # MLflow's database was made in the directory of the script, which isn't this process's.
    database = f"mlflow=sqlite:///{tracked.directory}/mlflow.db"
    names = [name for name in READERS if name != "mlflow"]
    to = [argument for each in (*names, database) for argument in ("--to", each)]
    arguments = [str(tracked.path), "--json", *to]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    sent = json.loads(done.stdout)["data"]["sent"]
    assert len(sent) == len(READERS)
    assert set(sent.values()) == {0}
    for read in READERS.values():
        assert_same(read(tracked), tracked)
