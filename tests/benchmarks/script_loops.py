"""The scripts that bench_script starts: `python script_loops.py PARTY WORKERS DIRECTORY`.

A torch script takes one step of DDP and notes when it is over. A whole script of another framework
trains next to nothing. Nothing is imported before it is needed, as in a user's script.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


def take_step(wrap: Callable[[Any], Any], directory: str, rank: int) -> None:
    """One step of a linear model, whose gradients are averaged over all ranks."""
    import torch

    torch.manual_seed(0)
    model = wrap(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 16)).square().mean().backward()
    optimizer.step()
    Path(directory, f"step-{rank}").write_text(repr(time.time()))


def by_polytrain(config: dict[str, Any]) -> None:
    """A worker of ours."""
    from polytrain_torch import prepare_model

    take_step(prepare_model, config["directory"], int(os.environ["RANK"]))


def by_ray_train(config: dict[str, Any]) -> None:
    """A worker of Ray Train's."""
    import ray.train
    import ray.train.torch

    rank = ray.train.get_context().get_world_rank()
    take_step(ray.train.torch.prepare_model, config["directory"], rank)


def by_ddp(directory: str) -> None:
    """A worker that has its rank from the environment."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    take_step(DistributedDataParallel, directory, dist.get_rank())
    dist.destroy_process_group()


def by_accelerate(directory: str) -> None:
    """A worker of Accelerate's."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    take_step(accelerator.prepare, directory, accelerator.process_index)
    accelerator.end_training()


def run_lightning(directory: str, workers: int) -> None:
    """Lightning, which starts all workers but the first itself."""
    import lightning
    import torch

    class Module(lightning.LightningModule):  # type: ignore[misc]  # Lightning's types aren't looked at
        def __init__(self) -> None:
            super().__init__()
            self.network = torch.nn.Linear(16, 1)

        def training_step(self, rows: Any, index: int) -> Any:
            return self.network(rows).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            Path(directory, f"step-{self.global_rank}").write_text(repr(time.time()))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy="ddp",
        use_distributed_sampler=False,
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader([torch.ones(8, 16)], batch_size=None))


def train_xgboost() -> None:
    """One round."""
    import numpy as np
    import xgboost

    rows = np.arange(64.0).reshape(16, 4)
    xgboost.train({"nthread": 1}, xgboost.DMatrix(rows, rows[:, 0]), num_boost_round=1)


def train_lightgbm() -> None:
    """One round."""
    import lightgbm
    import numpy as np

    rows = np.arange(64.0).reshape(16, 4)
    lightgbm.train(
        {"num_threads": 1, "verbose": -1}, lightgbm.Dataset(rows, rows[:, 0]), num_boost_round=1
    )


def train_tensorflow() -> None:
    """One step."""
    _fit_keras(contextlib.nullcontext())


def tensorflow_by_polytrain() -> None:
    """A worker of ours: the model is built in the scope of the run's strategy."""
    import polytrain_tf

    _fit_keras(polytrain_tf.strategy().scope())


def _fit_keras(scope: AbstractContextManager[object]) -> None:
    import tensorflow as tf

    with scope:
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    model.fit(tf.ones((8, 16)), tf.ones((8, 1)), verbose=0)


def train_torch() -> None:
    """One step."""
    import torch

    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 16)).square().mean().backward()
    optimizer.step()


ALONE: dict[str, Callable[[], None]] = {
    "torch": train_torch,
    "xgboost": train_xgboost,
    "lightgbm": train_lightgbm,
    "tensorflow": train_tensorflow,
}
"""Backend → the framework's own single process."""

OURS = {**ALONE, "tensorflow": tensorflow_by_polytrain}
"""Backend → the training function of ours."""


def run_polytrain(
    backend: str,
    function: Callable[..., None],
    config: dict[str, Any] | None,
    workers: int,
    directory: str,
) -> None:
    """A script of ours."""
    from polytrain import RunConfig, ScalingConfig, make_trainer

    make_trainer(
        backend,
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=workers,
            cluster="local",
            # Peers don't ask for cores of their own either.
            resources_per_worker={"CPU": min(1.0, len(os.sched_getaffinity(0)) / workers)},
        ),
        run_config=RunConfig(storage_path=Path(directory, "runs"), progress=False),
    ).fit()


def run_ray_train(workers: int, directory: str) -> None:
    """A script of Ray Train's, which starts a Ray of its own."""
    import ray
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address="local", num_cpus=workers + 1, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        by_ray_train,
        train_loop_config={"directory": directory},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(storage_path=str(Path(directory, "runs"))),
    ).fit()


def main() -> None:
    """Run a party's script."""
    party, workers, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    match party.split():
        case ["polytrain"]:
            run_polytrain("torch", by_polytrain, {"directory": directory}, workers, directory)
        case ["polytrain", backend]:
            run_polytrain(backend, OURS[backend], None, workers, directory)
        case ["alone", backend]:
            ALONE[backend]()
        case ["ddp"]:
            by_ddp(directory)
            # A thread of Gloo may still be freeing the last sum, and would abort the process.
            os._exit(0)
        case ["lightning"]:
            run_lightning(directory, workers)
        case ["ray_train"]:
            run_ray_train(workers, directory)
        case ["accelerate"]:
            from accelerate import debug_launcher

            # Its command wants MPI for several processes on CPUs.
            debug_launcher(by_accelerate, args=(directory,), num_processes=workers)
        case _:
            raise SystemExit(f"unknown party: {party}")


if __name__ == "__main__":
    main()
