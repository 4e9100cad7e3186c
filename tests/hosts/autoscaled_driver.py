"""A run on a cluster that grows: `autoscaled_driver.py STORAGE SCALING`, which is JSON.

Its ranks write down the rows of every step; see `tests.e2e.test_exactly_once`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.test_exactly_once import ROWS, train

from polytrain import (
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    checkpoint_requested,
    collective,
    make_trainer,
)

_FREE_STEPS = 3


def held_back(go_on: Path) -> Callable[[Any], Any]:
    """Let an attempt take a few steps, and hold the next ones until a file is there.

    A step that is held ends when a checkpoint is requested. The backend has no sum of arrays: ranks
    only keep step.
    """
    steps = 0

    def add_up(vector: Any) -> Any:
        nonlocal steps
        steps += 1
        collective.barrier()
        while steps > _FREE_STEPS and not (go_on.exists() or checkpoint_requested()):
            time.sleep(0.01)
        return vector

    return add_up


def main(storage: Path, scaling: dict[str, Any]) -> None:
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    workers = scaling.pop("num_workers", 1)
    diary = storage / "diary"
    diary.mkdir()
    config = {
        "diary": str(diary),
        "run": "",
        "kills": {},
        "add_up": partial(held_back, storage / "go-on"),
    }
    try:
        result = make_trainer(
            "reference",
            train,
            train_loop_config=config,
            datasets={"train": {"id": list(range(ROWS))}},
            scaling_config=ScalingConfig(
                num_workers=tuple(workers) if isinstance(workers, list) else workers, **scaling
            ),
            run_config=RunConfig(
                name="run",
                storage_path=storage,
                progress=False,
                failure_config=FailureConfig(max_failures=1),
            ),
        ).fit()
        print("FINISHED", result.finished, flush=True)
    except TrainingFailedError as error:
        print("FAILED", " ".join(str(error).split()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
