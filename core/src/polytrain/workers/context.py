"""The context of a training function: its rank, node and run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from polytrain.lazy_names import RayTrainClass, missing
from polytrain.workers.run_storage import RunStorage
from polytrain_plugins import CheckpointKind, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(metaclass=RayTrainClass):
    """This process's place in the run. The getters have the names of Ray Train's context."""

    _theirs: ClassVar[str] = "TrainContext"

    run_name: str
    world: World
    checkpoint_kind: CheckpointKind
    storage: RunStorage = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        raise missing("polytrain.TrainContext", name)

    def get_world_rank(self) -> int:
        """Rank of this process among all workers, from 0."""
        return self.world.me.rank

    def get_world_size(self) -> int:
        """Number of workers."""
        return self.world.size

    def get_local_rank(self) -> int:
        """Rank of this process among the workers of its node, from 0."""
        return self.world.me.local_rank

    def get_local_world_size(self) -> int:
        """Number of workers on this node."""
        return self.world.me.local_world_size

    def get_node_rank(self) -> int:
        """Rank of this node among the run's nodes, from 0."""
        return self.world.me.node_rank

    def get_experiment_name(self) -> str:
        """The run's name."""
        return self.run_name

    def get_attempt(self) -> int:
        """Number of earlier attempts, from 0."""
        return self.world.attempt

    def get_storage(self) -> RunStorage:
        """The run's directory in the storage, for a function that writes to it directly."""
        return self.storage

    def every_rank_writes(self) -> bool:
        """Whether a checkpoint has a part of every rank, not only of rank 0."""
        return self.checkpoint_kind is CheckpointKind.EVERY_RANK


TrainContext = Context
"""Ray Train's name of it."""
