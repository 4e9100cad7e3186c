"""Errors of a run. Those of the contract are in `polytrain_plugins.errors`.

    PolytrainError
    ├── InvalidJobError, RegistryError, …   (`polytrain_plugins.errors`) before anything is started
    ├── TrainingFailedError                 the run failed; has the causes and the result so far
    ├── BadDataError                        (ValueError) values that can't be trained on
    ├── NotInTrainerError                   a call that only works inside a training function
    ├── CheckpointError                     a checkpoint can't be read or written
    ├── RunOwnedError                       another driver works on the run
    ├── RunNotFoundError                    there is no run where one was said to be
    └── RunFormatError                      a run was written by another version of polytrain

All of them survive pickling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from polytrain_plugins.errors import PolytrainError, Problem

if TYPE_CHECKING:
    from polytrain.api.result import Result


class FailureKind(StrEnum):
    """What kind of thing went wrong."""

    USER_ERROR = "exception in the training process"
    WORKER_LOST = "worker lost"
    CONNECTION_LOST = "connection between ranks lost"
    AGENT_LOST = "agent lost"
    NODE_LOST = "node lost"
    OUT_OF_MEMORY = "out of memory"
    HANG = "hang"
    PREEMPTED = "preempted"
    STORAGE = "checkpoint could not be stored"
    CHECKPOINT_MISMATCH = "the ranks' parts make no checkpoint"
    STARTUP = "start-up failed"
    LEASE_LOST = "another driver has taken the run over"

    @property
    def is_loss(self) -> bool:
        """Whether a process is gone, or about to be: what its peers raise follows from that."""
        return self in _LOSSES


_LOSSES = (
    FailureKind.WORKER_LOST,
    FailureKind.AGENT_LOST,
    FailureKind.NODE_LOST,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.PREEMPTED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong on one rank."""

    kind: FailureKind
    rank: int | None
    """None when it isn't one rank's."""

    message: str
    """One line: the exception's type and text, or how the process ended."""

    traceback: str = ""
    """The rank's own traceback, as Python prints it; empty when there is none."""

    step: int = 0
    """The last step that the rank had reported."""

    output: str = ""
    """The last lines that the rank wrote to its standard error, where it could not say more."""

    stacks: Mapping[int, str] = field(default_factory=dict)
    """Rank → what it was doing, where that is the question."""

    error: bytes | None = None
    """The pickled exception, where it can be pickled."""

    since_s: float = 0.0
    """Seconds for which it had been so before it was known, where that can be told."""

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}{self.message}"


_MAX_STACKS = 8
"""In a text: more are in the journal."""


def stacks_text(stacks: Mapping[int, str]) -> str:
    """The stacks of the first ranks, for people."""
    told = [f"Rank {rank}:\n{stacks[rank].rstrip()}" for rank in sorted(stacks)[:_MAX_STACKS]]
    more = len(stacks) - len(told)
    return "\n\n".join([*told, *([f"{more} more are in the run's journal"] if more else [])])


class TrainingFailedError(PolytrainError):
    """The run ended in a failure.

    Attributes:
        reason: why the run was not restarted (again).
        failures: what went wrong in the last attempt; the root cause is first.
        result: metrics, history and checkpoint as they were at the end.
    """

    def __init__(
        self, reason: str, failures: tuple[Failure, ...], result: Result | None = None
    ) -> None:
        super().__init__(reason, failures, result)
        self.reason = reason
        self.failures = failures
        self.result = result

    def __str__(self) -> str:
        root = self.failures[0] if self.failures else None
        lines = [f"{root} ({self.reason})" if root else self.reason]
        heard = {(root.message, "")} if root else set()
        for failure in self.failures:
            if failure.stacks:
                lines.append(f"\nWhat the ranks were doing:\n{stacks_text(failure.stacks)}")
            # What several ranks have raised alike is told once.
            is_new = (failure.message, failure.traceback) not in heard
            heard.add((failure.message, failure.traceback))
            if failure.traceback and is_new:
                lines.append(f"\nOn rank {failure.rank}:\n{failure.traceback.rstrip()}")
            elif is_new or failure.kind.is_loss:
                lines.append(f"\nAlso on {failure}")
            if failure.output:
                told = failure.output.rstrip()
                lines.append(f"\nLast on rank {failure.rank}'s standard error:\n{told}")
        return "\n".join(lines)


class BadDataError(PolytrainError, ValueError):
    """Rows that can't be trained on, as the workers have found. It isn't tried again.

    Attributes:
        problems: all that was found, over all ranks.
    """

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems:\n{lines}"


class NotInTrainerError(PolytrainError, RuntimeError):
    """The call works only inside a training function that a worker process runs."""


class CheckpointError(PolytrainError):
    """A checkpoint can't be read or written."""


class RunOwnedError(PolytrainError):
    """Another driver works on the run of this name."""


class RunNotFoundError(PolytrainError):
    """There is no run where one was said to be."""


class RunFormatError(PolytrainError):
    """A run was written by another version of polytrain, in a format that this one doesn't read."""

    def __init__(self, found: object, known: int) -> None:
        super().__init__(found, known)
        self.found, self.known = found, known

    def __str__(self) -> str:
        return (
            f"The run's journal has format {self.found}; this version of polytrain reads format "
            f"{self.known}. Resume the run with the version that wrote it, or start another one "
            "with RunConfig(name=…)."
        )
