"""A run in one driver, from start to end: acquires and releases all its resources."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.parts import storage_message
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.common.config import RunConfig, ScalingConfig
from polytrain.common.errors import Failure, FailureKind, TrainingFailedError
from polytrain.common.return_values import Returned
from polytrain.common.runtime_env import variables_of
from polytrain.common.validation_config import ValidationConfig
from polytrain.data.shards.assignment import RunDataset
from polytrain.data.shards.spec import ShardSpec
from polytrain.data.streams.stream import StreamSpec
from polytrain.policy.cluster import ClusterChoice
from polytrain.policy.failure import FailurePolicy
from polytrain.run.actions import Conclude
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.checkpoint_coordinator import CheckpointCoordinator
from polytrain.run.controller import Controller
from polytrain.run.health_monitor import HealthMonitor
from polytrain.run.history import RunHistory
from polytrain.run.interrupts import stop_requests
from polytrain.run.journal import Journal
from polytrain.run.lease import Lease
from polytrain.run.ledger import Ledger
from polytrain.run.reports import Reports
from polytrain.run.states import State
from polytrain.run.stop_requests import StopRequests
from polytrain.run.user_callbacks import TrainRunContext, UserCallbacks
from polytrain.run.validation_coordinator import ValidationCoordinator
from polytrain.storage.failure import StorageError
from polytrain.storage.location import Location
from polytrain.ui.observers import Observers, installed_observers
from polytrain.ui.progress import ProgressLine, WorkerOutput
from polytrain.workers.agent_group import AgentCluster, AgentGroup, AgentGroupSpec
from polytrain.workers.available_validators import opened_validator
from polytrain.workers.group import WorkerGroup
from polytrain.workers.job import WorkerJob
from polytrain_plugins import (
    Backend,
    CheckpointInfo,
    CheckpointKind,
    Demand,
    Outcome,
    RunInfo,
    Stopped,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The validated parts of a run."""

    backend: Backend
    training_function: Callable[..., Any] | None
    training_config: Mapping[str, Any] | None
    datasets: tuple[RunDataset, ...]
    demand: Demand
    scaling: ScalingConfig
    cluster: AgentCluster | None
    """The cluster for agents; None for an inline run, which has none."""

    choice: ClusterChoice | None
    """Why this cluster was chosen."""

    config: RunConfig
    validation: ValidationConfig | None = None
    """How checkpoints are validated; None if they aren't."""

    location: Location
    """Where the run is stored."""

    identity: Mapping[str, Any]
    """What must stay the same when the run is resumed."""

    lease: Lease
    past: RunHistory | None
    """The history of earlier drivers; None if this is the first."""

    manager: CheckpointManager
    start: StartingPoint
    """This driver's starting point."""

    began: float
    """When `fit()` was called, in seconds since the epoch."""

    stop_requests: StopRequests = field(default_factory=StopRequests)
    watchers: tuple[Any, ...] = ()
    """Observers of polytrain's own, besides the user's."""

    @property
    def world_size(self) -> int:
        """Number of ranks; 1 for an inline run."""
        return max(1, self.scaling.max_workers)

    @property
    def saves_by_itself(self) -> bool:
        """Whether checkpoints are made without a training function's reports."""
        if self.training_function is not None:
            return False
        # If rank 0 writes checkpoints, declarative training also makes one on request.
        every = self.config.checkpoint_config.checkpoint_frequency
        return every > 0 or self.manager.kind is CheckpointKind.ONE_RANK

    @property
    def specs(self) -> tuple[ShardSpec | StreamSpec, ...]:
        """How each data set is divided among ranks, in order."""
        return tuple(self._spec(dataset) for dataset in self.datasets)

    def _spec(self, dataset: RunDataset) -> ShardSpec | StreamSpec:
        if dataset.source.stream is not None:
            return dataset.stream_spec()
        position = self.start.positions.get(dataset.name)
        tables = self.demand.reads_tables
        return dataset.spec(
            world_size=self.world_size,
            # The first driver of the run divides the data, once, unless the user does.
            shards=position["plan"]["shards"] if position and "plan" in position else None,
            whole=not dataset.is_split or dataset.name in self.demand.whole_datasets,
            as_tables=tables,
            only_tables=tables and self.training_function is None,
        )

    @property
    def info(self) -> RunInfo:
        """The run's information for observers."""
        return RunInfo(
            name=self.location.name,
            backend=self.backend.name,
            num_workers=self.scaling.max_workers,
            path=self.location.address,
            cluster="" if self.choice is None else str(self.choice),
        )

    @property
    def job(self) -> WorkerJob:
        """The run's job for worker processes."""
        checkpoints = self.config.checkpoint_config
        return WorkerJob(
            run_name=self.location.name,
            backend=self.backend,
            training_function=self.training_function,
            training_config=self.training_config,
            checkpoint_frequency=checkpoints.checkpoint_frequency,
            checkpoint_kind=self.manager.kind,
            merges_files=self.manager.merges_files,
            max_in_flight=checkpoints.max_in_flight,
            waits_for_commit=checkpoints.upload == "sync",
            near_staging=self.manager.store.near_staging,
            checkpoints=self.manager.store.checkpoints,
            validates=self.validation is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The outcome of a run, over all its drivers."""

    history: Reports
    """Rank 0's reported metrics, without those that a restart undid."""

    of_other_ranks: Mapping[int, Reports]
    """The same of ranks above 0, by rank, if they are kept."""

    newest: CheckpointInfo | None
    """The newest intact checkpoint."""

    best: tuple[CheckpointInfo, ...]
    """The kept checkpoints, from best to worst."""

    returned: tuple[Returned | None, ...]
    """What each rank's training function has returned; empty if none returned anything."""

    restarts: int
    ledger: Ledger
    stopped: Stopped | None
    """Who stopped the run early; None if nobody did."""

    error: TrainingFailedError | None


@contextlib.contextmanager
def storage_needed(location: Location) -> Iterator[None]:
    """Turn errors of the run's storage into a failure of the run.

    Raises:
        TrainingFailedError: the storage can't be used.
    """
    try:
        yield
    except OSError as error:
        failed = _storage_failed(location, error)
        raise TrainingFailedError(failed.reason, failed.failures, path=location.address) from error


def run_to_end(run: Run, held: contextlib.ExitStack) -> RunOutcome:
    """Run, release all resources, and return the outcome, with an error if the run failed.

    Args:
        run: the run.
        held: resources to release last.
    """
    with _journal(run) as journal:
        try:
            return _run_to_end(run, journal)
        finally:
            held.close()
            journal.closed()


def _run_to_end(run: Run, journal: Journal) -> RunOutcome:
    observers = Observers(_observers(run), stop=run.stop_requests.request)
    outcome = Outcome(succeeded=False, reason="interrupted", restarts=0)
    try:
        with contextlib.ExitStack() as stack:
            controller = _controller(run, journal, observers, stack)
            observers.run_started(run.info)
            conclusion = _concluded(run, controller)
            outcome = Outcome(
                succeeded=conclusion.succeeded,
                reason=conclusion.reason,
                restarts=controller.state.restarts,
                planned=conclusion.succeeded or conclusion.stopped is not None,
                failures=controller.told(conclusion.failures),
                stopped=conclusion.stopped,
            )
        return _outcome(run, controller, conclusion)
    finally:
        _tidy(run)
        observers.run_ended(run.info, outcome)


def _concluded(run: Run, controller: Controller) -> Conclude:
    def stop(signal_name: str) -> None:
        if run.scaling.num_workers == 0 and not controller.state.saves:
            # The training function runs in this thread: only an exception ends it.
            raise KeyboardInterrupt
        run.stop_requests.request(Stopped(by="signal", reason=signal_name))

    try:
        with stop_requests(stop):
            return controller.conclude()
    except StorageError as error:
        # Keep the journal and the manifests, from which the run can be resumed. The logs are in the
        # same storage, which was retried.
        controller.output.retry_s = 0.0
        return _storage_failed(run.location, error)


def _storage_failed(location: Location, error: OSError) -> Conclude:
    failure = Failure(kind=FailureKind.STORAGE, rank=None, message=storage_message(error, location))
    reason = f"the storage of the run, {location.address}, has failed"
    return Conclude(succeeded=False, reason=reason, failures=(failure,))


def _tidy(run: Run) -> None:
    """Delete uncommitted files. An error is only logged: the next driver deletes them too."""
    no_retry = CheckpointStore(location=replace(run.location, retry_s=0))
    last = AttemptId(token=run.lease.token + 1, attempt=0)
    try:
        no_retry.clear_staging(before=last)
        no_retry.sweep(before=last)
    except OSError as error:
        logger.warning("Uncommitted files can't be deleted: %s", error)


@contextlib.contextmanager
def _journal(run: Run) -> Iterator[Journal]:
    past = RunHistory() if run.past is None else run.past
    ranking = run.config.checkpoint_config
    with Journal(
        run.location.open(),
        token=run.lease.token,
        ledger=past.ledger,
        reports=past.history,
        of_other_ranks=past.of_other_ranks,
    ) as journal:
        with storage_needed(run.location):
            journal.opened(
                anew=run.past is None,
                identity=run.identity,
                world_size=run.world_size,
                began=run.began,
                ranking=(ranking.checkpoint_score_attribute, ranking.checkpoint_score_order),
            )
        yield journal


def _controller(
    run: Run, journal: Journal, observers: Observers, stack: contextlib.ExitStack
) -> Controller:
    output = _output(run, stack)
    group = _group(run, observers)
    background_tasks = stack.enter_context(
        BackgroundTasks(wake=group.wake, at_once=run.scaling.num_workers == 0)
    )
    # Closed after the workers are: it may have restarted the zygote that they share.
    validations = stack.enter_context(_validations(run, group, journal, output))
    workers = stack.enter_context(contextlib.ExitStack())
    workers.callback(group.close)
    failure = run.config.failure_config
    checkpoints = CheckpointCoordinator(
        run=run.info,
        group=group,
        manager=run.manager,
        lease=run.lease,
        journal=journal,
        background_tasks=background_tasks,
        observers=observers,
        validations=validations,
    )
    return Controller(
        run=run.info,
        state=State(
            world_size=run.world_size,
            policy=FailurePolicy(
                max_failures=failure.max_failures, retry_user_errors=failure.retry_user_errors
            ),
            node_cooldown_s=failure.node_cooldown_s,
            committed=run.start.step,
            saves=run.start.own or run.saves_by_itself,
        ),
        group=group,
        checkpoints=checkpoints,
        lease=run.lease,
        journal=journal,
        background_tasks=background_tasks,
        observers=observers,
        callbacks=_callbacks(run),
        keeps_all_reports=run.config.keep_reports == "every_rank",
        output=output,
        health_monitor=HealthMonitor(
            config=run.config.failure_config, group=group, journal=journal
        ),
        validations=validations,
        stop_requests=run.stop_requests,
        release_workers=workers.close,
    )


def _callbacks(run: Run) -> UserCallbacks:
    context = TrainRunContext(
        run=run.info,
        run_config=run.config,
        scaling_config=run.scaling,
        train_loop_config=run.training_config,
    )
    return UserCallbacks(run.config.callbacks, context, run.location.filesystem)


def _validations(
    run: Run, group: WorkerGroup, journal: Journal, output: WorkerOutput
) -> ValidationCoordinator:
    coordinator = ValidationCoordinator(
        config=run.validation,
        manager=run.manager,
        journal=journal,
        wake=group.wake,
        show=output.write,
    )
    if run.validation is not None:
        coordinator.validator = opened_validator(
            run.validation,
            group=group,
            demand=run.demand,
            threads=run.scaling.cpus_per_worker,
            is_local=run.choice is None or run.choice.is_local,
            path=_import_path(),
            tell=coordinator.tell,
        )
    return coordinator


def _output(run: Run, stack: contextlib.ExitStack) -> WorkerOutput:
    if run.location.is_local:
        logs = Path(run.location.address, "logs")
    else:
        prefix = "polytrain-logs-"
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)), "logs")
    output = WorkerOutput(
        logs,
        retry_s=run.location.retry_s,
        address=f"{run.location.address}/{_logs_of(run)}",
        show=run.config.show_output,
    )
    if not run.location.is_local:
        stack.callback(_store_logs, run, logs, output)
    return stack.enter_context(output)


def _logs_of(run: Run) -> str:
    """The directory of this driver's logs, below the run's. Object storage can't append."""
    return "logs" if run.location.is_local else f"logs/{run.lease.token:06d}"


def _store_logs(run: Run, logs: Path, output: WorkerOutput) -> None:
    """Store what is in a local directory. All logs together are retried as long as one file."""
    deadline = time.monotonic() + output.retry_s
    for file in logs.glob("*"):
        left_s = max(0.0, deadline - time.monotonic())
        storage = replace(run.location, retry_s=left_s).open()
        try:
            storage.put(file, f"{_logs_of(run)}/{file.name}", move=False)
        except OSError as error:
            logger.warning("The log %s can't be stored: %s", file.name, error)


def _group(run: Run, observers: Observers) -> WorkerGroup:
    if run.scaling.num_workers == 0:
        from polytrain.workers.inline_group import InlineGroup

        return InlineGroup(
            job=run.job,
            store=run.manager.store,
            datasets=run.datasets,
            specs=run.specs,
            environment=run.demand.environment,
            variables=variables_of(run.config.worker_runtime_env),
            cpus=run.scaling.cpus_per_worker,
        )
    assert run.cluster is not None, "a run that isn't inline has a cluster"
    failure = run.config.failure_config
    return AgentGroup(
        AgentGroupSpec(
            scaling=run.scaling,
            demand=run.demand,
            job=run.job,
            store=run.manager.store,
            marker=run.lease.path,
            hang_timeout_s=failure.hang_timeout_s,
            straggler_window_s=(
                failure.straggler_window_s if failure.stragglers != "ignore" else None
            ),
            passes_all_reports=observers.want_every_rank
            or bool(run.config.callbacks)
            or run.config.keep_reports == "every_rank",
            datasets=run.datasets,
            specs=run.specs,
            directory=os.getcwd(),
            path=_import_path(),
            runtime_env=run.config.worker_runtime_env or {},
        ),
        run.cluster,
    )


def _import_path() -> tuple[str, ...]:
    # At the interactive prompt the path has the working directory as "".
    return tuple(entry or os.getcwd() for entry in sys.path)


def _observers(run: Run) -> list[Any]:
    line = [ProgressLine(Console(stderr=True))] if run.config.progress else []
    return [*line, *run.watchers, *installed_observers(), *run.config.observers]


def _outcome(run: Run, controller: Controller, conclusion: Conclude) -> RunOutcome:
    manager = controller.checkpoints.manager
    error = None
    if not (conclusion.succeeded or conclusion.stopped):
        failures = conclusion.failures
        error = TrainingFailedError(
            conclusion.reason,
            failures,
            path=run.location.address,
            log=controller.output.log_of(failures[0].rank) if failures else "",
        )
        # If the storage has failed, don't retry it again.
        manager.store = CheckpointStore(location=replace(run.location, retry_s=0))
    newest = None
    try:
        with storage_needed(run.location):
            newest = manager.newest_intact()
    except TrainingFailedError as unreadable:
        if error is None:
            raise
        logger.warning("The run's checkpoints can't be read now: %s", unreadable.failures[0])
    return RunOutcome(
        history=controller.journal.reports,
        of_other_ranks=dict(sorted(controller.journal.of_other_ranks.items())),
        newest=newest,
        best=tuple(manager.best()),
        returned=controller.returned if conclusion.succeeded else (),
        restarts=controller.state.restarts + (0 if run.past is None else run.past.launches),
        ledger=controller.journal.ledger,
        stopped=conclusion.stopped,
        error=error,
    )
