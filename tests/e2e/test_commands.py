"""Commands that reach an active run from another process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.e2e.driver import start_driver
from tests.sweeps import only_in_sweep

import polytrain
from polytrain.testing.processes import eventually

TRAINS_ON = """
import tempfile
from polytrain import Checkpoint, CheckpointConfig

def wait_for_better_times(step):
    time.sleep(0.02)

def train():
    for step in range(1, 100_000):
        wait_for_better_times(step)
        with tempfile.TemporaryDirectory() as directory:
            open(f"{directory}/step", "w").write(str(step))
            rank = polytrain.get_context().get_world_rank()
            saved = Checkpoint.from_directory(directory) if rank == 0 and step % 10 == 0 else None
            polytrain.report({"step": step}, checkpoint=saved)

result = make_trainer(
    "reference", train, scaling_config=ScalingConfig(num_workers=WORKERS),
    run_config=RunConfig(
        name="run", storage_path=".", checkpoint_config=CheckpointConfig(num_to_keep=2)
    ),
).fit()
print("stopped:", result.stopped)
"""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "polytrain", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def reports(run: Path) -> Any:
    try:
        return polytrain.load(run).history
    except polytrain.RunNotFoundError:
        return []


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [only_in_sweep(0), 2])
def test_a_run_is_looked_at_and_stopped_from_another_process(tmp_path: Path, workers: int) -> None:
    run = str(tmp_path / "run")
    with start_driver(tmp_path, TRAINS_ON.replace("WORKERS", str(workers))) as driver:
        assert eventually(lambda: len(reports(tmp_path / "run")) > 0)
        stacks = command("stacks", run, "--json")
        assert stacks.returncode == 0, stacks.stderr
        by_rank = json.loads(stacks.stdout)["data"]
        assert sorted(by_rank) == [str(rank) for rank in range(max(1, workers))]
        assert all("train" in text for text in by_rank.values())
        wrong = command("stacks", run, "--rank", "7")
        assert wrong.returncode == 1
        assert "--rank: there is no rank 7" in wrong.stderr
        follower = subprocess.Popen(
            [sys.executable, "-m", "polytrain", "show", run, "-f", "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        with follower:
            assert follower.stdout is not None
            followed = (json.loads(line) for line in follower.stdout)
            assert next(followed)["event"] == "run_started"
            assert next(each for each in followed if each["event"] == "progress")["step"] > 0
            stopped = command("stop", run, "--reason", "lunch")
            *_, end = followed
            assert (end["event"], end["state"]) == ("run_ended", "stopped")
        assert follower.returncode == 75
        assert (stopped.returncode, stopped.stdout) == (
            75,
            "run: stopped by polytrain stop: lunch\n",
        )
        output, errors = driver.communicate(timeout=60)
    assert "stopped: stopped by polytrain stop: lunch" in output, errors
    again = command("stop", run)
    assert again.returncode == 1
    assert "run isn't active: it is stopped" in again.stderr


ENDLESS = """
import tempfile, time
from pathlib import Path
from polytrain import Checkpoint, RunConfig, ScalingConfig, make_trainer, report

def train():
    for step in range(1, 100_000):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            report({"step": step}, checkpoint=Checkpoint.from_directory(directory))
        time.sleep(0.02)

trainer = make_trainer(
    "reference", train, scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="run", storage_path="."),
)
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), only_in_sweep(signal.SIGTERM, 143)]
)
def test_a_signal_ends_the_command_after_the_next_checkpoint(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    process = subprocess.Popen(
        [sys.executable, "-m", "polytrain", "run", "endless:trainer"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert eventually(lambda: len(reports(tmp_path / "run")) > 10)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert f"stopped by {number.name}. To resume it" in errors
    assert "Traceback" not in errors
    assert polytrain.load(tmp_path / "run").checkpoint is not None


def test_a_job_in_a_file_trains_and_its_run_predicts(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(400, 2))
    rows = pa.table({"id": range(400), "a": x[:, 0], "b": x[:, 1], "y": x.sum(axis=1)})
    pq.write_table(rows, tmp_path / "rows.parquet")
    (tmp_path / "job.toml").write_text(JOB.format(directory=tmp_path))
    trained = command("run", f"{tmp_path}/job.toml", "--set", "num_boost_round=9")
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.startswith(f"{tmp_path}/job: finished. train-rmse 0.")
    predict = ("predict", f"{tmp_path}/job", f"{tmp_path}/rows.parquet", "--keep", "id")
    predicted = command(*predict, "-o", f"{tmp_path}/out")
    assert predicted.returncode == 0, predicted.stderr
    table = pq.read_table(tmp_path / "out").sort_by("id")
    expected = polytrain.load(tmp_path / "job").predict(rows)
    assert table["id"].to_pylist() == rows["id"].to_pylist()
    assert table["prediction"].to_numpy().tolist() == expected.tolist()
    wrong = command("predict", f"{tmp_path}/job", f"{tmp_path}/no.parquet", "-o", "out")
    assert wrong.returncode == 2
    assert "no.parquet" in wrong.stderr


def test_a_run_without_one_score_of_its_validations_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unscored.py").write_text(UNSCORED)
    monkeypatch.chdir(tmp_path)
    trained = command("run", "unscored:trainer")
    assert trained.returncode == 1
    why = "all 2 validations failed: KeyError: 'accuracy'"
    assert f"finished, but no checkpoint has a score: {why}" in trained.stdout
    [ended] = [line for line in trained.stderr.splitlines() if ": finished" in line]
    assert ended.endswith(f"but no checkpoint has a score: {why}")
    assert polytrain.load(tmp_path / "run").validation_failure == why


UNSCORED = """
import os
import polytrain
from polytrain import Checkpoint, RunConfig, ScalingConfig, ValidationConfig, make_trainer

def train():
    os.makedirs("model", exist_ok=True)
    for step in range(2):
        saved = Checkpoint.from_directory("model")
        polytrain.report({"step": step}, checkpoint=saved, validation=True)

def validate(checkpoint):
    return {"score": {}["accuracy"]}

trainer = make_trainer(
    "reference", train, scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(name="run", storage_path="."),
    validation_config=ValidationConfig(fn=validate),
)
"""


JOB = """
backend = "xgboost"
label = "y"
dataset_config = {{columns = ["a", "b", "y"]}}

[datasets]
train = "{directory}/rows.parquet"

[scaling_config]
num_workers = 2

[run_config]
name = "job"
storage_path = "{directory}"
"""
