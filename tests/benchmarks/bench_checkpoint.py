"""How long training stands still for a checkpoint, and 20 steps with 5 of them, against Ray Train.

What the training function itself writes, with torch.save, is no stall: everybody has to. The row
"torch.save" says what that takes; "one copy" what it takes to copy the files to the storage instead
of reporting them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint_loop import EVERY, STEPS, Report, training_function
from harness import (
    OURS,
    RAY_TRAIN,
    Bound,
    Figure,
    conclude,
    parse,
    positive,
    require_ray_train,
    running_ray,
    settle,
    sizes,
    take_turns,
)

from polytrain import Result, RunConfig, ScalingConfig, make_trainer

_WORKERS = 2
_RAY_TRAIN_ASYNC = "… async"
_SAVE = "torch.save"
_COPY = "one copy"
_STALL = [Bound(factor=0.03, of=RAY_TRAIN), Bound(factor=1.0, of=_COPY)]


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Seconds that one run took: medians over its checkpoints, and its loop."""

    stall: float
    loop: float
    save: float


def measure_ours(megabytes: float, products: int, directory: Path) -> Pause:
    """Run ours. Ray must be up."""
    result = _fit_ours(_reporting_ours(), megabytes, products, directory)
    # A checkpoint that is cheap because it gets lost would be no achievement.
    assert len(result.best_checkpoints) == STEPS // EVERY
    assert result.checkpoint is not None
    result.checkpoint.verify()
    return _reported(directory)


def measure_copy(megabytes: float, products: int, directory: Path) -> Pause:
    """Run ours with a training function that copies its files itself."""
    _fit_ours(_copying(), megabytes, products, directory)
    return _reported(directory)


def measure_ray_train(mode: str, megabytes: float, products: int, directory: Path) -> Pause:
    """Run Ray Train.

    Args:
        mode: of its uploads, "SYNC" or "ASYNC".
    """
    import ray.train
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        training_function(_reporting_ray_train(mode)),
        train_loop_config=_config(megabytes, products, directory),
        scaling_config=ray.train.ScalingConfig(num_workers=_WORKERS),
        run_config=ray.train.RunConfig(storage_path=str(directory / "runs")),
    )
    settle()
    result = trainer.fit()
    assert len(result.best_checkpoints) == STEPS // EVERY
    return _reported(directory)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(
        argv, description=__doc__.splitlines()[0], repetitions=3, add_own=_add_own_options
    )
    figures = []
    with running_ray(num_cpus=2 * _WORKERS):
        for megabytes in (1,) if options.quick else (1, 500):
            parties: dict[str, Callable[..., Pause]] = {OURS: measure_ours, _COPY: measure_copy}
            if not options.quick:
                require_ray_train()
                parties[RAY_TRAIN] = partial(measure_ray_train, "SYNC")
                parties[_RAY_TRAIN_ASYNC] = partial(measure_ray_train, "ASYNC")
            products = 1 if options.quick else options.own.products
            runs = {
                name: partial(_in_directory, measure, megabytes, products)
                for name, measure in parties.items()
            }
            taken = take_turns(runs, repetitions=options.repetitions, what=f"{megabytes} MB")
            figures += _figures(megabytes, taken, judged=not options.quick)
    return conclude(f"checkpoints, {_WORKERS} workers", figures)


def _figures(megabytes: float, taken: dict[str, list[Pause]], *, judged: bool) -> list[Figure]:
    size = sizes(megabytes * 1e6)
    stalls = {name: [run.stall for run in runs] for name, runs in taken.items()}
    stalls[_SAVE] = [run.save for run in taken[OURS]]
    loops = {name: [run.loop for run in runs] for name, runs in taken.items()}
    return [
        Figure(what=f"{size}: stall", samples=stalls, bounds=_STALL if judged else []),
        Figure(what=f"{size}: {STEPS} steps", samples=loops),
    ]


def _add_own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--products", type=positive, default=40, metavar="N", help="matrix products in a step"
    )


def _in_directory(measure: Callable[..., Pause], megabytes: float, products: int) -> Pause:
    with tempfile.TemporaryDirectory() as directory:
        return measure(megabytes, products, Path(directory))


def _config(megabytes: float, products: int, directory: Path) -> dict[str, Any]:
    return {"bytes": int(megabytes * 1e6), "products": products, "directory": str(directory)}


def _fit_ours(report: Report, megabytes: float, products: int, directory: Path) -> Result:
    trainer = make_trainer(
        "torch",
        training_function(report),
        train_loop_config=_config(megabytes, products, directory),
        scaling_config=ScalingConfig(num_workers=_WORKERS),
        run_config=RunConfig(storage_path=directory / "runs", progress=False),
    )
    settle()
    return trainer.fit()


def _reported(directory: Path) -> Pause:
    reported = json.loads((directory / "result.json").read_text())
    return Pause(
        stall=statistics.median(reported["stalls"]),
        loop=reported["loop"],
        save=statistics.median(reported["saves"]),
    )


def _reporting_ours() -> Report:
    def report(metrics: dict[str, Any], directory: str | None) -> None:
        import shutil

        import polytrain

        if directory is None:
            polytrain.report(metrics)
            return
        polytrain.report(metrics, checkpoint=polytrain.Checkpoint.from_directory(directory))
        shutil.rmtree(directory)

    return report


def _copying() -> Report:
    def report(metrics: dict[str, Any], directory: str | None) -> None:
        import shutil

        import polytrain

        if directory is not None:
            shutil.copytree(directory, f"{directory}-kept")
            shutil.rmtree(directory)
        polytrain.report(metrics)

    return report


def _reporting_ray_train(mode: str) -> Report:
    def report(metrics: dict[str, Any], directory: str | None) -> None:
        import ray.train

        if directory is None:
            ray.train.report(metrics)
            return
        ray.train.report(
            metrics,
            checkpoint=ray.train.Checkpoint.from_directory(directory),
            checkpoint_upload_mode=ray.train.CheckpointUploadMode[mode],
            delete_local_checkpoint_after_upload=True,
        )

    return report


if __name__ == "__main__":
    sys.exit(main())
