"""Sends copies of a rank's state to the agent of a rank on another host.

A copy is sent in pieces, one at a time, while the training continues. The sender keeps what it has
sent, by links: other ranks may resume from it when the worker process has deleted its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from polytrain.checkpoint.parts import StagedPart
from polytrain.checkpoint.staging import beneath, link, remove, size_of
from polytrain.events.attempt import CopySent
from polytrain.policy.copies import to_keep
from polytrain.workers.processes.loop_thread import in_daemon_thread

_SENT = "sent"
"""Directory in the run's directory on a node: of sent copies."""

_PIECE = 4 << 20
"""Bytes that are sent at once."""

Hashes = Mapping[str, str]
"""Name of a file → SHA-256."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a rank's state, on its node or on another."""

    part: StagedPart
    is_report: bool
    """Whether it is the checkpoint of a report."""

    is_ahead: bool
    """Whether steps were taken since that."""

    is_earlier: bool = False
    """Whether its rank has made more reports since, which a restart makes again."""

    reports: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    """See `StateWritten.reports`."""

    def delete(self) -> None:
        if self.part.staged is not None:
            remove(self.part.staged)


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


class SentCopies:
    """A rank's copies, as its agent sends them. All methods run on the agent's event loop."""

    def __init__(self, emit: Callable[[CopySent], None]) -> None:
        """
        Args:
            emit: called once for each copy that is sent, or can't be.
        """
        self._emit = emit
        self.neighbour: Neighbour | None = None
        """None if all ranks are on one host."""

        self.there: dict[int, Copy] = {}
        """Number → copy that was sent, or is being sent."""

        self._scratch = Path()
        self._attempt = self._rank = -1
        self._from = 0
        """The copies from this number on may be sent."""

        self._common: int | None = None
        """The newest copy that all ranks have sent."""

        self._newest = 0
        self._sending: asyncio.Task[None] | None = None
        self._is_over = False
        """Whether the neighbour can't take any."""

    async def launched(self, attempt: int, rank: int, scratch: Path) -> None:
        """Delete the copies of earlier attempts.

        Args:
            attempt: the attempt that starts.
            scratch: the run's directory on the node.
        """
        if attempt < self._attempt:
            # It was killed while it was loaded: the next one has started meanwhile.
            return
        self.stop()
        old = list(self.there.values())
        self.there.clear()
        self._attempt, self._rank, self._scratch = attempt, rank, scratch
        self._from = self._newest = 0
        self._common = None
        self._is_over = False
        for copy in old:
            await in_daemon_thread(copy.delete, else_here=True)

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
            in_daemon_thread(self.there.pop(other).delete, else_here=True)
        staged = copy.part.staged
        assert staged is not None
        target = self._scratch / _SENT / staged.name
        link(staged, target)
        self.there[number] = replace(copy, part=replace(copy.part, staged=target))

    async def _send(self, neighbour: Neighbour, number: int, copy: Copy) -> None:
        part = copy.part
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
        self._ended(number, holder=neighbour.rank)

    def _can_not(self, number: int, why: str) -> None:
        self._is_over = True
        self._ended(number, reason=why)

    def _ended(self, number: int, *, holder: int | None = None, reason: str = "") -> None:
        self._emit(
            CopySent(
                attempt=self._attempt,
                rank=self._rank,
                number=number,
                newest=self._newest,
                holder=holder,
                reason=reason,
            )
        )


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
