"""An agent whose zygote is the test: what it does about a process that doesn't do as it should."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from tests.descriptors import opened, since
from tests.unit.checkpoint.checkpoints import ATTEMPT, stage
from tests.unit.workers.agents.agent_specs import agent_spec

from polytrain.checkpoint.manifest import AttemptId, directory_name
from polytrain.checkpoint.parts import StagedPart, StateWritten
from polytrain.checkpoint.staging import Stagings
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.errors import FailureKind
from polytrain.events.attempt import (
    Died,
    Exited,
    Failed,
    KeepsState,
    Stacks,
    Started,
    StateUnwritten,
    Unkillable,
)
from polytrain.policy.placement import NodeAddress, members
from polytrain.storage import calls as storage_calls
from polytrain.storage.local import LocalStorage
from polytrain.workers.agents import agent as agent_module
from polytrain.workers.agents import part_storer
from polytrain.workers.agents.agent import Agent
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.agents.calls import (
    Acknowledge,
    AgentEvent,
    DrainAttempt,
    Kill,
    LaunchProcess,
    RankAssignment,
    ReadStacks,
    SendRoster,
    WriteState,
)
from polytrain.workers.agents.kept_copies import KeptCopies, Room
from polytrain.workers.agents.shard_cache import ShardCache
from polytrain.workers.agents.worker_connection import KeptEnd
from polytrain.workers.processes.channel import SocketChannel
from polytrain.workers.processes.zygote_client import Listener
from polytrain.workers.processes.zygote_connection import ZygoteSpec
from polytrain.workers.session.job import JobMemory, LaunchOrder
from polytrain.workers.session.messages import (
    keeps_message,
    unwritten_message,
    written_message,
)
from polytrain.workers.session.survivor import Place
from polytrain_plugins import Offer

HERE = NodeAddress(node_id="node", host="127.0.0.1")


class FakeZygoteClient:
    """Forks nothing, and kills nothing."""

    theirs: ClassVar[socket.socket]

    def __init__(self, spec: ZygoteSpec, entry: str, *, listener: Listener) -> None:
        self.listener = listener

    async def connect(self) -> None:
        """It is there."""

    def fork(self, attempt: int, *, descriptors: list[int], **rest: Any) -> None:
        # The process's end of the socket: nobody reads it, unless the test does.
        FakeZygoteClient.theirs = socket.socket(fileno=socket.dup(descriptors[0]))

    def kill(self, attempt: int) -> None:
        """The process hangs in the kernel."""

    def close(self) -> None:
        self.theirs.close()


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentSpec:
    monkeypatch.setattr("polytrain.workers.agents.agent.ZygoteClient", FakeZygoteClient)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return agent_spec(tmp_path, kill_timeout_s=0.01)


class HeardAgent(Agent):
    """An agent whose events the test takes."""

    def __init__(self, spec: AgentSpec, job: JobMemory) -> None:
        self.events: asyncio.Queue[AgentEvent] = asyncio.Queue()
        super().__init__(spec, HERE, {}, job, None, Room(), emit=self.events.put_nowait)


async def launch(agent: Agent, attempt: int = 0, *, data: Any = None) -> None:
    order = LaunchOrder(
        attempt_id=AttemptId(token=1, attempt=attempt),
        members=members([HERE], cpus=1, gpus=0),
        start=StartingPoint(),
        first_checkpoint=0,
    )
    assignment = RankAssignment(rank=0, world_size=1, data=data) if attempt == 0 else None
    await agent.carry_out(LaunchProcess(order=order, streams=()), assignment)


async def received(agent: HeardAgent, kind: type[AgentEvent]) -> Any:
    """The next thing of this kind that the agent tells."""
    while not isinstance(event := await agent.events.get(), kind):
        pass
    return event


def with_agent(spec: AgentSpec, test: Callable[[HeardAgent], Awaitable[None]]) -> None:
    async def run() -> None:
        with closing(JobMemory(b"job")) as job:
            agent = HeardAgent(spec, job)
            await agent.place()
            await test(agent)
            await agent.end()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_process_that_does_not_die_is_given_up(spec: AgentSpec) -> None:
    """It waits in the kernel for a device, or for a file server that is gone."""

    async def test(agent: HeardAgent) -> None:
        await launch(agent)
        await received(agent, Started)
        await agent.carry_out(Kill(attempt=0))
        given_up = await received(agent, Unkillable)
        assert (given_up.attempt, given_up.rank, given_up.after_s) == (0, 0, 0.01)
        exited = await received(agent, Exited)
        assert (exited.attempt, exited.rank, exited.killed) == (0, 0, True)
        # Its end comes after all: the next attempt's process isn't meant.
        await launch(agent, 1)
        agent.process_ended(0, "killed by SIGKILL", killed=True)
        agent.process_ended(1, "exited with code 3", killed=False)
        exited = await received(agent, Exited)
        assert (exited.attempt, exited.how) == (1, "exited with code 3")

    with_agent(spec, test)


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """What a read waits for that hangs."""
    event = threading.Event()
    yield event
    event.set()


def test_an_attempt_ends_though_its_rows_are_still_read(
    spec: AgentSpec, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    request: Any = object()

    def hold(wanted: Any, before: Any) -> ShardCache:
        hung.wait()
        return ShardCache(opened=(), request=wanted)

    monkeypatch.setattr("polytrain.workers.agents.shard_cache.hold", hold)

    async def test(agent: HeardAgent) -> None:
        launching = asyncio.create_task(launch(agent, data=request))
        await asyncio.sleep(0)
        await agent.carry_out(Kill(attempt=0))
        exited = await received(agent, Exited)
        assert (exited.attempt, exited.how) == (0, "never started")
        hung.set()
        await launching
        # No process is forked for an attempt that has ended.
        await launch(agent, 1)
        started = await received(agent, Started)
        assert started.attempt == 1

    with_agent(spec, test)


def test_an_agent_is_there_while_a_process_does_not_read_its_messages(spec: AgentSpec) -> None:
    """A process that is stopped, or hangs while it starts, reads nothing."""
    offers = (Offer(host="127.0.0.1", port=1, details={"long": "x" * (4 << 20)}),)

    async def test(agent: HeardAgent) -> None:
        await launch(agent)
        await agent.carry_out(SendRoster(attempt=0, offers=offers))
        await agent.carry_out(ReadStacks(attempt=0, pausing=False))
        assert "it has not been forked yet" in (await received(agent, Stacks)).text
        process = SocketChannel(FakeZygoteClient.theirs)
        receive = asyncio.get_running_loop().run_in_executor
        start, roster = [await receive(None, process.receive) for _ in range(2)]
        assert (start[0], roster[0]) == ("start", "roster")
        assert len(str(roster[1:])) > 4 << 20
        agent.process_ended(0, "exited with code 3", killed=False)

    with_agent(spec, test)


LATE_ROSTER, ROSTER = (SendRoster(attempt=attempt, offers=()) for attempt in (0, 1))
LATE_DRAIN, DRAIN = (DrainAttempt(attempt=attempt) for attempt in (0, 1))


@pytest.mark.parametrize(
    "calls",
    [
        (ROSTER, DRAIN),
        (DRAIN, LATE_ROSTER, ROSTER),
        (ROSTER, LATE_ROSTER, DRAIN),
        (DRAIN, LATE_DRAIN, ROSTER),
    ],
)
def test_a_process_is_drained_after_its_roster_in_whatever_order_ray_brings_both(
    spec: AgentSpec, calls: Sequence[SendRoster | DrainAttempt]
) -> None:
    async def test(agent: HeardAgent) -> None:
        await launch(agent)
        agent.process_ended(0, "exited with code 3", killed=False)
        await launch(agent, 1)
        for call in (*calls, Acknowledge(attempt=1, checkpoint=0)):
            await agent.carry_out(call)
        process, kinds = SocketChannel(FakeZygoteClient.theirs), []
        while "settled" not in kinds:
            receive = asyncio.get_running_loop().run_in_executor(None, process.receive)
            kinds.append((await receive)[0])
        assert kinds == ["start", "roster", "drain", "settled"]
        agent.process_ended(1, "exited with code 3", killed=False)

    with_agent(spec, test)


def test_a_signal_shortens_the_wait_for_room_in_the_storage(
    spec: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ray the agent has a process of its own, which gets no signal."""
    is_full = threading.Event()

    def put(self: LocalStorage, file: Path, path: str, *, move: bool) -> str:
        def once() -> str:
            is_full.set()
            raise OSError(errno.ENOSPC, "no space left on device")

        return self._retrying(once, syncs=True)

    monkeypatch.setattr(LocalStorage, "put", put)
    monkeypatch.setattr(part_storer, "PATIENCE_S", 0.0)
    store = CheckpointStore(location=dataclasses.replace(spec.store.location, retry_s=3600))
    part = StagedPart(
        attempt_id=ATTEMPT,
        rank=0,
        checkpoint=1,
        staged=stage(store, 1, model="1"),
        stamps={},
        step=1,
        metrics={},
        positions={},
    )

    async def test(agent: HeardAgent) -> None:
        agent._parts.take(part)
        await asyncio.get_running_loop().run_in_executor(None, is_full.wait, 60)
        # Who stops a run otherwise waits for its checkpoint.
        await agent.carry_out(DrainAttempt(attempt=0))
        assert agent.events.empty()
        await agent.carry_out(DrainAttempt(attempt=0, ends_run=True))
        failed = await received(agent, Failed)
        assert failed.failure.kind is FailureKind.STORAGE

    with_agent(dataclasses.replace(spec, store=store), test)
    assert not storage_calls._limits


def test_an_end_is_reported_though_a_part_waits_for_another_rank(
    spec: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank may wait for the one that has ended."""
    monkeypatch.setattr(agent_module, "_STORED_WITHIN_S", 0.0)

    async def test(agent: HeardAgent) -> None:
        await launch(agent)
        waiting = asyncio.get_running_loop().create_future()
        agent._parts._tasks.add(asyncio.ensure_future(waiting))
        agent.process_ended(0, "killed by SIGKILL", killed=False)
        died = await received(agent, Died)
        assert (died.attempt, died.rank, died.how) == (0, 0, "killed by SIGKILL")
        assert agent.events.empty()
        waiting.set_result(None)
        exited = await received(agent, Exited)
        assert (exited.how, exited.killed) == ("killed by SIGKILL", False)

    with_agent(spec, test)


@pytest.mark.parametrize(
    ("owner", "name", "refused"),
    [
        (os, "dup", OSError(errno.EMFILE, "too many open files")),
        (threading.Thread, "start", RuntimeError("can't start new thread")),
    ],
    ids=["descriptor", "thread"],
)
def test_an_agent_without_a_descriptor_or_a_thread_left_knows_no_stacks(
    owner: Any, name: str, refused: Exception, spec: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It isn't lost for that."""

    async def test(agent: HeardAgent) -> None:
        await launch(agent)
        agent.process_started(0, os.getpid())
        monkeypatch.setattr(owner, name, Mock(side_effect=refused))
        await agent.carry_out(ReadStacks(attempt=0, pausing=False))
        assert (await received(agent, Stacks)).text == f"not known: {refused}"
        agent.process_ended(0, "exited with code 0", killed=False)

    with_agent(spec, test)


def test_an_attempt_starts_though_the_system_refuses_the_thread_that_deletes_copies(
    spec: AgentSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of another rank."""

    async def test(agent: HeardAgent) -> None:
        agent.left._kept_copies = kept = KeptCopies(tmp_path, Room())
        refused = RuntimeError("can't start new thread")
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", Mock(side_effect=refused))
            await launch(agent)
        await received(agent, Started)
        assert kept.attempt == 0
        agent.process_ended(0, "exited with code 0", killed=False)

    with_agent(spec, test)


def test_a_refused_fork_leaves_no_descriptor_open(
    spec: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run tries again and again: at last nothing of the driver could be opened any more."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(FakeZygoteClient, "fork", refuse)
    FakeZygoteClient.theirs = socket.socket()

    async def test(agent: HeardAgent) -> None:
        before = opened()
        for attempt in range(3):
            await launch(agent, attempt)
            failed = await received(agent, Failed)
            assert "too many open files" in failed.failure.message
        # What earlier tests have left is closed at any time, and its number is free then.
        assert since(before) == {}

    with_agent(spec, test)


def test_a_process_that_lacks_a_descriptor_leaves_none_open(
    spec: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit may be reached with any of those that a worker process needs."""
    pipe, made = os.pipe, 0

    def second_refused() -> tuple[int, int]:
        nonlocal made
        made += 1
        if made % 2 == 0:
            raise OSError(errno.EMFILE, "too many open files")
        return pipe()

    FakeZygoteClient.theirs = socket.socket()

    async def test(agent: HeardAgent) -> None:
        before = opened()
        monkeypatch.setattr(os, "pipe", second_refused)
        for attempt in range(3):
            await launch(agent, attempt)
            await received(agent, Failed)
        assert since(before) == {}

    with_agent(spec, test)


@pytest.mark.parametrize("limit_s", [0.0, 0.05, 60.0], ids=["late", "in time", "it ends"])
def test_a_state_that_is_not_written_is_reported_once(
    spec: AgentSpec, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    """The process says why, and the time for its answer ends; or the process does."""
    monkeypatch.setattr(KeptEnd, "opened", Mock())
    is_late, ends = limit_s == 0, limit_s == 60

    async def test(agent: HeardAgent) -> None:
        await launch(agent)
        process = SocketChannel(FakeZygoteClient.theirs)
        process.send(keeps_message(0, 1, 0, 1))
        await received(agent, KeepsState)
        await agent.carry_out(
            WriteState(
                attempt=0,
                checkpoint=7,
                point=1,
                kept={},
                settles_s=limit_s,
                limit_s=limit_s,
                kills=True,
            )
        )
        if ends:
            agent.process_ended(0, "killed by SIGKILL", killed=False)
            unwritten = await received(agent, StateUnwritten)
            assert unwritten.reason == "its process has ended: killed by SIGKILL"
            return
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(limit_s, over.set)
        if is_late:
            await over.wait()
        process.send(unwritten_message(7, "it is between two steps"))
        await received(agent, StateUnwritten)
        await over.wait()
        agent.process_ended(0, "exited with code 0", killed=False)
        rest = [await agent.events.get()]
        while not isinstance(rest[-1], Exited):
            rest.append(await agent.events.get())
        assert [event for event in rest if isinstance(event, StateUnwritten)] == []

    with_agent(spec, test)


@pytest.mark.parametrize("kills", [True, False])
def test_a_survivor_may_be_killed_while_its_state_is_stored(
    spec: AgentSpec, monkeypatch: pytest.MonkeyPatch, kills: bool
) -> None:
    """Its end comes after the state."""
    monkeypatch.setattr(KeptEnd, "opened", Mock())

    killed: list[int] = []

    def kill(zygote: FakeZygoteClient, attempt: int) -> None:
        killed.append(attempt)
        zygote.listener.process_ended(attempt, "killed by SIGKILL", killed=True)

    monkeypatch.setattr(FakeZygoteClient, "kill", kill)

    async def test(agent: HeardAgent) -> None:
        await launch(agent)
        process = SocketChannel(FakeZygoteClient.theirs)
        process.send(keeps_message(0, 1, 0, 1))
        await received(agent, KeepsState)
        await agent.carry_out(
            WriteState(
                attempt=0, checkpoint=7, point=1, kept={}, settles_s=1, limit_s=60, kills=kills
            )
        )
        name = directory_name(7, AttemptId(token=1, attempt=0))
        staging = Stagings(scratch=agent.left.scratch, near=None).new(name, 0)
        (staging / "weights").write_bytes(b"weights")
        place = Place(step=1, metrics={}, positions={})
        process.send(written_message(7, staging, place, is_copy=False))
        written = await agent.events.get()
        assert isinstance(written, StateWritten)
        assert [file.name for file in written.part.files] == ["weights"]
        assert killed == [0] * kills
        if kills:
            exited = await agent.events.get()
            assert isinstance(exited, Exited)
            assert exited.killed

    with_agent(spec, test)
