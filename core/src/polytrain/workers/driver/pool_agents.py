"""The agents of a run: with ranks, on standby, and requested."""

from __future__ import annotations

from polytrain.policy.placement import rank_order
from polytrain.workers.agents.agent_host import AgentHandle


class PoolAgents:
    """Those that are there, and those that are requested."""

    def __init__(self) -> None:
        self.ranked: list[AgentHandle] = []
        """Those of the last attempt, by rank; some may be gone."""

        self._ranks: dict[AgentHandle, int] = {}
        """The rank of each of `ranked` that isn't gone."""

        self.spares: dict[AgentHandle, None] = {}
        """Those that have arrived and have no rank, in order of their arrival."""

        self.coming: dict[AgentHandle, None] = {}
        """Those that are requested and haven't arrived."""

    @property
    def here(self) -> list[AgentHandle]:
        """Those that have arrived, those with a rank first."""
        return [*self._ranks, *self.spares]

    @property
    def up(self) -> int:
        """The number of those that have arrived; asked after each arrival."""
        return len(self._ranks) + len(self.spares)

    @property
    def nodes(self) -> list[str]:
        """The nodes of those that have arrived, in the same order."""
        return [agent_handle.place.node_id for agent_handle in self.here]

    @property
    def bundles(self) -> set[int | None]:
        """The bundles of all of them."""
        return {agent_handle.bundle for agent_handle in (*self.here, *self.coming)}

    def assign_ranks(self, size: int, first_node: str) -> None:
        """Assign an agent to every rank.

        Args:
            first_node: the node whose workers get the first ranks, if it has any.
        """
        if size == len(self.ranked):
            # A remaining agent keeps its rank, and so its data.
            spares = iter(self.spares)
            self.ranked = [next(spares) if r.is_gone else r for r in self.ranked]
        else:
            chosen = self.here[:size]
            order = rank_order([agent_handle.place for agent_handle in chosen], first_node)
            self.ranked = [chosen[index] for index in order]
        self._ranks = {agent_handle: rank for rank, agent_handle in enumerate(self.ranked)}
        self.spares = {each: None for each in self.spares if each not in self._ranks}

    def forget(self, agent_handle: AgentHandle) -> int | None:
        """Note that an agent is gone; return the rank that it had, if any."""
        self.spares.pop(agent_handle, None)
        self.coming.pop(agent_handle, None)
        return self._ranks.pop(agent_handle, None)
