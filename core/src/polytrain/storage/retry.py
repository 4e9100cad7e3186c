"""Retries of storage calls: temporary errors are retried, permanent ones aren't."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import tenacity

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_urgent: list[Callable[[], bool]] = []

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 15.0

_PERMANENT = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.EFBIG,
        errno.EINVAL,
    }
)

# Arrow's object storage clients raise the services' messages without error numbers.
_PERMANENT_WORDS = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "INVALID_SIGNATURE",
    "SIGNATURE_DOES_NOT_MATCH",
    "NO_SUCH_BUCKET",
    "No such bucket",
)


def retry(call: Callable[[], Answer], *, retry_s: float, what: str) -> Answer:
    """Call until it works, with exponential backoff and jitter.

    Args:
        call: may be called any number of times.
        retry_s: seconds after which the last error is raised.
        what: name of the file or call, for the warning at the first failure.

    Raises:
        OSError: it still fails, or the error is permanent.
    """
    try:
        return call()
    except OSError as error:
        if not is_temporary(error):
            raise
        first = [error]
    # Import it late: that takes a while, and most runs need no retry.
    import tenacity

    def call_again() -> Answer:
        if first:
            # Let tenacity handle the first failure like any other.
            raise first.pop()
        return call()

    def warn(state: tenacity.RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            logger.warning(
                "%s: %s. Trying again for up to %g s.", what, state.outcome.exception(), retry_s
            )

    is_late = tenacity.stop_before_delay(retry_s)
    repeated = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_temporary),
        wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
        stop=lambda state: _is_urgent() or is_late(state),
        before_sleep=warn,
        reraise=True,
    )
    return repeated(call_again)


@contextmanager
def no_retries_once(is_urgent: Callable[[], bool]) -> Iterator[None]:
    """Retry nothing in this block once the program wants to end.

    Args:
        is_urgent: whether the program wants to end.
    """
    _urgent.append(is_urgent)
    try:
        yield
    finally:
        _urgent.remove(is_urgent)


def _is_urgent() -> bool:
    return any(is_urgent() for is_urgent in _urgent)


def is_temporary(error: BaseException) -> bool:
    """Return whether the same call may work later."""
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError | PermissionError):
        return False
    if error.errno in _PERMANENT:
        return False
    text = str(error)
    return not any(word in text for word in _PERMANENT_WORDS)
