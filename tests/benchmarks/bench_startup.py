"""From `fit()` to training, and the smallest fit as a whole, against Ray Train."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    OURS,
    RAY_TRAIN,
    Bound,
    Figure,
    conclude,
    parse,
    require_ray_train,
    running_ray,
    settle,
    take_turns,
)

from polytrain import RunConfig, ScalingConfig, make_trainer
from polytrain.workers.processes.cache import let_go

_WORLD_SIZES = (2, 4)
_AGAIN = "… again"
_A_THIRD = Bound(factor=1 / 3, of=RAY_TRAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Seconds since `fit()` was called."""

    first_line: float
    """Until the training function has begun on all ranks."""

    whole: float
    """Until `fit()` has returned."""


def measure_ours(workers: int) -> Startup:
    """The first run of ours in a process. Ray must be up."""
    let_go()
    return _measure(workers)


def measure_again(workers: int) -> Startup:
    """The second, which finds what the first has left."""
    measure_ours(workers)
    return _measure(workers)


def _measure(workers: int) -> Startup:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trainer = make_trainer(
            "torch",
            _noting_function(),
            train_loop_config={"directory": name},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(storage_path=directory / "runs", progress=False),
        )
        return _time(trainer.fit, directory, workers)


def measure_ray_train(workers: int) -> Startup:
    """The same run of Ray Train's."""
    import ray.train
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trainer = TorchTrainer(
            _noting_function(),
            train_loop_config={"directory": name},
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(storage_path=str(directory / "runs")),
        )
        return _time(trainer.fit, directory, workers)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__, repetitions=5)
    if not options.quick:
        require_ray_train()
    figures = []
    for workers in _WORLD_SIZES[:1] if options.quick else _WORLD_SIZES:
        parties = {OURS: partial(measure_ours, workers), _AGAIN: partial(measure_again, workers)}
        if not options.quick:
            parties[RAY_TRAIN] = partial(measure_ray_train, workers)
        with running_ray(num_cpus=2 * workers):
            taken = take_turns(parties, repetitions=options.repetitions, what=f"{workers} workers")
        figures += [
            Figure(
                what=f"{workers} workers: first line",
                samples={name: [run.first_line for run in runs] for name, runs in taken.items()},
                bounds=[_A_THIRD],
            ),
            Figure(
                what=f"{workers} workers: all of fit()",
                samples={name: [run.whole for run in runs] for name, runs in taken.items()},
                bounds=[_A_THIRD],
            ),
        ]
    return conclude("From fit(), torch, Ray already up", figures)


def _noting_function() -> Callable[[dict[str, Any]], None]:
    """The training function. Made here so that it travels by value: no worker has this module."""

    def train(config: dict[str, Any]) -> None:
        begun = time.time()
        Path(config["directory"], f"begun-{os.environ['RANK']}").write_text(repr(begun))

    return train


def _time(fit: Callable[[], object], directory: Path, workers: int) -> Startup:
    settle()
    called = time.time()
    fit()
    returned = time.time()
    begun = [float(note.read_text()) for note in directory.glob("begun-*")]
    assert len(begun) == workers
    return Startup(first_line=max(begun) - called, whole=returned - called)


if __name__ == "__main__":
    sys.exit(main())
