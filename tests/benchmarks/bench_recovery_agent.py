"""From the loss of an agent, and of a node, to the first step of all ranks, with a standby.

An agent is lost by a SIGKILL to its actor, a node by one to its raylet. How long Ray takes to tell
that a node is gone is Ray's affair, and is stated apart. Nodes are raylets of their own on this
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness import OURS, Bound, Figure, conclude, parse, running_ray, settle, take_turns
from lost_processes import agent, raylet
from recovery_loop import killed_at, recovery, training_function
from recovery_peers import our_rank, our_step

from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

_WORKERS = 2
_A_SECOND = Bound(factor=1.0)
_BACKENDS = ("torch", "xgboost", "lightgbm", "tensorflow")

_TELLS_OF_THE_LOSS = ("AgentLost", "NodeLost")
"""Lines of the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Seconds since an agent or a node was killed."""

    noticed: float
    """Until Ray has noticed the driver."""

    first_line: float
    first_step: float

    @property
    def step_after_notice(self) -> float:
        """Seconds from there to the first step on all ranks."""
        return self.first_step - self.noticed


def measure(backend: str, victim: Callable[[], Callable[[], int]], *, standby: int) -> Replacement:
    """One loss and its recovery. Ray must be up, with room for the standby."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trainer = make_trainer(
            backend,
            training_function(our_step(backend), our_rank(), victim()),
            train_loop_config={"directory": name},
            scaling_config=ScalingConfig(num_workers=_WORKERS, standby=standby),
            run_config=RunConfig(
                name="run",
                storage_path=directory,
                failure_config=FailureConfig(max_failures=1),
                progress=False,
            ),
        )
        result = trainer.fit()
        assert result.restarts == 1
        recovered = recovery(directory, _WORKERS)
        return Replacement(
            noticed=_noticed_at(directory / "run" / "journal.jsonl") - killed_at(directory),
            first_line=recovered.first_line,
            first_step=recovered.first_step,
        )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(
        argv, description=__doc__.splitlines()[0], repetitions=5, add_own=_add_own_options
    )
    standby = options.own.standby
    bounds = [] if options.quick or not standby else [_A_SECOND]
    figures: list[Figure] = []
    for backend in options.own.backend or (_BACKENDS[:1] if options.quick else _BACKENDS):
        losses = {
            "agent": partial(_of_agent, backend, standby),
            "node": partial(_of_node, backend, standby),
        }
        if options.quick:
            del losses["node"]
        taken = take_turns(losses, repetitions=options.repetitions, what=backend)
        for what, runs in taken.items():
            parts = {
                f"{backend}, {what} lost: noticed": [run.noticed for run in runs],
                f"{backend}, {what} lost: first line": [run.first_line for run in runs],
                f"{backend}, {what} lost: first step": [run.first_step for run in runs],
                f"{backend}, {what} lost: step since notice": [
                    run.step_after_notice for run in runs
                ],
            }
            judged = "first step" if what == "agent" else "step since notice"
            figures += [
                Figure(
                    what=part,
                    samples={OURS: samples},
                    bounds=bounds if part.endswith(f": {judged}") else [],
                )
                for part, samples in parts.items()
            ]
    return conclude(f"From a SIGKILL, {_WORKERS} workers and {standby} standby", figures)


def _of_agent(backend: str, standby: int) -> Replacement:
    with running_ray(num_cpus=2 * _WORKERS):
        settle()
        return measure(backend, agent, standby=standby)


def _of_node(backend: str, standby: int) -> Replacement:
    with _nodes(_WORKERS + 1):
        return measure(backend, raylet, standby=standby)


@contextlib.contextmanager
def _nodes(count: int) -> Iterator[None]:
    """A cluster of nodes with one CPU each; the driver is on the first."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def _noticed_at(journal: Path) -> float:
    """When the journal says that the loss became known, in seconds since the epoch."""
    entries = map(json.loads, journal.read_text().splitlines())
    found: float = next(e["time"] for e in entries if e["event"] in _TELLS_OF_THE_LOSS)
    return found


def _add_own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", action="append", choices=_BACKENDS, help="only this one; again for more"
    )
    parser.add_argument(
        "--standby", type=int, default=1, metavar="N", help="0 replaces what is lost by new actors"
    )


if __name__ == "__main__":
    sys.exit(main())
