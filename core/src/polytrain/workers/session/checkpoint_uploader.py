"""Passes a worker process's checkpoints to its agent, as a local snapshot and a message.

It also receives the agent's messages: a checkpoint is committed, or the next one is the last.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from polytrain.checkpoint.manifest import directory_name
from polytrain.checkpoint.staging import Stagings, Stamps, beneath, remove
from polytrain.errors import CheckpointError
from polytrain.events.notices import PreemptionInfo
from polytrain.linux.progress_page import WorkerStage, during
from polytrain.policy.failed_attempts import AFTER_WAIT
from polytrain.storage.calls import PATIENCE_S, is_full, is_passing, is_unwritable, retry
from polytrain.workers.processes.channel import Channel, Message
from polytrain.workers.session.checkpoint_files import CheckpointFiles, Write
from polytrain.workers.session.job import LaunchOrder, WorkerJob
from polytrain.workers.session.messages import (
    END,
    checkpoints_asked_message,
    drained_message,
    preemption_of,
    staged_message,
)

_SHORTENED = ", after a wait that a signal has shortened"
"""Part of a message instead of `AFTER_WAIT`: another attempt may wait longer."""

_NAP_S = 0.005
"""Seconds between two polls for a message, in a wait with a deadline."""


class CheckpointUploader:
    """The uploads of one worker process's checkpoints.

    All methods raise `ConnectionClosedError` if the agent is gone.
    """

    def __init__(
        self, *, job: WorkerJob, order: LaunchOrder, rank: int, channel: Channel, scratch: Path
    ) -> None:
        """
        Args:
            job: the run's work.
            rank: this worker process's rank.
        """
        self._attempt = order.attempt_id
        self._rank = rank
        self._channel = channel
        self._stagings = Stagings(scratch=scratch, near=job.near_staging)
        self._max_in_flight = job.spec.run_config.checkpoint_config.max_in_flight
        self._retry_s = job.spec.run_config.storage_timeout_s
        self._next = order.first_checkpoint
        self._newest: int | None = None
        self._in_flight: set[int] = set()
        self._asked_to_stop = False
        self._ends_run = False
        self._preemption: PreemptionInfo | None = None
        self._questions = 0
        self._dropped_copies: list[tuple[int, bool]] = []
        self._stalled_s = 0.0
        self._stalled_since: float | None = None
        self.copied_s = 0.0
        """Seconds that training has waited for copies of its state in memory so far."""

    @property
    def stalled_s(self) -> float:
        """Seconds that training has waited for checkpoints so far."""
        since = self._stalled_since
        return self._stalled_s + (0.0 if since is None else time.monotonic() - since)

    def submit(
        self,
        files: CheckpointFiles,
        *,
        step: int,
        metrics: Mapping[str, Any],
        positions: Mapping[str, Any],
        validation: Mapping[str, Any] | None = None,
        report: Callable[[], list[Message]],
        waits: bool,
    ) -> None:
        """Stage a checkpoint, and pass it to the agent.

        Args:
            files: the checkpoint's files.
            positions: data set → this rank's position in it.
            validation: the requested validation, as plain values; None if none is requested.
            report: returns the messages of its report, which are sent before it once the files are
                written.
            waits: whether to wait until the checkpoint is committed or dropped. Otherwise wait
                only while too many uploads are in flight.

        Raises:
            CheckpointError: the file system is read-only, or still full after
                `storage_timeout_s`, which is its cause.
        """
        with self.stalling():
            self._wait(at_most=self._max_in_flight - 1)
            number = self._next
            staging, stamps = self._staged(files)
            self._next += 1
            self._newest = number
            self._in_flight.add(number)
            staged = staged_message(
                number,
                staging,
                stamps,
                step,
                metrics,
                positions,
                validation=validation,
                waits=waits or self._max_in_flight == 1,
            )
            # Send all in one call, last: on a busy machine the agent may run before this returns.
            # From here on the agent owns the checkpoint, even if this process dies.
            self._channel.send(*report(), staged)
            if waits:
                self._wait(at_most=0)

    @property
    def are_in_flight(self) -> bool:
        """Whether a checkpoint isn't known to be committed or dropped."""
        return bool(self._in_flight)

    @property
    def next_directory(self) -> str:
        """Name of the next checkpoint's directory."""
        return directory_name(self._next, self._attempt)

    def _staged(self, files: CheckpointFiles) -> tuple[str, Stamps]:
        """Write the files into a new directory; wait if the disk is full.

        Files that lie in a directory are copied again after other errors that pass, too. Of an
        engine that writes them nobody knows what else has failed.

        Returns:
            Its path, and the files' stamps.
        """
        write = files.write
        if write is None:
            return "", {}
        expected = is_full if files.directory is None else is_passing
        with self._unwritable_named(), ExitStack() as waiting:

            def passes(error: OSError) -> bool:
                if not expected(error):
                    return False
                # From here on it is no hang. A first try that hangs is one.
                waiting.enter_context(during(WorkerStage.WAITING_FOR_COMMIT))
                return True

            return retry(
                partial(self._written, write, files.directory),
                retry_s=self._retry_s,
                what=self.next_directory,
                passes=passes,
                is_costly=True,
                limit_s=self._patience_s,
            )

    def _patience_s(self) -> float:
        """How many seconds to wait at most for room: not for long once a signal ends the run."""
        self._take_arrived()
        return PATIENCE_S if self._ends_run else math.inf

    def _written(self, write: Write, source: Path | None) -> tuple[str, Stamps]:
        staging = self._stagings.new(self.next_directory, self._rank, source=source)
        root, path = beneath(staging)
        try:
            with root.directory(path) as descriptor:
                # Engines take a path. This one leads to the opened directory, even if somebody who
                # can write to the run's directory has replaced it.
                opened = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
                return str(staging), write(opened)
        except OSError as error:
            if is_unwritable(error):
                # The directory of all staged parts: that path would mean nothing to people.
                error.filename = str(staging.parent)
                del error.filename2
            if is_full(error):
                remove(staging)
            raise

    @contextmanager
    def _unwritable_named(self) -> Iterator[None]:
        """Explain that the staging directory, which the error names, can't be written to.

        Raises:
            CheckpointError: its file system is full or read-only.
        """
        try:
            yield
        except OSError as error:
            if not is_unwritable(error):
                raise
            what, remedy, other = "No checkpoint can be written to", "Mount it anew", "another disk"
            waited = ""
            if is_full(error):
                what, remedy = "No room for a checkpoint in", "Make room there"
                other, waited = "a larger disk", AFTER_WAIT if self._retry_s else ""
                if self._ends_run and self._retry_s > PATIENCE_S:
                    waited = _SHORTENED
            raise CheckpointError(
                f"{what} {error.filename} ({error.strerror}){waited}. Earlier checkpoints are "
                f"intact. {remedy}, or set TMPDIR or RunConfig(storage_path=…) to {other}."
            ) from error

    def newest(self) -> str | None:
        """Wait for all uploads, and return the directory of the last checkpoint.

        Returns:
            Its name; None if this process has reported none in this attempt.
        """
        if self._newest is None:
            return None
        with self.stalling():
            self._wait(at_most=0)
        return directory_name(self._newest, self._attempt)

    def all_of_run(self, *, validated: bool, timeout_s: float | None) -> list[Any]:
        """Wait for all uploads, and return the run's checkpoints as the driver knows them.

        Args:
            validated: whether to wait for all validations.
            timeout_s: maximum seconds to wait; None for no limit.

        Returns:
            Path, metrics and validation status of each.

        Raises:
            TimeoutError: it took longer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self.stalling(), during(WorkerStage.WAITING_FOR_COMMIT):
            while self._in_flight:
                self._take(self._received(deadline))
            self._questions += 1
            self._channel.send(checkpoints_asked_message(self._questions, validated=validated))
            while True:
                message = self._received(deadline)
                if message[:2] == ["checkpoints", self._questions]:
                    found: list[Any] = message[2]
                    return found
                self._take(message)

    def _received(self, deadline: float | None) -> Message:
        """Wait for the next message, at most until this time."""
        if deadline is None:
            return self._channel.receive()
        while (message := self._channel.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("the run's checkpoints aren't known in time")
            time.sleep(_NAP_S)
        return message

    def is_asked_to_stop(self) -> bool:
        """Return whether the next checkpoint is the last of this worker process."""
        if not self._asked_to_stop:
            self._take_arrived()
        return self._asked_to_stop

    def preemption(self) -> PreemptionInfo | None:
        """Return the nodes that are about to be taken away, as far as is known."""
        self._take_arrived()
        return self._preemption

    def dropped_copies(self) -> list[tuple[int, bool]]:
        """Return the copies of the state to drop since the last call; see `Copies.dropped`."""
        self._take_arrived()
        dropped, self._dropped_copies = self._dropped_copies, []
        return dropped

    def stop(self) -> NoReturn:
        """Report that the last checkpoint is made, and wait to be killed."""
        self._channel.send(drained_message(self.stalled_s, self.copied_s))
        with during(WorkerStage.WAITING_FOR_COMMIT):
            while True:
                self._channel.receive()

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """Count the time inside as time in which the training waits for a checkpoint."""
        self._stalled_since = time.monotonic()
        try:
            yield
        finally:
            self._stalled_s, self._stalled_since = self.stalled_s, None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Count the time inside as time in which the training waits for a copy of its state."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.copied_s += time.monotonic() - began

    def _wait(self, *, at_most: int) -> None:
        """Wait until at most this many uploads are in flight."""
        while len(self._in_flight) > at_most:
            with during(WorkerStage.WAITING_FOR_COMMIT):
                message = self._channel.receive()
            self._take(message)

    def _take_arrived(self) -> None:
        while (message := self._channel.poll()) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        if message[0] in ("drain", *END):
            self._asked_to_stop = True
            self._ends_run = self._ends_run or message == END
            self._preemption = preemption_of(message) or self._preemption
        elif message[0] == "settled":
            self._in_flight.discard(message[1])
        elif message[0] == "drop copy":
            self._dropped_copies.append((message[1], message[2]))
        # Ignore other messages: they are answers that arrived too late.
