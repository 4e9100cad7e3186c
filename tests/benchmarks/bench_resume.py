"""From the death of a worker after nine tenths of an epoch to the rows that come next.

The worker is killed by SIGKILL, a batch after a checkpoint. Ours goes on in the order of the epoch
where the checkpoint was made. Ray Train begins the epoch anew, so its loop passes over as many rows
as it had before. (In which order they come the second time, Ray Data doesn't promise.)
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import parquet_data
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
from parquet_data import Files
from resume_loops import our_function, ray_function, resume

from polytrain import DataConfig, FailureConfig, RunConfig, ScalingConfig, make_trainer

_WORKERS = 2
_PART = 0.9
_A_SECOND = Bound(factor=1.0)

_WINDOWS = f"{OURS}, windows"
_IN_MEMORY = f"{OURS}, in memory"


def measure_ours(data: Path, config: DataConfig, batch_size: int) -> float:
    """One kill and restart of ours. Ray must be up."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trainer = make_trainer(
            "torch",
            our_function(),
            train_loop_config={"directory": name, "batch_size": batch_size, "part": _PART},
            datasets={"train": data},
            dataset_config={"train": config},
            scaling_config=ScalingConfig(num_workers=_WORKERS),
            run_config=RunConfig(
                storage_path=directory / "runs",
                failure_config=FailureConfig(max_failures=1),
                progress=False,
            ),
        )
        settle()
        result = trainer.fit()
        assert result.restarts == 1
        return resume(directory, _WORKERS).first_batch


def measure_ray_train(files: Files, batch_size: int) -> float:
    """The same of Ray Train's."""
    import ray.data
    import ray.train
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config: dict[str, Any] = {"directory": name, "batch_size": batch_size}
        trainer = TorchTrainer(
            ray_function(),
            train_loop_config=config | {"part": _PART, "rows": files.rows},
            datasets={"train": ray.data.read_parquet(str(files.directory))},
            scaling_config=ray.train.ScalingConfig(num_workers=_WORKERS),
            run_config=ray.train.RunConfig(
                storage_path=str(directory / "runs"),
                failure_config=ray.train.FailureConfig(max_failures=1),
            ),
        )
        settle()
        trainer.fit()
        return resume(directory, _WORKERS).first_batch


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(
        argv,
        description=__doc__.splitlines()[0],
        repetitions=3,
        add_own=parquet_data.add_arguments,
    )
    if not options.quick:
        require_ray_train()
    batch_size = options.own.batch_size
    with parquet_data.made_files(options) as files, running_ray(num_cpus=2 * _WORKERS):
        one_file = files.paths[0]
        ours = {
            OURS: (files.directory, DataConfig()),
            _WINDOWS: (files.directory, DataConfig(shuffle="window")),
            _IN_MEMORY: (one_file, DataConfig(shuffle=True)),
        }
        parties: dict[str, Callable[[], float]] = {
            name: partial(measure_ours, data, config, batch_size)
            for name, (data, config) in ours.items()
        }
        if not options.quick:
            parties[RAY_TRAIN] = partial(measure_ray_train, files, batch_size)
        taken = take_turns(parties, repetitions=options.repetitions, what="resume")
    bounds = [] if options.quick else [_A_SECOND]
    in_order = {name: taken[name] for name in (OURS, RAY_TRAIN) if name in taken}
    figures = [
        Figure(what="in order", samples=in_order, bounds=bounds),
        Figure(what="windows", samples={OURS: taken[_WINDOWS]}, bounds=bounds),
        Figure(what="any order", samples={OURS: taken[_IN_MEMORY]}, bounds=bounds),
    ]
    return conclude(
        f"From a SIGKILL at {_PART:.0%} of an epoch to the next rows, {_WORKERS} workers",
        figures,
        notes=[
            str(files),
            'windows: shuffle="window"; any order: shuffle=True, one of the files, in memory',
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
