"""The attempts of a run: how each began and ended. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from polytrain.errors import Failure
from polytrain.record.entries import AttemptEnded, Entry, Launched, Opened, RunConcluded


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOverview:
    """One attempt of a run."""

    driver: int
    """Fencing token of the driver's lease."""

    number: int
    """Which of the driver's attempts it is, from 0."""

    num_workers: int
    first_step: int
    """Steps that were done before."""

    checkpoint: str | None
    """The one that it started from."""

    launched: float
    """When its worker processes were requested, in seconds since the epoch."""

    ended: float | None = None
    """When it ended; None if it hasn't, or if its driver died."""

    start_s: float
    """When it was launched, in seconds of the run's own time."""

    stop_s: float | None = None
    """When it ended, or its driver's successor began; None if it hasn't."""

    failure: Failure | None = None
    """What failed; None if nothing did."""

    reason: str = ""
    """Why there was another attempt, or not."""


class Attempts:
    """The attempts of a run, over all its drivers."""

    def __init__(self) -> None:
        self._attempts: list[AttemptOverview] = []

    def take(self, entry: Entry, now_s: float) -> None:
        """Take the next entry of the journal, but no report.

        Args:
            entry: the entry.
            now_s: seconds of the run's own time until this entry.
        """
        match entry:
            case Opened():
                self._end(stop_s=now_s)
            case Launched():
                self._end(stop_s=now_s)
                self._attempts.append(
                    AttemptOverview(
                        driver=entry.token,
                        number=entry.attempt,
                        num_workers=entry.world_size,
                        first_step=entry.step,
                        checkpoint=entry.start,
                        launched=entry.time,
                        start_s=now_s,
                    )
                )
            case AttemptEnded(failure=failure, reason=reason):
                self._end(ended=entry.time, stop_s=now_s, failure=failure, reason=reason)
            case RunConcluded(reason=reason):
                self._end(ended=entry.time, stop_s=now_s, reason=reason)

    def _end(
        self,
        *,
        stop_s: float,
        ended: float | None = None,
        failure: Failure | None = None,
        reason: str = "",
    ) -> None:
        """End the last attempt, unless it has ended."""
        if self._attempts and self._attempts[-1].stop_s is None:
            self._attempts[-1] = replace(
                self._attempts[-1], ended=ended, stop_s=stop_s, failure=failure, reason=reason
            )

    def __iter__(self) -> Iterator[AttemptOverview]:
        return iter(self._attempts)

    def __len__(self) -> int:
        return len(self._attempts)
