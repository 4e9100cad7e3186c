"""The run's journal: one JSON line for everything that changes its state, with the reason.

It is only ever appended to, by one driver after another; `chronicle` reads it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from polytrain.checkpoint.events import CheckpointEvent
from polytrain.common.errors import Failure
from polytrain.common.events import Done, Drained, Event, Exited, Failed, Reported
from polytrain.run.actions import Conclude, EndAttempt
from polytrain.run.ledger import Ledger
from polytrain.run.transition import Transition
from polytrain.storage.protocol import Log, Storage

logger = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"

FORMAT = 2
"""Of its lines: a journal of another format isn't read."""


class Journal:
    """Appends to the journal as things happen."""

    def __init__(self, storage: Storage, *, token: int, ledger: Ledger) -> None:
        """
        Args:
            storage: the run's.
            lease: number of this driver's lease; stands in every line.
            ledger: of what is in the journal already; it is kept up to date.
        """
        self.ledger = ledger
        self._log: Log = storage.open_log(JOURNAL, series=f"{token:06d}")
        self._lease = token

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._log.__exit__(kind, error, traceback)
        except OSError as unwritten:
            # What matters is synced where it matters; something else ends the run here.
            logger.warning("The end of the journal can't be written: %s", unwritten)

    def opened(
        self,
        *,
        anew: bool,
        identity: Mapping[str, Any],
        world_size: int,
        began: float | None = None,
    ) -> None:
        """A driver has begun.

        Args:
            anew: whether what earlier ones have done doesn't count.
            identity: what mustn't change while the run is one.
            world_size: ranks.
            began: when `fit()` was called, in seconds since the epoch; now by default.
        """
        began = time.time() if began is None else began
        self._write(
            "Opened",
            format=FORMAT,
            anew=anew,
            identity=identity,
            world_size=world_size,
            began=began,
        )
        self.sync()

    def transition(self, event: Event | CheckpointEvent | None, transition: Transition) -> None:
        """Note what an event led to; a transition without a reason changed nothing."""
        if transition.reason:
            self._write(
                type(event).__name__ if event is not None else "Begun",
                phase=type(transition.state.phase).__name__,
                attempt=transition.state.attempt,
                reason=transition.reason,
                **_measured(event),
            )

    def launched(self, *, attempt: int, step: int, start: str | None, world_size: int) -> None:
        """An attempt begins.

        Args:
            attempt: which.
            step: what is reported after it is reported once more.
            start: what it resumes from.
            world_size: ranks.
        """
        self._write("Launched", attempt=attempt, step=step, start=start, world_size=world_size)

    def started(self, *, attempt: int) -> None:
        """Every rank's process has been asked for: its data and what it starts from are there."""
        self._write("Started", attempt=attempt)

    def attempt_ended(self, ended: EndAttempt) -> None:
        """An attempt has ended before it was done; without a failure if that was wanted."""
        root = ended.root
        failure = root and {
            "kind": root.kind.name,
            "rank": root.rank,
            "step": root.step,
            "message": root.message,
            "traceback": root.traceback,
            "output": root.output,
            "stacks": {str(rank): stack for rank, stack in root.stacks.items()},
        }
        self._write("AttemptEnded", attempt=ended.attempt, failure=failure, reason=ended.reason)

    def reported(self, report: Reported) -> None:
        """Rank 0 has reported."""
        self._write("Reported", step=report.step, metrics=report.metrics, **_measured(report))

    def stacks_dumped(self, *, attempt: int, reason: str, stacks: Mapping[int, str]) -> None:
        """Something was not as it should be, and this is what every rank was doing then."""
        by_rank = {str(rank): text for rank, text in stacks.items()}
        self._write("StacksDumped", attempt=attempt, reason=reason, stacks=by_rank)

    def straggler(self, *, attempt: int, rank: int, host: str, reason: str) -> None:
        """A rank holds the others up."""
        self._write("Straggler", attempt=attempt, rank=rank, host=host, reason=reason)

    def concluded(self, conclusion: Conclude) -> None:
        """The run is over, or this driver has stopped working on it."""
        self._write(
            "Concluded",
            succeeded=conclusion.succeeded,
            stopped=conclusion.stopped,
            reason=conclusion.reason,
        )
        self.sync()

    def closed(self) -> None:
        """This driver has released everything.

        Raises nothing: whatever this tells, it changes no result.
        """
        try:
            self._write("Closed")
        except OSError as unwritten:
            logger.warning("The end of the journal can't be written: %s", unwritten)

    def sync(self) -> None:
        """Return once everything is where a crash of this machine doesn't reach it."""
        self._log.sync()

    def _write(self, event: str, **fields: Any) -> None:
        entry = {"time": time.time(), "token": self._lease, "event": event, **fields}
        self.ledger.take(entry)
        self._log.write(json.dumps(entry) + "\n")


def _measured(event: Event | CheckpointEvent | None) -> dict[str, float]:
    """What an event tells of time: how long before it something was so."""
    match event:
        case (
            Reported(rank=0, stalled_s=s) | Done(rank=0, stalled_s=s) | Drained(rank=0, stalled_s=s)
        ):
            measured = {"stalled_s": s}
        case Exited(since_s=s) | Failed(failure=Failure(since_s=s)):
            measured = {"since_s": s}
        case _:
            measured = {}
    return {name: round(seconds, 6) for name, seconds in measured.items() if seconds}
