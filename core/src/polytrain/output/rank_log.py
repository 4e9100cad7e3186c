"""The log of one rank's output. A temporary error of its storage loses no lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from polytrain.storage.beneath import Beneath
from polytrain.storage.calls import StorageHealth, is_full, is_temporary, retry

_KEPT = 32 << 20
"""Maximum bytes that wait for the storage; beyond that the oldest are dropped."""

_PAUSE_S = 1.0
"""Seconds between an error and the next try."""


class RankLog:
    """Appends text to a file.

    Text that can't be written is kept and retried as long as other files of the run are. Then it
    is dropped, and a line in the log says so: an error of a log must not end the run.
    """

    def __init__(self, path: Path, *, warn: Callable[[OSError], None]) -> None:
        """
        Args:
            path: the log's path, in a directory of the run; the first text creates the file.
            warn: called with the error when text is dropped.
        """
        self._path = path
        self._warn = warn
        self._descriptor: int | None = None
        self._unwritten = bytearray()
        self._missing = 0
        self._failing_since: float | None = None
        self._next_try = 0.0

    def write(self, text: str, *, retry_s: float) -> None:
        """Append text, or keep it for later.

        Args:
            retry_s: seconds after which text that can't be written is dropped.
        """
        self._unwritten += text.encode(errors="backslashreplace")
        now = time.monotonic()
        if now < self._next_try and len(self._unwritten) <= _KEPT:
            return
        try:
            self._append()
        except OSError as error:
            # A file server that was replaced doesn't know the open file any more. What a close says
            # then isn't news: the text is kept.
            self._release(lambda error: None)
            self._failing_since = since = self._failing_since or now
            self._next_try = now + _PAUSE_S
            if not is_temporary(error) or now - since >= retry_s:
                self._leave_out(len(self._unwritten), error)
                # Try the next text at once: a full disk may have room again.
                self._next_try = now
            else:
                self._leave_out(len(self._unwritten) - _KEPT, error)

    def close(self, *, deadline: float, health: StorageHealth | None = None) -> None:
        """Write the kept text, and release the file. A full disk isn't waited for.

        Args:
            deadline: the `time.monotonic()` after which writing isn't retried.
            health: of the run's storage, if the log is in it.
        """
        if self._unwritten:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                retry(
                    self._append,
                    retry_s=left_s,
                    what=str(self._path),
                    health=health,
                    proves_health=False,
                    # Room may take long to make, and the run has ended.
                    passes=lambda error: is_temporary(error) and not is_full(error),
                )
            except OSError as error:
                self._leave_out(len(self._unwritten), error)
        self.release()

    def release(self) -> None:
        """Close the file; the next text opens it again."""
        self._release(self._warn)

    def _release(self, warn: Callable[[OSError], None]) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:  # NFS flushes its cache here
                warn(error)

    def _append(self) -> None:
        if self._descriptor is not None and not os.fstat(self._descriptor).st_nlink:
            # It was deleted, to make room: what is written there only takes more.
            self.release()
        if self._descriptor is None:
            directory = self._path.parent
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            path = f"{directory.name}/{self._path.name}"
            self._descriptor = Beneath(directory.parent).open(path, flags)
        if self._missing:
            missing = f"{self._missing} bytes are missing here: they couldn't be written"
            note = f"[polytrain: {missing}]\n".encode()
            self._unwritten[:0] = note[os.write(self._descriptor, note) :]
            self._missing = 0
        # Remove what each call has written, so that a retry doesn't write it again.
        while self._unwritten:
            del self._unwritten[: os.write(self._descriptor, self._unwritten)]
        self._failing_since = None

    def _leave_out(self, size: int, error: OSError) -> None:
        if size <= 0:
            return
        del self._unwritten[:size]
        self._missing += size
        self._warn(error)
