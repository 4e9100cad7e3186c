"""Copies of ranks' state on another host: an agent sends its rank's, and keeps a neighbour's.

A copy is sent in pieces, one at a time, while the training continues; it counts once all its files
are there, with their hashes. Until the next one is whole, a host keeps one whole copy of a rank:
the newest that all ranks have sent, or if there is none, the rank's newest. The sender keeps what
it has sent, by links: other ranks may resume from it when the worker process has deleted its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from polytrain.checkpoint.manifest import directory_name
from polytrain.checkpoint.parts import StagedPart
from polytrain.checkpoint.staging import beneath, link, remove, size_of, staged_in
from polytrain.events.attempt import CopySent
from polytrain.policy.neighbours import to_keep

_SENT, _KEPT = "sent", "neighbours"
"""Directories in the run's directory on a node: of sent copies, and of those of other ranks."""

_PIECE = 4 << 20
"""Bytes that are sent at once."""

_AT_ONCE = 2
"""Number of a rank's copies that are there while the newer one arrives."""

Copy = tuple[StagedPart, bool, bool]
"""A copy, whether it is the checkpoint of a report, and whether steps were taken since."""

Hashes = Mapping[str, str]
"""Name of a file → SHA-256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of one file of a copy."""

    part: StagedPart
    """The copy, which is staged on the sender's host."""

    common: int | None
    """The number of the newest copy that all ranks have sent; None if there is none."""

    size: int
    """Bytes of the whole copy."""

    name: str
    offset: int
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The end of a copy: all its files were sent."""

    copy: Copy
    hashes: Hashes


class Neighbour(Protocol):
    """The agent on another host that keeps this one's copies."""

    @property
    def rank(self) -> int:
        """The agent's rank."""

    async def keep(self, sent: Piece | Whole) -> None:
        """Keep a piece; the next one is sent once this has returned.

        Raises:
            ConnectionError: it is lost.
            Exception: it can't.
        """


@dataclass(slots=True)
class SentCopies:
    """A rank's copies, as its agent sends them. All methods run on the agent's event loop."""

    tell: Callable[[CopySent], None]
    neighbour: Neighbour | None = None
    """None if all ranks are on one host."""

    there: dict[int, Copy] = field(default_factory=dict)
    """Number → copy that was sent, or is being sent."""

    _scratch: Path = field(default_factory=Path)
    _attempt: int = -1
    _rank: int = -1
    _from: int = 0
    """The copies from this number on may be sent."""

    _common: int | None = None
    """The newest copy that all ranks have sent."""

    _newest: int = 0
    _sending: asyncio.Task[None] | None = None
    _is_over: bool = False
    """Whether the neighbour can't take any."""

    async def launched(self, attempt: int, rank: int, scratch: Path) -> None:
        """Delete the copies of earlier attempts.

        Args:
            attempt: the attempt that starts.
            rank: the rank.
            scratch: the run's directory on the node.
        """
        self.stop()
        old = list(self.there.values())
        self.there.clear()
        self._attempt, self._rank, self._scratch = attempt, rank, scratch
        self._from = self._newest = 0
        self._common = None
        self._is_over = False
        for copy in old:
            await asyncio.to_thread(_remove, copy)

    def stop(self) -> None:
        """Send nothing more."""
        if self._sending is not None:
            self._sending.cancel()
        self._sending = None

    def made(self, copies: Mapping[int, Copy]) -> None:
        """Note that the rank has made a copy, and send it if it is this one's turn.

        Args:
            copies: number → each of its copies that are there.
        """
        self._newest = max(copies)
        is_idle = self._sending is None and not self._is_over
        if self.neighbour is None or not is_idle:
            return
        for due in sorted(number for number in copies if number >= self._from):
            try:
                self._keep(copies[due], number=due)
            except FileNotFoundError:
                # The worker process has deleted it: a later one is sent.
                continue
            except OSError as error:
                self._can_not(due, f"it can't keep its own: {error}")
                return
            sending = self._send(self.neighbour, due, self.there[due])
            self._sending = asyncio.get_running_loop().create_task(sending)
            return

    def send_from(
        self, attempt: int, number: int, common: int | None, copies: Mapping[int, Copy]
    ) -> None:
        """Send the next copy: the first one from this number on; see `SendCopies`."""
        if attempt == self._attempt:
            self._sending, self._from, self._common = None, number, common
            if copies:
                self.made(copies)

    def _keep(self, copy: Copy, *, number: int) -> None:
        """Keep a copy when its worker process deletes it, and one of those before."""
        for other in set(self.there) - {to_keep(self.there, self._common)}:
            asyncio.get_running_loop().run_in_executor(None, _remove, self.there.pop(other))
        part, is_report, is_ahead = copy
        assert part.staged is not None
        target = self._scratch / _SENT / part.staged.name
        link(part.staged, target)
        self.there[number] = replace(part, staged=target), is_report, is_ahead

    async def _send(self, neighbour: Neighbour, number: int, copy: Copy) -> None:
        part = copy[0]
        assert part.staged is not None
        try:
            size, pieces, common = size_of(part.staged), _pieces(part.staged), self._common
            hashed: dict[str, Any] = defaultdict(hashlib.sha256)
            while (read := await asyncio.to_thread(next, pieces, None)) is not None:
                name, offset, content = read
                await asyncio.to_thread(hashed[name].update, content)
                piece = Piece(
                    part=part,
                    common=common,
                    size=size,
                    name=name,
                    offset=offset,
                    content=content,
                )
                await neighbour.keep(piece)
            hashes = {name: each.hexdigest() for name, each in hashed.items()}
            await neighbour.keep(Whole(copy=copy, hashes=hashes))
        except ConnectionError:
            # The loss of an agent is an event of its own.
            self._is_over = True
            return
        except Exception as error:  # whatever it is, the training continues
            self._can_not(number, str(error) or type(error).__name__)
            return
        self._tell(number, holder=neighbour.rank)

    def _can_not(self, number: int, why: str) -> None:
        self._is_over = True
        self._tell(number, reason=why)

    def _tell(self, number: int, *, holder: int | None = None, reason: str = "") -> None:
        self.tell(
            CopySent(
                attempt=self._attempt,
                rank=self._rank,
                number=number,
                newest=self._newest,
                holder=holder,
                reason=reason,
            )
        )


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

    _whole: dict[tuple[int, int], tuple[Copy, Hashes]] = field(default_factory=dict)
    """Rank and number of a copy → the copy, and its files' hashes."""

    _begun: dict[int, StagedPart] = field(default_factory=dict)
    """Rank → the copy that arrives."""

    _attempt: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def launched(self, attempt: int) -> None:
        """Delete the copies of earlier attempts."""
        with self._lock:
            if attempt <= self._attempt:
                return
            for copy, _ in self._whole.values():
                _remove(copy)
                self.room.release(self._attempt, copy[0].rank)
            for part in self._begun.values():
                self._abandon(part)
            self._whole.clear()
            self._begun.clear()
            self._attempt = attempt

    def take(self, sent: Piece | Whole) -> None:
        """Keep what a neighbour has sent.

        Raises:
            OSError: there is no room for it.
            ValueError: it isn't of this attempt.
        """
        part = sent.part if isinstance(sent, Piece) else sent.copy[0]
        with self._lock:
            if part.attempt_id.attempt != self._attempt:
                raise ValueError("its agent is in another attempt")
            if isinstance(sent, Whole):
                _, is_report, is_ahead = sent.copy
                copy = replace(part, staged=self._place(part)), is_report, is_ahead
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
        return self._whole.get((rank, number)) if attempt == self._attempt else None

    def _begin(self, sent: Piece) -> None:
        """Make room for a copy: only one whole one of the rank stays."""
        part = sent.part
        mine = {number for rank, number in self._whole if rank == part.rank}
        kept = to_keep(mine, sent.common)
        for number in mine - {kept}:
            _remove(self._whole.pop((part.rank, number))[0])
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


def _pieces(staged: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield name, offset and content of all files' pieces; an empty file has an empty one."""
    root, below = beneath(staged)
    for path, _ in root.files(below):
        name, offset = path.removeprefix(f"{below}/"), 0
        with root.reading(path) as file:
            content = file.read(_PIECE)
            yield name, offset, content
            while len(content) == _PIECE:
                offset += _PIECE
                content = file.read(_PIECE)
                yield name, offset, content


def _remove(copy: Copy) -> None:
    if copy[0].staged is not None:
        remove(copy[0].staged)
