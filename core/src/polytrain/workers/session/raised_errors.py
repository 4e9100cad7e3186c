"""The message of an exception: its text, the user's part of its traceback, and its kind."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from types import TracebackType

from polytrain.data_errors import DataError
from polytrain.errors import BadDataError, CheckpointError, FailureKind, ReplicasDifferError
from polytrain.storage.calls import is_unwritable
from polytrain.text.secret_names import without_credentials_in
from polytrain.workers.processes.channel import Message

_PROCESSES = ("polytrain.workers.session.worker_process", "polytrain.validation.validator")
"""Modules that call the user's functions in processes of their own."""

_PACKAGES = (
    "polytrain",
    "polytrain_plugins",
    "polytrain_torch",
    "polytrain_xgboost",
    "polytrain_lightgbm",
    "polytrain_tf",
)


def raised_message(
    error: BaseException, pickled: bytes | None, *, connection_lost: bool = False
) -> Message:
    """Return the message of an exception.

    Args:
        pickled: the same, pickled; None if that isn't possible.
        connection_lost: whether it says that the connection to another rank broke.
    """
    # Omit the traceback for problems of the data: it doesn't help.
    refused = isinstance(error, BadDataError)
    text = (
        ""
        if refused
        else "".join(
            traceback.format_exception(type(error), error, _of_training(error.__traceback__))
        )
    )
    kind = _kind_of(error, connection_lost=connection_lost)
    shown = map(without_credentials_in, (_summary(error), text))
    return ["raised", *shown, pickled, kind.value]


def _summary(error: BaseException) -> str:
    if isinstance(error, DataError):
        # Use only the message: it starts with the error of the user's code.
        return str(error)
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return f"SystemExit: exited with the code {error.code}"
    return "".join(traceback.format_exception_only(error)).strip()


def _of_training(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of the process itself.

    If a function that the user has called refuses its arguments, the user's line is the last one.
    """
    entries = list(_entries(frames))
    while entries and _module(entries[0]) in _PROCESSES:
        del entries[0]
    if entries and _is_raised_here(entries[-1]):
        of_others = [place for place, entry in enumerate(entries) if not _is_ours(entry)]
        entries = entries[: of_others[-1] + 1] if of_others else entries
    shown = None
    for entry in reversed(entries):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown or frames


def _entries(frames: TracebackType | None) -> Iterator[TracebackType]:
    while frames is not None:
        yield frames
        frames = frames.tb_next


def _module(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__"))


def _is_ours(entry: TracebackType) -> bool:
    return _module(entry).partition(".")[0] in _PACKAGES


def _is_raised_here(entry: TracebackType) -> bool:
    """Return whether the line is a `raise` statement, and so no mistake of its own."""
    line = linecache.getline(entry.tb_frame.f_code.co_filename, entry.tb_lineno)
    return line.lstrip().startswith("raise ")


_KINDS_OF_REPLICAS = {
    True: FailureKind.REPLICAS_DIFFER,
    # It can't continue with the rank that differs, which is the cause.
    False: FailureKind.CONNECTION_LOST,
    None: FailureKind.CHECKPOINT_MISMATCH,
}


def _kind_of(error: BaseException, *, connection_lost: bool) -> FailureKind:
    # Frameworks have their own error classes for a device's memory.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return FailureKind.OUT_OF_MEMORY
    # The user's own files may be on a full disk, too: that is an error of the user's code.
    # Keras raises again what its callbacks have raised, `from None`: then the context is left.
    if isinstance(error, CheckpointError) and is_unwritable(error.__cause__ or error.__context__):
        return FailureKind.STORAGE
    if isinstance(error, ReplicasDifferError):
        return _KINDS_OF_REPLICAS[error.is_here]
    return FailureKind.CONNECTION_LOST if connection_lost else FailureKind.USER_ERROR
