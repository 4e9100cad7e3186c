"""The run's directory on a node's disk: staged snapshots, and local copies of checkpoints.

There is one directory per run and node, below the system's directory for temporary files. Each
process that uses it holds a lock, which ends with the process. The next run on the node removes
directories that no process has locked. Other users can create files in the system's directory, so a
name alone proves nothing: the directory must belong to this user, with mode 0700, and only
directories that contain the lock file are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import inspect
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polytrain.linux.processes import OwnDescriptor

_LOCK = "in-use"
"""The lock file in a run's directory. It also marks the directory as a run's."""

OF_RUN = "run-"
"""Prefix of the names of runs' directories."""


class Scratch:
    """The run's directory on this node, locked by this process."""

    def __init__(self, path: Path, lock: OwnDescriptor) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def hold(cls, token: str) -> Scratch:
        """Create and lock the directory of a run, and remove directories that are not locked.

        Args:
            token: identifies the run on every node.
        """
        home = Path(tempfile.gettempdir(), f"polytrain-{os.getuid()}")
        path = home / f"{OF_RUN}{token}"
        lock = _locked(path)
        for other in home.iterdir():
            if other != path:
                _remove_unless_held(other)
        return cls(path, lock)

    def hold_again(self) -> None:
        """Create and lock the directory anew if it was deleted, or its lock: systems delete what
        is old in their directory for temporary files."""
        if not _is_lock_of(self._lock.fileno(), self.path):
            old, self._lock = self._lock, _locked(self.path)
            old.close()

    def release(self) -> None:
        """Release the lock. The last process to do so removes the directory."""
        with contextlib.suppress(OSError):
            # Without its lock file it would stay.
            self.hold_again()
        self._lock.close()
        _remove_unless_held(self.path)
        with contextlib.suppress(OSError):
            # It fails if other runs' directories are in it, or if it is gone.
            self.path.parent.rmdir()

    @contextlib.contextmanager
    def one_at_a_time(self, name: str) -> Iterator[None]:
        """Hold a lock of this name against other processes on this node."""
        with contextlib.closing(_opened(self.path / f"{name}.lock")) as lock:
            # No time limit: the holder may be copying a checkpoint of any size. An agent that waits
            # here still answers calls, and ends its attempt on request.
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
            yield


def directory_of_attempt(scratch: Path, *, rank: int, attempt: int) -> Path:
    """Create a directory for a rank's attempt, and remove those of its earlier attempts."""
    path = scratch / f"rank-{rank}" / str(attempt)
    if not path.exists():
        shutil.rmtree(path.parent, ignore_errors=True)
        make_again(scratch)
        path.mkdir(parents=True)
    return path


def make_again(directory: Path) -> None:
    """Create a run's directory, and those above, if the system has deleted them as old."""
    if not directory.exists():
        make_again(directory.parent)
        _make_own(directory)


@contextlib.contextmanager
def temporary_directories_in(scratch: Path, *, rank: int, attempt: int) -> Iterator[None]:
    """Let `tempfile.TemporaryDirectory` put its directories into that of a rank's attempt.

    A worker process is killed wherever it is, which is often in a report of a checkpoint, inside
    the `with` block of a temporary directory: nobody would remove that. TMPDIR stays as it is, for
    caches, sockets and files that are found there by their names; so does a directory that the
    function chooses, as an argument or for all of `tempfile`.
    """
    try:
        # Now, because later several threads, and forked children, may need it at once.
        own = directory_of_attempt(scratch, rank=rank, attempt=attempt)
    except OSError:
        # Whoever has to write there says what is wrong with the disk.
        yield
        return
    create = tempfile.TemporaryDirectory.__init__
    signature = inspect.signature(create)

    @functools.wraps(create)
    def create_in_own(*args: Any, **named: Any) -> None:
        bound = signature.bind(*args, **named)
        given = bound.arguments
        is_free = given.get("dir") is None and not isinstance(
            given.get("prefix") or given.get("suffix"), bytes
        )
        is_usual = Path(tempfile.gettempdir()) == scratch.parent.parent
        # A child of the worker process may outlive the attempt.
        if is_free and is_usual and own.is_dir():
            given["dir"] = str(own)
        create(*bound.args, **bound.kwargs)

    # Not another class: modules have imported this one by its name.
    of_all: Any = tempfile.TemporaryDirectory
    of_all.__init__ = create_in_own
    try:
        yield
    finally:
        of_all.__init__ = create


def _opened(file: Path) -> OwnDescriptor:
    # A forked child that outlives this process would keep the lock.
    return OwnDescriptor(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _locked(directory: Path) -> OwnDescriptor:
    while True:
        # Another run that ends may remove the parent directory if it is empty.
        _make_own(directory.parent)
        with contextlib.suppress(FileNotFoundError):
            _make_own(directory)
        try:
            lock = _opened(directory / _LOCK)
        except FileNotFoundError:
            continue
        try:
            # No time limit: an exclusive holder only renames a directory, or releases it at once.
            fcntl.flock(lock.fileno(), fcntl.LOCK_SH)
        except OSError as error:
            lock.close()
            # Some network file systems have no locks.
            raise OSError(
                f"No file can be locked in {directory.parent} ({error.strerror}): set TMPDIR to a "
                "directory on another disk."
            ) from error
        # Another run may have removed the directory between the two calls.
        if _is_lock_of(lock.fileno(), directory):
            return lock
        lock.close()


def _make_own(directory: Path) -> None:
    # Not `exist_ok`: it fails if another run removes the directory during the call.
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    with contextlib.suppress(FileNotFoundError):
        wrong = _reason_not_own(directory.lstat())
        if wrong is not None:
            raise PermissionError(f"{directory} {wrong}, or set TMPDIR to another directory.")


def _reason_not_own(status: os.stat_result) -> str | None:
    """Return why a directory can't be used, and a remedy; None if only this user has access."""
    mode = stat.S_IMODE(status.st_mode) & 0o777
    if stat.S_ISLNK(status.st_mode):
        # The files behind the link would be removed.
        return "is a symbolic link: remove it"
    if not stat.S_ISDIR(status.st_mode):
        return "isn't a directory: remove it"
    if status.st_uid != os.getuid():
        return "belongs to another user: have it removed"
    if mode != 0o700:
        return f"has mode {mode:04o}, and checkpoints in it are for you alone: chmod 700 it"
    return None


def _remove_unless_held(directory: Path) -> None:
    if not directory.name.startswith(OF_RUN) or directory.is_symlink():
        return
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # Another process is creating or removing the directory, or died doing so. Without the
        # lock file, remove it only if it is empty.
        with contextlib.suppress(OSError):
            directory.rmdir()
        return
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_lock_of(lock, directory):
            # Rename it first: a new directory of this name must not lose its files.
            doomed = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}")
            directory.rename(doomed)
            _remove(doomed)
    except OSError:
        # It is held, or can't be removed now: NFS keeps a deleted file while somebody has it open.
        return
    finally:
        os.close(lock)


def _remove(directory: Path) -> None:
    """Remove a directory, the lock file last: if this process dies, the rest is still marked."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _LOCK:
            path.unlink(missing_ok=True)
    if [path.name for path in directory.iterdir()] == [_LOCK]:
        (directory / _LOCK).unlink()
        with contextlib.suppress(FileNotFoundError):
            # Any process may have removed the empty directory.
            directory.rmdir()


def _is_lock_of(lock: int, directory: Path) -> bool:
    """Return whether the directory of this name still contains the opened lock file."""
    try:
        return os.path.samestat(os.fstat(lock), (directory / _LOCK).stat())
    except FileNotFoundError:
        return False
