"""The attempts of a run: how each began and ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from polytrain.errors import Failure
from polytrain.record.entries import Launched


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

    virtual_workers: int | None = None
    has_passed_check: bool = False
    """Whether a check of virtual workers has passed."""

    why_not_exact: tuple[str, ...] = ()
    """What such checks have found."""


def counting_attempts(attempts: Iterable[AttemptOverview]) -> list[AttemptOverview]:
    """Return the attempts whose steps count, in the order of their first steps."""
    counting: list[AttemptOverview] = []
    for each in attempts:
        # It repeats every step of those that began where it does, or later.
        while counting and counting[-1].first_step >= each.first_step:
            counting.pop()
        counting.append(each)
    return counting


class Attempts:
    """The attempts of a run, over all its drivers."""

    def __init__(self) -> None:
        self._attempts: list[AttemptOverview] = []

    def launched(self, entry: Launched, now_s: float) -> None:
        """Add an attempt.

        Args:
            now_s: seconds of the run's own time until it was launched.
        """
        self.end(stop_s=now_s)
        self._attempts.append(
            AttemptOverview(
                driver=entry.token,
                number=entry.attempt,
                num_workers=entry.world_size,
                first_step=entry.step,
                checkpoint=entry.start,
                launched=entry.time,
                start_s=now_s,
                virtual_workers=entry.virtual_workers,
            )
        )

    def checked(self, why_not: str) -> None:
        """Note what a check of virtual workers has found; nothing if it has passed."""
        if not self._attempts:
            return
        last = self._attempts[-1]
        self._attempts[-1] = (
            replace(last, why_not_exact=(*last.why_not_exact, why_not))
            if why_not
            else replace(last, has_passed_check=True)
        )

    def end(
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

    def why_not_exact(self, last_step: int) -> tuple[str, ...] | None:
        """Return why the run may not be exact over world sizes; see `Result.why_not_exact`.

        Args:
            last_step: the run's last report; 0 without any.
        """
        counting = counting_attempts(self._attempts)
        if all(each.virtual_workers is None for each in counting):
            return None
        ends = [*(each.first_step for each in counting[1:]), last_step]
        found = dict.fromkeys(
            why_not
            for each, end in zip(counting, ends, strict=True)
            for why_not in _inexact(each, has_steps=end > each.first_step)
        )
        if not found and not any(each.has_passed_check for each in counting):
            return ("nothing has been checked",)
        return tuple(found)

    def __iter__(self) -> Iterator[AttemptOverview]:
        return iter(self._attempts)


def _inexact(attempt: AttemptOverview, *, has_steps: bool) -> tuple[str, ...]:
    """Return what makes an attempt inexact, if it has steps that count."""
    name = f"attempt {attempt.driver}.{attempt.number}"
    if attempt.virtual_workers is None:
        return (f"{name} had no virtual workers",) if has_steps else ()
    if has_steps and not attempt.has_passed_check and not attempt.why_not_exact:
        return (f"{name} ended before a check",)
    return attempt.why_not_exact
