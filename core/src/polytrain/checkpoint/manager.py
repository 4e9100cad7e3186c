"""The index of a run's checkpoints while it runs: parts come in, manifests and deletions go out."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from polytrain.checkpoint.manifest import AttemptId, Manifest, directory_name, merged
from polytrain.checkpoint.parts import Committed, PartStored
from polytrain.checkpoint.starting_point import StartingPoint, from_manifest
from polytrain.checkpoint.store import CheckpointStore, FoundCheckpoints
from polytrain.config.configs import CheckpointConfig
from polytrain.linux.clock import Clock
from polytrain.policy.divergence import Divergences
from polytrain.policy.retention import expendable, ranked
from polytrain.policy.validation import Validations
from polytrain.storage.protocol import storage_errors
from polytrain_plugins import CheckpointInfo, CheckpointKind

logger = logging.getLogger(__name__)

_LAST = 8
"""Number of the newest checkpoints among which a survivor's state is looked for: the next commit
deletes it, at the latest the second."""

_REMEMBERED = 256
"""Number of rank 0's newest checkpoints with which late parts are compared, at least."""


@dataclass(slots=True, kw_only=True)
class CheckpointManager:
    """Keeps the committed checkpoints, and notices when a new one has all its parts."""

    store: CheckpointStore
    config: CheckpointConfig
    backend: str
    kind: CheckpointKind
    versions: Mapping[str, str]
    world_size: int
    token: int
    """Fencing token of this driver's lease on the run."""

    transform: str | None = None
    """See `Manifest.transform`."""

    virtual_workers: int | None = None
    """See `Manifest.virtual_workers`."""

    merges_files: bool = False
    """Whether files that other ranks report are added to rank 0's."""

    origin: StartingPoint = field(default_factory=StartingPoint)
    """The starting point of the run itself."""

    clock: Clock = field(default_factory=Clock)
    validations: Validations = field(default_factory=Validations)
    """Their metrics count in the ranking; a checkpoint with a pending validation is kept."""

    divergences: Divergences = field(default_factory=Divergences)
    """Checkpoints of what has diverged don't count, and what they led to is left out."""

    spares_previous: bool = False
    """Whether retention keeps the checkpoint before the newest, too: another rank may still find
    that training had diverged when the newest was made."""

    checkpoints: list[Manifest] = field(default_factory=list)
    """The committed checkpoints, oldest first."""

    left_out: int = 0
    """Number of checkpoints that don't count any more, because training had diverged."""

    next_number: int = 0
    """Number of the next checkpoint."""

    _damaged: list[str] = field(default_factory=list)
    _writers: set[int] = field(default_factory=set)
    """Ranks whose parts a checkpoint of this attempt needs."""

    _parts: dict[int, dict[int, PartStored]] = field(default_factory=dict)
    """Number → rank → part, for the last committed checkpoint and later ones."""

    _staged: dict[int, set[int]] = field(default_factory=dict)
    """Number → ranks that have staged a part which isn't stored yet."""

    _dropped: set[int] = field(default_factory=set)
    """Numbers of this attempt's checkpoints that were dropped."""

    _files_of_rank_0: dict[int, Mapping[str, str]] = field(default_factory=dict)
    """Number → name → SHA-256, of the newest checkpoints of this attempt."""

    _wanted_validations: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Directory → the validation that the checkpoint's report requests."""

    _last_complete: int = -1
    _has_grown: bool = False
    """Whether the last complete checkpoint has since received another part with files."""

    _uneven: set[str] = field(default_factory=set)
    """Data sets that a warning has named because ranks reported different positions."""

    _has_deleted: bool = False
    """Whether retention has deleted a checkpoint."""

    _stamps: dict[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """Directory → stamps that show whether its files have changed since they were verified."""

    def take_over(self, found: FoundCheckpoints) -> None:
        """Resume with the checkpoints of earlier drivers."""
        self.checkpoints = list(found.manifests)
        self.leave_bad_out()
        self.next_number = max((m.number + 1 for m in found.manifests), default=0)
        for directory, wrong in found.damaged.items():
            self._put_aside(directory, wrong)

    def leave_bad_out(self) -> None:
        """Drop the checkpoints of what has diverged; they are deleted after the next commit."""
        bad = {each.directory for each in self.checkpoints if not is_good(each, self.divergences)}
        self.left_out += len(bad)
        self._damaged.extend(sorted(bad))
        self.checkpoints = [each for each in self.checkpoints if each.directory not in bad]

    @property
    def nothing_good(self) -> str:
        """Why divergence leaves no checkpoint to go back to; empty if one is left, or none was."""
        if self.checkpoints or not self.left_out:
            return ""
        count = "the only checkpoint" if self.left_out == 1 else f"all {self.left_out} checkpoints"
        return f"{count} may hold what has diverged, so the run starts from its beginning"

    @property
    def newest_reported(self) -> Manifest | None:
        """The newest committed checkpoint that was reported; None without one."""
        newest_first = reversed(self.checkpoints)
        return next((each for each in newest_first if not each.is_rescue), None)

    @property
    def progress(self) -> int:
        """Step of the newest checkpoint that no failed attempt has left, or of the run's start."""
        newest_first = reversed(self.checkpoints)
        return next((each.step for each in newest_first if not each.is_left), self.origin.step)

    @property
    def newest_step(self) -> int:
        """Step of the newest committed checkpoint, or of the run's start."""
        return self.checkpoints[-1].step if self.checkpoints else self.origin.step

    def launched(self, world_size: int) -> frozenset[int]:
        """Start an attempt, and drop the unfinished checkpoints of the previous one.

        Returns:
            The ranks whose parts a checkpoint is known to need.
        """
        self.world_size = world_size
        self._parts.clear()
        self._staged.clear()
        self._dropped.clear()
        self._files_of_rank_0.clear()
        self._last_complete, self._has_grown = -1, False
        everybody = set(range(world_size))
        self._writers = {0}
        if self.kind is CheckpointKind.EVERY_RANK:
            self._writers = everybody
        elif self.merges_files and (newest := self.newest_reported) is not None:
            wrote = {0, *(file.rank for file in newest.files)}
            if newest.world_size > 1 and wrote == set(range(newest.world_size)):
                self._writers = everybody
            elif newest.world_size == world_size:
                self._writers = wrote
        return frozenset(self._writers)

    def expect(self, rank: int, number: int) -> None:
        """Note that a rank has staged its part: the checkpoint isn't complete without it."""
        if number > self._last_complete and number not in self._dropped:
            self._staged.setdefault(number, set()).add(rank)

    def expect_no_more(self, rank: int) -> None:
        """Stop waiting for a rank's parts."""
        for ranks in self._staged.values():
            ranks.discard(rank)

    def stored_files(self, number: int) -> Mapping[str, str] | None:
        """Return name → SHA-256 of rank 0's stored files of a checkpoint; None if unknown."""
        return self._files_of_rank_0.get(number)

    def is_dropped(self, number: int) -> bool:
        """Return whether a checkpoint of this attempt was dropped."""
        return number in self._dropped

    def is_over(self, number: int) -> bool:
        """Return whether a part that is staged now is ignored: its checkpoint was dropped, or is
        older than the files of rank 0 that are remembered."""
        is_forgotten = number < self._last_complete and number not in self._files_of_rank_0
        return is_forgotten or number in self._dropped

    def ranks_of(self, number: int) -> frozenset[int]:
        """Return the ranks whose parts of a checkpoint are stored."""
        return frozenset(self._parts.get(number, {}))

    def ranks_that_add_nothing(self, number: int) -> frozenset[int]:
        """Return the ranks whose stored part of a checkpoint has no files beyond rank 0's."""
        parts = self._parts.get(number, {})
        return frozenset(rank for rank, part in parts.items() if not part.files)

    def is_committed(self, number: int, attempt: int) -> bool:
        """Return whether an attempt's checkpoint was committed with all its stored parts."""
        if number < self._last_complete:
            return True
        if number == self._last_complete and self._has_grown:
            return False
        directory = directory_name(number, AttemptId(token=self.token, attempt=attempt))
        since = itertools.takewhile(lambda each: each.number >= number, reversed(self.checkpoints))
        return any(manifest.directory == directory for manifest in since)

    def is_last_left(self, number: int, attempt: int) -> bool:
        """Return whether a checkpoint is committed, and retention has deleted all older ones."""
        return (
            self._has_deleted
            and len(self.checkpoints) == 1
            and self.checkpoints[0].directory
            == directory_name(number, AttemptId(token=self.token, attempt=attempt))
        )

    def drop(self, number: int, attempt: int) -> str | None:
        """Drop a checkpoint that can't be committed, or that was committed without all its files.

        Returns:
            Its directory, for the caller to delete, if it was committed.
        """
        self._dropped.add(number)
        for known in (self._parts, self._staged, self._files_of_rank_0):
            known.pop(number, None)
        directory = directory_name(number, AttemptId(token=self.token, attempt=attempt))
        for manifest in self.checkpoints:
            if manifest.directory == directory:
                self.checkpoints.remove(manifest)
                return manifest.directory
        return None

    def add(self, part: PartStored) -> None:
        """Add one rank's stored part.

        Raises:
            ValueError: the part comes too late for its files to be added; the message says why.
        """
        number = part.checkpoint
        self.next_number = max(self.next_number, number + 1)
        self._staged.get(number, set()).discard(part.rank)
        adds_files = self.merges_files and part.rank != 0 and bool(part.files)
        if adds_files:
            self._writers.add(part.rank)
        if number in self._dropped:
            return
        if part.rank == 0:
            self._files_of_rank_0[number] = {file.name: file.sha256 for file in part.files}
            self._forget_old_files()
        if number < self._last_complete:
            if adds_files:
                name = part.files[0].name
                raise ValueError(
                    f"rank {part.rank} reported {name!r} for checkpoint {number} only after the "
                    f"run had committed checkpoint {self._last_complete} without a file of this "
                    "rank. Set CheckpointConfig(written_by='every_rank') so that every checkpoint "
                    "waits for the files of all ranks, or written_by='rank_0' to keep rank 0's "
                    "alone"
                )
            return
        if adds_files:
            self._has_grown = self._has_grown or number == self._last_complete
        self._parts.setdefault(number, {})[part.rank] = part

    def _forget_old_files(self) -> None:
        """Forget rank 0's files of old checkpoints that wait for no other rank's part."""
        known = self._files_of_rank_0
        while len(known) > _REMEMBERED and (oldest := min(known)) < self._last_complete:
            del known[oldest]

    def of_state(self, part: PartStored, *, is_rescue: bool) -> Manifest:
        """Return the manifest of a whole checkpoint that one rank has written for all."""
        self.next_number = max(self.next_number, part.checkpoint + 1)
        manifest = replace(self._manifest({part.rank: part}), is_rescue=is_rescue, is_left=True)
        self._want_validation(manifest, part.validation)
        return manifest

    def next_complete(self) -> Manifest | None:
        """Return the manifest of the oldest checkpoint that can be committed now.

        A checkpoint with a part that is being stored holds up later ones, which would replace it.
        If files are merged, the same checkpoint may be returned again: another rank's part of the
        first checkpoint may arrive after rank 0's part is committed.

        Raises:
            ValueError: the ranks' parts don't fit into one directory; the message says why.
        """
        for number in sorted(self._parts):
            if number > self._last_complete or (number == self._last_complete and self._has_grown):
                if self._staged.get(number):
                    return None
                parts = self._parts[number]
                # Compare the numbers first: this is asked after each part.
                if len(self._writers) <= len(parts) and self._writers <= parts.keys():
                    return self._completed(number)
        return None

    def _completed(self, number: int) -> Manifest:
        """Return the manifest of a checkpoint that has all its parts, and drop incomplete ones."""
        # Pop first: parts that don't fit together never will, and are reported once.
        parts = self._parts.pop(number)
        manifest = self._manifest(parts)
        self._parts[number] = parts
        wanted = (parts[rank].validation for rank in sorted(parts))
        # The lowest rank that requests a validation decides.
        self._want_validation(manifest, next((each for each in wanted if each is not None), None))
        for known in (self._parts, self._staged):
            for older in [each for each in known if self._last_complete < each < number]:
                del known[older]
        self._last_complete, self._has_grown = number, False
        return manifest

    def _want_validation(self, manifest: Manifest, validation: Mapping[str, Any] | None) -> None:
        if validation is not None:
            self._wanted_validations[manifest.directory] = validation

    def commit(self, manifest: Manifest) -> Committed:
        """Commit the stored files as a checkpoint. Touches only the storage.

        Raises:
            CheckpointError: files are missing.
            OSError: the storage failed.
        """
        return Committed(manifest=manifest, stamps=self.store.commit(manifest))

    def committed(self, committed: Committed) -> tuple[CheckpointInfo, list[str]]:
        """Note a commit; return the checkpoint, and the directories that can now be deleted.

        Older checkpoints are kept until a newer one is committed.
        """
        manifest = committed.manifest
        for known in (self._parts, self._staged):
            for older in [each for each in known if each < manifest.number]:
                del known[older]
        if self.checkpoints and self.checkpoints[-1].directory == manifest.directory:
            self.checkpoints.pop()
        self.checkpoints.append(manifest)
        self._stamps[manifest.directory] = committed.stamps
        doomed = [*self._damaged, *self.superseded()]
        self._damaged.clear()
        return self._info(manifest), doomed

    def superseded(self) -> list[str]:
        """Remove the checkpoints that retention doesn't keep, and return their directories.

        The newest checkpoint must be known to be intact. If it has no files, nothing can start from
        it, and none is removed.
        """
        if self.checkpoints and not self.checkpoints[-1].files:
            return []
        # A run may have made many thousands of checkpoints; only the last may be unreported.
        last = self.checkpoints[-_LAST:-1]
        old = {each.directory for each in last if each.is_rescue}
        if self.config.num_to_keep is not None:
            old |= {each.directory for each in expendable(self._scored(), self.config)}
        if not old:
            return []
        waiting = {validation.checkpoint for validation in self.validations.pending}
        if self.spares_previous:
            waiting |= {each.directory for each in self.checkpoints[-2:]}
        old -= waiting
        self.checkpoints = [each for each in self.checkpoints if each.directory not in old]
        self._has_deleted = self._has_deleted or bool(old)
        for directory in old:
            self._stamps.pop(directory, None)
        return sorted(old)

    def committed_as(self, directory: str) -> Manifest | None:
        """Return the committed checkpoint in a directory; None if it is gone, or never was."""
        newest_first = reversed(self.checkpoints)
        return next((each for each in newest_first if each.directory == directory), None)

    def info_of(self, directory: str) -> CheckpointInfo | None:
        """Return a committed checkpoint, with the metrics of its validation."""
        manifest = self.committed_as(directory)
        return None if manifest is None else self._info(manifest)

    def validation_of(self, directory: str) -> Mapping[str, Any] | None:
        """Remove and return the validation requested for a complete checkpoint; None if none is."""
        return self._wanted_validations.pop(directory, None)

    def start(self) -> StartingPoint:
        """Return the starting point of the next attempt: the newest checkpoint that verifies.

        Checkpoints that don't verify are logged as warnings and dropped.

        Raises:
            StorageError: the storage can't be read.
        """
        with storage_errors():
            manifest = self._newest_intact()
        if manifest is None:
            start = self.origin
        else:
            location = self.store.location_of(manifest.directory)
            start = from_manifest(manifest, location, own=True)
        # A replay starts with what its run has left out.
        return replace(start, skipped=self.divergences.skipped or self.origin.skipped)

    def newest_intact(self) -> CheckpointInfo | None:
        """Return the newest committed checkpoint that verifies."""
        manifest = self._newest_intact()
        return self._info(manifest) if manifest else None

    def newest(self) -> CheckpointInfo | None:
        """Return the newest committed checkpoint, unread: for a storage that doesn't answer."""
        return self._info(self.checkpoints[-1]) if self.checkpoints else None

    def distrust(self) -> None:
        """Verify every checkpoint again before its next use: something didn't match."""
        self._stamps.clear()

    def best(self) -> list[CheckpointInfo]:
        """Return the reported checkpoints that are kept, from best to worst."""
        return [self._info(manifest) for manifest in ranked(self._scored(), self.config)]

    def reported(self) -> Sequence[tuple[str, Mapping[str, Any], str]]:
        """Return path, metrics and status of validation of the reported ones, oldest first.

        The status is empty if no validation was requested.
        """
        found = []
        for manifest in self.checkpoints:
            if manifest.is_rescue:
                continue
            info, validation = self._info(manifest), self.validations.of(manifest.directory)
            status = "" if validation is None else validation.status.value
            found.append((info.path, dict(info.metrics), status))
        return found

    def _newest_intact(self) -> Manifest | None:
        while self.checkpoints:
            manifest = self.checkpoints[-1]
            known = self._stamps.get(manifest.directory)
            if known and self.store.stamps(manifest) == known:
                return manifest
            # Take the stamps before the files are read, to notice a change during the reading.
            stamps = self.store.stamps(manifest)
            damage = self.store.damage(manifest)
            if not damage:
                self._stamps[manifest.directory] = stamps
                return manifest
            self.checkpoints.pop()
            self._put_aside(manifest.directory, "; ".join(damage))
        return None

    def _scored(self) -> list[Manifest]:
        """Return the reported checkpoints, with the metrics of their validations."""
        reported = [each for each in self.checkpoints if not each.is_rescue]
        return with_validations(reported, self.validations)

    def _put_aside(self, directory: str, wrong: str) -> None:
        """Leave a checkpoint out; it is deleted after the next commit, unless all are to be kept:
        the user may have changed its files on purpose, or a storage may not show them all now."""
        if self.config.num_to_keep is not None:
            self._damaged.append(directory)
        self.store.warn_of_damage(directory, wrong)

    def _manifest(self, parts: dict[int, PartStored]) -> Manifest:
        first = parts[min(parts)]
        for part in parts.values():
            if self.merges_files and part.step != first.step:
                raise ValueError(
                    f"ranks {first.rank} and {part.rank} reported checkpoint {part.checkpoint} at "
                    f"different steps, {first.step} and {part.step}. Report it at the same step on "
                    "all ranks, or set CheckpointConfig(written_by='rank_0') to keep rank 0's alone"
                )
        files = merged({rank: part.files for rank, part in parts.items()})
        by_rank_0 = self.kind is CheckpointKind.ONE_RANK and all(file.rank == 0 for file in files)
        return Manifest(
            number=first.checkpoint,
            attempt_id=AttemptId(token=self.token, attempt=first.attempt),
            step=first.step,
            metrics=first.metrics,
            backend=self.backend,
            written_by=(CheckpointKind.ONE_RANK if by_rank_0 else CheckpointKind.EVERY_RANK).value,
            versions=self.versions,
            created=datetime.fromtimestamp(self.clock.now(), UTC).isoformat(timespec="seconds"),
            world_size=self.world_size,
            virtual_workers=self.virtual_workers,
            positions=self._positions(parts),
            files=files,
            transform=self.transform,
        )

    def _positions(self, parts: dict[int, PartStored]) -> Mapping[str, Any]:
        """Return the position in the data, which is the same on ranks that train together."""
        first = parts[min(parts)]
        for part in parts.values():
            for name, position in first.positions.items():
                if name in self._uneven or part.positions.get(name, position) == position:
                    continue
                self._uneven.add(name)
                logger.warning(
                    "Ranks %d and %d reported checkpoint %d at different rows of the data set %r. "
                    "A restart resumes at those of rank %d. That is right if rank %d alone reads "
                    "the data set, for example to validate.",
                    first.rank,
                    part.rank,
                    part.checkpoint,
                    name,
                    first.rank,
                    first.rank,
                )
        return first.positions

    def _info(self, manifest: Manifest) -> CheckpointInfo:
        path = self.store.location_of(manifest.directory).address
        metrics = self.validations.metrics_of(manifest.directory, manifest.metrics)
        return CheckpointInfo(path=path, step=manifest.step, metrics=metrics)


def is_good(manifest: Manifest, divergences: Divergences) -> bool:
    """Return whether training hadn't diverged when a checkpoint was made."""
    made_by = manifest.attempt_id.token, manifest.attempt_id.attempt
    where = manifest.directory
    return not divergences.is_bad(made_by, manifest.step, where, is_rescue=manifest.is_rescue)


def with_validations(manifests: Sequence[Manifest], validations: Validations) -> list[Manifest]:
    """Return checkpoints with their validations' metrics added to those of their reports."""
    return [
        each
        if validations.of(each.directory) is None
        else replace(each, metrics=validations.metrics_of(each.directory, each.metrics))
        for each in manifests
    ]
