"""Agents as the driver sees them: asked for, arrived, lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from polytrain.common.errors import FailureKind
from polytrain.common.placement import NodeAddress
from polytrain.workers.group import Happening


class Call(Protocol):
    """Calls a method of an agent, without waiting for it."""

    def __call__(self, method: str, /, *arguments: Any) -> Any: ...


@dataclass(slots=True, eq=False, kw_only=True)
class AgentHandle:
    """One agent, from the moment it is asked for."""

    call: Call
    bundle: int | None
    """Its bundle of the placement group; None outside of it."""

    place: NodeAddress = field(default_factory=lambda: NodeAddress(node_id="", host=""))
    """Where it is, once it has arrived."""

    seat: tuple[int, int] | None = None
    """The rank that it was prepared for, and of how many."""

    is_gone: bool = False
    """Whether it is lost, or was sent away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """An agent is there."""

    agent_handle: AgentHandle
    place: NodeAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """An agent is lost, or never came to be."""

    agent_handle: AgentHandle
    kind: FailureKind
    reason: str


Delivery = Sequence[Happening | Arrived | Gone]
"""What is told at once; nothing, only to wake the reader."""
