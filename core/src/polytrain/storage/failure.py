"""The errors of a run's storage, as a class of their own among those of the system."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class StorageError(OSError):
    """A run's storage refused, or couldn't be reached; the cause is what it raised."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(*cause.args)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.cause)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Say of errors inside that they are the storage's.

    Raises:
        StorageError: in the place of any OSError.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error) from error


def expect_size(path: str, size: int, at_most: int) -> None:
    """Check that a file may be read whole.

    Raises:
        OSError: it is larger than that.
    """
    if size > at_most:
        what = f"it has more than {at_most:,} bytes, and no file of a run of this name has"
        raise OSError(errno.EFBIG, what, path)
