"""Errors of a run. Those of the contract are in `polytrain_plugins.errors`.

    PolytrainError
    ├── InvalidJobError, RegistryError, …   (`polytrain_plugins.errors`) before any worker starts
    ├── TrainingFailedError                 the run failed; has the causes and the result so far
    ├── BadDataError                        (ValueError) values that can't be trained on
    ├── NotInWorkerError                   a call that only works inside a training function
    ├── PredictionFailedError               workers that predict were lost again and again
    ├── CheckpointError                     a checkpoint can't be read or written
    ├── ReturnValueError                    what a training function returned can't be read
    ├── RunOwnedError                       another driver works on the run
    ├── RunNotFoundError                    the given directory has no run
    ├── RunFormatError                      a run was written by another version of polytrain
    └── DamagedFileError                    (ValueError) a stored file holds what polytrain never
                                            writes

All of them survive pickling.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from polytrain.text.described import ShortRepr
from polytrain_plugins.errors import PolytrainError, Problem

if TYPE_CHECKING:
    from polytrain.api.result import Result


class FailureKind(StrEnum):
    """What kind of thing went wrong."""

    USER_ERROR = "user_error"
    """The training function, or a library that it uses, raised an exception."""

    WORKER_LOST = "worker_lost"
    """A worker process ended by itself or by a signal."""

    CONNECTION_LOST = "connection_lost"
    """The connection between two ranks broke."""

    AGENT_LOST = "agent_lost"
    """An agent ended, and its worker process with it."""

    NODE_LOST = "node_lost"
    """A node is gone, with its agents."""

    OUT_OF_MEMORY = "out_of_memory"
    """A process, or a device, had no memory left."""

    HANG = "hang"
    """A rank made no progress."""

    PREEMPTED = "preempted"
    """The cluster took a node away."""

    STORAGE = "storage"
    """The run's storage couldn't be written or read."""

    CHECKPOINT_MISMATCH = "checkpoint_mismatch"
    """The files that ranks reported don't make one checkpoint."""

    STARTUP = "startup"
    """A rank failed before it trained."""

    REPLICAS_DIFFER = "replicas_differ"
    """A rank held other weights than the ranks that should have the same."""

    DIVERGED = "diverged"
    """A report showed that training diverges, and by `FailureConfig.on_divergence` ended the
    attempt."""

    VALIDATION = "validation"
    """A checkpoint's validation failed, which by `ValidationConfig.on_failure` ends the run."""

    LEASE_LOST = "lease_lost"
    """Another driver has taken the run over, or the run's directory is gone."""

    UNKNOWN = "unknown"
    """A newer version has recorded it, which knows more kinds."""

    @property
    def is_loss(self) -> bool:
        """Whether a process is lost, or about to be. Its peers' exceptions follow from that."""
        return self in _LOSSES


_LOSSES = (
    FailureKind.WORKER_LOST,
    FailureKind.AGENT_LOST,
    FailureKind.NODE_LOST,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.PREEMPTED,
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Failure(ShortRepr):
    """What went wrong on one rank."""

    kind: FailureKind
    rank: int | None
    """None if the failure isn't that of one rank."""

    message: str
    """One line: the exception's type and text, or how the process ended."""

    traceback: str = field(default="", repr=False)
    """The rank's own traceback, as Python prints it; empty when there is none."""

    host: str = ""
    """Address of the rank's node; empty if that isn't known."""

    step: int = 0
    """The last step that the rank had reported; if all ranks hang, that of the furthest."""

    output: str = field(default="", repr=False)
    """The end of the rank's standard error, or of all its output if both are one terminal, pipe or
    file; empty if it could report an exception."""

    last_lines: tuple[str, ...] = field(default=(), repr=False)
    """The end of what the rank has printed."""

    stacks: Mapping[int, str] = field(default_factory=dict, repr=False)
    """Rank → its stacks, for hangs."""

    error: bytes | None = field(default=None, repr=False)
    """The pickled exception, if it can be pickled."""

    since_s: float = 0.0
    """Detection latency in seconds; 0 if unknown."""

    late: frozenset[int] = frozenset()
    """Ranks that were late to start; empty if any rank may have kept the others waiting."""

    @property
    def where(self) -> str:
        """The rank, with another machine's address; empty if the failure isn't that of one rank."""
        return "" if self.rank is None else rank_at(self.rank, self.host)

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


def rank_at(rank: int, host: str) -> str:
    """Return a rank with the address of its node, unless that is this machine's own."""
    # On one machine every rank is at its loopback address.
    return f"rank {rank} on {host}" if host and not host.startswith("127.") else f"rank {rank}"


_MAX_STACKS = 8
"""Stacks in an error's text. The journal has all of them."""

_MAX_OTHERS = 16
"""Failures besides the root that an error's text shows: a run may have thousands of ranks."""


def stacks_text(stacks: Mapping[int, str]) -> str:
    """The stacks of the first ranks, as text for people."""
    shown = [f"Rank {rank}:\n{stacks[rank].rstrip()}" for rank in sorted(stacks)[:_MAX_STACKS]]
    more = len(stacks) - len(shown)
    return "\n\n".join([*shown, *([f"{more} more are in the run's journal"] if more else [])])


class TrainingFailedError(PolytrainError):
    """The run ended in a failure.

    Attributes:
        reason: why the run was not restarted (again).
        failures: what went wrong in the last attempt; the root cause is first.
        result: metrics, history and checkpoint as they were at the end.
        path: the run's directory or address.
        log: where the output of the rank is kept that failed first; empty if it has written none.
        host: the address of that rank's node; empty if that isn't known.
        last_lines: the end of that rank's output.
    """

    def __init__(
        self,
        reason: str,
        failures: tuple[Failure, ...],
        result: Result | None = None,
        path: str = "",
        log: str = "",
        host: str = "",
        last_lines: tuple[str, ...] = (),
    ) -> None:
        super().__init__(reason, failures, result, path, log, host, last_lines)
        self.reason = reason
        self.failures = failures
        self.result = result
        self.path = path
        self.log = log
        self.host = host
        self.last_lines = last_lines

    def __str__(self) -> str:
        root = self.failures[0] if self.failures else None
        lines = [self._verdict(root) if root else self.reason]
        shown = {(root.message, root.traceback), (root.message, "")} if root else set()
        of_others = 0
        for failure in self.failures:
            if failure is not root and of_others == _MAX_OTHERS:
                more = len(self.failures) - 1 - of_others
                lines.append(f"\n{more} more failures are in the run's journal")
                break
            if failure.stacks:
                lines.append(f"\nWhat the ranks were doing:\n{stacks_text(failure.stacks)}")
            # The same exception of several ranks is shown once.
            is_new = (failure.message, failure.traceback) not in shown
            shown.add((failure.message, failure.traceback))
            of_others += failure is not root and (is_new or failure.kind.is_loss)
            if failure.traceback and is_new:
                lines.append(_raised(failure))
            elif failure is not root and (is_new or failure.kind.is_loss):
                lines.append(f"\nAlso on {failure}")
            output = failure.output.rstrip()
            is_shown = failure is root and {*output.splitlines()} <= {*self.last_lines}
            if output and not is_shown:
                lines.append(f"\nThe last output of {_writer(failure)}:\n{output}")
        if root and self.last_lines and not {*self.last_lines} < {*root.output.splitlines()}:
            last = "\n".join(f"    {line}" for line in self.last_lines)
            lines.append(f"\nThe last lines of {_writer(root)}:\n{last}")
        if self.path:
            lines.append(f"\nThe run's directory: {self.path}")
        if self.path and root:
            command = next_command(self.path, root.rank, has_output=bool(self.log))
            lines.append(f"To see more: {command}")
        if root and root.traceback:
            # Last of all, as in a traceback of Python's: the user's line, and what it raised.
            lines.append(_raised(root))
        return "\n".join(lines)

    def _verdict(self, root: Failure) -> str:
        who = "" if root.rank is None else f"{rank_at(root.rank, self.host)}: "
        after = f", after step {root.step}" if root.step else ""
        return f"{who}{root.message}{after} ({self.reason})"


def _writer(failure: Failure) -> str:
    """Return who has written the output that a failure has."""
    return "validations" if failure.rank is None else f"rank {failure.rank}"


def _raised(failure: Failure) -> str:
    where = "" if failure.rank is None else f"On rank {failure.rank}:\n"
    return f"\n{where}{failure.traceback.rstrip()}"


class BadDataError(PolytrainError, ValueError):
    """The workers have found rows that can't be trained on. This isn't retried.

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


class ReplicasDifferError(PolytrainError):
    """Ranks hold different values of what should be the same on all of them.

    Attributes:
        is_here: whether this rank differs from most; None if no value is that of most.
    """

    def __init__(self, message: str, is_here: bool | None = None) -> None:
        super().__init__(message, is_here)
        self.is_here = is_here

    def __str__(self) -> str:
        return str(self.args[0])


class NotInWorkerError(PolytrainError, RuntimeError):
    """The call works only inside a training function that a worker process runs."""


class PredictionFailedError(PolytrainError):
    """Workers were lost again and again while they predicted the same rows."""


class CheckpointError(PolytrainError):
    """A checkpoint can't be read or written."""


class ReturnValueError(PolytrainError):
    """What a training function has returned wasn't kept, or can't be read."""


class RunOwnedError(PolytrainError):
    """Another driver works on the run of this name."""


class RunNotFoundError(PolytrainError):
    """The given directory has no run."""


class RunFormatError(PolytrainError):
    """A run was written by a version of polytrain whose format this version can't read."""

    def __init__(self, found: object, known: int) -> None:
        super().__init__(found, known)
        self.found, self.known = found, known

    def __str__(self) -> str:
        return (
            f"The run's journal has format {self.found}; this version of polytrain reads format "
            f"{self.known}. Resume the run with the version that wrote it, or start a new run "
            "with RunConfig(name=…)."
        )


class DamagedFileError(PolytrainError, ValueError):
    """A file of a run, or of a checkpoint, holds what no version of polytrain writes.

    Attributes:
        file: its name.
        field: the field that is wrong; empty if it is the whole file.
        what: what is wrong with it.
    """

    def __init__(self, file: str, field: str, what: str) -> None:
        super().__init__(file, field, what)
        self.file, self.field, self.what = file, field, what

    def __str__(self) -> str:
        where = f"{self.file}: {self.field!r}" if self.field else self.file
        return (
            f"{where} {self.what}. The file is damaged, or somebody has changed it: restore it "
            "from a copy, or start anew under another name."
        )


def next_command(path: str, rank: int | None, *, has_output: bool) -> str:
    """Return the command that shows a rank's whole output, or else the run.

    Args:
        path: the run's directory or address.
        rank: the rank that failed; None if the failure isn't one rank's.
        has_output: whether the rank has printed anything.
    """
    if rank is None or not has_output:
        return f"polytrain show {shlex.quote(path)}"
    return f"polytrain logs {shlex.quote(path)} --rank {rank}"
