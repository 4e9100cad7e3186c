"""Makes calls of a storage: many at once, and each again after a temporary error."""

from __future__ import annotations

import errno
import logging
import math
import random
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from polytrain.text.secret_names import without_credentials_in

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_limits: list[Callable[[], float]] = []

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 15.0

_FIRST_WAIT_FOR_ROOM_S = 1.0
_LONGEST_WAIT_FOR_ROOM_S = 60.0
"""The same for calls that would fill a full disk again."""

_NAP_S = 0.5
"""Longest sleep until a waiting call notices that it needn't wait any more."""

PATIENCE_S = 5.0
"""Seconds to wait for a storage after a signal. What sends SIGTERM often kills 30 s later."""

_TRY_S = 1.0
"""How long a call may take without an answer when no patience is left."""

_SLOWEST_BYTES_PER_S = 1e6

_CALLS = 16
"""Maximum concurrent calls."""

_SMALL = 1 << 20
"""Files below this size in bytes are handled concurrently."""

_AT_FIRST_S = 60.0
"""Seconds after a storage's first answer for which a refusal is the user's mistake. Later it may be
a ticket or a key that is about to be renewed, or a disk that is mounted anew."""

_REFUSALS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

_PERMANENT = _REFUSALS | frozenset(
    {
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
_REFUSAL_WORDS = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "INVALID_SIGNATURE",
    "SIGNATURE_DOES_NOT_MATCH",
    "ExpiredToken",
    # Google's
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    # Azure's
    "AuthenticationFailed",
    "AuthorizationFailure",
    "AuthorizationPermissionMismatch",
)
_PERMANENT_WORDS = (*_REFUSAL_WORDS, "NO_SUCH_BUCKET", "No such bucket")


_PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.EIO,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EPIPE,
        errno.ESHUTDOWN,
        errno.ENOTCONN,
        errno.EPROTO,
        errno.ENOLINK,
        errno.ETIME,
        errno.ENOLCK,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOSPC,
        errno.EDQUOT,
        # Of a name server. Its numbers are negative.
        socket.EAI_AGAIN,
    }
)
_OF_SERVICE = re.compile(r"AWS Error|google::cloud::Status|Azure Error")
_STAYING_OF_SERVICE = re.compile(
    r"HTTP status 4(?!08|29)\d\d|NotFound|NOT_FOUND|NoSuch|NO_SUCH|InvalidArgument|INVALID_ARGUMENT"
)
"""What a service says of a request that it refuses. What passes, it says in many ways."""


class TargetError(OSError):
    """The local file to which one of a storage is copied takes nothing: its disk is full, or
    read-only. That is no fault of the storage, and calling it again is of no use."""


class StorageHealth:
    """Whether a storage answers, as this process knows it from all calls. Threads share it.

    Once a call has been retried in vain for as long as it may, no other call is retried either: the
    end of a run would otherwise wait as long for each thing that it still wants to store. Each gets
    one try, and the first that works makes the storage healthy again.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self._worked_at = math.inf
        """Monotonic time of the first answer."""

    def has_worked(self) -> None:
        """Note that the storage has answered."""
        self.has_failed = False
        self._worked_at = min(self._worked_at, time.monotonic())

    def has_lost(self, error: OSError) -> bool:
        """Return whether an error refuses access that this process has had for a while."""
        is_lost = is_refusal(error) and not isinstance(error, TargetError)
        return is_lost and time.monotonic() - self._worked_at > _AT_FIRST_S

    def __reduce__(self) -> tuple[type[StorageHealth], tuple[()]]:
        # Another process has a connection of its own, and finds out for itself.
        return StorageHealth, ()


def retry(
    call: Callable[[], Answer],
    *,
    retry_s: float,
    what: str,
    health: StorageHealth | None = None,
    proves_health: bool = True,
    passes: Callable[[OSError], bool] | None = None,
    is_costly: bool = False,
    limit_s: Callable[[], float] = lambda: math.inf,
) -> Answer:
    """Call until it works, with exponential backoff and jitter.

    Args:
        call: may be called any number of times.
        retry_s: seconds after which the last error is raised.
        what: name of the file or call, for the warning at the first failure.
        health: of the storage that is called.
        proves_health: whether an answer shows that the storage works. The memory of this machine
            also answers reads, and takes what isn't synced.
        passes: returns whether an error is temporary; `is_temporary` by default, and refusals of a
            storage that has worked for a while.
        is_costly: whether each try may fill what little room a full disk has.
        limit_s: another limit in seconds, as for `retries_limited`, for this call alone.

    Raises:
        OSError: it still fails, or the error is permanent.
    """
    health = StorageHealth() if health is None else health
    tries, began = 0, 0.0
    while True:
        try:
            answer = call()
        except OSError as error:
            has_lost = passes is None and health.has_lost(error)
            if not (has_lost or (passes or is_temporary)(error)):
                health.has_failed &= not proves_health
                raise
            if tries == 0:
                if health.has_failed or retry_s <= 0:
                    raise
                began = time.monotonic()
            doublings = 2 ** min(tries, 10)
            wait_s = random.uniform(0, min(_FIRST_WAIT_S * doublings, _LONGEST_WAIT_S))
            if is_costly and is_full(error):
                most_s = min(_FIRST_WAIT_FOR_ROOM_S * doublings, _LONGEST_WAIT_FOR_ROOM_S)
                wait_s = random.uniform(most_s / 2, most_s)
            patience_s = min(retry_s, limit_s(), _limit_s())
            if time.monotonic() - began + wait_s >= patience_s:
                health.has_failed = True
            if health.has_failed:
                raise
            if tries == 0:
                remedy = " Make room there meanwhile." * is_full(error)
                remedy += " Restore the access meanwhile." * has_lost
                logger.warning(
                    "%s. Trying again for up to %g s.%s",
                    without_credentials_in(f"{what}: {error}").rstrip("."),
                    patience_s,
                    remedy,
                )
            _sleep(wait_s, health, began, limit_s)
            tries += 1
        else:
            if proves_health:
                health.has_worked()
            return answer


def _sleep(
    seconds: float, health: StorageHealth, began: float, limit_s: Callable[[], float]
) -> None:
    """Sleep, unless it is known meanwhile that waiting is of no use."""
    while seconds > 0 and not health.has_failed:
        if time.monotonic() - began >= min(limit_s(), _limit_s()):
            break
        time.sleep(min(seconds, _NAP_S))
        seconds -= _NAP_S


def answered(
    call: Callable[[], Answer], *, what: str, health: StorageHealth, size: float = 0
) -> Answer:
    """Make a call; once the limits on retries are spent, don't wait for its answer any more.

    A client of an object storage that is silent waits by itself, for longer than a program may
    that is asked to end. The call is then left to its thread.

    Args:
        call: makes one call.
        what: name of the storage, for the error.
        health: of the storage; a call without an answer makes it fail.
        size: bytes that the call sends, for which it gets more time; infinite if nobody knows.

    Raises:
        TimeoutError: the storage doesn't answer.
    """
    if not _limits:
        return call()
    outcome: Future[Answer] = Future()

    def make() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=make, name="polytrain-storage-call", daemon=True).start()
    began: float | None = None
    while not wait([outcome], _NAP_S / 2).done:
        limit_s = _limit_s()
        if limit_s == math.inf:
            continue
        # A call of a storage that is slow may have been under way for long.
        began = time.monotonic() if began is None else began
        patience_s = _TRY_S if health.has_failed else max(limit_s, _TRY_S)
        if time.monotonic() - began >= patience_s + size / _SLOWEST_BYTES_PER_S:
            health.has_failed = True
            raise TimeoutError(f"{what} doesn't answer, and this program is asked to end")
    return outcome.result()


@contextmanager
def retries_limited(limit_s: Callable[[], float]) -> Iterator[None]:
    """Retry calls in this block, and wait for answers, no longer than a limit allows.

    Args:
        limit_s: the limit in seconds; asked again and again, since it may change.
    """
    _limits.append(limit_s)
    try:
        yield
    finally:
        _limits.remove(limit_s)


def _limit_s() -> float:
    return min((limit_s() for limit_s in _limits), default=math.inf)


def is_temporary(error: BaseException) -> bool:
    """Return whether the same call may work later."""
    permanent = FileNotFoundError | PermissionError | TargetError
    if not isinstance(error, OSError) or isinstance(error, permanent):
        return False
    if error.errno in _PERMANENT:
        return False
    text = str(error)
    return not any(word in text for word in _PERMANENT_WORDS)


def is_refusal(error: OSError) -> bool:
    """Return whether a storage refuses access."""
    # A subclass says that a file is no one of the run's.
    is_refused = type(error) is PermissionError or error.errno in _REFUSALS
    return is_refused or any(word in str(error) for word in _REFUSAL_WORDS)


def is_passing(error: OSError) -> bool:
    """Return whether an error is known to pass: of a disk, a network, or a service that is busy.

    For calls that read what users give: there, any other error is more likely to stay. It may be
    that of a damaged file, of a socket among the files, or of a process with too many open files.
    """
    # Loaded here, as few errors are looked at. These have numbers of their own.
    from ssl import SSLEOFError, SSLZeroReturnError

    if isinstance(error, ConnectionError | TimeoutError | SSLEOFError | SSLZeroReturnError):
        return True
    if error.errno is not None:
        return error.errno in _PASSING
    text = str(error)
    is_of_service = _OF_SERVICE.search(text) and not _STAYING_OF_SERVICE.search(text)
    return bool(is_of_service) and is_temporary(error)


def is_full(error: BaseException | None) -> bool:
    """Return whether a disk or a quota has no room left, which others, or deletions, may make."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_unwritable(error: BaseException | None) -> bool:
    """Return whether a file system takes no files: it is full, or read-only."""
    return is_full(error) or (isinstance(error, OSError) and error.errno == errno.EROFS)


def small_at_once(call: Callable[[Item], Answer], sizes: Mapping[Item, int]) -> dict[Item, Answer]:
    """Return the answers to a call with each file, by file. Only small ones are concurrent.

    A large one alone takes all of a disk's or a network's bandwidth, and training needs the CPUs
    that would hash several.

    Args:
        call: handles one file.
        sizes: file → its bytes.
    """
    small = [file for file, size in sizes.items() if size < _SMALL]
    answers = dict(zip(small, at_once(call, small), strict=True))
    return {file: answers[file] if file in answers else call(file) for file in sizes}


def at_once(call: Callable[[Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
    """Yield the answers to a call with each item, in their order; the first error is raised.

    A single call is made in this thread. Others are made in threads that no program waits for when
    it ends: a storage may never answer.
    """
    items = list(items)
    if len(items) < 2:
        yield from map(call, items)
        return
    answers: deque[Future[Answer]] = deque(Future() for _ in items)
    left = deque(zip(answers, items, strict=True))

    def make_calls() -> None:
        while True:
            try:
                answer, item = left.popleft()
            except IndexError:
                return
            try:
                answer.set_result(call(item))
            except BaseException as error:
                answer.set_exception(error)

    make = partial(threading.Thread, target=make_calls, name="polytrain-storage", daemon=True)
    make().start()
    for _ in range(min(len(items), _CALLS) - 1):
        # The system may refuse some.
        with suppress(RuntimeError):
            make().start()
    try:
        while answers:
            yield answers[0].result()
            answers.popleft()
    finally:
        # After an error, or once nobody wants the rest, only calls under way are waited for.
        unmade: set[Future[Answer]] = set()
        with suppress(IndexError):
            while True:
                unmade.add(left.popleft()[0])
        wait(set(answers) - unmade)
