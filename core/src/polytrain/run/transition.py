"""The state machine's result for one event, and its journal entries. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polytrain.errors import Failure
from polytrain.events.attempt import (
    ConditionMet,
    Done,
    Drained,
    DrainWanted,
    Event,
    Exited,
    Failed,
    Joined,
)
from polytrain.record.entries import (
    DrainRequested,
    Entry,
    RankJoined,
    StopConditionMet,
    Transitioned,
)
from polytrain.run.actions import Action
from polytrain.run.states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The outcome of one event."""

    state: State
    actions: tuple[Action, ...] = ()
    reason: str = ""
    """The reason, for the journal; empty if nothing changed."""


def entries_of(event: Event | None, transition: Transition) -> Iterator[Entry]:
    """Yield the journal entries of a transition; none if it has no reason.

    Args:
        event: the event; None for the beginning of the run.
        transition: the state machine's answer.
    """
    if isinstance(event, ConditionMet):
        yield StopConditionMet(attempt=event.attempt, stopped=event.stopped)
    if not transition.reason:
        return
    its: dict[str, Any] = {
        "cause": "Begun" if event is None else type(event).__name__,
        "phase": type(transition.state.phase).__name__,
        "attempt": transition.state.attempt,
        "reason": transition.reason,
    }
    match event:
        case Joined():
            yield RankJoined(
                **its, rank=event.rank, rows=event.rows, device=event.device, node=event.node
            )
        # `ConditionMet` has an entry of its own besides.
        case DrainWanted() | ConditionMet():
            yield DrainRequested(**{**its, "cause": "DrainWanted"})
        case Done(rank=0, stalled_s=s) | Drained(rank=0, stalled_s=s):
            yield Transitioned(**its, stalled_s=round(s, 6))
        case Exited(since_s=s) | Failed(failure=Failure(since_s=s)):
            yield Transitioned(**its, since_s=round(s, 6))
        case _:
            yield Transitioned(**its)
