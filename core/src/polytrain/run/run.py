"""A validated run, all that is needed to carry it out, and what `on_rollback` changes of it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.manifest import Manifest
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.config.run_spec import RunSpec
from polytrain.errors import Failure, FailureKind
from polytrain.events.notices import Rollback
from polytrain.functions.pickling import code_of_job, pickled_with
from polytrain.policy.scaling import ClusterChoice
from polytrain.policy.stop_rule import StopRule, stop_rule
from polytrain.policy.validation import Validation
from polytrain.record.history import RunHistory
from polytrain.run.lease import Lease
from polytrain.run.requests import StopRequests
from polytrain.storage.location import Location
from polytrain.workers.driver.group import AgentCluster
from polytrain_plugins import Demand, RunInfo

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
        of_backend = self.spec.backend.total_steps if is_declarative else None
        known = [step for step in (of_backend, self.stop_rule.last_step) if step is not None]
        return min(known, default=None)

    @property
    def shard_specs(self) -> tuple[DatasetSpec, ...]:
        """The division of each data set among the ranks, in order."""
        return tuple(self._shard_spec(dataset) for dataset in self.datasets)

    def _shard_spec(self, dataset: RunDataset) -> DatasetSpec:
        if dataset.source.stream is not None:
            return dataset.stream_spec()
        position = self.start.positions.get(dataset.name)
        tables = self.demand.reads_tables
        return dataset.spec(
            world_size=self.spec.repeats or self.spec.world_size,
            # The first driver of the run divides the data, once, unless the user does.
            shards=position["plan"]["shards"] if position and "plan" in position else None,
            whole=not dataset.is_split or dataset.name in self.demand.whole_datasets,
            as_tables=tables,
            virtual_workers=self.spec.scaling_config.virtual_workers,
            only_tables=tables and self.spec.train_loop_per_worker is None,
        )

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


class OnRollbackError(Exception):
    """The user's function has raised, or what it returned can't be sent to the workers."""

    def __init__(self, error: Exception, rollback: Rollback) -> None:
        super().__init__(f"FailureConfig.on_rollback: {type(error).__name__}: {error}")
        self.failure = Failure(
            kind=FailureKind.DIVERGED,
            rank=None,
            message=f"training diverges at {rollback}, and on_rollback has failed",
            traceback="".join(traceback.format_exception(error)),
        )


@dataclass(slots=True, kw_only=True)
class ConfigChanges:
    """What `on_rollback` makes of a request, from one rollback to the next."""

    spec: RunSpec
    """The original request."""

    function: Callable[..., Any]
    """The user's `on_rollback`."""

    _done: int = 0
    """Number of rollbacks that are dealt with."""

    _changes: dict[str, Any] = field(default_factory=dict)

    def after(self, rollbacks: Sequence[Rollback]) -> bytes | None:
        """Return the changed arguments of the request, pickled; None if there are none.

        Args:
            rollbacks: all of the run. A run that is resumed calls the function again, for each
                that has left no batches out.

        Raises:
            OnRollbackError: the function has failed.
        """
        for rollback in rollbacks[self._done :]:
            try:
                # What has left batches out, before the function was given, has changed nothing.
                if not rollback.skipped:
                    self._changes = self._changed(rollback)
            except Exception as error:
                raise OnRollbackError(error, rollback) from error
            self._done += 1
        if not self._changes:
            return None
        try:
            return pickled_with(*code_of_job(*self._changes.values()), value=self._changes)
        except Exception as error:
            raise OnRollbackError(error, rollbacks[-1]) from error

    def _changed(self, rollback: Rollback) -> dict[str, Any]:
        spec = self.spec
        # The function may change what it gets, and returns nothing then: that would be lost.
        if spec.train_loop_per_worker is not None:
            given = self._changes.get("train_loop_config", spec.train_loop_config)
            return {"train_loop_config": _returned(self.function(deepcopy(given), rollback))}
        backend: Any = self._changes.get("backend", spec.backend)
        params = _returned(self.function(deepcopy(backend.params), rollback))
        return {"backend": replace(backend, params=params)}


def _returned(config: Any) -> Any:
    if config is None:
        raise TypeError("it returned None; it has to return the configuration")
    return config


class AttachedWork(Protocol):
    """Works on a run's checkpoints beside training.

    The controller polls it for results, and waits for the rest when training has ended.
    """

    failure: Failure | None
    """A failure of its work that ends the run."""

    @property
    def is_busy(self) -> bool:
        """Whether it works on a committed checkpoint, or has one to work on."""

    @property
    def pending(self) -> int:
        """Number of committed checkpoints that it hasn't finished."""

    @property
    def all_failed(self) -> str:
        """The reason if all its work has failed; else empty."""

    def request(self, manifest: Manifest) -> None:
        """Note a checkpoint before it is committed."""

    def nudge(self) -> None:
        """Wake a waiting `take`. Any thread, or a signal handler, may call this."""

    def take(self, *, wait: bool = False) -> Sequence[Validation]:
        """Start the next work, and return the validations that have ended.

        Args:
            wait: whether to wait for a result; only while it `is_busy`.
        """

    def warn_if_unused(self) -> None:
        """Warn if the user has configured it, but no checkpoint used it."""
