"""From `fit()` to the training functions of many workers, on two nodes of Ray's."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from harness import OURS, Bound, Figure, conclude, parse, settle, sizes, take_turns

from polytrain import RunConfig, ScalingConfig, make_trainer
from polytrain.workers.processes.cache import let_go

_FORKS = "bare forks"
_AGAIN = "… again"
_ELASTIC = "… elastic"
_WORKERS = (2, 4, 16, 32, 64, 128)
_BOUNDS_S = {32: 3.0, 128: 10.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One `fit()` of workers that do nothing."""

    first_line: float
    """Seconds until the training function has begun on all ranks."""

    whole: float
    """Seconds until `fit()` has returned."""

    memory: float = 0.0
    """Bytes by which the driver has grown."""

    threads: float = 0.0
    """Threads of the driver, at most."""


def measure_ours(workers: int) -> Start:
    """Start workers of the reference backend. Ray must be up."""
    let_go()
    return measure_again(workers)


def measure_again(workers: int, *, least: int | None = None) -> Start:
    """The same with the driver's zygote of the run before.

    Args:
        workers: how many; of an elastic run the most.
        least: the least workers of an elastic run; None for one of a fixed size.
    """
    size = workers if least is None else (least, workers)
    with tempfile.TemporaryDirectory() as name, _threads() as seen:
        trainer = make_trainer(
            "reference",
            _note,
            train_loop_config={"directory": name},
            scaling_config=ScalingConfig(num_workers=size, cluster="ray"),
            run_config=RunConfig(storage_path=Path(name) / "runs", progress=False),
        )
        settle()
        before, called = psutil.Process().memory_info().rss, time.time()
        trainer.fit()
        whole = time.time() - called
        grown = max(0, psutil.Process().memory_info().rss - before)
        begun = [float(note.read_text()) for note in Path(name).glob("begun-*")]
        assert len(begun) == workers
        return Start(
            first_line=max(begun) - called, whole=whole, memory=grown, threads=max(seen, default=0)
        )


def measure_forks(workers: int) -> Start:
    """As many children of this process, which end at once."""
    began = time.time()
    children = []
    for _ in range(workers):
        child = os.fork()
        if child == 0:
            os._exit(0)
        children.append(child)
    forked = time.time() - began
    for child in children:
        os.waitpid(child, 0)
    return Start(first_line=forked, whole=time.time() - began)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__, repetitions=3)
    figures = []
    for workers in _WORKERS[:1] if options.quick else _WORKERS:
        with _two_nodes(cpus=max(workers // 2, 1)):
            parties = {
                OURS: partial(measure_ours, workers),
                _AGAIN: partial(measure_again, workers),
                _ELASTIC: partial(measure_again, workers, least=1),
                _FORKS: partial(measure_forks, workers),
            }
            taken = take_turns(parties, repetitions=options.repetitions, what=f"{workers} workers")
        bounds = [Bound(factor=_BOUNDS_S[workers])] if workers in _BOUNDS_S else []
        trained = {name: runs for name, runs in taken.items() if name != _FORKS}
        figures += [
            Figure(
                what=f"{workers} workers: first line",
                samples={name: [run.first_line for run in runs] for name, runs in taken.items()},
            ),
            Figure(
                what=f"{workers} workers: all of fit()",
                samples={name: [run.whole for run in runs] for name, runs in taken.items()},
                bounds=bounds,
            ),
            Figure(
                what=f"{workers} workers: driver's memory",
                samples={name: [run.memory for run in runs] for name, runs in trained.items()},
                show=sizes,
            ),
            Figure(
                what=f"{workers} workers: driver's threads",
                samples={name: [run.threads for run in runs] for name, runs in trained.items()},
                show=_number_of_threads,
            ),
        ]
    return conclude("From fit(), workers that do nothing, two nodes, Ray up", figures)


def _number_of_threads(*numbers: float) -> str:
    return "–".join(f"{number:.0f}" for number in numbers) + " threads"


def _note(config: dict[str, Any]) -> None:
    import polytrain

    rank = polytrain.get_context().get_world_rank()
    Path(config["directory"], f"begun-{rank}").write_text(repr(time.time()))


_note.__module__ = "__main__"
"""It travels by value: no worker has this module."""


@contextmanager
def _two_nodes(*, cpus: int) -> Iterator[None]:
    """Ray with two nodes on this machine, which claim to have so many CPUs each."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cpus, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=40)
        cluster.wait_for_nodes()
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def _threads() -> Iterator[list[int]]:
    """Count this process's threads while the block runs."""
    seen: list[int] = []
    over = threading.Event()

    def count() -> None:
        while not over.wait(0.05):
            seen.append(threading.active_count())

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    try:
        yield seen
    finally:
        over.set()
        counting.join()


if __name__ == "__main__":
    sys.exit(main())
