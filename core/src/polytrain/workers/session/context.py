"""The context of a training function: its rank, node and run's storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.lazy_names import RayTrainClass, missing
from polytrain.storage.location import Location
from polytrain.text.described import ShortRepr
from polytrain_plugins import CheckpointKind, World


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStorage:
    """The run's directory in the storage, with the names of Ray Train's storage context."""

    location: Location
    """The run's directory or address."""

    next_directory: Callable[[], Location]
    """Returns the location of this rank's next checkpoint."""

    @property
    def storage_filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` of all paths here."""
        return self.location.on_filesystem()[0]

    @property
    def storage_fs_path(self) -> str:
        """Path of `RunConfig.storage_path` on the file system."""
        return _path(self.location.parent)

    @property
    def experiment_fs_path(self) -> str:
        """Path of the run's directory on the file system."""
        return _path(self.location)

    @property
    def experiment_dir_name(self) -> str:
        """Name of the run's directory."""
        return self.location.name

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Return the path on the file system to write this rank's next checkpoint to.

        Each attempt of a run has its own paths, so no process that was mistaken for dead can write
        into a checkpoint. The path stays the same until its checkpoint is reported with
        `CheckpointUploadMode.NO_UPLOAD`. Ranks that report every checkpoint get the same path; a
        rank that writes but reports none must get it from rank 0, by `polytrain.collective`. Report
        it when all ranks have written their files.

        Args:
            checkpoint_name: any name; polytrain numbers checkpoints.
        """
        return _path(self.next_directory())

    def is_next(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint is at the location of this rank's next one."""
        place = self.next_directory()
        given = str(checkpoint.path).rstrip("/")
        # Compare the unique name first: the rest may open the file system.
        return given.endswith(place.name) and given in (place.address, _path(place))

    def is_in(self, directory: Path) -> bool:
        """Return whether the run's directory is, or is below, a directory of this machine."""
        if not self.location.is_local:
            return False
        return Path(self.location.address).resolve().is_relative_to(directory.resolve())

    def shares(self, directory: Path) -> bool:
        """Return whether a local directory is in the run's directory, or contains it."""
        if not self.location.is_local:
            return False
        run = Path(self.location.address).resolve()
        return self.is_in(directory) or directory.resolve().is_relative_to(run)


def _path(location: Location) -> str:
    path: str = location.on_filesystem()[1]
    return path


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Context(ShortRepr, metaclass=RayTrainClass):
    """This process's place in the run, with the getters of Ray Train's context."""

    _theirs: ClassVar[str] = "TrainContext"

    run_name: str
    world: World = field(repr=False)
    checkpoint_kind: CheckpointKind
    storage: RunStorage = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        raise missing("polytrain.TrainContext", name)

    def get_world_rank(self) -> int:
        """Return this process's rank among all workers, from 0."""
        return self.world.me.rank

    def get_world_size(self) -> int:
        """Return the number of workers."""
        return self.world.size

    def get_local_rank(self) -> int:
        """Return this process's rank among the workers of its node, from 0."""
        return self.world.me.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers on this node."""
        return self.world.me.local_world_size

    def get_node_rank(self) -> int:
        """Return this node's rank among the run's nodes, from 0."""
        return self.world.me.node_rank

    def get_experiment_name(self) -> str:
        """Return the run's name."""
        return self.run_name

    def get_attempt(self) -> int:
        """Return the number of earlier attempts, from 0."""
        return self.world.attempt

    def get_storage(self) -> RunStorage:
        """Return the run's directory in the storage, for functions that write to it directly."""
        return self.storage

    def every_rank_writes(self) -> bool:
        """Whether a checkpoint contains a part of every rank, not only of rank 0."""
        return self.checkpoint_kind is CheckpointKind.EVERY_RANK


TrainContext = Context
"""Ray Train's name of `Context`."""
