"""Failures and dumped stacks, with equal stacks listed once. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from polytrain.errors import Failure, rank_at
from polytrain.record.entries import StacksDumped
from polytrain.view.timeline import TimedEntry

_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\b\d{4,}\b")
"""What differs between equal stacks: addresses, and numbers of processes and threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStack:
    """The stack of one rank, and of all ranks that have the same."""

    ranks: tuple[int, ...]
    stack: str
    """That of the first of these ranks."""

    @property
    def title(self) -> str:
        """Whose it is: "ranks 0, 2–7"."""
        return f"rank{'' if len(self.ranks) == 1 else 's'} {ranges(self.ranks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureFacts:
    """Why an attempt failed."""

    kind: str
    rank: int | None
    host: str
    """Of the rank's node; empty if that isn't known."""

    step: int
    message: str
    traceback: str
    output: str
    """The last lines that the rank printed."""

    stacks: tuple[SharedStack, ...]

    @property
    def sentence(self) -> str:
        """What happened, and where."""
        who = "" if self.rank is None else f"{rank_at(self.rank, self.host)}: "
        return f"{who}{self.message} (step {self.step})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Stacks that were dumped during an attempt."""

    at: float
    """Seconds of the run's own time before it."""

    attempt: int
    reason: str
    stacks: tuple[SharedStack, ...]


def failure_of(failure: Failure) -> FailureFacts:
    """Return what a page shows of a failure."""
    return FailureFacts(
        kind=failure.kind.name,
        rank=failure.rank,
        step=failure.step,
        message=failure.message,
        traceback=failure.traceback,
        host=failure.host,
        output="\n".join(failure.last_lines) or failure.output,
        stacks=folded(failure.stacks),
    )


def dumps_of(timed: Iterable[TimedEntry]) -> Iterator[Dump]:
    """Yield the stacks that a run's journal has."""
    for each in timed:
        match each.entry:
            case StacksDumped(attempt=attempt, reason=reason, stacks=stacks):
                yield Dump(at=each.at, attempt=attempt, reason=reason, stacks=folded(stacks))


def folded(stacks: Mapping[int, str]) -> tuple[SharedStack, ...]:
    """Return each stack once, of those that are equal but for addresses and numbers of processes.

    Args:
        stacks: rank → its stack.
    """
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        groups.setdefault(_VARIABLE.sub("…", stack), []).append(rank)
    return tuple(
        SharedStack(ranks=tuple(ranks), stack=stacks[ranks[0]]) for ranks in groups.values()
    )


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers in short: "0, 2–7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
