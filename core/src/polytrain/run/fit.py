"""One run from first to last: everything that it holds is acquired and released here."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.keeper import CheckpointKeeper
from polytrain.checkpoint.start import StartingPoint
from polytrain.config import RunConfig, ScalingConfig
from polytrain.data.assignment import RunDataset
from polytrain.data.spec import ShardSpec
from polytrain.data.stream import StreamSpec
from polytrain.errors import TrainingFailedError
from polytrain.policy.failure import FailurePolicy
from polytrain.reporting.observers import Observers, installed_observers
from polytrain.reporting.progress import ProgressLine, TrainerOutput
from polytrain.result import Result
from polytrain.run.actions import Conclude
from polytrain.run.controller import Controller
from polytrain.run.journal import Journal
from polytrain.run.states import State
from polytrain.workers.group import WorkerGroup
from polytrain.workers.job import TrainerJob
from polytrain_plugins import Backend, Demand, Outcome, RunInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that a run consists of, checked."""

    backend: Backend
    training_function: Callable[..., Any] | None
    training_config: Mapping[str, Any] | None
    datasets: tuple[RunDataset, ...]
    demand: Demand
    scaling: ScalingConfig
    config: RunConfig
    path: Path
    """The run's directory, which isn't there yet."""

    start: StartingPoint
    """What the run begins with."""

    @property
    def world_size(self) -> int:
        """Ranks; one when the run is inline."""
        return max(1, self.scaling.num_workers)

    @property
    def specs(self) -> tuple[ShardSpec | StreamSpec, ...]:
        """How the data sets are shared out, in their order."""
        return tuple(self._spec(dataset) for dataset in self.datasets)

    def _spec(self, dataset: RunDataset) -> ShardSpec | StreamSpec:
        if dataset.source.stream is not None:
            return dataset.stream_spec()
        position = self.start.positions.get(dataset.name)
        tables = self.demand.reads_tables
        return dataset.spec(
            world_size=self.world_size,
            # Cut once, by the run that began with the data.
            shards=position["plan"]["shards"] if position and "plan" in position else None,
            whole=dataset.name in self.demand.whole_datasets,
            as_tables=tables,
            only_tables=tables and self.training_function is None,
        )

    @property
    def info(self) -> RunInfo:
        """What observers are told of it."""
        return RunInfo(
            name=self.path.name,
            backend=self.backend.name,
            num_workers=self.scaling.num_workers,
            path=str(self.path),
        )

    @property
    def job(self) -> TrainerJob:
        """What its trainers are told of it."""
        return TrainerJob(
            run_name=self.path.name,
            run_path=self.path,
            backend=self.backend,
            training_function=self.training_function,
            training_config=self.training_config,
            checkpoint_frequency=self.config.checkpoint_config.checkpoint_frequency,
        )


def run_to_end(run: Run) -> Result:
    """Run, release everything, and return the result, which has an error if the run failed."""
    observers = Observers(_observers(run.config))
    run.path.mkdir(parents=True)
    interrupted = Outcome(succeeded=False, reason="interrupted", restarts=0)
    outcome = interrupted
    try:
        with contextlib.ExitStack() as stack:
            controller = _controller(run, observers, stack)
            observers.run_started(run.info)
            conclusion = controller.conclude()
            outcome = Outcome(
                succeeded=conclusion.succeeded,
                reason=conclusion.reason,
                restarts=controller.state.restarts,
            )
        return _result(run, controller, conclusion)
    finally:
        run.job.store.sweep()
        observers.run_ended(run.info, outcome)


def _controller(run: Run, observers: Observers, stack: contextlib.ExitStack) -> Controller:
    group = _group(run)
    stack.callback(group.close)
    return Controller(
        run=run.info,
        state=State(
            world_size=run.world_size,
            policy=FailurePolicy(max_failures=run.config.failure_config.max_failures),
        ),
        group=group,
        keeper=CheckpointKeeper(
            store=run.job.store,
            config=run.config.checkpoint_config,
            backend=run.backend.name,
            kind=run.backend.capabilities.checkpoint,
            world_size=run.world_size,
            origin=run.start,
        ),
        journal=stack.enter_context(Journal(run.path / "journal.jsonl")),
        observers=observers,
        output=stack.enter_context(TrainerOutput(run.path / "logs")),
    )


def _group(run: Run) -> WorkerGroup:
    if run.scaling.num_workers == 0:
        from polytrain.workers.inline_group import InlineGroup

        return InlineGroup(
            job=run.job,
            datasets=run.datasets,
            specs=run.specs,
            environment=run.demand.environment,
            cpus=run.scaling.cpus_per_worker,
        )
    # Ray is imported by whom needs it only: inline runs and trainers do without.
    from polytrain.workers.ray_group import RayGroup, RayGroupSpec

    directory = os.getcwd()
    return RayGroup(
        RayGroupSpec(
            scaling=run.scaling,
            demand=run.demand,
            job=run.job,
            datasets=run.datasets,
            specs=run.specs,
            directory=directory,
            # At the interactive prompt the working directory is on the path as "".
            path=tuple(entry or directory for entry in sys.path),
        )
    )


def _observers(config: RunConfig) -> list[Any]:
    line = [ProgressLine(Console(stderr=True))] if config.progress else []
    return [*line, *installed_observers(), *config.observers]


def _result(run: Run, controller: Controller, conclusion: Conclude) -> Result:
    keeper = controller.keeper
    newest = keeper.newest_intact()
    history = tuple(report.metrics for report in controller.history)
    error = None
    if not conclusion.succeeded:
        error = TrainingFailedError(conclusion.reason, conclusion.failures)
    result = Result(
        metrics=history[-1] if history else {},
        history=history,
        checkpoint=Checkpoint(newest.path) if newest else None,
        best_checkpoints=tuple((Checkpoint(c.path), c.metrics) for c in keeper.best()),
        path=str(run.path),
        restarts=controller.state.restarts,
        error=error,
        backend=run.backend,
    )
    if error is not None:
        error.result = result
    return result
