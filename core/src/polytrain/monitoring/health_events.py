"""What agents tell of their workers, besides the events that the state machine decides about."""

from __future__ import annotations

from dataclasses import dataclass

from polytrain.monitoring.progress_page import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A worker process has been asked for; from here on it has limited time to meet the others."""

    attempt: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """How a worker is that has joined. Told when something about it changes that matters."""

    attempt: int
    rank: int
    stage: Stage
    quiet_s: float
    """Seconds without progress."""

    idle_s: float
    """Seconds, of these, since it or a process of its last spent CPU time worth mentioning."""

    stopped_s: float
    """Seconds, of these, for which a signal has kept it stopped."""

    cpu_s: float
    """CPU time spent since the last progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a worker process was for a while in which it made progress."""

    attempt: int
    rank: int
    window: int
    """Which while: they are counted from when the ranks have joined."""

    busy: float
    """Share of the time in which its main thread didn't wait for anybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """What a worker process is doing, frame by frame."""

    attempt: int
    rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overstayed:
    """A worker process was asked to leave, didn't, and has been killed."""

    attempt: int
    rank: int
    after_s: float
    stacks: str


HealthEvent = Started | Vitals | Load | Stacks | Overstayed
