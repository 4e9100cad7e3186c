"""The arguments of observer hooks: plain values that describe a run's progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Metrics that one rank reported."""

    rank: int
    attempt: int
    step: int
    """Declarative training: the steps done in the whole run. A training function: which of the
    rank's reports in this attempt it is, from 1."""

    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint."""

    path: str
    step: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt or a run ended."""

    succeeded: bool
    reason: str
    restarts: int
    """Restarts of the run so far."""

    planned: bool = False
    """Whether this is a planned end: to continue with different workers, or because the user stops
    the run."""
