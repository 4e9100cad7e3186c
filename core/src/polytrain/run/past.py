"""What earlier drivers have left of a run: what they have written down, and its checkpoints."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata

from polytrain.checkpoint.keeper import CheckpointKeeper
from polytrain.checkpoint.start import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config import RunConfig
from polytrain.run.chronicle import Chronicle, read_chronicle
from polytrain.run.claim import Claim
from polytrain.run.journal import JOURNAL
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage
from polytrain_plugins import Backend, CheckpointKind

_KINDS = {"rank_0": CheckpointKind.ONE_RANK, "every_rank": CheckpointKind.EVERY_RANK}


def checkpoint_kind(backend: Backend, config: RunConfig) -> CheckpointKind:
    """Who writes the run's checkpoints."""
    chosen = config.checkpoint_config.written_by
    return _KINDS[chosen] if chosen is not None else backend.capabilities.checkpoint


def keeper_of(
    backend: Backend,
    *,
    config: RunConfig,
    location: Location,
    world_size: int,
    claim: Claim,
    past: Chronicle | None,
    origin: StartingPoint,
) -> CheckpointKeeper:
    """The run's checkpoints, with those of earlier drivers.

    Raises:
        OSError: the storage can't be read.
    """
    store = CheckpointStore(location=location)
    keeper = CheckpointKeeper(
        store=store,
        config=config.checkpoint_config,
        backend=backend.name,
        kind=checkpoint_kind(backend, config),
        versions=_versions(backend),
        world_size=world_size,
        claim=claim.number,
        origin=origin,
    )
    if past is not None:
        keeper.take_over(store.find(since_claim=past.since_claim))
    return keeper


def past_of(storage: Storage) -> Chronicle | None:
    """What earlier drivers have written down of a run; None if there was none.

    Raises:
        OSError: the storage can't be read.
    """
    return read_chronicle(storage.read_log(JOURNAL))


def _versions(backend: Backend) -> dict[str, str]:
    """Versions of what a checkpoint is written with."""
    found = {"python": platform.python_version()}
    for distribution in ("polytrain-core", *backend.requires):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[distribution] = metadata.version(distribution)
    return found
