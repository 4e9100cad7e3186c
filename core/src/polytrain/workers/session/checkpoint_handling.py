"""Derives a report's handling of checkpoint files from Ray Train's arguments or polytrain's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from polytrain.checkpoint.checkpoint import Checkpoint

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


DEFAULT = CheckpointHandling()


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
