"""How a worker process gives checkpoints away: a local snapshot, and a message to its agent.

What the agent says meanwhile arrives here too: that one is committed, or is to be the last.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from polytrain.checkpoint.manifest import directory_name
from polytrain.checkpoint.parts import is_full
from polytrain.checkpoint.snapshot import Stamps
from polytrain.checkpoint.staging import Stagings
from polytrain.common.errors import CheckpointError
from polytrain.monitoring.progress_page import Stage, during
from polytrain.workers.job import LaunchOrder, WorkerJob
from polytrain.workers.messages import (
    Channel,
    Message,
    drain_message,
    drained_message,
    staged_message,
)

Write = Callable[[Path], Stamps]
"""Puts a checkpoint's files into an empty directory; returns the stamps of those that are links."""


class CheckpointUploader:
    """The checkpoints of one worker process that are on their way to the storage."""

    def __init__(
        self, *, job: WorkerJob, order: LaunchOrder, rank: int, channel: Channel, scratch: Path
    ) -> None:
        """
        Args:
            job: what is trained.
            order: in which attempt.
            rank: this worker process's.
            channel: to its agent.
            scratch: directory on the node for files on their way.
        """
        self._attempt = order.attempt_id
        self._rank = rank
        self._channel = channel
        self._stagings = Stagings(scratch=scratch, near=job.near_staging)
        self._max_in_flight = job.max_in_flight
        self._next = order.first_checkpoint
        self._newest: int | None = None
        self._in_flight: set[int] = set()
        self._asked_to_stop = False
        self._stalled_s = 0.0
        self._stalled_since: float | None = None

    @property
    def stalled_s(self) -> float:
        """Seconds that training has stood still for checkpoints, so far."""
        since = self._stalled_since
        return self._stalled_s + (0.0 if since is None else time.monotonic() - since)

    def give(
        self,
        write: Write,
        *,
        source: Path | None = None,
        step: int,
        metrics: Mapping[str, Any],
        positions: Mapping[str, Any],
        with_it: Callable[[], list[Message]],
        waits: bool,
    ) -> None:
        """Give a checkpoint away.

        Args:
            write: makes the files.
            source: where they are taken from; None if they are made anew.
            step: last reported.
            metrics: reported at that step.
            positions: data set → where this rank stands in it.
            with_it: makes messages to be sent before, once the files are made.
            waits: return only when it is committed, or won't ever be; otherwise that is waited for
                only while too many are on their way.

        Raises:
            CheckpointError: there is no room for the files.
            ConnectionClosedError: the agent is gone.
        """
        with self._stalling():
            self._wait(at_most=self._max_in_flight - 1)
            number = self._next
            staging = self._stagings.new(
                directory_name(number, self._attempt), self._rank, source=source
            )
            try:
                stamps = write(staging)
            except OSError as error:
                if is_full(error):
                    shutil.rmtree(staging, ignore_errors=True)
                    raise _no_room(error, staging) from error
                raise
            self._next += 1
            self._newest = number
            self._in_flight.add(number)
            staged = staged_message(
                number,
                str(staging),
                stamps,
                step,
                metrics,
                positions,
                waits=waits or self._max_in_flight == 1,
            )
            # All at once, and last: on a busy machine the agent may run before this returns. From
            # here on the checkpoint is the agent's, whatever becomes of this process.
            self._channel.send(*with_it(), staged)
            if waits:
                self._wait(at_most=0)

    def newest(self) -> str | None:
        """The directory of the checkpoint that was given last, once nothing is on its way any more.

        Returns:
            Its name; None if this attempt has given none.

        Raises:
            ConnectionClosedError: the agent is gone.
        """
        if self._newest is None:
            return None
        with self._stalling():
            self._wait(at_most=0)
        return directory_name(self._newest, self._attempt)

    def is_asked_to_stop(self) -> bool:
        """Whether the next checkpoint is to be the last of this worker process.

        Raises:
            ConnectionClosedError: the agent is gone.
        """
        while not self._asked_to_stop and (message := self._channel.poll()) is not None:
            self._take(message)
        return self._asked_to_stop

    def stop(self) -> NoReturn:
        """Say that the last checkpoint is made, and wait for the end.

        Raises:
            ConnectionClosedError: it has come.
        """
        self._channel.send(drained_message(self.stalled_s))
        with during(Stage.WAITING_FOR_COMMIT):
            while True:
                self._channel.receive()

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        self._stalled_since = time.monotonic()
        try:
            yield
        finally:
            self._stalled_s, self._stalled_since = self.stalled_s, None

    def _wait(self, *, at_most: int) -> None:
        """Wait until no more checkpoints than this are on their way."""
        while len(self._in_flight) > at_most:
            with during(Stage.WAITING_FOR_COMMIT):
                message = self._channel.receive()
            self._take(message)

    def _take(self, message: Message) -> None:
        if message == drain_message():
            self._asked_to_stop = True
        else:
            self._in_flight.discard(message[1])


def _no_room(error: OSError, staging: Path) -> CheckpointError:
    return CheckpointError(
        f"No room for a checkpoint in {staging.parent} ({error.strerror}). Those before it are "
        "intact. Make room there, or set TMPDIR or RunConfig(storage_path=…) to a larger disk."
    )
