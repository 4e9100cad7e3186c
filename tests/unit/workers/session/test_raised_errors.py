"""What is known in the driver of an exception in a worker process."""

from __future__ import annotations

import errno
import os

import pytest

from polytrain.api.backend_checks import raise_if_any
from polytrain.errors import CheckpointError, Failure, FailureKind
from polytrain.events.attempt import Failed
from polytrain.workers.processes.channel import FrameBuffer, pack
from polytrain.workers.session.messages import to_event
from polytrain.workers.session.raised_errors import raised_message
from polytrain_plugins import Problem


def arrived(error: BaseException, pickled: bytes | None = None) -> Failure:
    """The failure of rank 5 that an exception leads to."""
    [received] = FrameBuffer().feed(pack(raised_message(error, pickled)))
    event = to_event(received, attempt=2, rank=5)
    assert isinstance(event, Failed)
    return event.failure


def raised() -> ValueError:
    """An exception that has been raised."""
    try:
        raise ValueError("no such column: é")
    except ValueError as error:
        return error


def test_an_exception_arrives_with_its_traceback() -> None:
    failure = arrived(raised(), b"pickle")
    assert (failure.kind, failure.rank) == (FailureKind.USER_ERROR, 5)
    assert failure.message == "ValueError: no such column: é"
    assert 'raise ValueError("no such column: é")' in failure.traceback
    assert failure.error == b"pickle"


def caused(number: int, kind: type[Exception]) -> Exception:
    """An exception that was raised because of an error of the system."""
    try:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise kind("no") from error
    except kind as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (caused(errno.ENOSPC, CheckpointError), FailureKind.STORAGE),
        (caused(errno.EDQUOT, CheckpointError), FailureKind.STORAGE),
        (caused(errno.EROFS, CheckpointError), FailureKind.STORAGE),
        (caused(errno.EACCES, CheckpointError), FailureKind.USER_ERROR),
        (CheckpointError("no such directory"), FailureKind.USER_ERROR),
        (caused(errno.ENOSPC, RuntimeError), FailureKind.USER_ERROR),
        (OSError(errno.ENOSPC, "No space left on device"), FailureKind.USER_ERROR),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
    ],
)
def test_a_disk_that_takes_no_checkpoint_is_no_error_of_the_user(
    error: Exception, kind: FailureKind
) -> None:
    failure = arrived(error)
    assert failure.kind is kind


def test_a_full_disk_is_known_when_a_library_raises_it_again() -> None:
    """Keras does so with what its callbacks raise."""
    caught = caused(errno.ENOSPC, CheckpointError)
    try:
        try:
            raise caught
        except CheckpointError as error:
            raise error from None
    except CheckpointError as error:
        failure = arrived(error)
    assert failure.kind is FailureKind.STORAGE


def refused(values: object) -> Exception:
    try:
        raise_if_any(values)  # type: ignore[arg-type]  # wrong on purpose
    except Exception as error:
        return error
    raise AssertionError


def test_the_line_that_is_refused_is_the_last_one_of_a_traceback() -> None:
    problem = Problem(field="a", what="it is wrong", remedy="Mend it")
    failure = arrived(refused([problem]))
    assert "in raise_if_any" not in failure.traceback
    assert failure.traceback.count("raise_if_any(values)") == 1


def test_a_mistake_of_ours_keeps_its_own_line() -> None:
    failure = arrived(refused(5))
    assert "in raise_if_any" in failure.traceback


def test_an_exception_about_an_undecodable_file_name_arrives() -> None:
    """Such a name holds lone surrogates, which UTF-8 can't hold: losing the error is no option."""
    failure = arrived(FileNotFoundError("no file 'caf\udce9.csv'"))
    assert failure.message.startswith("FileNotFoundError: no file 'caf")
