"""The index of a run's checkpoints while it runs: parts come in, commits and deletions go out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polytrain.checkpoint.manifest import Manifest
from polytrain.checkpoint.start import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config import CheckpointConfig
from polytrain.policy.retention import expendable, ranked
from polytrain.run.events import PartStored
from polytrain_plugins import CheckpointInfo, CheckpointKind

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CheckpointKeeper:
    """Commits a checkpoint once every rank that has to say something has said it."""

    store: CheckpointStore
    config: CheckpointConfig
    backend: str
    kind: CheckpointKind
    world_size: int
    origin: StartingPoint = field(default_factory=StartingPoint)
    """What the run itself began with."""

    committed: list[Manifest] = field(default_factory=list)
    _parts: dict[int, dict[int, PartStored]] = field(default_factory=dict)
    _next_number: int = 0

    @property
    def next_number(self) -> int:
        """Number of the next checkpoint that nobody has begun."""
        return self._next_number

    def add(self, part: PartStored) -> CheckpointInfo | None:
        """Take one rank's part; return the checkpoint if that was the last one missing."""
        self._next_number = max(self._next_number, part.checkpoint + 1)
        parts = self._parts.setdefault(part.checkpoint, {})
        parts[part.rank] = part
        if len(parts) < self._parts_needed:
            return None
        return self._commit(self._parts.pop(part.checkpoint))

    def start(self) -> StartingPoint:
        """What the next attempt goes on from."""
        manifest = self._newest_intact()
        if manifest is None:
            return self.origin
        return StartingPoint(
            path=str(self.store.directory(manifest.number)),
            step=manifest.step,
            own=True,
            positions=manifest.positions,
        )

    def newest_intact(self) -> CheckpointInfo | None:
        """The newest committed checkpoint whose files are all there; others are warned about."""
        manifest = self._newest_intact()
        return self._info(manifest) if manifest else None

    def best(self) -> list[CheckpointInfo]:
        """The committed checkpoints, from best to worst."""
        return [self._info(manifest) for manifest in ranked(self.committed, self.config)]

    def _newest_intact(self) -> Manifest | None:
        for manifest in reversed(self.committed):
            damage = self.store.damage(manifest)
            if not damage:
                return manifest
            logger.warning(
                "Checkpoint %s is left out: %s.",
                self.store.directory(manifest.number),
                "; ".join(damage),
            )
        return None

    @property
    def _parts_needed(self) -> int:
        return self.world_size if self.kind is CheckpointKind.EVERY_RANK else 1

    def _commit(self, parts: dict[int, PartStored]) -> CheckpointInfo:
        first = parts[min(parts)]
        manifest = Manifest(
            number=first.checkpoint,
            step=first.step,
            metrics=first.metrics,
            backend=self.backend,
            world_size=self.world_size,
            generation=first.generation,
            positions=self._positions(parts),
            files=tuple(file for rank in sorted(parts) for file in parts[rank].files),
        )
        self.store.commit(manifest)
        self.committed.append(manifest)
        # Only now: until the newer one is committed the older may be all that there is.
        for old in expendable(self.committed, self.config):
            self.committed.remove(old)
            self.store.delete(old.number)
        return self._info(manifest)

    def _positions(self, parts: dict[int, PartStored]) -> Mapping[str, Any]:
        """Where the ranks stood in the data: at the same rows, as far as they train together."""
        first = parts[min(parts)]
        for part in parts.values():
            if part.positions != first.positions:
                logger.warning(
                    "Ranks %d and %d reported checkpoint %d at different rows of the data. A "
                    "restart goes on at those of rank %d.",
                    first.rank,
                    part.rank,
                    part.checkpoint,
                    first.rank,
                )
                break
        return first.positions

    def _info(self, manifest: Manifest) -> CheckpointInfo:
        path = str(self.store.directory(manifest.number))
        return CheckpointInfo(path=path, step=manifest.step, metrics=manifest.metrics)
