"""Reads what earlier drivers of a run left: its history and its checkpoints."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config.run_spec import RunSpec
from polytrain.record.history import JOURNAL, RunHistory, read_history
from polytrain.run.lease import Lease
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage
from polytrain_plugins import Backend


def checkpoint_manager(
    spec: RunSpec,
    *,
    location: Location,
    lease: Lease,
    past: RunHistory | None,
    origin: StartingPoint,
    transform: str | None,
) -> CheckpointManager:
    """Return the manager of the run's checkpoints, with those of earlier drivers.

    Args:
        spec: the request.
        location: the run's location.
        lease: this driver's lease.
        past: the history of earlier drivers.
        origin: the starting point of the run itself.
        transform: see `Manifest.transform`.

    Raises:
        OSError: the storage can't be read.
    """
    store = CheckpointStore(location=location)
    manager = CheckpointManager(
        store=store,
        config=spec.run_config.checkpoint_config,
        backend=spec.backend.name,
        kind=spec.checkpoint_kind,
        merges_files=spec.merges_files,
        versions=versions_of(spec.backend),
        world_size=spec.world_size,
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
    """The record of a run by its earlier drivers."""

    journal: Mapping[str, int]
    """The journal's files and their sizes, which change with every line."""

    history: RunHistory | None
    """The history; None if there was no driver."""


def previous_run(storage: Storage, *, known: PreviousRun | None = None) -> PreviousRun:
    """Read the journal.

    Args:
        storage: the run's storage.
        known: the last result, which is returned if the journal hasn't changed.

    Raises:
        OSError: the storage can't be read.
    """
    # Get the state before reading, so that the next call notices lines written meanwhile.
    journal = storage.log_state(JOURNAL)
    if known is not None and known.journal == journal:
        return known
    return PreviousRun(journal=journal, history=read_history(storage.read_log(JOURNAL)))


def versions_of(backend: Backend, *others: str) -> dict[str, str]:
    """Return the versions of Python, polytrain and the backend's requirements in this process.

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
