"""A run whose parts are checked: what it consists of, for those that carry it out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.config.configs import RunConfig, ScalingConfig
from polytrain.config.validation_config import ValidationConfig
from polytrain.policy.cluster import ClusterChoice
from polytrain.policy.stop_rule import StopRule, stop_rule
from polytrain.record.history import RunHistory
from polytrain.run.lease import Lease
from polytrain.run.stop_requests import StopRequests
from polytrain.storage.location import Location
from polytrain.workers.agent_group import AgentCluster
from polytrain.workers.job import WorkerJob
from polytrain_plugins import Backend, CheckpointKind, Demand, RunInfo

if TYPE_CHECKING:
    from polytrain.data.shards.assignment import RunDataset
    from polytrain.data.shards.spec import ShardSpec
    from polytrain.data.streams.stream import StreamSpec


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

    stop_requests: StopRequests = field(default_factory=StopRequests)
    watchers: tuple[Any, ...] = ()
    """Observers of polytrain's own, besides the user's."""

    @property
    def world_size(self) -> int:
        """Number of ranks; 1 for an inline run."""
        return max(1, self.scaling.max_workers)

    @property
    def import_path(self) -> tuple[str, ...]:
        """The driver's `sys.path`; at the interactive prompt that has the directory as ""."""
        return tuple(entry or os.getcwd() for entry in sys.path)

    @property
    def stop_rule(self) -> StopRule:
        """The conditions that end the run."""
        return stop_rule(self.config)

    @property
    def saves_by_itself(self) -> bool:
        """Whether checkpoints are made without a training function's reports."""
        if self.training_function is not None:
            return False
        # If rank 0 writes checkpoints, declarative training also makes one on request.
        every = self.config.checkpoint_config.checkpoint_frequency
        return every > 0 or self.manager.kind is CheckpointKind.ONE_RANK

    @property
    def total_steps(self) -> int | None:
        """The most steps that the whole run may have; None if that is unknown."""
        of_backend = self.backend.total_steps if self.training_function is None else None
        known = [step for step in (of_backend, self.stop_rule.last_step) if step is not None]
        return min(known, default=None)

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
            stop_rule=self.stop_rule,
            saves_by_itself=self.saves_by_itself,
        )
