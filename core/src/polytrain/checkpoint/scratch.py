"""The node's own disk: snapshots on their way to the storage, and copies of what lies far away.

Everything is in one directory per run and node, below the system's directory for temporary files.
Each process that uses it holds a lock on it, which ends with the process however that ends: what
nobody holds is removed by the next run on the node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK = "in-use"


class Scratch:
    """A process's hold on the run's directory on this node."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def hold(cls, token: str) -> Scratch:
        """Hold the directory of a run, and remove those that nobody holds any more.

        Args:
            token: names the run on every node.
        """
        home = Path(tempfile.gettempdir(), f"polytrain-{os.getuid()}")
        path = home / token
        lock = _locked(path)
        for other in home.iterdir():
            if other != path:
                _remove_unless_held(other)
        return cls(path, lock)

    def release(self) -> None:
        """Let go; the last one to do so removes the directory."""
        os.close(self._lock)
        _remove_unless_held(self.path)
        with contextlib.suppress(OSError):
            # Other runs have theirs in it, or it is gone.
            self.path.parent.rmdir()

    @contextlib.contextmanager
    def one_at_a_time(self, name: str) -> Iterator[None]:
        """Let no other process of this node do the thing of this name meanwhile."""
        with (self.path / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def directory_of_attempt(scratch: Path, *, rank: int, attempt: int) -> Path:
    """A directory for a rank's attempt; those of its earlier attempts are removed.

    Args:
        scratch: the run's directory on the node.
        rank: whose it is.
        attempt: the attempt's.
    """
    path = scratch / f"rank-{rank}" / str(attempt)
    if not path.exists():
        shutil.rmtree(path.parent, ignore_errors=True)
        path.mkdir(parents=True)
    return path


def _locked(directory: Path) -> int:
    while True:
        # Another run that ends removes the home of all if it is empty.
        _make_own(directory.parent)
        with contextlib.suppress(FileNotFoundError):
            _make_own(directory)
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        # Whoever tidied up may have taken the directory away between the two calls.
        if _is_lock_of(lock, directory):
            return lock
        os.close(lock)


def _make_own(directory: Path) -> None:
    # Not `exist_ok`: that asks whether it is a directory after somebody has tidied it away.
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    with contextlib.suppress(FileNotFoundError):
        if directory.stat().st_uid != os.getuid():
            raise PermissionError(
                f"{directory} belongs to another user: set TMPDIR to another directory."
            )


def _remove_unless_held(directory: Path) -> None:
    try:
        # Made anew if whoever was about to hold the directory, or to remove it, has died.
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # Somebody has just removed it.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_lock_of(lock, directory):
            # Out of the way at once: whoever makes a new one meanwhile keeps what is in it.
            doomed = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}")
            directory.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


def _is_lock_of(lock: int, directory: Path) -> bool:
    """Whether the directory of this name is still the one that the lock was opened in."""
    try:
        return os.path.samestat(os.fstat(lock), (directory / _LOCK).stat())
    except FileNotFoundError:
        return False
