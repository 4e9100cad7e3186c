"""From the death of a worker to training again, against Ray Train and torchrun."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import recovery_loop
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
from recovery_loop import Recovery, recovery, training_function

from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

_WORKERS = 2
_A_TENTH = Bound(factor=0.1, of=RAY_TRAIN)
_TORCHRUN = "torchrun"
_TORCHRUN_TRIES = 10
_TORCHRUN_TIMEOUT_S = 60.0


def measure_ours() -> Recovery:
    """One kill and restart of ours. Ray must be up."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trainer = make_trainer(
            "torch",
            training_function(),
            train_loop_config={"directory": name},
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
        return recovery(directory, _WORKERS)


def measure_ray_train() -> Recovery:
    """The same of Ray Train's."""
    import ray.train
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trainer = TorchTrainer(
            training_function(),
            train_loop_config={"directory": name},
            scaling_config=ray.train.ScalingConfig(num_workers=_WORKERS),
            run_config=ray.train.RunConfig(
                storage_path=str(directory / "runs"),
                failure_config=ray.train.FailureConfig(max_failures=1),
            ),
        )
        settle()
        trainer.fit()
        return recovery(directory, _WORKERS)


@dataclass(slots=True)
class Torchrun:
    """Measures torchrun, and counts the restarts that didn't work."""

    tried: int = 0
    failed: int = 0
    refused: int = 0
    """Of those that failed: with "connection refused", by a store of the first attempt's."""

    def measure(self) -> Recovery:
        """One kill and restart; tried again if it fails, which it often does.

        Raises:
            RuntimeError: if it never works.
        """
        output = ""
        for _ in range(_TORCHRUN_TRIES):
            with tempfile.TemporaryDirectory() as name:
                directory = Path(name)
                self.tried += 1
                succeeded, output = _run_torchrun(directory)
                if succeeded:
                    return recovery(directory, _WORKERS)
                self.failed += 1
                self.refused += "connection refused" in output.lower()
        raise RuntimeError(f"torchrun failed {_TORCHRUN_TRIES} times in a row:\n{output}")

    def __str__(self) -> str:
        return (
            f"torchrun: {self.failed} of {self.tried} restarts failed, "
            f"{self.refused} of them with 'connection refused'; measured are those that worked"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__, repetitions=5)
    torchrun = Torchrun()
    parties: dict[str, Callable[[], Recovery]] = {OURS: measure_ours}
    if not options.quick:
        require_ray_train()
        parties |= {RAY_TRAIN: measure_ray_train, _TORCHRUN: torchrun.measure}
    with running_ray(num_cpus=2 * _WORKERS):
        taken = take_turns(parties, repetitions=options.repetitions, what="recovery")
    figures = [
        Figure(
            what="first line",
            samples={name: [run.first_line for run in runs] for name, runs in taken.items()},
            bounds=[_A_TENTH],
        ),
        Figure(
            what="first all-reduce",
            samples={name: [run.all_reduce for run in runs] for name, runs in taken.items()},
        ),
    ]
    return conclude(
        f"From the SIGKILL of one of {_WORKERS} torch workers to the next attempt's",
        figures,
        notes=[str(torchrun)] if torchrun.tried else [],
    )


def _run_torchrun(directory: Path) -> tuple[bool, str]:
    """Whether it has restarted and finished, and what it has printed."""
    log = directory / "torchrun.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={_WORKERS}", "--max-restarts=1"]
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


if __name__ == "__main__":
    sys.exit(main())
