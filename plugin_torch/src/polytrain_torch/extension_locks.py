"""The locks of C++ extensions that torch builds where they are first used, as DeepSpeed has them.

torch's lock is a file that exists. A process that is killed leaves it, and all later ones wait for
its removal, forever and without a word. Here the owner also locks the file by `flock`, which ends
with the process. Some shared file systems keep such locks on each node alone, so the file says on
which one its owner is, and only a process there asks.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torch.utils.file_baton import FileBaton

logger = logging.getLogger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Names this node's kernel, until it starts again."""

_WARN_AFTER_S = 30.0


@contextmanager
def guarded_extension_locks() -> Iterator[None]:
    """In a block, take over locks whose owner is gone, and name those that stay."""
    names = ("try_acquire", "wait", "release")
    before = [getattr(FileBaton, name) for name in names]
    for name, method in zip(names, (_try_acquire, _wait, _release), strict=True):
        setattr(FileBaton, name, method)
    try:
        yield
    finally:
        for name, method in zip(names, before, strict=True):
            setattr(FileBaton, name, method)


def _try_acquire(self: FileBaton) -> bool:
    while True:
        try:
            self.fd = os.open(self.lock_file_path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except FileExistsError:
            with suppress(FileNotFoundError):
                self.fd = _abandoned(self.lock_file_path)
                return self.fd is not None
        else:
            with suppress(OSError):  # a file system without locks: then it is as torch's own
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(self.fd, _BOOT.read_bytes())
            return True


def _wait(self: FileBaton) -> None:
    path, began, has_warned = Path(self.lock_file_path), time.monotonic(), False
    with suppress(FileNotFoundError):
        while (descriptor := _abandoned(path)) is None:
            if time.monotonic() - began > _WARN_AFTER_S and not has_warned:
                has_warned = True
                logger.warning(
                    "This process waits for another one to build a C++ extension, until %s is "
                    "gone. If no compiler runs, remove this file.",
                    path,
                )
            time.sleep(self.wait_seconds)
        os.close(descriptor)
        raise RuntimeError(
            f"The process that was building the C++ extension in {path.parent} is gone. Try "
            "again: the next process that needs it builds it."
        )


def _release(self: FileBaton) -> None:
    # Removed first: what is there without an owner is taken for an abandoned one.
    os.remove(self.lock_file_path)
    if self.fd is not None:
        os.close(self.fd)


def _abandoned(path: str | Path) -> int | None:
    """Return the descriptor of a lock whose owner is gone: it is ours until it is closed.

    Returns:
        None if it has an owner, or one of which nothing is known here.

    Raises:
        FileNotFoundError: it was released.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except PermissionError:
        return None
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        here = _BOOT.read_bytes()
        if os.pread(descriptor, len(here), 0) != here:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise FileNotFoundError(path)
        stack.pop_all()
        return descriptor
