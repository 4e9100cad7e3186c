"""Parts of a checkpoint: stored from where a worker process staged them, reported, and counted."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polytrain.checkpoint.manifest import AttemptId, Manifest, StoredFile, directory_name
from polytrain.checkpoint.staging import Stamps, forget_aside, kept_aside, remove, staged_in
from polytrain.checkpoint.store import CheckpointStore, SnapshotChangedError
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import Failed, OfRank
from polytrain.policy.failed_attempts import AFTER_WAIT
from polytrain.storage.calls import TargetError, is_full
from polytrain.storage.location import Location
from polytrain.storage.protocol import StorageError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PartTracker:
    """Counts the parts that each rank of one attempt has staged.

    A rank may be slow. It is overdue if another rank is at a later checkpoint, waits for this one
    or has ended, and this rank stages nothing for `timeout_s`. A rank that ends without its part
    is overdue at once.
    """

    ranks: set[int]
    """Ranks that are known to stage parts."""

    timeout_s: float
    _counts: dict[int, int] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _waiting: set[int] = field(default_factory=set)
    _at: Counter[int] = field(default_factory=Counter)
    """Number of parts → how many of `ranks` have staged as many. With this, the cost of an event
    doesn't grow with the number of ranks."""

    _done_at: Counter[int] = field(default_factory=Counter)
    """The same of those of them that have ended."""

    _fewest: int = 0
    """The fewest parts of one of `ranks`."""

    _most: int = 0
    """The most parts of any rank."""

    _still_at_most: set[int] = field(default_factory=set)
    """Ranks with the most parts that have ended, or wait."""

    _behind_since: float | None = None

    def __post_init__(self) -> None:
        self._at[0] = len(self.ranks)

    def part_staged(self, rank: int, *, waits: bool, now: float) -> None:
        """Note that a rank has staged its next part, and whether it waits for the commit."""
        before, fewest = self._count(rank), self._fewest
        self._counts[rank] = before + 1
        (self._waiting.add if waits else self._waiting.discard)(rank)
        if rank in self.ranks:
            self._at[before] -= 1
            self._at[before + 1] += 1
            if rank in self._done:
                self._done_at[before] -= 1
                self._done_at[before + 1] += 1
            while not self._at[self._fewest]:
                del self._at[self._fewest]
                self._fewest += 1
        if before + 1 > self._most:
            self._most = before + 1
            self._still_at_most.clear()
        self._note_stand(rank)
        self._look(now, resumes=self._fewest > fewest)

    def expect(self, rank: int) -> None:
        """Count this rank among those that stage parts."""
        if rank not in self.ranks:
            self.ranks.add(rank)
            self._at[self._count(rank)] += 1
            self._done_at[self._count(rank)] += rank in self._done
            self._fewest = min(self._fewest, self._count(rank))

    def done(self, rank: int, *, now: float) -> None:
        """Note that a rank's training has ended."""
        if rank not in self._done:
            self._done.add(rank)
            self._done_at[self._count(rank)] += rank in self.ranks
        self._note_stand(rank)
        self._look(now, resumes=False)

    @property
    def deadline(self) -> float | None:
        """The time at which to call `overdue` again; None if no rank is behind."""
        return None if self._behind_since is None else self._behind_since + self.timeout_s

    def overdue(self, *, now: float) -> tuple[int, str] | None:
        """Return the rank that is overdue, and the error message; None if there is none."""
        if self._fewest == self._most:
            return None
        is_late = self.deadline is not None and now >= self.deadline
        if not is_late and not self._done_at[self._fewest]:
            return None
        behind, ahead = self._extremes()
        counts = (
            f"rank {behind} has reported {self._count(behind)} of them, and rank {ahead} "
            f"{self._count(ahead)}"
        )
        remedy = (
            "All ranks that report checkpoints must report as many of them; with "
            "CheckpointConfig(written_by='rank_0') only rank 0's count"
        )
        if behind in self._done:
            return behind, f"a checkpoint lacks a part: {counts}; rank {behind} has ended. {remedy}"
        if is_late:
            waited = f"rank {behind} has reported none for {self.timeout_s:g} s"
            return behind, f"a checkpoint lacks a part: {counts}; {waited}. {remedy}"
        return None

    def _note_stand(self, rank: int) -> None:
        stands = self._count(rank) == self._most and self._stands_still(rank)
        (self._still_at_most.add if stands else self._still_at_most.discard)(rank)

    def _look(self, now: float, *, resumes: bool) -> None:
        moved_on = self._most - self._fewest > 1 or (
            bool(self._still_at_most) and self._most > self._fewest
        )
        if not moved_on:
            self._behind_since = None
        elif self._behind_since is None or resumes:
            self._behind_since = now

    def _extremes(self) -> tuple[int, int]:
        """Return the rank that is furthest behind, preferring one that has ended, and one ahead."""
        behind = min(
            sorted(self.ranks), key=lambda rank: (self._count(rank), rank not in self._done)
        )
        # Include ranks that needn't stage parts: a part that one does stage waits for the others'.
        seen = sorted(self.ranks | self._counts.keys())
        return behind, max(seen, key=lambda rank: (self._count(rank), self._stands_still(rank)))

    def _stands_still(self, rank: int) -> bool:
        return rank in self._done or rank in self._waiting

    def _count(self, rank: int) -> int:
        return self._counts.get(rank, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStaged(OfRank):
    """A worker process has staged its part of a checkpoint for its agent."""

    checkpoint: int
    waits: bool
    """Whether the worker process waits for the commit before it reports another checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStored(OfRank):
    """The agent has stored one rank's part of a checkpoint. Nothing is committed yet."""

    checkpoint: int
    step: int
    metrics: Mapping[str, Any]
    positions: Mapping[str, Any]
    """Data set → the rank's position in it, as plain values."""

    files: tuple[StoredFile, ...]
    left_out: tuple[str, ...] = ()
    """Files that differ from rank 0's file of the same name, which is kept."""

    validation: Mapping[str, Any] | None = None
    """The requested validation, as plain values; None if none is requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWritten(OfRank):
    """A survivor's state is stored as a whole checkpoint, which isn't committed yet."""

    part: PartStored
    is_report: bool
    """Whether it is the checkpoint of a report that the rank was making."""

    is_ahead: bool = False
    """Whether steps were taken since the last report, which the positions don't show."""

    is_earlier: bool = False
    """Whether there may have been more reports since, which a restart makes again."""

    is_copy: bool = False
    """Whether it was copied while the training continued: it may be older than the last report."""

    is_joined: bool = False
    """Whether its files are those of all ranks, of which each has copied its own part."""

    reports: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    """Step and metrics of the rank's last reports before it; empty if they aren't known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartVoid(OfRank):
    """A rank's part is invalid: its files have changed since the rank reported them."""

    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint's manifest is written."""

    manifest: Manifest
    stamps: Mapping[str, tuple[int, ...]]
    """File → values that change whenever the file changes."""

    ranks: frozenset[int] = frozenset()
    """The ranks whose parts are in the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsAsked(OfRank):
    """A training function asks for the run's checkpoints."""

    number: int
    """Number of the question in its worker process."""

    validated: bool
    """Whether the answer waits for all validations."""


CheckpointEvent = PartStaged | PartStored | PartVoid | Committed


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPart:
    """One rank's complete part of a checkpoint, in its staging directory."""

    attempt_id: AttemptId
    rank: int
    checkpoint: int
    staged: Path | None
    """The staging directory; None if the rank has written its files to the storage itself."""

    stamps: Stamps
    step: int
    """The rank's last reported step."""

    metrics: Mapping[str, Any]
    positions: Mapping[str, Any]
    validation: Mapping[str, Any] | None = None
    """The requested validation, as plain values; None if none is requested."""


def misplaced_part(part: StagedPart, *, scratch: Path, near: Path | None) -> Failed | None:
    """Check the staging directory that a worker process names; return a failure if it is wrong.

    The check is needed because the agent moves the files away and deletes the directory.

    Args:
        part: the part as the worker process describes it.
        near: the staging directory in the storage, if there is one.
    """
    name = directory_name(part.checkpoint, part.attempt_id)
    roots = [root for root in (scratch, near) if root is not None]
    if part.staged is None or part.staged in [staged_in(root, name, part.rank) for root in roots]:
        return None
    message = f"it staged its part of {name} in {part.staged}, which is outside the run"
    failure = Failure(kind=FailureKind.STORAGE, rank=part.rank, message=message)
    return Failed(attempt=part.attempt_id.attempt, failure=failure)


def stored_part(
    store: CheckpointStore, part: StagedPart, stored_already: Mapping[str, str] | None = None
) -> PartStored | PartVoid | Failed:
    """Store one rank's part of a checkpoint, and return the outcome. Never raises.

    Args:
        stored_already: name → SHA-256 of the files that rank 0 has stored already.
    """
    attempt = part.attempt_id.attempt
    try:
        directory = directory_name(part.checkpoint, part.attempt_id)
        known = stored_already or {}
        if part.staged is None:
            stored = store.find_part(directory, part.rank, stored_already=known)
        else:
            stored = store.store_part(
                directory, part.rank, part.staged, part.stamps, stored_already=known
            )
    except SnapshotChangedError as error:
        return PartVoid(
            attempt=attempt, rank=part.rank, checkpoint=part.checkpoint, reason=str(error)
        )
    except Exception as error:  # any error of a storage ends the attempt, not the agent
        message = storage_message(error, store.location)
        failure = Failure(
            kind=FailureKind.STORAGE,
            rank=part.rank,
            message=f"{message}{kept_if_unstored(store, part)}",
        )
        return Failed(attempt=attempt, failure=failure)
    if part.staged is not None:
        forget_aside(part.staged)
    return PartStored(
        attempt=attempt,
        rank=part.rank,
        checkpoint=part.checkpoint,
        step=part.step,
        metrics=part.metrics,
        positions=part.positions,
        files=stored.files,
        left_out=stored.left_out,
        validation=part.validation,
    )


def kept_if_unstored(store: CheckpointStore, part: StagedPart) -> str:
    """Keep the files of a part that can't be stored; return a sentence that says where they are.

    The sentence is also logged: the run may have ended for another failure of its storage.

    Object storage gets copies, so the staged files are whole. Those that a directory gets are moved
    one by one, or are in it already.
    """
    if part.staged is None or store.location.is_local:
        return ""
    kept = kept_aside(part.staged)
    if kept is None:
        return ""
    name = directory_name(part.checkpoint, part.attempt_id)
    where = f"The files of {name} aren't stored; they are in {kept} on {os.uname().nodename}"
    logger.warning("%s.", where)
    return f". {where}"


def clear_staged(part: StagedPart) -> None:
    """Delete a staged part."""
    if part.staged is not None:
        remove(part.staged)


def storage_message(error: Exception, location: Location) -> str:
    """Return the user's message for an error of the run's storage."""
    error = error.cause if isinstance(error, StorageError) else error
    text = f"{type(error).__name__}: {error}"
    if is_full(error) and not isinstance(error, TargetError):
        waited = AFTER_WAIT if location.retry_s else ""
        text = f"{text}. {location.address} is full{waited}; the checkpoints there are intact"
    return text
