"""The arguments of observer hooks: plain values that describe a run's progress."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One call of `fit()`."""

    name: str
    backend: str
    num_workers: int
    path: str
    """Where the run's checkpoints, journal and logs are stored."""

    cluster: str = ""
    """Where its workers run, and why; empty if it is inline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt."""

    number: int
    """0 for the first attempt."""

    checkpoint: str | None
    """Directory of the checkpoint that it resumes from."""

    num_workers: int
    """Number of worker processes."""

    first_step: int = 1
    """The first step that it reports: the one after its checkpoint's, or 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Metrics that one rank reported."""

    rank: int
    attempt: int
    step: int
    """Declarative training: the steps done in the whole run. A training function: which of the
    rank's reports it is, from `Attempt.first_step`."""

    metrics: Mapping[str, Any]
    time: float = 0.0
    """When the rank reported it, in seconds since the epoch: its node's clock as the rank joined,
    and the time since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint."""

    path: str
    step: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureInfo:
    """What went wrong on one rank."""

    kind: str
    """For example "user_error" or "worker_lost": the values of `polytrain.FailureKind`."""

    rank: int | None
    """None if the failure isn't that of one rank."""

    message: str
    """One line: the exception's type and text, or how the process ended."""

    step: int = 0
    """The last step that the rank had reported."""

    traceback: str = ""
    """The rank's own traceback, as Python prints it; empty if there is none."""

    log: str = ""
    """Where the rank's output is kept; empty if it has written nothing. In object storage it is
    there once the run has ended."""

    pickled: bytes | None = field(default=None, repr=False)
    """The pickled exception, if it can be pickled."""

    @property
    def exception(self) -> BaseException | None:
        """The exception itself; None if it isn't known here.

        This imports the module that defines its class.
        """
        if self.pickled is None:
            return None
        try:
            loaded = pickle.loads(self.pickled)
        except Exception:  # its class may not exist in this process; there is its text
            return None
        return loaded if isinstance(loaded, BaseException) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Who stopped a run before its end, and why."""

    by: Literal["signal", "observer", "handle", "command", "condition"]
    """A signal (Ctrl-C, SIGTERM, SIGHUP), an observer, the handle of `Trainer.fit(wait=False)`, the
    command `polytrain stop`, or a condition of `RunConfig`: `stop` or `time_budget_s`. Only a
    condition finishes the run."""

    reason: str
    """The signal's name; the observer's class, and what it gave as the reason; what the handle's
    `stop` or the command was given; or the condition with what met it."""

    condition: str = ""
    """The condition that was met, such as "loss <= 0.1"; or the name of the function in `stop`."""

    metric: str = ""
    """The metric that the condition is about; empty for a function and for the time."""

    step: int | None = None
    """The step at which it was met. The run ended with the next checkpoint, often the same."""

    value: float | None = None
    """The value of the metric that met it, or the seconds of training."""

    @property
    def is_final(self) -> bool:
        """Whether the run is finished: nobody interrupted it."""
        return self.by == "condition"

    def __str__(self) -> str:
        who = {
            "signal": "a signal",
            "observer": "an observer",
            "handle": "its handle",
            "command": "polytrain stop",
            "condition": "a condition",
        }[self.by]
        return f"stopped by {who}: {self.reason}" if self.reason else f"stopped by {who}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt or a run ended."""

    succeeded: bool
    reason: str
    restarts: int
    """Restarts of the run so far, over all its drivers: attempts after the first."""

    planned: bool = False
    """Whether this is a planned end: to continue with different workers, or because the user stops
    the run."""

    failures: tuple[FailureInfo, ...] = ()
    """What went wrong, on which ranks; the cause is first. Empty if nothing did."""

    stopped: Stopped | None = None
    """Who stopped the run, and why; None if nobody did."""
