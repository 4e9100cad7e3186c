"""A validated run: all that is needed to carry it out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.config.run_spec import RunSpec
from polytrain.policy.scaling import ClusterChoice
from polytrain.policy.stop_rule import StopRule, stop_rule
from polytrain.record.history import RunHistory
from polytrain.run.lease import Lease
from polytrain.run.requests import StopRequests
from polytrain.storage.location import Location
from polytrain.workers.driver.group import AgentCluster
from polytrain_plugins import Demand, RunInfo
from polytrain_plugins.returned import total_steps_of

if TYPE_CHECKING:
    from polytrain.data.shards.assignment import RunDataset
    from polytrain.data.shards.spec import DatasetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The validated parts of a run."""

    spec: RunSpec
    datasets: tuple[RunDataset, ...]
    demand: Demand
    cluster: AgentCluster | None
    """The cluster for agents; None for an inline run, which has none."""

    choice: ClusterChoice | None
    """The chosen cluster, and the reason."""

    location: Location
    """The location of the run's storage."""

    identity: Mapping[str, Any]
    """The identity, part of which must stay the same when the run is resumed."""

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
    def import_path(self) -> tuple[str, ...]:
        """The driver's `sys.path`, with the working directory in place of ""."""
        return tuple(entry or os.getcwd() for entry in sys.path)

    @property
    def stop_rule(self) -> StopRule:
        """The conditions that end the run."""
        return stop_rule(self.spec.run_config)

    @property
    def total_steps(self) -> int | None:
        """The most steps that the whole run may have; None if that is unknown."""
        is_declarative = self.spec.train_loop_per_worker is None
        of_backend = total_steps_of(self.spec.backend) if is_declarative else None
        known = [step for step in (of_backend, self.stop_rule.last_step) if step is not None]
        return min(known, default=None)

    @property
    def shard_specs(self) -> tuple[DatasetSpec, ...]:
        """The division of each data set among the ranks, in order."""
        return tuple(self._shard_spec(dataset) for dataset in self.datasets)

    def _shard_spec(self, dataset: RunDataset) -> DatasetSpec:
        if dataset.source.stream is not None:
            return dataset.stream_spec()
        position = self.start.positions.get(dataset.name, {})
        plan = position.get("plan", {})
        tables = self.demand.reads_tables
        return dataset.spec(
            world_size=self.spec.repeats or self._divided_for or self.spec.world_size,
            # The first driver of the run decides them, once, unless the user does.
            shards=plan.get("shards"),
            # Small windows of other data may be much slower.
            window=plan.get("window") if dataset.is_same(position) else None,
            whole=not dataset.is_split or dataset.name in self.demand.whole_datasets,
            as_tables=tables,
            virtual_workers=self.spec.scaling_config.virtual_workers,
            only_tables=tables and self.spec.train_loop_per_worker is None,
        )

    @property
    def _divided_for(self) -> int:
        """Number of workers for which data are divided in which batches are left out; else 0."""
        return self.past.divided_for if self.past is not None and self.start.skipped else 0

    @property
    def info(self) -> RunInfo:
        """The run's information for observers."""
        return RunInfo(
            name=self.location.name,
            backend=self.spec.backend.name,
            num_workers=self.spec.scaling_config.max_workers,
            path=self.location.address,
            cluster="" if self.choice is None else str(self.choice),
        )
