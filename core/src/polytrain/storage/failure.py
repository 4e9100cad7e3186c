"""The errors of a run's storage, as a class of their own among those of the system."""

from __future__ import annotations

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
