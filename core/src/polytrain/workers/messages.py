"""Messages between a worker process and its agent, and their framing on a stream socket.

A frame is a length of four bytes and a msgpack value. Messages hold plain values only, so an agent
that reads one never imports a framework or executes code.
"""

from __future__ import annotations

import math
import socket
import struct
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgpack

from polytrain.checkpoint.events import CheckpointsAsked, PartStaged
from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.parts import StagedPart
from polytrain.data_errors import DataError
from polytrain.errors import BadDataError, Failure, FailureKind
from polytrain.events.attempt import (
    ConditionMet,
    Done,
    Drained,
    Event,
    Failed,
    Joined,
    Offered,
    Reported,
    SavesOnRequest,
)
from polytrain.functions.return_values import Returned
from polytrain.workers.report_ring import Ring
from polytrain_plugins import Member, Offer, Stopped, World

Message = list[Any]
"""A message's kind, then its fields."""

_LENGTH = struct.Struct(">I")

_WORKER_PROCESS = "polytrain.workers.worker_process"

_LONGEST_READ = 1 << 20

# File names in an exception's text may hold bytes that aren't UTF-8. They must be sent too.
_UNDECODABLE = "surrogatepass"


class ConnectionClosedError(EOFError):
    """The other end is gone. Its own class, because training may raise EOFError itself."""


class Channel(Protocol):
    """A worker process's channel to its agent."""

    def send(self, *messages: Message) -> None:
        """Send messages, which survive this process."""

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            ConnectionClosedError: the other end is gone.
        """

    def poll(self) -> Message | None:
        """Return the next message, if there is one.

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
        self._sent = 0

    def gather_reports(self, ring: Ring, *, calls_every_s: float) -> None:
        """From now on, write reports into a ring, and call its reader at intervals.

        Args:
            ring: the ring to write to.
            calls_every_s: minimum seconds between two calls. The reader looks again after this
                time.
        """
        self._ring, self._calls_every_s = ring, calls_every_s

    def send(self, *messages: Message) -> None:
        if self._ring is not None and messages[0][0] == "report":
            # The reader learns which of the socket's messages it has to read first. If the ring is
            # full, the report goes through the socket.
            report, *others = messages
            if self._ring.put(pack(report), after=self._sent):
                if not others and not self._may_call():
                    return
                messages = tuple(others) or (_CALL,)
        self._sent += len(messages)
        self._socket.sendall(b"".join(map(pack, messages)))

    def _may_call(self) -> bool:
        """Return whether to call the ring's reader now, and note the call."""
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
        # Messages to worker processes are short and arrive in one piece.
        return self.receive()


class FrameBuffer:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add received bytes; return the messages that are now complete."""
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


class ReportReader:
    """Reads the reports in a ring, in their order among the messages of the socket."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._frames = FrameBuffer()
        self._received = 0

    def take(self) -> list[Message]:
        """Return the new reports, up to one that was sent after a message still to come."""
        return self._frames.feed(self._ring.take(received=self._received))

    def before_message(self) -> list[Message]:
        """Return the new reports before the socket's next message. Call it for each message."""
        reports = self.take()
        self._received += 1
        return reports

    def close(self) -> None:
        """Release the ring's memory."""
        self._ring.close()


def pack(message: Any) -> bytes:
    """Return the frame of a message."""
    body: bytes = msgpack.packb(message, unicode_errors=_UNDECODABLE)
    return _LENGTH.pack(len(body)) + body


_CALL: Message = ["reports"]


def unpack(body: bytes) -> Any:
    """Return the message in a frame's body."""
    return msgpack.unpackb(body, strict_map_key=False, unicode_errors=_UNDECODABLE)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Read this many bytes.

    Raises:
        ConnectionClosedError: the other end closed the connection first.
    """
    parts = bytearray()
    while len(parts) < size:
        data = connection.recv(min(size - len(parts), _LONGEST_READ))
        if not data:
            raise ConnectionClosedError("the other end of the connection is gone")
        parts += data
    return bytes(parts)


# From worker process to agent


def offer_message(offer: Offer) -> Message:
    return ["offer", offer.host, offer.port, dict(offer.details)]


def joined_message(rows: Mapping[str, int], *, device: str, node: str) -> Message:
    """The rank trains from now on; see `Joined`."""
    return ["joined", dict(rows), device, node]


def report_message(
    step: int,
    metrics: Mapping[str, Any],
    stalled_s: float = 0.0,
    *,
    has_checkpoint: bool = False,
    at: float = 0.0,
) -> Message:
    """Return the message of a report.

    Args:
        step: the step.
        metrics: its metrics.
        stalled_s: seconds that training has waited for checkpoints.
        has_checkpoint: whether the rank's part of a checkpoint follows.
        at: the time, in seconds since the epoch.
    """
    return ["report", step, dict(metrics), stalled_s, has_checkpoint, at]


def staged_message(
    checkpoint: int,
    staged: str,
    stamps: Mapping[str, Sequence[int]],
    step: int,
    metrics: Mapping[str, Any],
    positions: Mapping[str, Any],
    *,
    validation: Mapping[str, Any] | None = None,
    waits: bool,
) -> Message:
    """The rank's complete part of this checkpoint is in this directory; "" if it is stored."""
    plain = [dict(stamps), step, dict(metrics), dict(positions)]
    return ["staged", checkpoint, staged, *plain, validation, waits]


def done_message(stalled_s: float = 0.0, returned: Returned | None = None) -> Message:
    """Training has returned, and what it has returned."""
    value = None if returned is None else [returned.kind, returned.data, returned.why]
    return ["done", stalled_s, value]


def saves_on_request_message() -> Message:
    """The training function makes a checkpoint when one is requested."""
    return ["saves on request"]


def condition_met_message(stopped: Stopped) -> Message:
    """The last report meets a condition that ends the run; rank 0 stops by itself."""
    return ["condition met", asdict(stopped)]


def checkpoints_asked_message(number: int, *, validated: bool) -> Message:
    """The training function asks for the run's checkpoints; see `CheckpointsAsked`."""
    return ["checkpoints asked", number, validated]


def drained_message(stalled_s: float = 0.0) -> Message:
    """The worker process has stopped after a checkpoint, as requested."""
    return ["drained", stalled_s]


def raised_message(error: BaseException, pickled: bytes | None) -> Message:
    # A traceback doesn't help with problems of the data.
    refused = isinstance(error, BadDataError)
    text = (
        ""
        if refused
        else "".join(
            traceback.format_exception(type(error), error, _of_training(error.__traceback__))
        )
    )
    # The message of these starts with the error of the user's code.
    summary = (
        str(error)
        if isinstance(error, DataError)
        else "".join(traceback.format_exception_only(error)).strip()
    )
    return ["raised", summary, text, pickled, _is_out_of_memory(error)]


def _of_training(frames: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of the worker process that called what has raised, if it did."""
    inner = frames
    while inner is not None and inner.tb_frame.f_globals.get("__name__") == _WORKER_PROCESS:
        inner = inner.tb_next
    return frames if inner is None else inner


def _is_out_of_memory(error: BaseException) -> bool:
    # Frameworks have their own classes for a device's memory.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def imported_message(modules: Sequence[str], variables: Mapping[str, str | None]) -> Message:
    """The modules that the worker process imported, and the variables that changed since."""
    return ["imported", list(modules), dict(variables)]


def to_part(message: Message, *, attempt_id: AttemptId, rank: int) -> StagedPart:
    """Return the part of a checkpoint that a `staged` message describes."""
    _, checkpoint, staged, stamps, step, metrics, positions, validation, _ = message
    return StagedPart(
        attempt_id=attempt_id,
        rank=rank,
        checkpoint=checkpoint,
        staged=Path(staged) if staged else None,
        stamps=stamps,
        step=step,
        metrics=metrics,
        positions=positions,
        validation=validation,
    )


def to_event(
    message: Message, *, attempt: int, rank: int
) -> Event | Reported | PartStaged | CheckpointsAsked:
    """Return the event of a worker process's message."""
    match message:
        case ["offer", host, port, details]:
            offer = Offer(host=host, port=port, details=details)
            return Offered(attempt=attempt, rank=rank, offer=offer)
        case ["joined", rows, device, node]:
            return Joined(attempt=attempt, rank=rank, rows=rows, device=device, node=node)
        case ["report", step, metrics, stalled_s, has_checkpoint, at]:
            return Reported(
                attempt=attempt,
                rank=rank,
                step=step,
                metrics=metrics,
                stalled_s=stalled_s,
                has_checkpoint=has_checkpoint,
                at=at,
            )
        case ["saves on request"]:
            return SavesOnRequest(attempt=attempt, rank=rank)
        case ["condition met", stopped]:
            return ConditionMet(attempt=attempt, rank=rank, stopped=Stopped(**stopped))
        case ["staged", checkpoint, *_, waits]:
            return PartStaged(attempt=attempt, rank=rank, checkpoint=checkpoint, waits=waits)
        case ["checkpoints asked", number, validated]:
            return CheckpointsAsked(attempt=attempt, rank=rank, number=number, validated=validated)
        case ["done", stalled_s, value]:
            returned = value and Returned(kind=value[0], data=value[1], why=value[2])
            return Done(attempt=attempt, rank=rank, stalled_s=stalled_s, returned=returned)
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
    """This checkpoint is committed or dropped."""
    return ["settled", checkpoint]


def checkpoints_message(number: int, checkpoints: Sequence[Any]) -> Message:
    """The answer to a question for the run's checkpoints: path, metrics and status of each."""
    return ["checkpoints", number, [list(each) for each in checkpoints]]


def world_from(message: Message, *, attempt: int, members: tuple[Member, ...], rank: int) -> World:
    """Return the world that a roster describes."""
    offers = tuple(
        Offer(host=host, port=port, details=details) for host, port, details in message[1]
    )
    return World(attempt=attempt, me=members[rank], members=members, offers=offers)
