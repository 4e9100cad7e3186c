"""Train in the background, stop when it is good enough, and resume later.

pip install '.[lightgbm]'
python examples/stop_and_resume.py
"""

from __future__ import annotations

import tempfile

import numpy as np

from polytrain import CheckpointConfig, RunConfig, ScalingConfig, make_trainer


def rows():
    x = np.random.default_rng(0).normal(size=(5000, 4))
    return {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": x[:, 0] * x[:, 1] + x[:, 2]}


def trainer(storage):
    return make_trainer(
        "lightgbm",
        params={"objective": "regression", "verbose": -1},
        num_boost_round=200,
        label="y",
        datasets={"train": rows()},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="in_two_parts",
            storage_path=storage,
            checkpoint_config=CheckpointConfig(checkpoint_frequency=1),
        ),
    )


def main():
    with tempfile.TemporaryDirectory() as storage:
        handle = trainer(storage).fit(wait=False)
        for report in handle.reports():
            if report.metrics["train-l2"] < 0.5:
                handle.stop("the error is below 0.5")
        first = handle.result()
        print(f"finished: {first.finished}, because {first.stopped.reason}")
        # Any process may do this, at any later time: the same name in the same storage.
        second = trainer(storage).fit()
        print(f"finished: {second.finished}, after {len(second.history)} rounds")
        print(f"repeated rounds: {second.ledger.lost_steps}")


if __name__ == "__main__":
    main()
