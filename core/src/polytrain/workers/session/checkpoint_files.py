"""The checkpoints of a training function: what a report asks for, its files, and all of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.manifest import MANIFEST_NAME
from polytrain.checkpoint.staging import Snapshots, Stamps
from polytrain.errors import CheckpointError
from polytrain.policy.validation import ValidationStatus
from polytrain.storage.location import Location
from polytrain.storage.protocol import expect_inside
from polytrain.text.described import ShortRepr
from polytrain.workers.session.context import RunStorage
from polytrain_plugins.type_names import a_type, with_article

UploadFunction = Callable[[Checkpoint, str], Checkpoint]
"""Stores a checkpoint under a name, and returns the stored checkpoint."""


class CheckpointUploadMode(Enum):
    """The way in which the files of a reported checkpoint get into the storage."""

    ASYNC = "ASYNC"
    """Upload while training continues. The reported directory is deleted, unless
    `delete_local_checkpoint_after_upload=False`."""

    SYNC = "SYNC"
    """Upload before `report` returns."""

    NO_UPLOAD = "NO_UPLOAD"
    """The training function has stored the files. At the path of
    `get_context().get_storage().build_checkpoint_path_from_name(name)` they are hashed and
    committed in place; from any other place they are copied."""

    def default_delete_local_checkpoint_after_upload(self) -> bool:
        """Whether the reported directory is deleted by default."""
        return self is CheckpointUploadMode.ASYNC


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHandling:
    """A report's handling of its checkpoint's files."""

    upload: Literal["async", "sync"] | None = None
    """Whether it waits for the commit; None for the run's configuration."""

    deletes: bool = False
    """Whether the reported directory is deleted once its files are staged."""

    upload_function: UploadFunction | None = None
    """Called to store the files."""

    name: str | None = None
    """The user's name for the checkpoint, which only `upload_function` gets."""


DEFAULT_HANDLING = CheckpointHandling()


def handling_of(
    *,
    upload: Any,
    mode: Any,
    deletes: Any,
    upload_function: Any,
    name: Any,
) -> CheckpointHandling:
    """Return the handling that a report's arguments request.

    Raises:
        TypeError: an argument has another type.
        ValueError: an argument has an unknown value, or two of them contradict each other.
    """
    if upload not in (None, "async", "sync"):
        raise ValueError(f"upload={upload!r} is unknown: pass 'async' or 'sync'.")
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"checkpoint_dir_name={name!r} is not a name: pass a string.")
    if upload_function is not None and not callable(upload_function):
        raise TypeError(f"checkpoint_upload_fn={upload_function!r} is not a function.")
    chosen = _mode(mode)
    if chosen is not None and upload is not None:
        raise ValueError("report() got both checkpoint_upload_mode and upload: pass one of them.")
    is_stored = chosen is CheckpointUploadMode.NO_UPLOAD
    if is_stored and (deletes or upload_function is not None):
        other = "delete_local_checkpoint_after_upload" if deletes else "checkpoint_upload_fn"
        raise ValueError(
            f"report(checkpoint_upload_mode=NO_UPLOAD) excludes {other}: the checkpoint is where "
            "the training function has written it."
        )
    if chosen is CheckpointUploadMode.ASYNC:
        upload = "async"
    elif chosen is CheckpointUploadMode.SYNC:
        upload = "sync"
    if deletes is None:
        deletes = chosen is not None and chosen.default_delete_local_checkpoint_after_upload()
    return CheckpointHandling(
        upload=upload, deletes=bool(deletes), upload_function=upload_function, name=name
    )


def _mode(given: Any) -> CheckpointUploadMode | None:
    if given is None:
        return None
    try:
        # Accept Ray Train's own enum, too.
        return CheckpointUploadMode(getattr(given, "value", given))
    except ValueError:
        known = ", ".join(each.value for each in CheckpointUploadMode)
        raise ValueError(
            f"checkpoint_upload_mode={given!r} is unknown: pass a polytrain.CheckpointUploadMode "
            f"({known})."
        ) from None


Write = Callable[[Path], Stamps]
"""Writes a checkpoint's files into an empty directory, and returns the stamps of linked ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """The files of a reported checkpoint; all fields are None if the storage already has them."""

    write: Write | None = None
    """Stages the files."""

    directory: Path | None = None
    """Their directory, if it is on this node."""


def files_of(checkpoint: Checkpoint, storage: RunStorage, snapshots: Snapshots) -> CheckpointFiles:
    """Find the files of a reported checkpoint.

    Raises:
        CheckpointError: there is no such directory, or it contains the run's directory.
    """
    if storage.is_next(checkpoint):
        return CheckpointFiles()
    place = Location.of(checkpoint.path, checkpoint.filesystem)
    if not place.is_local:
        return CheckpointFiles(write=partial(_fetch, place))
    directory = Path(place.address)
    if not directory.is_dir():
        raise CheckpointError(
            f"There is no directory {checkpoint.path!r} to make a checkpoint of. "
            "Report it before it is deleted."
        )
    if storage.is_in(directory):
        raise CheckpointError(
            f"{checkpoint.path!r} has this run in it, {storage.location.address!r}: each "
            "checkpoint would hold those before it. Write a checkpoint's files into a directory "
            "of their own."
        )
    return CheckpointFiles(write=partial(snapshots.take, directory), directory=directory)


def directory_to_delete(checkpoint: Checkpoint, storage: RunStorage) -> Path:
    """Return the reported directory, to be deleted once its files are staged.

    Raises:
        ValueError: it is in the run's storage, or contains it.
    """
    place = Location.of(checkpoint.path, checkpoint.filesystem)
    if not place.is_local or storage.shares(Path(place.address)):
        raise ValueError(
            "delete_local_checkpoint_after_upload deletes a directory outside of the storage, "
            f"and {checkpoint.path!r} isn't one: leave it out."
        )
    return Path(place.address)


def expect_checkpoint(checkpoint: Any) -> None:
    """
    Raises:
        TypeError: the reported value is something else.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"report takes a polytrain.Checkpoint, not {_named(checkpoint)}. "
            "Pass polytrain.Checkpoint.from_directory(path)."
        )


def expect_stored(stored: Any) -> Checkpoint:
    """Return the checkpoint that a `checkpoint_upload_fn` has returned.

    Raises:
        TypeError: the value isn't a checkpoint.
    """
    if not isinstance(stored, Checkpoint):
        raise TypeError(
            "checkpoint_upload_fn must return the polytrain.Checkpoint that it has stored; it "
            f"returned {_named(stored)}."
        )
    return stored


def _named(value: Any) -> str:
    kind = type(value)
    # Ray Train's class has the same name.
    is_namesake = kind.__name__ == Checkpoint.__name__
    return with_article(f"{kind.__module__}.{kind.__name__}") if is_namesake else a_type(value)


def _fetch(place: Location, target: Path) -> Stamps:
    """Copy a reported checkpoint from any location into its staging directory."""
    storage = place.open()
    names = [name for name in storage.list("") if name != MANIFEST_NAME]
    if not names:
        raise CheckpointError(f"There are no files in {place.address} to make a checkpoint of.")
    for name in names:
        storage.get(name, target / expect_inside(name))
    return {}


class CheckpointConsistencyMode(Enum):
    """The condition that `get_all_reported_checkpoints` waits for."""

    COMMITTED = "COMMITTED"
    """Wait for the commit of all checkpoints that this rank has reported."""

    VALIDATED = "VALIDATED"
    """Wait also for the end of all requested validations."""


class ReportedCheckpointStatus(Enum):
    """The status of a reported checkpoint."""

    COMMITTED = "COMMITTED"
    """The checkpoint is committed; no validation was requested."""

    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    VALIDATION_FAILED = "VALIDATION_FAILED"


STATUS_BY_VALIDATION = {
    "": ReportedCheckpointStatus.COMMITTED,
    ValidationStatus.PENDING: ReportedCheckpointStatus.PENDING_VALIDATION,
    ValidationStatus.VALIDATED: ReportedCheckpointStatus.VALIDATED,
    ValidationStatus.TIMED_OUT: ReportedCheckpointStatus.VALIDATION_TIMEOUT,
    ValidationStatus.FAILED: ReportedCheckpointStatus.VALIDATION_FAILED,
}
"""`ValidationStatus` of a checkpoint, or "" if no validation was requested → its status."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReportedCheckpoint(ShortRepr):
    """A committed checkpoint of the run."""

    checkpoint: Checkpoint
    metrics: Mapping[str, Any]
    """The metrics of its report and of its validation."""

    status: ReportedCheckpointStatus
