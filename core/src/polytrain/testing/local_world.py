"""A world of local processes without Ray: what the contract tier runs backends in.

The test's process does what agents and controller do: it starts one process for each rank, gathers
offers, sends the roster, and lets everybody leave once all are done.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pyarrow as pa

from polytrain.checkpoint.manifest import Attempt
from polytrain.checkpoint.start import StartingPoint
from polytrain.data.assignment import RunDataset
from polytrain.data.opening import open_shards
from polytrain.data.sources.describe import describe
from polytrain.run.events import Done, Failed, Offered, Reported
from polytrain.storage.location import Location
from polytrain.testing.processes import eventually
from polytrain.workers.job import LaunchOrder, TrainerJob
from polytrain.workers.pickling import code_of_job, pickled_with
from polytrain.workers.placement import Place, members
from polytrain.workers.trainer_process import run_trainer
from polytrain.workers.wire import (
    FrameBuffer,
    Message,
    SocketChannel,
    leave_message,
    pack,
    roster_message,
    to_event,
)
from polytrain_plugins import Backend, CheckpointKind, Job

_HOST = "127.0.0.1"


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """What one rank did."""

    reports: list[Reported] = field(default_factory=list)
    failure: Failed | None = None
    done: bool = False
    leaks: Mapping[str, list[Any]] | None = None
    """Ports and variables that it had beyond before, after it left; None if it never left."""

    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldRecord:
    """What a world of processes did."""

    ranks: tuple[RankRecord, ...]
    path: Path

    def saved(self, rank: int) -> Mapping[str, bytes]:
        """The files that the rank's newest checkpoint consisted of, by name."""
        newest = self.newest_staging(rank)
        if newest is None:
            return {}
        files = (file for file in sorted(newest.rglob("*")) if file.is_file())
        return {file.relative_to(newest).as_posix(): file.read_bytes() for file in files}

    def newest_staging(self, rank: int) -> Path | None:
        """Directory of those files; None if the rank has saved nothing."""
        return max(self.path.glob(f"checkpoint_*-rank_{rank}"), default=None)

    def saved_files(self, rank: int) -> dict[str, bytes]:
        """Those files, by name.

        Raises:
            FileNotFoundError: the rank has saved nothing.
        """
        newest = self.newest_staging(rank)
        if newest is None:
            raise FileNotFoundError(f"rank {rank} has saved nothing")
        return {path.name: path.read_bytes() for path in newest.rglob("*") if path.is_file()}


def run_world(
    backend: Backend,
    *,
    data: pa.Table,
    path: Path,
    world_size: int = 2,
    training_function: Callable[..., Any] | None = None,
    training_config: Mapping[str, Any] | None = None,
    checkpoint: Path | None = None,
    seconds: float = 120,
) -> WorldRecord:
    """Run one generation to its end, or to its first failure, in processes of this machine.

    Args:
        backend: its offering, joined and train are run.
        data: the data set "train"; each rank gets its shard.
        path: a directory for what the ranks save.
        world_size: number of processes.
        training_function: run instead of `Engine.train`.
        training_config: what it is called with.
        checkpoint: directory to go on from.
        seconds: after which everything is killed and an error is raised.

    Raises:
        TimeoutError: if the world hasn't ended in time.
    """
    path.mkdir(parents=True, exist_ok=True)
    job = TrainerJob(
        run_name="conformance",
        backend=backend,
        training_function=training_function,
        training_config=training_config,
        checkpoint_frequency=0,
        checkpoint_kind=CheckpointKind.EVERY_RANK,
        # Nobody takes them away: what a rank has saved stays in its staging.
        max_in_flight=sys.maxsize,
        waits_for_commit=False,
        near_staging=None,
    )
    order = LaunchOrder(
        attempt=Attempt(claim=0, generation=0),
        members=members([Place(node_id="local", host=_HOST)] * world_size, cpus=1, gpus=0),
        start=StartingPoint(location=Location.of(checkpoint) if checkpoint else None),
        first_checkpoint=0,
    )
    with _Processes(job, order, data, path) as processes:
        return processes.run(seconds)


class _Processes:
    """The processes of one world. Whatever happens, none of them is left."""

    def __init__(self, job: TrainerJob, order: LaunchOrder, data: pa.Table, path: Path) -> None:
        self._path = path
        self._order = order
        self._job = job
        self._data = data
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._records = [RankRecord() for _ in order.members]
        self._offers: dict[int, Any] = {}

    def __enter__(self) -> _Processes:
        world_size = len(self._order.members)
        dataset = RunDataset(source=describe("train", self._data))
        spec = dataset.spec(world_size=world_size, whole=False, as_tables=False, only_tables=False)
        environment = {**os.environ, **self._environment()}
        for member in self._order.members:
            ours, theirs = socket.socketpair()
            code = f"from polytrain.testing.local_world import child; child({theirs.fileno()})"
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                )
            )
            theirs.close()
            self._sockets.append(ours)
            start = (self._job, self._order, member.rank, spec, self._data, self._path)
            written = code_of_job(self._job.training_function, self._job.backend)
            ours.sendall(pack(["start", pickled_with(*written, value=start)]))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for ours in self._sockets:
            ours.close()

    def run(self, seconds: float) -> WorldRecord:
        buffers = [FrameBuffer() for _ in self._sockets]
        with selectors.DefaultSelector() as selector:
            for rank, ours in enumerate(self._sockets):
                selector.register(ours, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(seconds)
                if not ready:
                    raise TimeoutError(f"nothing has happened for {seconds:g} s")
                for key, _ in ready:
                    rank = key.data
                    data = self._sockets[rank].recv(1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                        self._records[rank].exit_code = self._processes[rank].wait()
                    for message in buffers[rank].feed(data):
                        self._take(rank, message)
                if any(
                    r.failure or (r.exit_code is not None and not r.done) for r in self._records
                ):
                    break
        return WorldRecord(ranks=tuple(self._records), path=self._path)

    def _take(self, rank: int, message: Message) -> None:
        record = self._records[rank]
        if message[0] == "left":
            record.leaks = message[1]
            return
        if message[0] == "staged":
            return
        match to_event(message, generation=0, rank=rank):
            case Offered(offer=offer):
                self._offers[rank] = offer
                if len(self._offers) == len(self._records):
                    roster = tuple(self._offers[r] for r in range(len(self._records)))
                    self._tell_all(roster_message(roster))
            case Reported() as report:
                record.reports.append(report)
            case Failed() as failed:
                record.failure = failed
            case Done():
                record.done = True
                if all(other.done for other in self._records):
                    self._tell_all(leave_message())

    def _tell_all(self, message: Message) -> None:
        for ours in self._sockets:
            ours.sendall(pack(message))

    def _environment(self) -> Mapping[str, str]:
        job = Job(
            num_workers=len(self._order.members),
            use_gpu=False,
            cpus_per_worker=1,
            has_training_function=self._job.training_function is not None,
            datasets={},
        )
        return {"OMP_NUM_THREADS": "1", **self._job.backend.demand(job).environment}


def child(descriptor: int) -> None:
    """The body of a rank's process: a trainer's, with a look at what it leaves behind."""
    channel = SocketChannel(socket.socket(fileno=descriptor))
    _, start = channel.receive()
    job, order, rank, spec, table, path = cloudpickle.loads(start)
    # The framework's import may set variables and start threads: that isn't the engine's doing.
    job.backend.engine()
    before = _Traces.now()
    run_trainer(
        job=job,
        order=order,
        rank=rank,
        shards=lambda: open_shards(
            [spec], iter([table]), {}, world_size=len(order.members), rank=rank
        ),
        channel=channel,
        scratch=path,
    )
    # A library's own thread may be just about to close what it listened on.
    eventually(lambda: not _Traces.now().beyond(before)["ports"], seconds=2)
    channel.send(["left", _Traces.now().beyond(before)])
    # As in a real trainer: the interpreter's own finalisation is left out.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traces:
    """What a process holds that others could stumble over."""

    ports: frozenset[int]
    environment: Mapping[str, str]

    @classmethod
    def now(cls) -> _Traces:
        connections = psutil.Process().net_connections(kind="tcp")
        listening = (c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN)
        return cls(ports=frozenset(listening), environment=dict(os.environ))

    def beyond(self, before: _Traces) -> dict[str, list[Any]]:
        names = {*self.environment, *before.environment}
        changed = [n for n in names if self.environment.get(n) != before.environment.get(n)]
        return {"ports": sorted(self.ports - before.ports), "variables": sorted(changed)}
