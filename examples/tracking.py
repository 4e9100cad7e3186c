"""Track a run whose worker is killed: every step is in each store exactly once.

pip install '.[tensorboard,mlflow]'
python examples/tracking.py
tensorboard --logdir tracking/runs

The backend "reference" is polytrain's own, in plain Python: it needs no framework. See
docs/writing-a-backend.md.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import polytrain
from polytrain import Checkpoint, FailureConfig, RunConfig, make_trainer
from polytrain.trackers import CSV, MLflow, TensorBoard

STEPS, DIES_AT = 30, 17


def train() -> None:
    checkpoint, done = polytrain.get_checkpoint(), 0
    if checkpoint is not None:
        done = int(Path(checkpoint.path, "step").read_text())
    for step in range(done + 1, STEPS + 1):
        if step == DIES_AT and polytrain.get_context().get_attempt() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as directory:
            kept = None
            if step % 5 == 0:
                Path(directory, "step").write_text(str(step))
                kept = Checkpoint.from_directory(directory)
            metrics = {"loss": 1 / step, "eval": {"accuracy": step / STEPS}}
            polytrain.report(metrics, checkpoint=kept)


def main() -> None:
    directory = Path("tracking").absolute()
    directory.mkdir(exist_ok=True)
    database = f"sqlite:///{directory}/mlflow.db"
    result = make_trainer(
        "reference",
        train,
        run_config=RunConfig(
            name="tracked",
            storage_path=directory / "runs",
            if_finished="new",
            observers=(CSV(), TensorBoard(), MLflow(database, experiment="polytrain")),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    lines = Path(result.path, "metrics.csv").read_text().splitlines()
    print(f"{result.restarts} restart; metrics.csv: {lines[0]}, {len(lines) - 1} steps")

    from mlflow.tracking import MlflowClient

    client = MlflowClient(database)
    experiment = client.get_experiment_by_name("polytrain")
    run = client.search_runs([experiment.experiment_id])[0]
    losses = client.get_metric_history(run.info.run_id, "loss")
    print(f"MLflow: {len(losses)} losses, {run.data.tags['polytrain.restarts']} restart")


if __name__ == "__main__":
    main()
