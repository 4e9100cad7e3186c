"""Who bench_recovery measures: polytrain, Ray Train's trainers, and torchrun."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import recovery_loop
from harness import scaling_in, settle
from recovery_loop import Recovery, recovery, training_function
from recovery_steps import StepOf, lightgbm_step, tensorflow_step, torch_step, xgboost_step

from polytrain import FailureConfig, RunConfig, make_trainer

_RAY_TRAINERS = {
    "torch": "TorchTrainer",
    "xgboost": "XGBoostTrainer",
    "lightgbm": "LightGBMTrainer",
    "tensorflow": "TensorflowTrainer",
}
_TORCHRUN_TRIES = 5
_TORCHRUN_TIMEOUT_S = 60.0


def measure_ours(backend: str, workers: int, cluster: Literal["ray", "local"]) -> Recovery:
    """One kill and restart of ours. Ray must be up."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trainer = make_trainer(
            backend,
            training_function(our_step(backend), our_rank(), os.getpid),
            train_loop_config={"directory": name},
            scaling_config=scaling_in(cluster, workers),
            run_config=RunConfig(
                storage_path=directory / "runs",
                failure_config=FailureConfig(max_failures=1),
                progress=False,
            ),
        )
        settle()
        result = trainer.fit()
        assert result.restarts == 1
        return recovery(directory, workers)


def measure_ray_train(backend: str, workers: int) -> Recovery:
    """The same of Ray Train's."""
    import ray.train

    module = importlib.import_module(f"ray.train.{backend}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trainer = getattr(module, _RAY_TRAINERS[backend])(
            training_function(_ray_step(backend), _ray_rank(), os.getpid),
            train_loop_config={"directory": name},
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(
                storage_path=str(directory / "runs"),
                failure_config=ray.train.FailureConfig(max_failures=1),
            ),
        )
        settle()
        trainer.fit()
        return recovery(directory, workers)


@dataclass(slots=True)
class Torchrun:
    """Measures torchrun, and counts the restarts that didn't work."""

    workers: int
    tried: int = 0
    failed: int = 0
    refused: int = 0
    """Of those that failed: with "connection refused", by a store of the first attempt's."""

    def measure(self) -> Recovery | None:
        """One kill and restart; tried again if it fails, which it often does. None if all fail."""
        for _ in range(_TORCHRUN_TRIES):
            with tempfile.TemporaryDirectory() as name:
                directory = Path(name)
                self.tried += 1
                succeeded, output = _run_torchrun(directory, self.workers)
                if succeeded:
                    return recovery(directory, self.workers)
                self.failed += 1
                self.refused += "connection refused" in output.lower()
        return None

    def __str__(self) -> str:
        return (
            f"torchrun, {self.workers} workers: {self.failed} of {self.tried} restarts failed, "
            f"{self.refused} of them with 'connection refused'; measured are those that worked"
        )


def our_rank() -> Callable[[], int]:
    """What tells the rank in a training function of ours."""

    def rank() -> int:
        import polytrain

        return polytrain.get_context().get_world_rank()

    return rank


def our_step(backend: str) -> StepOf:
    """A step as a training function of ours takes it."""

    def network() -> dict[str, Any]:
        import polytrain_lightgbm

        return polytrain_lightgbm.network_params()

    def strategy() -> Any:
        import polytrain_tf

        return polytrain_tf.strategy()

    return _step(backend, network, strategy)


def _ray_rank() -> Callable[[], int]:
    def rank() -> int:
        import ray.train

        world_rank: int = ray.train.get_context().get_world_rank()
        return world_rank

    return rank


def _ray_step(backend: str) -> StepOf:
    def network() -> dict[str, Any]:
        from ray.train.lightgbm import get_network_params

        return {"tree_learner": "data", "pre_partition": True, **get_network_params()}

    def strategy() -> Any:
        import tensorflow as tf

        return tf.distribute.MultiWorkerMirroredStrategy()

    return _step(backend, network, strategy)


def _step(
    backend: str, network: Callable[[], dict[str, Any]], strategy: Callable[[], Any]
) -> StepOf:
    match backend:
        case "torch":
            return torch_step()
        case "xgboost":
            return xgboost_step()
        case "lightgbm":
            return lightgbm_step(network)
        case "tensorflow":
            return tensorflow_step(strategy)
        case _:
            raise ValueError(backend)


def _run_torchrun(directory: Path, workers: int) -> tuple[bool, str]:
    """Whether it has restarted and finished, and what it has printed."""
    log = directory / "torchrun.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={workers}", "--max-restarts=1"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, str(Path(recovery_loop.__file__)), str(directory)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(_TORCHRUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    return code == 0, log.read_text(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun with its workers, which are in sessions of their own: it must do that itself."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(45)  # it gives its workers 30 s
        return
    process.kill()
    process.wait()
