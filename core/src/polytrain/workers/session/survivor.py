"""Keeps the state of the training after each step, for the case that another rank is lost.

A backend tells how (`StateWriter`). After a loss the agents ask a survivor for its newest clean
state: a thread of its process writes that, while the training waits in a collective for the lost
rank. Then the process is killed as after any failure.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

from polytrain.checkpoint.manifest import AttemptId, directory_name
from polytrain.checkpoint.staging import Stagings, beneath, remove
from polytrain.config.validation_config import ValidationTaskConfig, validation_of_report
from polytrain.linux.kept_states import KeptState, KeptStates
from polytrain.text.metrics import plain_metrics
from polytrain.workers.processes.channel import Channel, SocketChannel
from polytrain.workers.session.messages import (
    keeps_message,
    keeps_nothing_message,
    unwritten_message,
    written_message,
)
from polytrain_plugins.type_names import a_type

if TYPE_CHECKING:
    from polytrain.workers.session.copies import Copies


_KNOWN_FOR_S = 5.0
"""Seconds after which rank 0's agent has passed on a report, unless it is lost."""

_KNOWN = 1024
"""Reports that are kept at most until then."""


class NotCleanError(Exception):
    """This rank can't offer a state; the message says why."""


@dataclass(slots=True, kw_only=True)
class Place:
    """What a session knows at a clean point.

    It isn't frozen: one is made in each step, and that takes three times as long.
    """

    step: int
    """The number of reports so far."""

    metrics: Mapping[str, Any]
    """The metrics of the last report."""

    positions: Mapping[str, Any]
    """Data set → the position in it."""

    is_report: bool = False
    """Whether the last report is being made here, with a checkpoint."""

    validation: Mapping[str, Any] | None = None
    """The validation that it requests, as plain values; None if it requests none."""

    is_ahead: bool = False
    """Whether steps were taken since the last report, which the positions don't show."""

    is_earlier: bool = False
    """Whether there may have been more reports since, which a restart makes again."""

    def after_report(
        self, metrics: Mapping[str, Any], validation: bool | ValidationTaskConfig = False
    ) -> Place:
        """Return the place after a report with a checkpoint, which is being made.

        Raises:
            TypeError: it can't be validated like that; nor can it, if it is a `ValueError`.
        """
        wanted = validation_of_report(validation, has_checkpoint=True, validates=True)
        return replace(
            self,
            step=self.step + 1,
            metrics=plain_metrics(metrics),
            is_report=True,
            validation=wanted,
            is_ahead=False,
        )

    def plain_positions(self) -> dict[str, Any]:
        """Return the positions as plain values, for data that was read."""
        return {
            name: position.to_plain()
            for name, position in self.positions.items()
            if not position.is_beginning
        }


class StateWriter(Protocol):
    """How a backend writes the newest clean state. A thread calls it while the training waits."""

    def hold(self, point: int, has_time: Callable[[], bool]) -> int:
        """Keep the training from changing its state, and return the clean point that it is at.

        Args:
            point: wait for this point, which another rank has reached, while there is time.
            has_time: whether there is time left to wait. There is none once training has ended, as
                after a lost connection: look for the point before you ask.

        Raises:
            NotCleanError: there is no clean state.
        """

    def write(self, kept: Mapping[int, Sequence[KeptState]], point: int, directory: Path) -> Place:
        """Write what a checkpoint at this point holds, and return the session's place there.

        Args:
            kept: rank → its small states, oldest first.
            point: the point that `hold` has returned.
            directory: an empty directory.

        Raises:
            NotCleanError: the state isn't what it was at the point, or another rank's is lost.
        """


def staged_state(
    stagings: Stagings, name: str, rank: int, write: Callable[[Path], Place]
) -> tuple[Path, Place]:
    """Write a state as one rank's part of a checkpoint; return where it is, and its place.

    Args:
        stagings: where to.
        name: name of the checkpoint's directory.
        write: writes into an empty directory, and returns the place.

    Raises:
        Exception: whatever `write` raises; then nothing is left.
    """
    staging = stagings.new(name, rank)
    root, path = beneath(staging)
    try:
        with root.directory(path) as descriptor:
            place: Any = write(Path(f"/proc/{os.getpid()}/fd/{descriptor}"))
            if not isinstance(place, Place):
                raise TypeError(f"StateWriter.write returned {a_type(place)}. Return a Place.")
            return staging, place
    except BaseException:
        remove(staging)
        raise


@dataclass(slots=True, kw_only=True)
class Survivor:
    """A worker process's side; see the module."""

    channel: Channel
    attempt: AttemptId
    rank: int
    stagings: Stagings
    place: Callable[[], Place]
    """Returns the session's place now."""

    copies: Copies | None = None
    """Copies the state while the training continues; None if that isn't wanted."""

    has_ended: bool = False
    """Whether the training function has returned, or raised an error."""

    _reports: deque[tuple[float, int, Mapping[str, Any]]] = field(
        default_factory=lambda: deque(maxlen=_KNOWN)
    )
    """Time, step and metrics of the last reports, oldest first: rank 0's may be lost with its host.
    """

    reads_checkpoint: int = 0
    """How often the training function has read its starting checkpoint itself."""

    @property
    def can_keep(self) -> bool:
        """Whether there is an agent that outlives this process."""
        return isinstance(self.channel, SocketChannel)

    def keep(self, writer: StateWriter, *, capacity: int, size: int) -> KeptStates:
        """Start to keep states; return the memory for this rank's small ones.

        Args:
            writer: writes the whole state after a loss.
            capacity: maximum bytes of a small state.
            size: bytes of the whole state.
        """
        kept = KeptStates.new(capacity)
        requests, asking = os.pipe()
        thread = threading.Thread(
            target=self._serve, args=(writer, requests), name="polytrain-survivor", daemon=True
        )
        thread.start()
        # The agent opens both by their numbers in this process.
        self.channel.send(keeps_message(kept.descriptor, capacity, asking, size))
        return kept

    def reported(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note a report, or the step from which the attempt starts."""
        now, reports = time.monotonic(), self._reports
        reports.append((now, step, metrics))
        # The oldest one shows that none is missing after it.
        while len(reports) > 1 and reports[1][0] < now - _KNOWN_FOR_S:
            reports.popleft()

    def keep_nothing(self, why: str) -> None:
        """Have the run say after a loss why no state was kept, or now if copies are wanted."""
        if self.copies is not None:
            self.copies.refuse(why)
        if self.can_keep:
            self.channel.send(keeps_nothing_message(why))

    def _serve(self, writer: StateWriter, requests: int) -> None:
        with os.fdopen(requests, "rb") as lines:
            for line in lines:
                agent, number = map(int, line.split())
                descriptor = os.open(f"/proc/{agent}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
                with os.fdopen(descriptor, "rb") as file:
                    request = msgpack.unpackb(file.read(), strict_map_key=False)
                checkpoint, point, settles_s, kept = request
                states = {
                    rank: [
                        KeptState(point=at, is_forecast=is_forecast, content=content)
                        for at, is_forecast, content in each
                    ]
                    for rank, each in kept.items()
                }
                self._answer(writer, checkpoint, point, settles_s, states)

    def _answer(
        self,
        writer: StateWriter,
        number: int,
        point: int,
        settles_s: float,
        kept: Mapping[int, Sequence[KeptState]],
    ) -> None:
        deadline = time.monotonic() + settles_s

        def has_time() -> bool:
            return time.monotonic() < deadline and not self.has_ended

        try:
            held = writer.hold(point, has_time)
            name = directory_name(number, self.attempt)
            write = partial(writer.write, kept, held)
            staging, place = staged_state(self.stagings, name, self.rank, write)
        except Exception as error:  # whatever it is, the run continues from its last checkpoint
            is_expected = isinstance(error, NotCleanError)
            why = str(error) if is_expected else f"{type(error).__name__}: {error}"
            self.channel.send(unwritten_message(number, why))
            return
        before = [(step, metrics) for _, step, metrics in [*self._reports] if step < place.step]
        self.channel.send(written_message(number, staging, place, is_copy=False, reports=before))
