"""From the start of `python train.py` to the first DDP step on all ranks, and whole scripts.

Every script is a new process, and its time begins before that process. Nothing is kept between
scripts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import script_loops
from harness import (
    OURS,
    RAY_TRAIN,
    Bound,
    Figure,
    conclude,
    parse,
    require_ray_train,
    sizes,
    take_turns,
)
from memory import Watch

_TORCHRUN, _PROCESSES, _ALONE = "torchrun", "bare processes", "one process"
_WORLD_SIZES = (2, 4)
_SHARE_OF_TORCHRUN = {2: 2 / 3, 4: 1 / 2}
_BEYOND_ALONE_S = 1.0
_BEYOND_WORKERS = 150e6
_TIMEOUT_S = 300

Start = Callable[[str], list[subprocess.Popen[bytes]]]
"""Starts the processes of a script; its argument is a directory."""


def measure_first_step(start: Start, workers: int) -> float:
    """Seconds from the start of a script to the end of the first step on all ranks."""
    with tempfile.TemporaryDirectory() as directory:
        begun = time.time()
        _run(start, directory)
        steps = [float(note.read_text()) for note in Path(directory).glob("step-*")]
        assert len(steps) == workers
        return max(steps) - begun


def measure_whole(start: Start) -> float:
    """Seconds from the start of a script to its end."""
    with tempfile.TemporaryDirectory() as directory:
        begun = time.perf_counter()
        _run(start, directory)
        return time.perf_counter() - begun


def measure_memory(start: Start) -> float:
    """Bytes of all processes of a script at their peak. Shared pages count once."""
    with tempfile.TemporaryDirectory() as directory:
        with Watch() as watch:
            _run(start, directory)
        return watch.memory.peak - watch.memory.before


def script(party: str, workers: int, directory: str) -> list[subprocess.Popen[bytes]]:
    """Start a script that starts its workers itself."""
    return [_started([script_loops.__file__, party, str(workers), directory])]


def torchrun(workers: int, directory: str) -> list[subprocess.Popen[bytes]]:
    """Start torchrun."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    return [_started([*command, script_loops.__file__, "ddp", str(workers), directory])]


def bare_processes(workers: int, directory: str) -> list[subprocess.Popen[bytes]]:
    """Start the workers of a DDP script without any launcher."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
    arguments = [script_loops.__file__, "ddp", str(workers), directory]
    return [_started(arguments, RANK=str(rank), **world) for rank in range(workers)]


def parties_of(workers: int, *, quick: bool) -> dict[str, Start]:
    """Name to what starts a torch script."""
    few: dict[str, Start] = {
        OURS: partial(script, "polytrain", workers),
        _TORCHRUN: partial(torchrun, workers),
        _PROCESSES: partial(bare_processes, workers),
    }
    if quick:
        return few
    return {
        **few,
        "Lightning": partial(script, "lightning", workers),
        "Accelerate": partial(script, "accelerate", workers),
        RAY_TRAIN: partial(script, "ray_train", workers),
    }


def first_steps(workers: int, *, quick: bool, repetitions: int) -> Figure:
    """The time to the first step, of everybody."""
    return _figure(
        f"{workers} workers: first step",
        parties_of(workers, quick=quick),
        partial(measure_first_step, workers=workers),
        repetitions,
        bounds=[Bound(factor=_SHARE_OF_TORCHRUN[workers], of=_TORCHRUN)],
    )


def whole_scripts(backend: str, *, repetitions: int) -> list[Figure]:
    """A whole script with two workers, and the framework's own single process."""
    whole = _figure(
        f"{backend}: whole script",
        {
            OURS: partial(script, f"polytrain {backend}", 2),
            _ALONE: partial(script, f"alone {backend}", 1),
        },
        measure_whole,
        repetitions,
    )
    beyond = _beyond(whole.samples, _ALONE)
    bounds = [Bound(factor=_BEYOND_ALONE_S)]
    return [whole, Figure(what=f"{backend}: more than alone", samples=beyond, bounds=bounds)]


def memory(*, repetitions: int) -> list[Figure]:
    """The peak memory of two workers, against two processes that nothing has started."""
    parties = {name: parties_of(2, quick=True)[name] for name in (OURS, _TORCHRUN, _PROCESSES)}
    peak = _figure("2 workers: peak memory", parties, measure_memory, repetitions, show=sizes)
    beyond = _beyond(peak.samples, _PROCESSES)
    bounds = [Bound(factor=_BEYOND_WORKERS)]
    what = "2 workers: more than bare"
    return [peak, Figure(what=what, samples=beyond, bounds=bounds, show=sizes)]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__.splitlines()[0], repetitions=5)
    if not options.quick:
        require_ray_train()
    rounds, quick = options.repetitions, options.quick
    figures = []
    for workers in _WORLD_SIZES[:1] if quick else _WORLD_SIZES:
        figures.append(first_steps(workers, quick=quick, repetitions=rounds))
    for backend in ["xgboost"] if quick else script_loops.ALONE:
        figures += whole_scripts(backend, repetitions=rounds)
    figures += memory(repetitions=rounds)
    if quick:
        # One round on whatever machine proves no bound.
        figures = [Figure(what=f.what, samples=f.samples, show=f.show) for f in figures]
    return conclude("Cold scripts, from the start of the process", figures)


def _figure(
    what: str,
    parties: Mapping[str, Start],
    measure: Callable[[Start], float],
    repetitions: int,
    **more: object,
) -> Figure:
    turns = {name: partial(measure, start) for name, start in parties.items()}
    samples = take_turns(turns, repetitions=repetitions, what=what)
    return Figure(what=what, samples=samples, **more)  # type: ignore[arg-type]


def _beyond(samples: Mapping[str, Sequence[float]], peer: str) -> dict[str, list[float]]:
    """By how much ours is more than a peer's, in each round."""
    return {OURS: [ours - its for ours, its in zip(samples[OURS], samples[peer], strict=True)]}


def _started(arguments: list[str], **variables: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", **variables}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=Path(script_loops.__file__).parent,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _run(start: Start, directory: str) -> None:
    """Run a script to its end.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    processes = start(directory)
    for process in processes:
        _, errors = process.communicate(timeout=_TIMEOUT_S)
        if process.returncode != 0:
            raise RuntimeError(f"{process.args} has failed:\n{errors.decode()[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
