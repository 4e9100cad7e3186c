"""The answer of the state machine to an event."""

from __future__ import annotations

from dataclasses import dataclass

from polytrain.run.actions import Action
from polytrain.run.states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The outcome of one event."""

    state: State
    actions: tuple[Action, ...] = ()
    reason: str = ""
    """The reason, for the journal; empty if nothing changed."""
