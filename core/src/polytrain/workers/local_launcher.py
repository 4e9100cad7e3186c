"""Agents in the driver: objects on one event loop, on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from polytrain.common.errors import FailureKind
from polytrain.common.placement import NodeAddress
from polytrain.workers.agent import Agent, AgentSpec
from polytrain.workers.agent_handle import AgentHandle, Arrived, Delivery, Gone

logger = logging.getLogger(__name__)


class LocalAgentLauncher:
    """Makes agents, as many as the machine has room for, and ends them."""

    def __init__(
        self,
        spec: AgentSpec,
        *,
        place: NodeAddress,
        room: int,
        mailbox: queue.SimpleQueue[Delivery],
    ) -> None:
        """
        Args:
            spec: what all agents have in common.
            place: where they are.
            room: how many there may be at once; further ones wait until others have gone.
            mailbox: gets what they tell.
        """
        self._spec = spec
        self._place = place
        self._room = room
        self._mailbox = mailbox
        self._agents: dict[AgentHandle, Agent] = {}
        self._waiting: deque[AgentHandle] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="polytrain-agents", daemon=True
        )
        self._thread.start()

    def reserve(self, bundles: int, strategy: str) -> None:
        """Nothing has to be reserved: nobody else asks this for agents."""

    def ask(self, *, bundle: int | None = None, avoid: frozenset[str] = frozenset()) -> AgentHandle:
        """Ask for an agent; it arrives once there is room for it.

        Args:
            bundle: a number that it is to be known by, if that is wanted.
            avoid: nodes on which it mustn't be.
        """

        def call(method: str, /, *arguments: Any) -> None:
            self._call(agent_handle, method, arguments)

        agent_handle = AgentHandle(call=call, bundle=bundle)
        if self._place.node_id not in avoid:
            self._waiting.append(agent_handle)
            self._start_those_with_room()
        return agent_handle

    def dismiss(self, agent_handle: AgentHandle) -> None:
        """End an agent."""
        if agent_handle in self._waiting:
            self._waiting.remove(agent_handle)
        agent = self._agents.pop(agent_handle, None)
        if agent is not None:
            self._submit(agent.end())
            self._start_those_with_room()

    def close(self, timeout_s: float, *, here: Sequence[AgentHandle]) -> None:
        """End all agents, and give back what they hold.

        Args:
            timeout_s: seconds to wait for that.
            here: the agents that are there.
        """
        self._waiting.clear()
        ending = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
        try:
            ending.result(timeout_s)
        except TimeoutError:
            logger.warning("Not everything that worker processes used could be given back in time.")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start_those_with_room(self) -> None:
        while self._waiting and len(self._agents) < self._room:
            agent_handle = self._waiting.popleft()
            agent = self._agents[agent_handle] = Agent(self._spec, self._place, {})
            self._submit(self._serve(agent_handle, agent), of=agent_handle)

    async def _serve(self, agent_handle: AgentHandle, agent: Agent) -> None:
        self._mailbox.put((Arrived(agent_handle=agent_handle, place=await agent.place()),))
        async for happenings in agent.events():
            self._mailbox.put(happenings)

    def _call(self, agent_handle: AgentHandle, method: str, arguments: tuple[Any, ...]) -> None:
        agent = self._agents.get(agent_handle)
        if agent is not None:
            self._submit(getattr(agent, method)(*arguments), of=agent_handle)

    def _submit(self, work: Coroutine[Any, Any, None], *, of: AgentHandle | None = None) -> None:
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        if of is not None:
            done.add_done_callback(lambda future: self._look_at(future, of))

    def _look_at(self, done: Future[None], agent_handle: AgentHandle) -> None:
        """An agent whose method fails is lost, as an actor would be."""
        error = None if done.cancelled() else done.exception()
        if error is not None:
            reason = f"{type(error).__name__}: {error}"
            gone = Gone(agent_handle=agent_handle, kind=FailureKind.AGENT_LOST, reason=reason)
            self._mailbox.put((gone,))

    async def _end_all(self) -> None:
        agents = list(self._agents.values())
        await asyncio.gather(*(agent.end() for agent in agents), return_exceptions=True)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
