"""What one report without a checkpoint costs the training function, against Ray Train.

Ray Train delivers reports when its controller polls, every 2 s by default. It is measured like that
and with the shortest interval that makes sense, which nobody runs with.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from harness import (
    OURS,
    RAY_TRAIN,
    Bound,
    Figure,
    add_cluster,
    conclude,
    parse,
    require_ray_train,
    running_ray,
    scaling_in,
    settle,
    take_turns,
)

from polytrain import RunConfig, make_trainer
from polytrain_plugins import changed_environment

_WORKERS = 2
_RAY_TRAIN_TUNED = "… tuned"
_TUNED = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.01"}
_A_TENTH_OF_A_MILLISECOND = Bound(factor=1e-4)


def measure_ours(cluster: Literal["ray", "local"], reports: int = 1000) -> float:
    """Median seconds of one report of ours, over all ranks. Ray must be up."""
    import polytrain

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trainer = make_trainer(
            "torch",
            _reporting_function(polytrain.report),
            train_loop_config={"directory": name, "reports": reports},
            scaling_config=scaling_in(cluster, _WORKERS),
            run_config=RunConfig(storage_path=directory / "runs", progress=False),
        )
        settle()
        result = trainer.fit()
        # A report that is cheap because it gets lost would be no achievement.
        assert [metrics["step"] for metrics in result.history] == list(range(reports))
        return _median(directory)


def measure_ray_train(reports: int, environment: Mapping[str, str]) -> float:
    """The same of Ray Train's.

    Args:
        reports: how many to take the median of.
        environment: Ray Train's settings.
    """
    import ray.train
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as name, changed_environment(environment):
        directory = Path(name)
        trainer = TorchTrainer(
            _reporting_function(ray.train.report),
            train_loop_config={"directory": name, "reports": reports},
            scaling_config=ray.train.ScalingConfig(num_workers=_WORKERS),
            run_config=ray.train.RunConfig(storage_path=str(directory / "runs")),
        )
        settle()
        trainer.fit()
        return _median(directory)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__.splitlines()[0], repetitions=3, add_own=add_cluster)
    parties: dict[str, Callable[[], float]] = {OURS: partial(measure_ours, options.own.cluster)}
    if not options.quick:
        require_ray_train()
        parties[RAY_TRAIN] = partial(measure_ray_train, 5, {})
        parties[_RAY_TRAIN_TUNED] = partial(measure_ray_train, 100, _TUNED)
    with running_ray(num_cpus=2 * _WORKERS):
        taken = take_turns(parties, repetitions=options.repetitions, what="report")
    tuning = " ".join(f"{name}={value}" for name, value in _TUNED.items())
    notes = [] if options.quick else [f"tuned: {tuning}"]
    # One repetition on whatever machine is at hand is no measurement to be judged.
    bounds = [] if options.quick else [_A_TENTH_OF_A_MILLISECOND]
    figure = Figure(what="one call", samples=taken, bounds=bounds)
    return conclude(f"report() without a checkpoint, {_WORKERS} workers", [figure], notes=notes)


def _reporting_function(report: Callable[..., None]) -> Callable[[dict[str, Any]], None]:
    """The training function. Made here so that it travels by value: no worker has this module."""

    def train(config: dict[str, Any]) -> None:
        durations = []
        for step in range(config["reports"]):
            begun = time.perf_counter()
            report({"step": step, "loss": 1.0 / (step + 1)})
            durations.append(time.perf_counter() - begun)
        note = Path(config["directory"], f"durations-{os.environ['RANK']}")
        note.write_text(json.dumps(durations))

    return train


def _median(directory: Path) -> float:
    notes: list[list[float]] = [
        json.loads(note.read_text()) for note in directory.glob("durations-*")
    ]
    assert len(notes) == _WORKERS
    return statistics.median(duration for note in notes for duration in note)


if __name__ == "__main__":
    sys.exit(main())
