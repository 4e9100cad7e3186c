"""Agents in actors: who shares one, and what becomes of a call that can't be carried out."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.own_ray import own_ray
from tests.sweeps import only_in_sweep
from tests.unit.workers.agents.agent_specs import agent_spec

from polytrain.errors import FailureKind
from polytrain.ray_api.state import free_resources
from polytrain.testing.processes import eventually, title
from polytrain.workers.agents.agent_host import AgentHandle, Arrived, Delivery, Gone
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.agents.calls import Kill, SendRoster

if TYPE_CHECKING:
    from polytrain.workers.ray.launcher import RayAgentLauncher


@pytest.fixture(scope="module")
def ray_of_module() -> Iterator[None]:
    with own_ray(num_cpus=2, resources={"device": 2}):
        yield


@pytest.fixture
def ray_here(ray_of_module: None) -> None:
    """All of Ray's resources are free, and no actor of an earlier test is left."""
    assert eventually(lambda: not hosts() and free_cpus() == 2 and free_devices() == 2)


class Unreadable:
    """What can be sent, and not received."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("not a number",)


def next_of(mailbox: queue.SimpleQueue[Delivery], kind: type[Arrived | Gone]) -> Arrived | Gone:
    """The first of this kind that comes."""
    while True:
        for event in mailbox.get(timeout=60):
            if isinstance(event, kind):
                return event


def hosts() -> list[psutil.Process]:
    processes = psutil.Process().children(recursive=True)
    return [process for process in processes if "ray::RayHost" in title(process)]


def launcher_of(
    spec: AgentSpec,
    resources: dict[str, float],
    mailbox: queue.SimpleQueue[Delivery],
    *,
    spread: bool = False,
    standby: bool = False,
) -> RayAgentLauncher:
    from polytrain.workers.ray.launcher import RayAgentLauncher

    return RayAgentLauncher(
        spec=spec,
        job=b"job",
        resources=resources,
        spread=spread,
        shares_hosts=not standby,
        mailbox=mailbox,
    )


@pytest.mark.usefixtures("ray_here")
@pytest.mark.sweep
@pytest.mark.parametrize("few_hosts", [8, only_in_sweep(0)])
def test_an_agent_that_can_not_do_what_it_is_asked_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_hosts: int
) -> None:
    """Its rank would be waited for without end, also if all hosts share one copy of the call."""
    monkeypatch.setattr("polytrain.workers.ray.launcher._FEW_HOSTS", few_hosts)
    spec = agent_spec(tmp_path)
    mailbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    launcher = launcher_of(spec, {"CPU": 1}, mailbox)
    agent_handle = launcher.ask()
    try:
        next_of(mailbox, Arrived)
        unreadable: Any = Unreadable()
        launcher.call(SendRoster(attempt=0, offers=unreadable), {agent_handle: None})
        gone = next_of(mailbox, Gone)
        assert isinstance(gone, Gone)
        assert gone.agent_handle is agent_handle
        assert gone.kind is FailureKind.AGENT_LOST
        assert "not a number" in gone.reason
    finally:
        launcher.close(10)


@pytest.mark.usefixtures("ray_here")
def test_an_agent_whose_process_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    """Its attempt would never end. Ray doesn't take it for dead."""
    mailbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    spec = agent_spec(tmp_path, kill_timeout_s=1.0)
    launcher = launcher_of(spec, {"CPU": 2}, mailbox)
    stopped = launcher.ask()
    next_of(mailbox, Arrived)
    [agent] = hosts()
    agent.suspend()
    try:
        launcher.call(Kill(attempt=0), {stopped: None})
        gone = next_of(mailbox, Gone)
        assert isinstance(gone, Gone)
        assert gone.agent_handle is stopped
        assert "hasn't answered for 1 s" in gone.reason
        # What a run does then: another one gets its resources.
        launcher.dismiss(stopped)
        another = launcher.ask()
        arrived = next_of(mailbox, Arrived)
        assert arrived.agent_handle is another
    finally:
        launcher.close(10)
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.kill()


@pytest.mark.usefixtures("ray_here")
def test_one_actor_serves_the_workers_of_a_node(tmp_path: Path) -> None:
    mailbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    spec = agent_spec(tmp_path)
    launcher = launcher_of(spec, {"CPU": 1}, mailbox)
    launcher.bundles.reserve(2, "PACK")
    try:
        first, second = launcher.ask(bundle=0), launcher.ask(bundle=1)
        assert arrivals(mailbox, 2) == {first, second}
        [host] = hosts()
        # The end of one is no end of the other.
        launcher.dismiss(first)
        third = launcher.ask(bundle=0)
        assert arrivals(mailbox, 1) == {third}
        assert [each.pid for each in hosts()] == [host.pid]
        # The end of the host is the end of all.
        host.kill()
        assert {lost.agent_handle for lost in losses(mailbox, 2)} == {second, third}
    finally:
        launcher.close(10)


@pytest.mark.usefixtures("ray_here")
def test_agents_without_the_runs_bundles_share_an_actor_too(tmp_path: Path) -> None:
    """As those of an elastic run. Each reserves its resources, and frees them when it ends."""
    total = 2
    assert eventually(lambda: free_cpus() == total)
    mailbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    spec = agent_spec(tmp_path)
    launcher = launcher_of(spec, {"CPU": 1}, mailbox)
    try:
        asked = [launcher.ask() for _ in range(total + 1)]
        arrived = arrivals(mailbox, total)
        [host] = hosts()
        # Ray counts them with a delay.
        assert eventually(lambda: free_cpus() == 0)
        [waiting] = set(asked) - arrived
        # The resources of one are those of the next. The first has started the node's zygote.
        first = min(arrived, key=lambda agent_handle: agent_handle.number)
        launcher.dismiss(first)
        arrived.remove(first)
        assert arrivals(mailbox, 1) == {waiting}
        # What waits is dismissed, too.
        launcher.dismiss(launcher.ask())
        host.kill()
        lost = {each.agent_handle for each in losses(mailbox, total)}
        assert lost == {*arrived, waiting}
    finally:
        launcher.close(10)
    assert eventually(lambda: free_cpus() == total)


@pytest.mark.usefixtures("ray_here")
def test_the_resources_of_lost_agents_are_those_of_the_next(tmp_path: Path) -> None:
    """Whoever else waits for them doesn't get them, and the next agents begin at once."""
    import ray

    total = 2
    mailbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    launcher = launcher_of(agent_spec(tmp_path), {"CPU": 1}, mailbox)
    try:
        asked = {launcher.ask() for _ in range(total)}
        assert arrivals(mailbox, total) == asked
        waiting = ray.util.placement_group([{"CPU": 1}])
        [host] = hosts()
        host.kill()
        for lost in losses(mailbox, total):
            launcher.dismiss(lost.agent_handle)
        avoided = ray.get_runtime_context().get_node_id()
        replaced = {launcher.ask() for _ in range(total)}
        assert arrivals(mailbox, total) == replaced
        # Not if their node is to be avoided.
        [host] = hosts()
        host.kill()
        for lost in losses(mailbox, total):
            launcher.dismiss(lost.agent_handle)
        launcher.ask(avoid=frozenset({avoided}))
        assert waiting.wait(30)
        ray.util.remove_placement_group(waiting)
    finally:
        launcher.close(10)


@pytest.mark.usefixtures("ray_here")
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("device", "reserved"), [(False, True), only_in_sweep(True, True), (True, False)]
)
def test_agents_that_have_their_room_and_start_are_known_with_their_nodes(
    tmp_path: Path, *, device: bool, reserved: bool
) -> None:
    import ray

    mailbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    resources = {"CPU": 1.0, **({"device": 1.0} if device else {})}
    launcher = launcher_of(agent_spec(tmp_path), resources, mailbox)
    bundle = 0 if reserved else None
    if reserved:
        launcher.bundles.reserve(1, "PACK")
    try:
        agent_handle = launcher.ask(bundle=bundle)
        assert eventually(lambda: launcher.starting().hosts)
        here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        assert launcher.starting().hosts == (here,)
        assert launcher.starting().setup is None
        arrived = next_of(mailbox, Arrived)
        assert isinstance(arrived, Arrived)
        agent_handle.place = arrived.place
        assert launcher.starting().hosts == ()
        # There is no room for the next.
        nowhere = frozenset({arrived.place.node_id})
        launcher.dismiss(agent_handle)
        if reserved:
            launcher.bundles.move([0], "PACK", nowhere)
        launcher.ask(bundle=bundle, avoid=nowhere)
        assert launcher.starting().hosts == ()
    finally:
        launcher.close(10)


@pytest.mark.usefixtures("ray_here")
@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind",
    [
        *("spread", "bundle of the run"),
        *(only_in_sweep("own group"), only_in_sweep("device"), only_in_sweep("standby")),
    ],
)
def test_a_lost_node_gets_no_agent_until_it_is_back(tmp_path: Path, kind: str) -> None:
    """Ray takes it for alive."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    mailboxes: list[queue.SimpleQueue[Delivery]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    # As two runs: the end of one would wait for a zygote that both use.
    specs = [agent_spec(tmp_path, zygote=name) for name in ("zygote", "another")]
    resources = {"CPU": 0.5, **({"device": 0.5} if kind == "device" else {})}
    launcher, other = (
        launcher_of(spec, resources, mailbox, spread=kind == "spread", standby=kind == "standby")
        for spec, mailbox in zip(specs, mailboxes, strict=True)
    )
    with contextlib.ExitStack() as stack:
        for each in (launcher, other):
            stack.callback(each.close, 10)
        launcher.bundles.reserve(1, "PACK")
        launcher.bundles.shun(here)
        asked = launcher.ask(bundle=0 if kind == "bundle of the run" else None)
        other.ask()
        assert arrivals(mailboxes[1], 1)
        assert launcher.starting().hosts == ()
        assert mailboxes[0].empty()
        launcher.readmit(here)
        assert arrivals(mailboxes[0], 1) == {asked}


@pytest.mark.usefixtures("ray_here")
def test_room_moves_to_other_nodes_and_back_and_none_is_held_twice(tmp_path: Path) -> None:
    import ray

    total = 2
    assert eventually(lambda: free_cpus() == total)
    here = ray.get_runtime_context().get_node_id()
    mailbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    launcher = launcher_of(agent_spec(tmp_path), {"CPU": 1}, mailbox)
    launcher.bundles.reserve(1, "PACK")
    try:
        first = launcher.ask(bundle=0)
        assert arrivals(mailbox, 1) == {first}
        launcher.dismiss(first)
        # There is no other node.
        launcher.bundles.move([0], "PACK", frozenset({here}))
        assert launcher.bundles.move_back([0]) == {0}
        second = launcher.ask(bundle=0)
        assert arrivals(mailbox, 1) == {second}
        launcher.dismiss(second)
        # Here there is.
        launcher.bundles.move([0], "PACK", frozenset())
        third = launcher.ask(bundle=0)
        assert arrivals(mailbox, 1) == {third}
        assert launcher.bundles.move_back([0]) == frozenset()
        assert eventually(lambda: free_cpus() == 0)
        launcher.bundles.free_unused()
        assert eventually(lambda: free_cpus() == 1)
    finally:
        launcher.close(10)
    assert eventually(lambda: free_cpus() == total)


@pytest.mark.usefixtures("ray_here")
def test_room_that_a_move_has_left_is_used_by_the_next(tmp_path: Path) -> None:
    """Each lost node would cost the run more room until its end otherwise."""
    total = 2
    mailbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    launcher = launcher_of(agent_spec(tmp_path), {"CPU": 0.5}, mailbox)
    launcher.bundles.reserve(2, "PACK")
    try:
        asked = {launcher.ask(bundle=0), launcher.ask(bundle=1)}
        assert arrivals(mailbox, 2) == asked
        for each in asked:
            launcher.dismiss(each)
        for _ in range(3):
            launcher.bundles.move([1], "PACK", frozenset())
            again = launcher.ask(bundle=1)
            assert arrivals(mailbox, 1) == {again}
            launcher.dismiss(again)
            launcher.bundles.free_unused()
        assert eventually(lambda: free_cpus() == total - 3 * 0.5)
    finally:
        launcher.close(10)


def free_cpus() -> float:
    return free_resources().get("CPU", 0.0)


def free_devices() -> float:
    return free_resources().get("device", 0.0)


@pytest.mark.usefixtures("ray_here")
def test_workers_with_devices_have_actors_of_their_own(tmp_path: Path) -> None:
    """Only an actor in a worker's bundle learns which devices it has."""
    mailbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    spec = agent_spec(tmp_path)
    resources = {"CPU": 1, "device": 1}
    before = threading.enumerate()
    launcher = launcher_of(spec, resources, mailbox)
    launcher.bundles.reserve(2, "PACK")
    try:
        asked = {launcher.ask(bundle=0), launcher.ask(bundle=1)}
        assert arrivals(mailbox, 2) == asked
        assert len(hosts()) == 2
        # One loop listens to both.
        new = [each.name for each in threading.enumerate() if each not in before]
        threads = [name for name in new if "polytrain" in name]
        assert threads == ["polytrain-hosts"]
    finally:
        launcher.close(10)


def arrivals(mailbox: queue.SimpleQueue[Delivery], count: int) -> set[AgentHandle]:
    """The agents that arrive next."""
    return {each.agent_handle for each in _of_kind(mailbox, Arrived, count)}


def losses(mailbox: queue.SimpleQueue[Delivery], count: int) -> list[Gone]:
    """The agents that are lost next."""
    return _of_kind(mailbox, Gone, count)


def _of_kind(mailbox: queue.SimpleQueue[Delivery], kind: type[Any], count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += [each for each in mailbox.get(timeout=60) if isinstance(each, kind)]
    return found
