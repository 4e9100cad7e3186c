"""What a worker process shares under a name, and the removal of what it leaves.

`multiprocessing` has its names tracked by a child, which outlives the process and removes the rest.
A worker process's children are killed with it, so its zygote is the tracker: killed workers' memory
would otherwise stay on the node, and the next attempt couldn't use the same names.
"""

from __future__ import annotations

import contextlib
import os
from multiprocessing import resource_tracker
from pathlib import Path

_READ_SIZE = 1 << 16

_PLACE = Path("/dev/shm")
_PREFIXES = {"shared_memory": "", "semaphore": "sem."}
"""Kind of a resource → what its file's name begins with."""


class NamedMemory:
    """The names that one worker process and its children have in use."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: the system has no descriptors left.
        """
        # Both ends stay open here, so that it never reads as ended.
        self._reader, self.writer = os.pipe()
        """`writer` is the worker process's descriptor."""

        os.set_blocking(self._reader, False)
        self._since = os.fstat(self._reader).st_mtime_ns
        self._begun = b""
        self._used: set[tuple[str, str]] = set()
        """Kinds and names."""

    def fileno(self) -> int:
        """Return the descriptor to watch: once it is readable, `read` has something to do."""
        return self._reader

    def read(self) -> bool:
        """Read once what the processes have sent; return whether there may be more."""
        try:
            data = self._begun + os.read(self._reader, _READ_SIZE)
        except BlockingIOError:
            return False
        *lines, self._begun = data.split(b"\n")
        for line in lines:
            match line.decode(errors="replace").split(":"):
                case ["REGISTER", name, kind]:
                    self._used.add((kind, name))
                case ["UNREGISTER", name, kind]:
                    self._used.discard((kind, name))
        return True

    def remove(self) -> None:
        """Remove what the processes, which have ended, have left."""
        while self.read():
            pass
        for kind, name in self._used:
            if kind in _PREFIXES:
                file = _PLACE / f"{_PREFIXES[kind]}{name.removeprefix('/')}"
                with contextlib.suppress(OSError):
                    # Until Python 3.13 a name is tracked where it is only used, too: what is older
                    # than the worker process is another's, such as the driver's.
                    if file.lstat().st_mtime_ns >= self._since:
                        file.unlink()
        self.close()

    def close(self) -> None:
        """Close both ends here."""
        os.close(self._reader)
        os.close(self.writer)


def have_names_tracked(writer: int) -> None:
    """Have this process, and its children, send their names to `NamedMemory`."""
    tracker = resource_tracker._resource_tracker
    # As in a child that `multiprocessing` has started: the tracker is another's child.
    tracker._fd, tracker._pid = writer, None  # type: ignore[attr-defined]  # no public interface
