"""Leases: at most one driver works on a run at a time.

Leases are numbered files. The holder of the highest token is the owner. Each token is given once,
because its file is created exclusively. The owner counts heartbeats in its file. A lease ends when
its owner releases it, when the owner's process is known to be dead, or when the heartbeats stop. A
driver that was mistaken for dead finds a higher token before its next commit.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

from polytrain.errors import DamagedFileError, RunOwnedError
from polytrain.linux.clock import Clock
from polytrain.linux.processes import started_at
from polytrain.record.history import JOURNAL, last_token
from polytrain.storage.protocol import Storage
from polytrain.storage.typed_json import Count, Duration, Seconds, Within, read_json
from polytrain.text.described import shown_name

logger = logging.getLogger(__name__)

_LEASES = "leases"
_TOKEN = re.compile("[0-9]{6,18}")
_BEAT_EVERY_S = 5.0
_LARGEST = 1 << 16
"""Maximum bytes of a lease file."""

_DEAD_AFTER_S = 30.0
"""Seconds without a heartbeat, on the waiting driver's clock."""

RUN = ("The run", "Wait for it to end, or give RunConfig another name")
"""The subject of a lease, and the remedy while another process holds it, for messages."""

_UNKNOWN = ""
"""The nonce of a lease that can't be read."""

_held: set[str] = set()
"""Nonces of the leases that this process holds or wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """The holder of a lease."""

    host: str
    pid: Annotated[int, Within(0, 2**31 - 1)]
    process_started: Count
    """Start time in ticks since boot: unlike the time of day, it isn't corrected."""

    nonce: str
    """Unique to this lease."""

    machine: str
    """Identifies the machine, its boot and its process namespace; empty if unknown."""

    since: str
    root: str = ""
    """The directory or address of what it leases."""

    beats: Count = 0
    beat_at: Seconds = 0.0
    """Time of the last heartbeat, by the driver's `Clock`."""

    beat_monotonic: Seconds = 0.0
    """Time of the last heartbeat, by its machine's monotonic clock."""

    ahead_s: Duration = 0.0
    """`Clock.ahead_s` at that time."""

    drives: bool = True
    """Whether it trains, and doesn't only keep drivers away."""

    released: bool = False

    @classmethod
    def this_process(cls, clock: Clock, *, root: str, drives: bool) -> _Owner:
        owner = cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started=started_at(os.getpid()) or 0,
            nonce=secrets.token_hex(8),
            machine=_this_machine(),
            since=datetime.fromtimestamp(clock.now(), UTC).isoformat(timespec="seconds"),
            root=root,
            drives=drives,
        )
        return owner.seen(clock)

    def seen(self, clock: Clock) -> _Owner:
        """Return it with a heartbeat now."""
        return replace(
            self,
            beat_at=clock.now(),
            beat_monotonic=time.monotonic(),
            ahead_s=clock.ahead_s(),
        )

    def lives(self) -> bool | None:
        """Return whether its process still holds the lease; None if this machine can't know."""
        if not self.machine or self.machine != _this_machine():
            return None
        if self.pid == os.getpid():
            # A lease that isn't held has ended, even if its release failed.
            return self.nonce in _held
        try:
            return started_at(self.pid) == self.process_started
        except PermissionError:
            return None

    def __str__(self) -> str:
        host, since = map(shown_name, (self.host, self.since))
        return f"process {self.pid} on {host}, since {since}"


class Lease:
    """This driver's lease on a run."""

    def __init__(
        self,
        storage: Storage,
        no_retry: Storage,
        token: int,
        path: str,
        owner: _Owner,
        *,
        subject: str,
        clock: Clock,
    ) -> None:
        self.token = token
        self.clock = clock
        """The clock for everything that this driver records."""

        self._subject = subject
        self._storage = storage
        self._no_retry = no_retry
        self.path = path
        """Path of the lease file in the run's storage."""

        self._owner = owner
        self.lost: RunOwnedError | None = None
        """The new owner, once this driver has found it."""

        self.is_gone = False
        """Whether the run's directory was renamed or deleted: nothing is written there again."""

        self._is_late = False
        """Whether the last heartbeat couldn't be written."""

        self._when_lost: Callable[[], None] | None = None
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="polytrain-lease", daemon=True)
        self._beating.start()

    def notify(self, when_lost: Callable[[], None]) -> None:
        """Call a function, on any thread, when another driver has taken the run over."""
        self._when_lost = when_lost

    def check(self) -> None:
        """Check that this driver still holds the lease.

        Raises:
            RunOwnedError: another driver holds it, or the run's directory is another one now.
            OSError: the storage failed.
        """
        self._check(self._storage)

    def _check(self, storage: Storage) -> None:
        token, owners = _owners(storage)
        nonces = {owner.nonce for owner in owners}
        # In a directory that was deleted and made anew, another driver may have the same token.
        is_anothers = bool(nonces) and nonces.isdisjoint({self._owner.nonce, _UNKNOWN})
        if token < self.token or (token == self.token and is_anothers):
            self.is_gone = True
            self._lose(
                f"{storage.root} isn't the directory any more in which {self._subject.lower()} "
                "began: it was renamed or deleted meanwhile. Nothing more is committed there. Give "
                "the directory its name back, remove what stands there now, and call fit() again."
            )
        if token > self.token:
            owner = _holder_among(owners)
            self._lose(
                f"{self._subject} in {storage.root} was taken over by {owner or 'another driver'}: "
                f"this process gave no sign of life for {_DEAD_AFTER_S:g} s."
            )

    def _lose(self, message: str) -> NoReturn:
        self.lost = RunOwnedError(message)
        if self._when_lost is not None:
            self._when_lost()
        raise self.lost

    def release(self) -> None:
        """Release the lease."""
        self._ended.set()
        # No time limit: the thread ends at once, or with its storage request, which has a limit.
        self._beating.join()
        self._when_lost = None
        if not self.is_gone:
            with suppress(RunOwnedError):
                self._write(replace(self._owner, released=True))

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_EVERY_S):
            beats = self._owner.beats + 1
            self._owner = replace(self._owner, beats=beats).seen(self.clock)
            try:
                self._write(self._owner)
            except RunOwnedError:
                return

    def _write(self, owner: _Owner) -> None:
        """Write the lease, unless it is lost; only that raises."""
        content = json.dumps(asdict(owner)).encode()
        lease = f"The lease {self.path} in {self._no_retry.root}"
        try:
            self._no_retry.replace(self.path, content, check=lambda: self._check(self._no_retry))
        except RunOwnedError:
            raise
        except Exception as error:  # a storage's client may raise anything
            # Another driver that finds the old file waits until the lease expires.
            if not self._is_late:
                logger.warning("%s can't be renewed now: %s", lease, error)
            self._is_late = True
        else:
            if self._is_late:
                logger.warning("%s is renewed again.", lease)
            self._is_late = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The driver that holds a run, or held it last."""

    description: str
    """Its process, its host and its start time, for people."""

    token: int
    """The fencing token of its lease."""

    root: str
    """The directory or address of the run that it works on; empty if unknown."""

    is_held: bool | None
    """Whether it still holds the run; None if this machine can't know."""

    beat_at: float = 0.0
    """Time of its last heartbeat, on the clock of its journal; 0 if unknown."""

    beat_monotonic: float = 0.0
    """Time of its last heartbeat, on its machine's monotonic clock."""

    ahead_s: float = 0.0
    """Seconds by which its machine's clock was ahead of its journal's."""

    def now(self) -> float:
        """Return the time on its journal's clock. If it is on another machine, this relies on the
        two machines' clocks."""
        if self.is_held:
            # It lives on this machine, so the monotonic clock hasn't restarted.
            return self.beat_at + time.monotonic() - self.beat_monotonic
        return time.time() - self.ahead_s


def holder(storage: Storage) -> Holder | None:
    """Return the driver that holds the run in a storage, or held it last; None if there is none.

    Raises:
        OSError: the storage failed.
    """
    newest, owner = _newest(storage)
    token = newest
    while owner is not None and not owner.drives:
        token, owner = _newest(storage, below=token)
    if owner is None:
        return None
    is_held = False if owner.released or token < newest else owner.lives()
    return Holder(
        description=str(owner),
        token=token,
        root=owner.root,
        is_held=is_held,
        beat_at=owner.beat_at,
        beat_monotonic=owner.beat_monotonic,
        ahead_s=owner.ahead_s,
    )


class HolderWatch:
    """Watches whether the driver that held a run when it was read holds it still."""

    def __init__(self, watched: Holder | None) -> None:
        self._watched = watched
        self._beat_since = time.monotonic()

    def is_held(self, storage: Storage) -> bool:
        """Return whether it does; as long as it does, nobody can resume the run.

        Where this machine can't know, the lease ends when the heartbeats stop, as for a driver that
        wants it.

        Raises:
            OSError: the storage failed.
        """
        owner = holder(storage)
        if owner is None or self._watched is None or owner.token != self._watched.token:
            return False
        if owner.is_held is not None:
            return owner.is_held
        if owner.beat_monotonic != self._watched.beat_monotonic:
            self._watched, self._beat_since = owner, time.monotonic()
        return time.monotonic() - self._beat_since < _DEAD_AFTER_S


@contextmanager
def leased(
    storage: Storage,
    no_retry: Storage,
    *,
    wording: tuple[str, str] = RUN,
    clock: Clock | None = None,
    drives: bool = True,
) -> Iterator[Lease]:
    """Acquire and hold the lease on a run, or on an output of predictions.

    Waits if it is unknown whether the current owner is alive.

    Args:
        no_retry: the same storage without retries, for heartbeats: a late one is useless.
        wording: the subject and the remedy for messages.
        clock: the driver's clock, if it has one already.
        drives: whether this process trains, and doesn't only keep drivers away.

    Raises:
        RunOwnedError: another driver works on the run.
        OSError: the storage failed.
    """
    clock = Clock() if clock is None else clock
    owner = _Owner.this_process(clock, root=storage.root, drives=drives)
    _held.add(owner.nonce)
    try:
        token, path = _taken(storage, owner, wording)
        lease = Lease(storage, no_retry, token, path, owner, subject=wording[0], clock=clock)
        try:
            yield lease
        finally:
            lease.release()
    finally:
        _held.discard(owner.nonce)


def _taken(storage: Storage, owner: _Owner, wording: tuple[str, str]) -> tuple[int, str]:
    """Return the number and path of the new lease."""
    watch = _Watch(storage.root, *wording)
    while True:
        token, other = _newest(storage)
        if token == 0:
            # Whoever deletes leases leaves what was written under them, which has to stay older.
            token = last_token(storage.read_log(JOURNAL))
            is_free = token == 0 or _newest(storage) == (0, None)
        else:
            # A token without an owner: its owner has just given way to a concurrent driver. Look
            # again, so as not to overtake that one.
            is_free = other is not None and watch.finds_over(token, other)
        if is_free:
            path = _create(storage, token + 1, owner)
            if path is not None:
                return token + 1, path
        threading.Event().wait(watch.pause_s)


class _Watch:
    """Watches the heartbeats of an owner."""

    def __init__(self, root: str, subject: str, remedy: str) -> None:
        self.pause_s = 0.0
        """Seconds until the next check."""

        self._root = root
        self._of = f"{subject} in {root}"
        self._remedy = remedy
        self._watched: tuple[int, int] | None = None
        self._waited = 0.0

    def finds_over(self, token: int, owner: _Owner) -> bool:
        """Return whether a lease has ended.

        Raises:
            RunOwnedError: its owner is alive.
        """
        self.pause_s = random.uniform(0.1, 0.5)
        lives = owner.lives()
        if owner.released or lives is False:
            return True
        if owner.root not in ("", self._root):
            # This may be a copy of its run, or another path to it: then heartbeats come.
            lives = None
        is_watched = self._watched is not None and self._watched[0] == token
        if lives or (is_watched and self._watched != (token, owner.beats)):
            raise RunOwnedError(f"{self._of} is being worked on by {owner}. {self._remedy}.")
        if not is_watched:
            self._watched, self._waited = (token, owner.beats), 0.0
            logger.warning(
                "%s belongs to %s. Waiting up to %g s for a sign of life of it.",
                self._of,
                owner,
                _DEAD_AFTER_S,
            )
        self._waited += self.pause_s
        return self._waited >= _DEAD_AFTER_S


def _create(storage: Storage, token: int, owner: _Owner) -> str | None:
    return storage.create(f"{_LEASES}/{token:06d}", json.dumps(asdict(owner)).encode())


def _newest(storage: Storage, *, below: int = sys.maxsize) -> tuple[int, _Owner | None]:
    """Return the highest token, below a limit, and its holder; 0 and None if there is no lease."""
    token, owners = _owners(storage, below=below)
    return token, _holder_among(owners)


def _holder_among(owners: Sequence[_Owner]) -> _Owner | None:
    """Return the holder of a token, of which others may be giving way."""
    return min(owners, key=lambda owner: owner.released, default=None)


def _owners(storage: Storage, *, below: int = sys.maxsize) -> tuple[int, list[_Owner]]:
    """Return the highest token, below a limit, and its owners.

    If several drivers try at once, there are several: all but one give way.
    """
    by_number: dict[int, list[str]] = {}
    for path in storage.list(_LEASES):
        token = Path(path).name.partition(".")[0]
        # NFS leaves files of its own beside files that are replaced while they are read.
        if _TOKEN.fullmatch(token) and int(token) < below:
            by_number.setdefault(int(token), []).append(path)
    if not by_number:
        return 0, []
    newest = max(by_number)
    return newest, [owner for path in sorted(by_number[newest]) if (owner := _read(storage, path))]


def _read(storage: Storage, path: str) -> _Owner | None:
    try:
        return read_json(_Owner, storage.read(path, at_most=_LARGEST), file=path)
    except FileNotFoundError:
        return None
    except DamagedFileError:
        # The file is incomplete; its writer may still be alive.
        return _Owner(
            host="an unknown host", pid=0, process_started=0, nonce=_UNKNOWN, machine="", since="?"
        )


def _this_machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
