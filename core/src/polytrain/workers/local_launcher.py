"""Agents in the driver: their host's event loop runs on its own thread."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Coroutine
from typing import Any

from polytrain.common.placement import NodeAddress
from polytrain.workers.agent import AgentSpec
from polytrain.workers.agent_handle import AgentHandle, Delivery, delivery
from polytrain.workers.agent_host import AgentHost, Mail

logger = logging.getLogger(__name__)


class LocalAgentLauncher:
    """Starts agents, as many as the machine has room for, and ends them."""

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
            spec: the settings of all agents.
            place: the node's address.
            room: maximum number of agents; further ones wait until others end.
            mailbox: receives their events.
        """
        self._place = place
        self._room = room
        self._mailbox = mailbox
        self._host = AgentHost(spec, place, {}, tell=self._deliver)
        self._numbers = itertools.count()
        self._handles: dict[int, AgentHandle] = {}
        """Those of agents that have been started, by number."""

        self._waiting: deque[tuple[int, AgentHandle]] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="polytrain-agents", daemon=True
        )
        self._thread.start()

    def reserve(self, bundles: int, strategy: str) -> None:
        """Do nothing: no other run uses this launcher."""

    def ask(self, *, bundle: int | None = None, avoid: frozenset[str] = frozenset()) -> AgentHandle:
        """Request an agent, which arrives once there is room for it.

        Args:
            bundle: a number to identify the agent by, if any.
            avoid: nodes to avoid.
        """
        number = next(self._numbers)

        def call(method: str, /, *arguments: Any) -> None:
            self._submit(self._host.call(number, method, arguments))

        agent_handle = AgentHandle(call=call, bundle=bundle)
        if self._place.node_id not in avoid:
            self._waiting.append((number, agent_handle))
            self._start_those_with_room()
        return agent_handle

    def dismiss(self, agent_handle: AgentHandle) -> None:
        """End an agent."""
        self._waiting = deque(w for w in self._waiting if w[1] is not agent_handle)
        for number, handle in list(self._handles.items()):
            if handle is agent_handle:
                del self._handles[number]
                self._submit(self._host.end(number))
        self._start_those_with_room()

    def close(self, timeout_s: float) -> None:
        """End all agents, and release their resources.

        Args:
            timeout_s: seconds to wait.
        """
        self._waiting.clear()
        try:
            self._submit(self._end_all()).result(timeout_s)
        except TimeoutError:
            logger.warning("The worker processes' resources could not all be released in time.")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start_those_with_room(self) -> None:
        while self._waiting and len(self._handles) < self._room:
            number, agent_handle = self._waiting.popleft()
            self._handles[number] = agent_handle
            self._loop.call_soon_threadsafe(self._host.start, number)

    def _submit(self, work: Coroutine[Any, Any, None]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _deliver(self, number: int, mail: Mail) -> None:
        agent_handle = self._handles.get(number)
        if agent_handle is not None:
            self._mailbox.put(delivery(agent_handle, mail))

    async def _end_all(self) -> None:
        await self._host.end_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
