"""Threads of a training function take turns at the channel to the agent; children have no turn."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from polytrain.backends.reference import Reference
from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.config.configs import CheckpointConfig, RunConfig
from polytrain.config.run_spec import RunSpec
from polytrain.errors import NotInWorkerError
from polytrain.policy.placement import NodeAddress, members
from polytrain.storage.location import Location
from polytrain.workers.agents.calls import Acknowledge, DrainAttempt, DropCopy, message_of
from polytrain.workers.processes.channel import Message, SocketChannel
from polytrain.workers.session.checkpoint_files import DEFAULT_HANDLING
from polytrain.workers.session.job import LaunchOrder, WorkerJob
from polytrain.workers.session.session import WorkerSession
from polytrain_plugins import Offer, World

TWO = members([NodeAddress(node_id="n", host="127.0.0.1")] * 2, cpus=1, gpus=0)


class WatchedChannel(SocketChannel):
    """Has another thread look for copies to drop while this one reads."""

    def __init__(self, connection: socket.socket, threads: ThreadPoolExecutor) -> None:
        super().__init__(connection)
        self.threads = threads
        self.look: Any = None
        self.looked: Future[Any] | None = None
        self.meets = threading.Event()

    def poll(self) -> Message | None:
        if threading.current_thread() is not threading.main_thread():
            self.meets.set()
        elif self.looked is None:
            self.looked = self.threads.submit(self.look)
            assert not self.meets.wait(0.2), "two threads read at once"
        return super().poll()


def session_with(
    channel: SocketChannel,
    directory: Path,
    *,
    start: StartingPoint | None = None,
    rank: int = 0,
    engine: Any = None,
    **config: Any,
) -> WorkerSession:
    job = WorkerJob(
        spec=RunSpec(
            backend=Reference(),
            run_config=RunConfig(checkpoint_config=CheckpointConfig(**config)),
        ),
        near_staging=None,
        checkpoints=Location.of(directory / "run" / "checkpoints"),
    )
    order = LaunchOrder(
        attempt_id=AttemptId(token=0, attempt=0),
        members=TWO,
        start=start or StartingPoint(),
        first_checkpoint=0,
    )
    return WorkerSession(
        job=job,
        order=order,
        world=World(attempt=0, me=TWO[rank], members=TWO, offers=(Offer(), Offer())),
        engine=engine,
        shards={},
        channel=channel,
        scratch=directory / "scratch",
    )


def test_copies_to_drop_are_looked_for_while_no_other_thread_reads(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as threads:
        channel = WatchedChannel(theirs, threads)
        session = session_with(channel, tmp_path, memory=1)
        copies = session.survivor.copies
        assert copies is not None
        channel.look = copies.dropped
        SocketChannel(ours).send(message_of(DropCopy(attempt=0, number=3, is_last=False)))
        assert session.preemption() is None
        assert channel.looked is not None
        assert channel.looked.result(timeout=30) == [(3, False)]


def test_a_child_takes_no_message_for_which_its_parent_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data loader's worker has the connection too: it would read from it, and the parent wait."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").touch()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        session = session_with(SocketChannel(theirs), tmp_path)
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: 0)
            assert session.newest_checkpoint() is None
        session.report_from_function({}, Checkpoint.from_directory(model), DEFAULT_HANDLING)
        calls = Acknowledge(attempt=0, checkpoint=0), DrainAttempt(attempt=0)
        SocketChannel(ours).send(*map(message_of, calls))
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: 0)
            for call in (session.newest_checkpoint, session.is_checkpoint_wanted):
                with pytest.raises(NotInWorkerError, match="child process"):
                    call()
        assert session.newest_checkpoint() is not None
        assert session.is_checkpoint_wanted()


def test_a_model_is_missed_only_where_it_is_to_be_saved(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = SocketChannel(theirs)
        session_with(channel, tmp_path, rank=1).finish(None)
        with pytest.raises(TypeError, match=r"\.train returned None\. Return the model"):
            session_with(channel, tmp_path).finish(None)
        saved = StartingPoint(step=0, own=True)
        session_with(channel, tmp_path, start=saved).finish(None)
