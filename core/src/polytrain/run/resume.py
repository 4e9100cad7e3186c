"""What earlier drivers left of a run: its history and its checkpoints."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config.configs import RunConfig
from polytrain.record.history import JOURNAL, RunHistory, read_history
from polytrain.run.lease import Lease
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage
from polytrain_plugins import Backend, CheckpointKind


def checkpoint_kind(backend: Backend, config: RunConfig) -> CheckpointKind:
    """Return which ranks write the run's checkpoints."""
    chosen = config.checkpoint_config.written_by
    return CheckpointKind(chosen) if chosen is not None else backend.capabilities.checkpoint


def checkpoint_manager(
    backend: Backend,
    *,
    config: RunConfig,
    is_declarative: bool,
    location: Location,
    world_size: int,
    lease: Lease,
    past: RunHistory | None,
    origin: StartingPoint,
    transform: str | None,
) -> CheckpointManager:
    """Return the manager of the run's checkpoints, with those of earlier drivers.

    Args:
        backend: the backend.
        config: the run's config.
        is_declarative: whether the backend trains and saves without a training function.
        location: the run's location.
        world_size: number of ranks.
        lease: this driver's lease.
        past: the history of earlier drivers.
        origin: the starting point of the run itself.
        transform: see `Manifest.transform`.

    Raises:
        OSError: the storage can't be read.
    """
    store = CheckpointStore(location=location)
    kind = checkpoint_kind(backend, config)
    is_undecided = config.checkpoint_config.written_by is None
    manager = CheckpointManager(
        store=store,
        config=config.checkpoint_config,
        backend=backend.name,
        kind=kind,
        merges_files=is_undecided and not is_declarative and kind is CheckpointKind.ONE_RANK,
        versions=versions_of(backend),
        world_size=world_size,
        token=lease.token,
        origin=origin,
        transform=transform,
        clock=lease.clock,
    )
    if past is not None:
        manager.validations = past.validations
        manager.take_over(store.find(since_token=past.since_token))
    return manager


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousRun:
    """What earlier drivers have written down of a run."""

    journal: Mapping[str, int]
    """What their journal was: it changes with every line."""

    history: RunHistory | None
    """None if there was no driver."""


def previous_run(storage: Storage, *, known: PreviousRun | None = None) -> PreviousRun:
    """Read the journal.

    Args:
        storage: the run's.
        known: the last answer, which is returned if nothing was added since.

    Raises:
        OSError: the storage can't be read.
    """
    # Before it is read: what is written meanwhile is noticed by the next call.
    journal = storage.log_state(JOURNAL)
    if known is not None and known.journal == journal:
        return known
    return PreviousRun(journal=journal, history=read_history(storage.read_log(JOURNAL)))


def versions_of(backend: Backend, *others: str) -> dict[str, str]:
    """Return the versions of Python, of polytrain, and of what the backend needs, in this process.

    Args:
        backend: the backend.
        others: more distributions, if they are installed.
    """
    found = {"python": platform.python_version()}
    for name in ("polytrain-core", *backend.requires, *others):
        # `xgboost` and `tensorflow` are also modules of distributions without support for GPUs.
        for distribution in (f"{name}-cpu", name):
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(distribution)
    return found
