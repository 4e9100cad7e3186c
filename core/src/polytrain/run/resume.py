"""What earlier drivers have left of a run: what they have written down, and its checkpoints."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata

from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.common.config import RunConfig
from polytrain.run.history import RunHistory, read_history
from polytrain.run.journal import JOURNAL
from polytrain.run.lease import Lease
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage
from polytrain_plugins import Backend, CheckpointKind


def checkpoint_kind(backend: Backend, config: RunConfig) -> CheckpointKind:
    """Who writes the run's checkpoints."""
    chosen = config.checkpoint_config.written_by
    return CheckpointKind(chosen) if chosen is not None else backend.capabilities.checkpoint


def checkpoint_manager(
    backend: Backend,
    *,
    config: RunConfig,
    location: Location,
    world_size: int,
    lease: Lease,
    past: RunHistory | None,
    origin: StartingPoint,
) -> CheckpointManager:
    """The run's checkpoints, with those of earlier drivers.

    Raises:
        OSError: the storage can't be read.
    """
    store = CheckpointStore(location=location)
    manager = CheckpointManager(
        store=store,
        config=config.checkpoint_config,
        backend=backend.name,
        kind=checkpoint_kind(backend, config),
        versions=_versions(backend),
        world_size=world_size,
        token=lease.token,
        origin=origin,
    )
    if past is not None:
        manager.take_over(store.find(since_token=past.since_token))
    return manager


def previous_history(storage: Storage) -> RunHistory | None:
    """What earlier drivers have written down of a run; None if there was none.

    Raises:
        OSError: the storage can't be read.
    """
    return read_history(storage.read_log(JOURNAL))


def _versions(backend: Backend) -> dict[str, str]:
    """Versions of what a checkpoint is written with."""
    found = {"python": platform.python_version()}
    for distribution in ("polytrain-core", *backend.requires):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[distribution] = metadata.version(distribution)
    return found
