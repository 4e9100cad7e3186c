"""Keeps copies of ranks on another host, as their agents send them.

A copy counts once all its files are there, with their hashes. Until the next one is whole, one
whole copy of a rank stays: the newest that all ranks have sent, or else the rank's newest.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from polytrain.checkpoint.manifest import directory_name
from polytrain.checkpoint.parts import StagedPart
from polytrain.checkpoint.staging import beneath, remove, staged_in
from polytrain.policy.copies import to_keep
from polytrain.workers.agents.sent_copies import Copy, Hashes, Piece, Whole

_KEPT = "neighbours"
"""Directory in the run's directory on a node: of copies of other ranks."""

_AT_ONCE = 2
"""Number of a rank's copies that are there while the newer one arrives."""


@dataclass(slots=True)
class Room:
    """The disk space that the agents of a host have for other ranks' copies. It is thread-safe."""

    _promised: dict[tuple[int, int], int] = field(default_factory=dict)
    """Attempt and rank → bytes that its copies may still take."""

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def promise(self, attempt: int, rank: int, needed: int, scratch: Path) -> None:
        """Promise a rank's copies so many bytes, in place of what they were promised before.

        Raises:
            OSError: the disk hasn't so many besides what others were promised.
        """
        with self._lock:
            self._promised.pop((attempt, rank), None)
            there = max(0, shutil.disk_usage(scratch).free - sum(self._promised.values()))
            if there < needed:
                raise OSError(
                    f"{os.uname().nodename} has room for {there / 1e6:.0f} MB in {scratch}, and "
                    f"needs {needed / 1e6:.0f} MB; set TMPDIR to a directory with more"
                )
            self._promised[attempt, rank] = needed

    def used(self, attempt: int, rank: int, size: int) -> None:
        """Note that so many of the promised bytes are on the disk."""
        with self._lock:
            left = self._promised.get((attempt, rank), 0) - size
            self._promised[attempt, rank] = max(0, left)

    def release(self, attempt: int, rank: int) -> None:
        """Note that a rank's copies need nothing more."""
        with self._lock:
            self._promised.pop((attempt, rank), None)


@dataclass(slots=True)
class KeptCopies:
    """Other ranks' copies that an agent keeps. It is thread-safe."""

    scratch: Path
    """The run's directory on the node."""

    room: Room
    """Shared by the agents of the host."""

    attempt: int = -1
    """The newest one: copies of others are refused."""

    _whole: dict[tuple[int, int], tuple[Copy, Hashes]] = field(default_factory=dict)
    """Rank and number of a copy → the copy, and its files' hashes."""

    _begun: dict[int, StagedPart] = field(default_factory=dict)
    """Rank → the copy that arrives."""

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def launched(self, attempt: int) -> None:
        """Delete the copies of earlier attempts."""
        with self._lock:
            if attempt <= self.attempt:
                return
            for copy, _ in self._whole.values():
                copy.delete()
                self.room.release(self.attempt, copy.part.rank)
            for part in self._begun.values():
                self._abandon(part)
            self._whole.clear()
            self._begun.clear()
            self.attempt = attempt

    def take(self, sent: Piece | Whole) -> None:
        """Keep what a neighbour has sent.

        Raises:
            OSError: there is no room for it.
            ValueError: it isn't of this attempt.
        """
        part = sent.part if isinstance(sent, Piece) else sent.copy.part
        with self._lock:
            if part.attempt_id.attempt != self.attempt:
                raise ValueError("its agent is in another attempt")
            if isinstance(sent, Whole):
                copy = replace(sent.copy, part=replace(part, staged=self._place(part)))
                self._whole[part.rank, part.checkpoint] = copy, sent.hashes
                self._begun.pop(part.rank, None)
                return
            if self._begun.get(part.rank) != part:
                self._begin(sent)
            try:
                self._write(sent)
            except OSError:
                self._abandon(self._begun.pop(part.rank))
                raise

    def copy(self, attempt: int, rank: int, number: int) -> tuple[Copy, Hashes] | None:
        """Return a whole copy and its files' hashes; None if it isn't there."""
        return self._whole.get((rank, number)) if attempt == self.attempt else None

    def _begin(self, sent: Piece) -> None:
        """Make room for a copy: only one whole one of the rank stays."""
        part = sent.part
        mine = {number for rank, number in self._whole if rank == part.rank}
        kept = to_keep(mine, sent.common)
        for number in mine - {kept}:
            self._whole.pop((part.rank, number))[0].delete()
        if (unfinished := self._begun.pop(part.rank, None)) is not None:
            self._abandon(unfinished)
        remove(self._place(part))
        needed = (_AT_ONCE if kept is None else _AT_ONCE - 1) * sent.size
        self.room.promise(part.attempt_id.attempt, part.rank, needed, self.scratch)
        self._begun[part.rank] = part

    def _write(self, sent: Piece) -> None:
        root, below = beneath(self._place(sent.part))
        descriptor = root.open(f"{below}/{sent.name}", os.O_WRONLY | os.O_CREAT)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(sent.offset)
            file.write(sent.content)
        self.room.used(sent.part.attempt_id.attempt, sent.part.rank, len(sent.content))

    def _abandon(self, part: StagedPart) -> None:
        """Delete a copy that hasn't arrived whole."""
        remove(self._place(part))
        self.room.release(part.attempt_id.attempt, part.rank)

    def _place(self, part: StagedPart) -> Path:
        name = directory_name(part.checkpoint, part.attempt_id)
        return staged_in(self.scratch / _KEPT, name, part.rank)


def damaged(stored: Mapping[str, str], hashes: Hashes) -> str:
    """Return which file of a copy isn't what was sent; empty if all are.

    Args:
        stored: name → SHA-256 of what was stored.
        hashes: the same of what was sent.
    """
    names = sorted({*stored, *hashes})
    return next((name for name in names if stored.get(name) != hashes.get(name)), "")
