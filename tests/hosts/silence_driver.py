"""A run whose ranks meet at every step: `silence_driver.py STORAGE WORKERS STANDBY STEPS`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import polytrain
from polytrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig, make_trainer


def train(config: dict[str, int]) -> None:
    step = 0
    if checkpoint := polytrain.get_checkpoint():
        with checkpoint.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
    is_first = polytrain.get_context().get_world_rank() == 0
    while step < config["steps"]:
        step += 1
        time.sleep(0.1)
        polytrain.collective.barrier()
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            kept = Checkpoint.from_directory(directory) if is_first else None
            polytrain.report({"step": step, "host": os.uname().nodename}, checkpoint=kept)


def main() -> None:
    storage, workers, standby, steps = sys.argv[1:]
    result = make_trainer(
        "reference",
        train,
        train_loop_config={"steps": int(steps)},
        scaling_config=ScalingConfig(
            num_workers=tuple(json.loads(workers)) if "[" in workers else int(workers),
            standby=int(standby),
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name="run", storage_path=storage, failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    print("LAST STEP", (result.metrics or {})["step"])


if __name__ == "__main__":
    main()
