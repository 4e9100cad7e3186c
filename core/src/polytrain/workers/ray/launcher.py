"""Launches agents on Ray: a host actor for each node's agents, and one event loop in the driver.

Ray reserves a bundle of resources per worker, as it would for actors. One actor without own
resources then serves all bundles of a node, because Ray takes much longer to start a process than
an agent takes to start. With accelerators, each agent has an actor in its bundle: only that actor
learns from Ray which devices belong to the bundle.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import InitVar, dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polytrain.config.runtime_env import named
from polytrain.errors import FailureKind
from polytrain.policy.autoscaling import AutoscalerDemand, Outlook, outlook
from polytrain.policy.links import FailedLink
from polytrain.policy.placement import SHARED_RESOURCES, NodeAddress
from polytrain.policy.scaling import Starting
from polytrain.ray_api.state import death_of_node, is_refused, node_addresses
from polytrain.workers.agents.agent_host import (
    AgentHandle,
    Gone,
    LinksTried,
    NodeReturned,
    for_driver,
)
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.agents.calls import (
    AgentCall,
    Kill,
    LaunchProcess,
    Leave,
    RankAssignment,
    SendRoster,
    StoreRest,
)
from polytrain.workers.driver.group import Mailbox
from polytrain.workers.processes.loop_thread import LoopThread
from polytrain.workers.ray.autoscaler import autoscaler_report
from polytrain.workers.ray.bundles import AgentBundles
from polytrain.workers.ray.host import RayHost, RayNeighbour
from polytrain.workers.ray.links import failed_links
from polytrain.workers.ray.losses import NodeContacts, why_gone

logger = logging.getLogger(__name__)

_HostActor = ray.remote(RayHost)

_CONCURRENT_CALLS = 100_000
"""Maximum concurrent calls of a host. An agent has several: `Leave` waits for its process."""

_FIRST_PAUSE_S = 0.005
"""Seconds between the first two checks whether Ray has placed a request; doubled each time."""

_LONGEST_PAUSE_S = 1.0

_FEW_HOSTS = 8
"""Hosts up to which each gets its own copy of a call."""

_LISTS_RANKS = (LaunchProcess, SendRoster, StoreRest)
"""Calls that grow with the number of ranks, or of files. A copy for each of a thousand hosts would
keep the driver busy for minutes."""

_VERDICT_S = 60.0
"""Seconds between two questions to Ray whether a lost node is dead."""

_CONNECT_TIMEOUT_S = 1.5
"""Seconds for a trial connection: the system repeats its first packet after one."""

_LINKS_TIMEOUT_S = 10.0
"""Seconds for all of them, of hosts that may be busy."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Host:
    """A host actor, and its agents by number."""

    actor: Any
    agents: dict[int, AgentHandle]
    node: str | None
    """The node whose bundles it serves; None if it holds the resources of its only agent."""

    avoid: frozenset[str] = frozenset()
    """The nodes that its request avoids, if it isn't in a bundle."""

    silent: frozenset[str] = frozenset()
    """The nodes that its request excludes because they were silent."""

    place: NodeAddress | None = None
    is_gone: bool = False
    is_replaced: bool = False
    """Whether it was requested anew, before it arrived."""


@dataclass(slots=True, kw_only=True)
class RayAgentLauncher:
    """Requests agents from Ray, and ends them. Their events go to one mailbox."""

    spec: AgentSpec
    job: InitVar[bytes]
    """The pickled job of the agents' worker processes."""

    resources: Mapping[str, float]
    """The resources of one agent."""

    labels: Sequence[Mapping[str, str]] = ()
    """Label selectors of the nodes: see `AgentBundles.labels`."""

    spread: bool
    """Whether to spread agents outside the run's bundles over nodes."""

    shares_hosts: bool
    """Whether agents outside the run's bundles share hosts; standbys must survive ranks' hosts."""

    mailbox: Mailbox
    _job: Any = field(init=False)
    """Reference to the job, which Ray copies once to each node."""

    bundles: AgentBundles = field(init=False)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _hosts: dict[int, _Host] = field(default_factory=dict)
    """Number of an agent → its host."""

    _by_node: dict[str, _Host] = field(default_factory=dict)
    """Node → the host that was started last for its bundles."""

    _unplaced: dict[int, AgentHandle] = field(default_factory=dict)
    """Requested agents whose bundles aren't placed yet, by number."""

    _placer: threading.Thread | None = None
    _loop: LoopThread = field(default_factory=lambda: LoopThread("polytrain-hosts"))
    _contacts: NodeContacts = field(default_factory=NodeContacts)
    _listeners: set[Future[None]] = field(default_factory=set)
    _is_requested: threading.Event = field(default_factory=threading.Event)
    """Set by a request and by the end, so that the placer checks at once."""

    _is_closed: bool = False

    def __post_init__(self, job: bytes) -> None:
        self._job = ray.put(job)
        self.bundles = AgentBundles(resources=self.resources, labels=self.labels)

    def ask(self, *, bundle: int | None = None, avoid: frozenset[str] = frozenset()) -> AgentHandle:
        """Request an agent; see `AgentLauncher.ask`."""
        number = next(self._numbers)
        agent_handle = AgentHandle(number=number, bundle=bundle)
        # The placer also adds hosts.
        with self._lock:
            if bundle is not None or not self.spread:
                self.bundles.request(number, bundle=bundle, avoid=avoid)
            if self._is_served_by_host(bundle):
                self._unplaced[number] = agent_handle
                self._have_placer()
            else:
                self._start_own_host(number, agent_handle, avoid)
        return agent_handle

    def outlook(self) -> Outlook:
        """Return the outlook by the cluster's autoscaler for the requested agents.

        It knows them already, by their groups, or spread actors, that wait for room.
        """
        with self._lock:
            late = [
                number
                for number, host in self._hosts.items()
                if host.node is None and host.place is None and not host.is_gone
            ]
        demand = AutoscalerDemand(
            groups=self.bundles.sizes(),
            actors=sum(self.bundles.strategy_of(number) is None for number in late),
            resources=self.resources,
        )
        return outlook(autoscaler_report(), demand)

    def starting(self) -> Starting:
        """Return the requested agents that have their resources, and are starting.

        A spread actor that is to hold the resources of its agent isn't among them until it runs:
        Ray doesn't say whether it has them before.
        """
        with self._lock:
            late = [
                (agent_handle, host)
                for host in {*self._hosts.values()}
                for agent_handle in host.agents.values()
                if not host.is_gone and not agent_handle.place.node_id
            ]
        nodes = [host.place.node_id if host.place is not None else host.node for _, host in late]
        own = [
            agent_handle.number
            for (agent_handle, _), node in zip(late, nodes, strict=True)
            if node is None
        ]
        nodes += self.bundles.placed(own).values() if own else []
        addresses = node_addresses() if any(nodes) else {}
        is_setting_up = bool(self.spec.runtime_env) and any(host.place is None for _, host in late)
        return Starting(
            hosts=tuple(addresses.get(node, node) for node in nodes if node is not None),
            setup=named(self.spec.runtime_env) if is_setting_up else None,
        )

    def call(
        self, call: AgentCall, assignments: Mapping[AgentHandle, RankAssignment | None]
    ) -> None:
        """Send a call to agents, with one message per host; see `AgentLauncher.call`."""
        by_host: dict[_Host, dict[int, AgentHandle]] = defaultdict(dict)
        for agent_handle in assignments:
            host = self._hosts.get(agent_handle.number)
            if host is not None:
                by_host[host][agent_handle.number] = agent_handle
        argument: Any = call
        if isinstance(call, _LISTS_RANKS) and len(by_host) > _FEW_HOSTS:
            # Pickle it once. Nodes then copy it from each other.
            argument = ray.put(call)
        for host, own in by_host.items():
            given = {number: assignments[each] for number, each in own.items()}
            answer = host.actor.call.remote(argument, given)
            self._loop.submit(self._await_answer(answer, host, call, list(own.values())))

    def introduce(self, neighbours: Mapping[AgentHandle, AgentHandle | None]) -> None:
        """Say to which agent on another host each agent sends copies of its rank's state."""
        by_host: dict[_Host, dict[int, RayNeighbour | None]] = defaultdict(dict)
        for agent_handle, other in neighbours.items():
            host = self._hosts.get(agent_handle.number)
            its = None if other is None else self._hosts.get(other.number)
            if host is None:
                continue
            by_host[host][agent_handle.number] = (
                None
                if other is None or other.assigned is None or its is None
                else RayNeighbour(actor=its.actor, number=other.number, rank=other.assigned[0])
            )
        for host, own in by_host.items():
            # If it is lost, `_listen` reports that.
            host.actor.meet.remote(own)

    def try_links(self, agent_handles: Sequence[AgentHandle]) -> None:
        """Have the nodes of these agents connect to each other; leads to `LinksTried`."""
        by_node = {each.place.node_id: each for each in agent_handles}
        self._loop.submit(self._try_links(list(by_node.values())))

    async def _try_links(self, agents: Sequence[AgentHandle]) -> None:
        failed: list[FailedLink] = []
        # What isn't known in time keeps no run from starting, and the loss of a host is an event.
        with contextlib.suppress(RayError, TimeoutError, KeyError):
            failed = await asyncio.wait_for(
                failed_links(
                    [self._hosts[each.number].actor for each in agents],
                    [each.place.host for each in agents],
                    timeout_s=_CONNECT_TIMEOUT_S,
                ),
                _LINKS_TIMEOUT_S,
            )
        self.mailbox.put([LinksTried(failed=tuple(failed))])

    def dismiss(self, agent_handle: AgentHandle) -> None:
        """End an agent, and its host with its last agent."""
        number = agent_handle.number
        with self._lock:
            if self._unplaced.pop(number, None) is not None:
                self.bundles.release(number)
            host = self._hosts.pop(number, None)
            if host is None:
                return
            del host.agents[number]
            if host.is_gone and host.node is not None:
                ray.kill(host.actor)
                self.bundles.keep(number, host.node)
            elif host.is_gone or not host.agents:
                host.is_gone = True
                ray.kill(host.actor)
                self.bundles.release(number)
            else:
                ended = host.actor.end.remote(number)
                self._loop.submit(self._release_after(ended, number))

    def _is_served_by_host(self, bundle: int | None) -> bool:
        """Return whether an agent gets a bundle, and shares its node's host.

        These agents have their own actors:

        - Agents with devices: only an actor in the bundle learns which.
        - Agents outside the run's bundles, in a run with standbys. The standby is chosen when the
          agents have arrived, and must survive the host of the others.
        - Agents outside the run's bundles that are spread. Ray spreads actors over nodes, and the
          bundles of one group, which are placed all or none, but not groups of one bundle.
        """
        if not self.resources.keys() <= SHARED_RESOURCES:
            return False
        return bundle is not None or (self.shares_hosts and not self.spread)

    async def _release_after(self, ended: Any, number: int) -> None:
        """Free an agent's bundle once it has ended."""
        # If its host ends first, the agent has released everything.
        with contextlib.suppress(RayError):
            await ended
        await asyncio.to_thread(self.bundles.release, number)

    def close(self, timeout_s: float) -> None:
        """End all agents, and release their resources.

        Args:
            timeout_s: seconds to wait for Ray to confirm it.
        """
        with self._lock:
            self._is_closed = True
        self._is_requested.set()
        deadline = time.monotonic() + timeout_s
        # Keep a reference: the placer may be ending by itself.
        placer = self._placer
        if placer is not None:
            placer.join(timeout_s)
        hosts = set(self._hosts.values())
        released = [host.actor.end_all.remote() for host in hosts if host.place is not None]
        if released:
            ray.wait(released, num_returns=len(released), timeout=timeout_s)
        for host in hosts:
            ray.kill(host.actor)
        # Killed actors hold their resources until their streams end.
        listening = wait([*self._listeners], max(0.0, deadline - time.monotonic())).not_done
        self._loop.close()
        self.bundles.free()
        if listening:
            logger.warning("Ray has not confirmed the end of all agents; they were killed.")

    def _limit_s(self, call: AgentCall) -> float | None:
        """Return the seconds within which a host answers a call that ends a worker process.

        The worker process's end may be reported later: its staged parts are stored first.
        """
        match call:
            case Kill():
                return self.spec.kill_timeout_s
            case Leave():
                return self.spec.leave_timeout_s + self.spec.kill_timeout_s
            case _:
                return None

    async def _await_answer(
        self, answer: Any, host: _Host, call: AgentCall, agents: list[AgentHandle]
    ) -> None:
        """Note the loss of a host that doesn't answer, and of agents that can't be called."""
        limit_s = self._limit_s(call)
        try:
            await asyncio.wait_for(answer, limit_s)
        except TimeoutError:
            # Its process is stopped, or hangs.
            reason = f"its agent hasn't answered for {limit_s:g} s, as if its process were stopped"
            self._lose(host, FailureKind.AGENT_LOST, reason)
        except RayTaskError as error:
            # The host can't receive the call, but lives on.
            kind, reason = why_gone(error, None, self.spec.runtime_env)
            self._report_lost(agents, kind, reason)
        except RayError:
            # The actor has died: `_listen` reports that.
            pass

    def _lose(
        self, host: _Host, kind: FailureKind, reason: str, *, node_may_return: bool = False
    ) -> None:
        """Report the loss of all agents of a host."""
        with self._lock:
            host.is_gone = True
            lost = list(host.agents.values())
        self._report_lost(lost, kind, reason, node=host.node, node_may_return=node_may_return)

    def _report_lost(
        self,
        agents: list[AgentHandle],
        kind: FailureKind,
        reason: str,
        **known: Any,
    ) -> None:
        self.mailbox.put(
            [Gone(agent_handle=each, kind=kind, reason=reason, **known) for each in agents]
        )

    def _start_own_host(
        self, number: int, agent_handle: AgentHandle, avoid: frozenset[str]
    ) -> None:
        """Start an actor that holds the resources of its only agent."""
        silent = self.bundles.excluded(number)
        options = self._own_options(number, avoid | silent)
        self._start_host(options, {number: agent_handle}, avoid=avoid, silent=silent)

    def _own_options(self, number: int, avoid: frozenset[str]) -> dict[str, Any]:
        """Return the options of an actor that holds the resources of its only agent."""
        resources = dict(self.resources)
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
        }
        in_bundle = self.bundles.strategy_of(number)
        options["scheduling_strategy"] = in_bundle or "SPREAD"
        labels = self.bundles.not_on(avoid)
        if in_bundle is None and labels:
            options["label_selector"] = labels
        return options

    def _have_placer(self) -> None:
        """Start the thread that places requested agents unless it runs. Call it under the lock."""
        self._is_requested.set()
        if self._placer is None or not self._placer.is_alive():
            self._placer = threading.Thread(
                target=self._place_agents, name="polytrain-placer", daemon=True
            )
            self._placer.start()

    def _place_agents(self) -> None:
        """Assign each requested agent to its node's host, once Ray has placed its bundle."""
        pause_s = _FIRST_PAUSE_S
        while not self._is_closed:
            with self._lock:
                requested = list(self._unplaced)
            self.bundles.renew(requested)
            nodes = self.bundles.placed(requested)
            with self._lock:
                by_node: dict[str, dict[int, AgentHandle]] = defaultdict(dict)
                for number, node in nodes.items():
                    if number in self._unplaced:
                        by_node[node][number] = self._unplaced.pop(number)
                for node, agents in by_node.items():
                    self._start_agents(node, agents)
                if not self._unplaced:
                    # Under the lock, so that the next request starts another thread.
                    self._placer = None
                    return
            # An elastic run may request agents for as long as it trains.
            if self._is_requested.wait(pause_s):
                self._is_requested.clear()
                pause_s = _FIRST_PAUSE_S
            else:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _start_agents(self, node: str, agents: dict[int, AgentHandle]) -> None:
        host = self._by_node.get(node)
        if host is not None and not host.is_gone:
            host.agents.update(agents)
            self._hosts.update(dict.fromkeys(agents, host))
            host.actor.start.remote(list(agents))
            return
        on_node = NodeAffinitySchedulingStrategy(node, soft=False)
        self._start_host({"num_cpus": 0, "scheduling_strategy": on_node}, agents, node=node)

    def _start_host(
        self,
        options: Mapping[str, Any],
        agents: dict[int, AgentHandle],
        *,
        node: str | None = None,
        avoid: frozenset[str] = frozenset(),
        silent: frozenset[str] = frozenset(),
    ) -> None:
        if self.spec.runtime_env:
            options = {**options, "runtime_env": dict(self.spec.runtime_env)}
        actor = _HostActor.options(max_concurrency=_CONCURRENT_CALLS, **options).remote(
            self.spec, self._job, list(agents)
        )
        host = _Host(actor=actor, agents=agents, node=node, avoid=avoid, silent=silent)
        self._hosts.update(dict.fromkeys(agents, host))
        if node is not None:
            self._by_node[node] = host
        listener = self._loop.submit(self._listen(host))
        self._listeners.add(listener)
        listener.add_done_callback(self._listeners.discard)

    async def _listen(self, host: _Host) -> None:
        """Pass on the mail of a host's agents until the host is gone, and report their loss."""
        kind, reason, ray_is_unaware = FailureKind.AGENT_LOST, "its agent has ended", False
        try:
            host.place = await host.actor.place.remote()
            silence = await self._mail_until_silence(host, host.place)
            if silence is not None:
                kind, ray_is_unaware = FailureKind.NODE_LOST, True
                reason = f"its node {host.place.host} is silent: {silence}"
        except RayError as error:
            kind, reason = await asyncio.to_thread(
                why_gone, error, host.place, self.spec.runtime_env
            )
            ray_is_unaware = kind is FailureKind.NODE_LOST and await self._seems_alive(host.place)
            if isinstance(error, ActorUnavailableError):
                # Kill it in case it lives: nothing listens to it now.
                ray.kill(host.actor)
        if host.is_replaced:
            return
        may_return = False
        if ray_is_unaware and host.place is not None:
            node = host.place.node_id
            # Ray would still start agents there: it doesn't know of the loss.
            self.bundles.shun(node)
            # A raylet that has ended doesn't return: its node only seems to live until Ray knows.
            may_return = not await asyncio.to_thread(is_refused, node)
            if may_return:
                self._loop.submit(self._await_return(host, node))
        self._lose(host, kind, reason, node_may_return=may_return)

    async def _seems_alive(self, place: NodeAddress | None) -> bool:
        """Return whether Ray hasn't noticed that an agent's node is dead."""
        if place is None:
            return True
        return await asyncio.to_thread(death_of_node, place.node_id) is None

    async def _mail_until_silence(self, host: _Host, place: NodeAddress) -> str | None:
        """Pass on mail until the host ends; return None, or what its node didn't answer."""
        mail = asyncio.create_task(self._pass_on_mail(host))
        contact = await self._contacts.to(place.node_id)
        silence = asyncio.create_task(contact.silence())
        try:
            await asyncio.wait({mail, silence}, return_when=asyncio.FIRST_COMPLETED)
            if mail.done():
                mail.result()
                return None
            return silence.result()
        finally:
            # Ray itself ends the stream of a silent node only after a minute.
            mail.cancel()
            silence.cancel()

    async def _pass_on_mail(self, host: _Host) -> None:
        async for reference in host.actor.events.options(num_returns="streaming").remote():
            batch = await reference
            if not host.is_replaced:
                agents = host.agents
                self.mailbox.put([for_driver(agents[n], mail) for n, mail in batch if n in agents])

    async def _await_return(self, host: _Host, node: str) -> None:
        """Use a lost node again once it answers, and end what has gone on there meanwhile."""
        contact = await self._contacts.to(node)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(contact.answer(), _VERDICT_S)
                break
            # What comes back after that is another node to Ray.
            if await asyncio.to_thread(death_of_node, node) is not None:
                return
        ray.kill(host.actor)
        self.readmit(node)

    def readmit(self, node: str) -> None:
        """Use a lost node again, for the agents that wait for room too."""
        self.bundles.readmit(node)
        self._is_requested.set()
        self.mailbox.put([NodeReturned(node_id=node)])
        with self._lock:
            if self._is_closed:
                return
            waiting = [
                (number, host)
                for number, host in self._hosts.items()
                if node in host.silent and host.place is None and not host.is_gone
            ]
            # Those that have their room elsewhere are starting.
            placed = self.bundles.placed([number for number, _ in waiting]) if waiting else {}
            for number, host in waiting:
                if number in placed:
                    continue
                host.is_replaced = True
                ray.kill(host.actor)
                self.bundles.renew([number])
                self._start_own_host(number, host.agents[number], host.avoid)
