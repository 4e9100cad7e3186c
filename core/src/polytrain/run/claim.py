"""Whose run it is: at most one driver works on a run at a time.

Claims are numbered files. The owner is who holds the highest number; a number is given once,
because its file is created exclusively. The owner counts beats in its file. A claim is over when
its owner says so, when the owner's process is known to be dead, or when its beats have stopped for
a while. Whoever was taken for dead finds a higher number before it commits anything more.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from polytrain.errors import RunOwnedError
from polytrain.storage.protocol import Storage

logger = logging.getLogger(__name__)

_CLAIMS = "claims"
_BEAT_EVERY_S = 5.0
_DEAD_AFTER_S = 30.0
"""Seconds without a beat, as the waiting driver's clock has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """What a claim says of its holder."""

    host: str
    pid: int
    process_started: float
    machine: str
    """Tells machines, their boots and their process namespaces apart; empty if nothing does."""

    since: str
    beats: int = 0
    released: bool = False

    @classmethod
    def this_process(cls) -> _Owner:
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started=psutil.Process().create_time(),
            machine=_this_machine(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def is_known_to_be_dead(self) -> bool:
        """Whether its process was on this machine, and is no more."""
        if not self.machine or self.machine != _this_machine():
            return False
        try:
            process = psutil.Process(self.pid)
            # Nobody may have asked for its exit code yet.
            ended = process.status() == psutil.STATUS_ZOMBIE
            return bool(ended or process.create_time() != self.process_started)
        except psutil.NoSuchProcess:
            return True

    def is_known_to_live(self) -> bool:
        """Whether its process is on this machine."""
        return (
            bool(self.machine)
            and self.machine == _this_machine()
            and not (self.is_known_to_be_dead())
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Claim:
    """This driver's claim on a run, while it is held."""

    def __init__(self, storage: Storage, number: int, path: str, owner: _Owner) -> None:
        self.number = number
        self._storage = storage
        self._path = path
        self._owner = owner
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="polytrain-claim", daemon=True)
        self._beating.start()

    def check(self) -> None:
        """Make sure that nobody else has taken the run.

        Raises:
            RunOwnedError: somebody has.
            OSError: the storage can't be asked.
        """
        number, owner = _newest(self._storage)
        if number > self.number:
            raise RunOwnedError(
                f"The run in {self._storage.root} was taken over by {owner}: this process gave no "
                f"sign of life for {_DEAD_AFTER_S:g} s."
            )

    def release(self) -> None:
        """Give the run up."""
        self._ended.set()
        self._beating.join()
        self._write(replace(self._owner, released=True))

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_EVERY_S):
            self._owner = replace(self._owner, beats=self._owner.beats + 1)
            self._write(self._owner)

    def _write(self, owner: _Owner) -> None:
        try:
            self._storage.write(self._path, json.dumps(asdict(owner)).encode())
        except OSError as error:
            # Whoever finds it unchanged waits until it is over.
            logger.warning("The claim %s can't be renewed: %s", self._path, error)


@contextmanager
def claimed(storage: Storage, impatient: Storage) -> Iterator[Claim]:
    """Hold a run. Waits for an owner of whom nobody knows whether it is still alive.

    Args:
        storage: the run's.
        impatient: the same, but its calls aren't repeated when they fail.

    Raises:
        RunOwnedError: another driver works on it.
        OSError: the storage refused.
    """
    owner = _Owner.this_process()
    watched: tuple[int, _Owner] | None = None
    waited = 0.0
    while True:
        number, other = _newest(storage)
        if other is None or other.released or other.is_known_to_be_dead():
            path = _create(storage, number + 1, owner)
            if path is not None:
                break
            pause = random.uniform(0.1, 0.5)
        else:
            if other.is_known_to_live() or (
                watched is not None and watched[0] == number and watched[1].beats != other.beats
            ):
                raise RunOwnedError(
                    f"The run in {storage.root} is being worked on by {other}. Wait for it to end, "
                    "or give RunConfig another name."
                )
            if watched is None or watched[0] != number:
                watched, waited = (number, other), 0.0
                logger.warning(
                    "The run in %s belongs to %s. Waiting up to %g s for a sign of life of it.",
                    storage.root,
                    other,
                    _DEAD_AFTER_S,
                )
            if waited >= _DEAD_AFTER_S:
                path = _create(storage, number + 1, owner)
                if path is not None:
                    break
            pause = 1.0
            waited += pause
        threading.Event().wait(pause)
    claim = Claim(impatient, number + 1, path, owner)
    try:
        yield claim
    finally:
        claim.release()


def _create(storage: Storage, number: int, owner: _Owner) -> str | None:
    return storage.create(f"{_CLAIMS}/{number:06d}", json.dumps(asdict(owner)).encode())


def _newest(storage: Storage) -> tuple[int, _Owner | None]:
    """The highest number, and who holds it; 0 and None if there is no claim."""
    by_number: dict[int, list[str]] = {}
    for path in storage.list(_CLAIMS):
        by_number.setdefault(int(Path(path).name.partition(".")[0]), []).append(path)
    if not by_number:
        return 0, None
    number = max(by_number)
    # Of several, which tried at once, all but one are about to give way.
    owners = [owner for path in sorted(by_number[number]) if (owner := _read(storage, path))]
    living = [owner for owner in owners if not owner.released]
    return number, next(iter(living or owners), None)


def _read(storage: Storage, path: str) -> _Owner | None:
    try:
        return _Owner(**json.loads(storage.read(path)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        # Torn. Whoever wrote it may be alive all the same.
        return _Owner(host="an unknown host", pid=0, process_started=0, machine="", since="?")


def _this_machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
