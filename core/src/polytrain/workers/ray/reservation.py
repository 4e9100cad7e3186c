"""Reserves a run's placement groups, and frees them even if the run's driver is killed.

Ray frees placement groups when their job ends. If `fit()` was called in an actor or a task, that
may be killed while the job continues: a guard, an actor that outlives it briefly, frees them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polytrain.linux.processes import is_readable, started_at
from polytrain.ray_api.private import is_worker_process
from polytrain.ray_api.state import death_of_node


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """The process that reserves a group."""

    node_id: str
    pid: int
    started: int | None

    @classmethod
    def this(cls) -> _Owner:
        node_id: str = ray.get_runtime_context().get_node_id()
        return cls(node_id=node_id, pid=os.getpid(), started=started_at(os.getpid()))

    def wait_for_end(self) -> bool:
        """Wait for its end, and return True; return False if it is on another, living node."""
        if ray.get_runtime_context().get_node_id() != self.node_id:
            return death_of_node(self.node_id) is not None
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        # The process id may have been reused.
        if started_at(self.pid) == self.started:
            is_readable(process, None)
        return True


class Reservation:
    """A placement group for a number of agents, all or nothing."""

    def __init__(
        self,
        name: str,
        resources: Mapping[str, float],
        count: int,
        strategy: str,
        *,
        labels: Sequence[Mapping[str, str]] = (),
    ):
        """
        Args:
            name: unique in the cluster. A guard frees it if it begins with the guard's name.
            strategy: Ray's placement strategy.
            labels: the label selector of each agent's node; empty for any node.
        """
        bundles = [dict(resources)] * count
        self.group: PlacementGroup = placement_group(
            bundles,
            strategy=strategy,
            name=name,
            bundle_label_selector=[dict(each) for each in labels] if any(labels) else None,
        )

    def free(self) -> None:
        """Free the group."""
        remove_placement_group(self.group)


class Guard:
    """Frees all groups of a run if this process is killed while its job continues.

    Start it before there is a group: this process may be killed at any time.
    """

    def __init__(self, name: str) -> None:
        """
        Args:
            name: prefix of the names of the run's groups, and of no others.
        """
        self._actor = _started_guard(name) if is_worker_process() else None

    def close(self) -> None:
        """End the guard: the groups are freed."""
        if self._actor is not None:
            ray.kill(self._actor)


class ReservationGuard:
    """The actor that frees groups when the process that has reserved them is gone.

    If its node is lost, and the process with it, Ray restarts it on another node.
    """

    def __init__(self, name: str, owner: _Owner) -> None:
        # Guard without a call, which would be lost if the owner died before this actor starts.
        this = ray.get_runtime_context().current_actor
        guarding = threading.Thread(target=_guard, args=(name, owner, this), daemon=True)
        guarding.start()


def _started_guard(name: str) -> Any:
    owner = _Owner.this()
    guard = ray.remote(ReservationGuard).options(
        num_cpus=0,
        lifetime="detached",
        max_restarts=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(owner.node_id, soft=True),
    )
    return guard.remote(name, owner)


def _guard(name: str, owner: _Owner, this: Any) -> None:
    try:
        if owner.wait_for_end():
            for group in placement_group_table().values():
                if group["name"].startswith(name) and group["state"] != "REMOVED":
                    # The group may have been freed meanwhile.
                    with contextlib.suppress(ValueError):
                        remove_placement_group(get_placement_group(group["name"]))
    finally:
        ray.kill(this)
