"""The errors of a run's storage, told apart from other system errors by their class."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class StorageError(OSError):
    """A run's storage refused a call, or couldn't be reached; `cause` is the original error."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(*cause.args)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.cause)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Mark errors of the block as the storage's.

    Raises:
        StorageError: in place of any OSError.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error) from error


def expect_size(path: str, size: int, at_most: int) -> None:
    """Check that a file is small enough to be read whole; sizes are in bytes.

    Raises:
        OSError: it is larger than `at_most`.
    """
    if size > at_most:
        what = f"it has more than {at_most:,} bytes, and no file of a run of this name has"
        raise OSError(errno.EFBIG, what, path)
