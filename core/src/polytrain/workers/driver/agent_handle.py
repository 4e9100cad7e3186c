"""The driver's view of agents: requested, arrived, lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polytrain.errors import FailureKind
from polytrain.workers.agents.agent_host import AgentReady, Broken, Mail
from polytrain.workers.agents.calls import AgentEvent
from polytrain.workers.agents.placement import NodeAddress


@dataclass(slots=True, eq=False, kw_only=True)
class AgentHandle:
    """The driver's handle of one agent, from its request on."""

    number: int
    """The agent's number in the run."""

    bundle: int | None
    """The agent's bundle in the placement group; None outside the group."""

    place: NodeAddress = field(default_factory=lambda: NodeAddress(node_id="", host=""))
    """The agent's node, once it has arrived."""

    assigned: tuple[int, int] | None = None
    """The rank that it was assigned, and the world size."""

    is_gone: bool = False
    """Whether it is lost or was dismissed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """An agent has arrived."""

    agent_handle: AgentHandle
    place: NodeAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """An agent is lost, or could not be started."""

    agent_handle: AgentHandle
    kind: FailureKind
    reason: str


Delivery = Sequence[AgentEvent | Arrived | Gone]
"""Events that are sent together; an empty delivery only wakes the reader."""


def delivery(agent_handle: AgentHandle, mail: Mail) -> Delivery:
    """Convert an agent's mail to a delivery for the driver."""
    return [_for_driver(agent_handle, each) for each in mail]


def _for_driver(
    agent_handle: AgentHandle, mail: AgentEvent | AgentReady | Broken
) -> AgentEvent | Arrived | Gone:
    match mail:
        case AgentReady(place=place):
            return Arrived(agent_handle=agent_handle, place=place)
        case Broken(reason=reason):
            return Gone(agent_handle=agent_handle, kind=FailureKind.AGENT_LOST, reason=reason)
        case _:
            return mail
