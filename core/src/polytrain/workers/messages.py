"""Messages between a worker process and its agent, and their framing on a stream socket.

A frame is four bytes of length and a msgpack value. Only plain values travel: an agent that reads
a message never imports a framework and never executes anything.
"""

from __future__ import annotations

import math
import socket
import struct
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgpack

from polytrain.checkpoint.events import FilesIgnored, PartStaged
from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.parts import StagedPart
from polytrain.common.data_errors import DataError
from polytrain.common.errors import BadDataError, Failure, FailureKind
from polytrain.common.events import (
    Done,
    Drained,
    Event,
    Failed,
    Joined,
    Offered,
    Reported,
    SavesOnRequest,
)
from polytrain.workers.report_ring import Ring
from polytrain_plugins import Member, Offer, World

Message = list[Any]
"""A message's kind, then its fields."""

_LENGTH = struct.Struct(">I")

# File names in an exception's text may hold bytes that are no text: they must arrive all the same.
_UNDECODABLE = "surrogatepass"


class ConnectionClosedError(EOFError):
    """The other end is gone. What training reads from files of its own may raise EOFError too."""


class Channel(Protocol):
    """A worker process's line to whoever watches over it."""

    def send(self, *messages: Message) -> None:
        """Hand messages over; they survive this process."""

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            ConnectionClosedError: the other end is gone.
        """

    def poll(self) -> Message | None:
        """The next message, if it is there.

        Raises:
            ConnectionClosedError: the other end is gone.
        """


class SocketChannel:
    """A channel over a stream socket. `send` returns once the kernel has the message."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._ring: Ring | None = None
        self._calls_every_s = 0.0
        self._called = -math.inf

    def gather_reports(self, ring: Ring, *, calls_every_s: float) -> None:
        """From now on, write reports into a ring, and call its reader now and then.

        Args:
            ring: where to write.
            calls_every_s: seconds between two calls, at least. What is written after one is looked
                for after this time.
        """
        self._ring, self._calls_every_s = ring, calls_every_s

    def send(self, *messages: Message) -> None:
        if self._ring is not None and messages[0][0] == "report":
            # All of them: reports in the ring would overtake one that isn't. Should it be full,
            # whoever reads the socket reads it first.
            report, *others = messages
            if self._ring.put(pack(report)):
                if not others and not self._may_call():
                    return
                messages = tuple(others) or (_CALL,)
        self._socket.sendall(b"".join(map(pack, messages)))

    def _may_call(self) -> bool:
        """Whether the ring's reader is to be called; if so, it has been."""
        now = time.monotonic()
        if now - self._called < self._calls_every_s:
            return False
        self._called = now
        return True

    def receive(self) -> Message:
        (length,) = _LENGTH.unpack(receive_exactly(self._socket, _LENGTH.size))
        message: Message = unpack(receive_exactly(self._socket, length))
        return message

    def poll(self) -> Message | None:
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        # Messages to worker processes are short, and sent in one piece.
        return self.receive()


class FrameBuffer:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add what was received; return the messages that are complete now."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(unpack(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


def pack(message: Any) -> bytes:
    """A frame that holds one message."""
    body: bytes = msgpack.packb(message, unicode_errors=_UNDECODABLE)
    return _LENGTH.pack(len(body)) + body


_CALL: Message = ["reports"]


def unpack(body: bytes) -> Any:
    """The message in a frame's body."""
    return msgpack.unpackb(body, strict_map_key=False, unicode_errors=_UNDECODABLE)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Read this many bytes.

    Raises:
        ConnectionClosedError: the other end was closed before.
    """
    parts = bytearray()
    while len(parts) < size:
        data = connection.recv(size - len(parts))
        if not data:
            raise ConnectionClosedError("the other end of the connection is gone")
        parts += data
    return bytes(parts)


# From worker process to agent


def offer_message(offer: Offer) -> Message:
    return ["offer", offer.host, offer.port, dict(offer.details)]


def joined_message() -> Message:
    return ["joined"]


def report_message(step: int, metrics: Mapping[str, Any], stalled_s: float = 0.0) -> Message:
    """Step and metrics, and the seconds that training has stood still for checkpoints."""
    return ["report", step, dict(metrics), stalled_s]


def staged_message(
    checkpoint: int,
    staged: str,
    stamps: Mapping[str, Sequence[int]],
    step: int,
    metrics: Mapping[str, Any],
    positions: Mapping[str, Any],
    *,
    waits: bool,
) -> Message:
    """The rank's part of this checkpoint lies in this directory, complete."""
    plain = [dict(stamps), step, dict(metrics), dict(positions)]
    return ["staged", checkpoint, staged, *plain, waits]


def ignored_message(step: int, names: Sequence[str]) -> Message:
    """The rank has reported these files, and only rank 0's are kept."""
    return ["ignored", step, list(names)]


def done_message(stalled_s: float = 0.0) -> Message:
    return ["done", stalled_s]


def saves_on_request_message() -> Message:
    """The training function asks whether a checkpoint is wanted."""
    return ["saves on request"]


def drained_message(stalled_s: float = 0.0) -> Message:
    """The worker process has stopped after a checkpoint, as it was asked to."""
    return ["drained", stalled_s]


def raised_message(error: BaseException, pickled: bytes | None) -> Message:
    # What is wrong with data isn't told by where it was found.
    refused = isinstance(error, BadDataError)
    text = "" if refused else "".join(traceback.format_exception(error))
    # Of these, the message alone begins with what the user's own code has raised.
    summary = (
        str(error)
        if isinstance(error, DataError)
        else "".join(traceback.format_exception_only(error)).strip()
    )
    return ["raised", summary, text, pickled, _is_out_of_memory(error)]


def _is_out_of_memory(error: BaseException) -> bool:
    # Frameworks have classes of their own for a device's memory.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def imported_message(modules: Sequence[str], variables: Mapping[str, str | None]) -> Message:
    """What the worker process has imported since it was forked, and variables that differ since."""
    return ["imported", list(modules), dict(variables)]


def to_part(message: Message, *, attempt_id: AttemptId, rank: int) -> StagedPart:
    """The part of a checkpoint that a message of this kind is about."""
    _, checkpoint, staged, stamps, step, metrics, positions, _ = message
    return StagedPart(
        attempt_id=attempt_id,
        rank=rank,
        checkpoint=checkpoint,
        staged=Path(staged),
        stamps=stamps,
        step=step,
        metrics=metrics,
        positions=positions,
    )


def to_event(message: Message, *, attempt: int, rank: int) -> Event | FilesIgnored | PartStaged:
    """What a worker process's message means to the run."""
    match message:
        case ["offer", host, port, details]:
            offer = Offer(host=host, port=port, details=details)
            return Offered(attempt=attempt, rank=rank, offer=offer)
        case ["joined"]:
            return Joined(attempt=attempt, rank=rank)
        case ["report", step, metrics, stalled_s]:
            return Reported(
                attempt=attempt, rank=rank, step=step, metrics=metrics, stalled_s=stalled_s
            )
        case ["saves on request"]:
            return SavesOnRequest(attempt=attempt, rank=rank)
        case ["staged", checkpoint, *_, waits]:
            return PartStaged(attempt=attempt, rank=rank, checkpoint=checkpoint, waits=waits)
        case ["ignored", step, names]:
            return FilesIgnored(attempt=attempt, rank=rank, step=step, names=tuple(names))
        case ["done", stalled_s]:
            return Done(attempt=attempt, rank=rank, stalled_s=stalled_s)
        case ["drained", stalled_s]:
            return Drained(attempt=attempt, rank=rank, stalled_s=stalled_s)
        case ["raised", summary, text, pickled, out_of_memory]:
            failure = Failure(
                kind=FailureKind.OUT_OF_MEMORY if out_of_memory else FailureKind.USER_ERROR,
                rank=rank,
                message=summary,
                traceback=text,
                error=pickled,
            )
            return Failed(attempt=attempt, failure=failure)
    raise ValueError(f"unknown message {message[:1]}")


# From agent to worker process


def roster_message(offers: tuple[Offer, ...]) -> Message:
    return ["roster", [[offer.host, offer.port, dict(offer.details)] for offer in offers]]


def leave_message() -> Message:
    return ["leave"]


def drain_message() -> Message:
    """Make a checkpoint, and stop."""
    return ["drain"]


def settled_message(checkpoint: int) -> Message:
    """This checkpoint isn't on its way any more: it is committed, or won't ever be."""
    return ["settled", checkpoint]


def world_from(message: Message, *, attempt: int, members: tuple[Member, ...], rank: int) -> World:
    """The world that a roster describes."""
    offers = tuple(
        Offer(host=host, port=port, details=details) for host, port, details in message[1]
    )
    return World(attempt=attempt, me=members[rank], members=members, offers=offers)
