"""The index of a run's checkpoints while it runs: parts come in, manifests and deletions go out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from polytrain.checkpoint.events import Committed, PartStored
from polytrain.checkpoint.manifest import AttemptId, Manifest, merged
from polytrain.checkpoint.starting_point import StartingPoint, from_manifest
from polytrain.checkpoint.store import CheckpointStore, Found
from polytrain.common.config import CheckpointConfig
from polytrain.policy.retention import expendable, ranked
from polytrain_plugins import CheckpointInfo, CheckpointKind

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CheckpointManager:
    """Knows what is committed, and when a checkpoint has all its parts."""

    store: CheckpointStore
    config: CheckpointConfig
    backend: str
    kind: CheckpointKind
    versions: Mapping[str, str]
    world_size: int
    token: int
    """Number of this driver's lease on the run."""

    origin: StartingPoint = field(default_factory=StartingPoint)
    """What the run itself began with."""

    checkpoints: list[Manifest] = field(default_factory=list)
    """The committed ones, the oldest first."""

    _next_number: int = 0
    _damaged: list[str] = field(default_factory=list)
    _parts: dict[int, dict[int, PartStored]] = field(default_factory=dict)
    _stamps: dict[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """Directory → what tells whether its files are still those whose hashes are known."""

    def take_over(self, found: Found) -> None:
        """Go on with what earlier drivers have left."""
        self.checkpoints = list(found.manifests)
        self._next_number = max((m.number + 1 for m in found.manifests), default=0)
        for directory, wrong in found.damaged.items():
            self._put_aside(directory, wrong)

    @property
    def next_number(self) -> int:
        """Number of the next checkpoint that nobody has begun."""
        return self._next_number

    def forget_parts(self) -> None:
        """Drop what a dead attempt has left unfinished."""
        self._parts.clear()

    def drop(self, number: int) -> None:
        """A checkpoint won't come to be."""
        self._parts.pop(number, None)

    def add(self, part: PartStored) -> Manifest | None:
        """Take one rank's part; return what to commit if that was the last one missing.

        Raises:
            ValueError: the parts of several ranks don't make one directory; the message says why.
        """
        self._next_number = max(self._next_number, part.checkpoint + 1)
        parts = self._parts.setdefault(part.checkpoint, {})
        parts[part.rank] = part
        needed = self.world_size if self.kind is CheckpointKind.EVERY_RANK else 1
        if len(parts) < needed:
            return None
        return self._manifest(self._parts.pop(part.checkpoint))

    def commit(self, manifest: Manifest) -> Committed:
        """Make a checkpoint of what was stored. Touches only the storage.

        Raises:
            CheckpointError: the files aren't there.
            OSError: the storage refused.
        """
        return Committed(manifest=manifest, stamps=self.store.commit(manifest))

    def committed(self, committed: Committed) -> tuple[CheckpointInfo, list[str]]:
        """Note a commit; return the checkpoint, and the directories to delete now.

        Only now: until the newer one is committed the older may be all that there is.
        """
        manifest = committed.manifest
        self.checkpoints.append(manifest)
        self._stamps[manifest.directory] = committed.stamps
        doomed = [*self._damaged, *self.superseded()]
        self._damaged.clear()
        return self._info(manifest), doomed

    def superseded(self) -> list[str]:
        """The directories of checkpoints that needn't be kept, which don't count from now on.

        The newest must be known to be intact.
        """
        old = expendable(self.checkpoints, self.config)
        for manifest in old:
            self.checkpoints.remove(manifest)
            self._stamps.pop(manifest.directory, None)
        return [manifest.directory for manifest in old]

    def start(self) -> StartingPoint:
        """What the next attempt resumes from: the newest checkpoint that verifies.

        Those that don't are warned about, and left out from now on.

        Raises:
            OSError: the storage can't be read.
        """
        manifest = self._newest_intact()
        if manifest is None:
            return self.origin
        return from_manifest(manifest, self.store.location_of(manifest.directory), own=True)

    def newest_intact(self) -> CheckpointInfo | None:
        """The newest committed checkpoint that verifies."""
        manifest = self._newest_intact()
        return self._info(manifest) if manifest else None

    def distrust(self) -> None:
        """Read everything again before it is used: something wasn't what it should be."""
        self._stamps.clear()

    def best(self) -> list[CheckpointInfo]:
        """The committed checkpoints, from best to worst."""
        return [self._info(manifest) for manifest in ranked(self.checkpoints, self.config)]

    def _newest_intact(self) -> Manifest | None:
        while self.checkpoints:
            manifest = self.checkpoints[-1]
            known = self._stamps.get(manifest.directory)
            if known and self.store.stamps(manifest) == known:
                return manifest
            # Taken before: a change while the files are read must not pass for none.
            stamps = self.store.stamps(manifest)
            damage = self.store.damage(manifest)
            if not damage:
                self._stamps[manifest.directory] = stamps
                return manifest
            self.checkpoints.pop()
            self._put_aside(manifest.directory, "; ".join(damage))
        return None

    def _put_aside(self, directory: str, wrong: str) -> None:
        self._damaged.append(directory)
        logger.warning(
            "%s is no checkpoint and is left out: %s.",
            self.store.location_of(directory).address,
            wrong,
        )

    def _manifest(self, parts: dict[int, PartStored]) -> Manifest:
        first = parts[min(parts)]
        return Manifest(
            number=first.checkpoint,
            attempt_id=AttemptId(token=self.token, attempt=first.attempt),
            step=first.step,
            metrics=first.metrics,
            backend=self.backend,
            written_by=self.kind.value,
            versions=self.versions,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            world_size=self.world_size,
            positions=self._positions(parts),
            files=merged({rank: part.files for rank, part in parts.items()}),
        )

    def _positions(self, parts: dict[int, PartStored]) -> Mapping[str, Any]:
        """Where the ranks stood in the data: at the same rows, as far as they train together."""
        first = parts[min(parts)]
        for part in parts.values():
            if part.positions != first.positions:
                logger.warning(
                    "Ranks %d and %d reported checkpoint %d at different rows of the data. A "
                    "restart resumes at those of rank %d.",
                    first.rank,
                    part.rank,
                    part.checkpoint,
                    first.rank,
                )
                break
        return first.positions

    def _info(self, manifest: Manifest) -> CheckpointInfo:
        path = self.store.location_of(manifest.directory).address
        return CheckpointInfo(path=path, step=manifest.step, metrics=manifest.metrics)
