"""A world of local processes without Ray, in which the contract tier runs backends.

The test's process replaces agents and controller: it starts one process for each rank, gathers
offers, sends the roster, and lets all ranks leave once all are done.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.config.configs import CheckpointConfig, RunConfig, ScalingConfig
from polytrain.config.run_spec import RunSpec
from polytrain.data.read.describe import describe
from polytrain.data.shards.assignment import RunDataset
from polytrain.events.attempt import Done, Failed, Offered, Reported
from polytrain.functions.pickling import code_of_job, pickled_with
from polytrain.policy.placement import NodeAddress, members
from polytrain.storage.location import Location
from polytrain.workers.agents.agent_spec import PRELOAD_WITH_DATA
from polytrain.workers.agents.calls import ForWorker, Leave, SendRoster, message_of
from polytrain.workers.processes.channel import Message
from polytrain.workers.processes.pool import Ended, ProcessPool, Sent, forked_pool
from polytrain.workers.session.job import LaunchOrder, WorkerJob
from polytrain.workers.session.messages import to_event
from polytrain_plugins import Backend, CheckpointKind, Job
from polytrain_plugins.returned import demand_of

_HOST = "127.0.0.1"
_ENTRY = "polytrain.testing.local_rank"


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """What one rank did."""

    reports: list[Reported] = field(default_factory=list)
    failure: Failed | None = None
    done: bool = False
    leaks: Mapping[str, list[Any]] | None = None
    """Ports, variables and processes that were left when it left the collective; None if it never
    left."""

    end: str | None = None
    """How its process has ended: "exited with code 0"; None while it hasn't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldRecord:
    """What a world of processes did."""

    ranks: tuple[RankRecord, ...]
    path: Path

    def saved(self, rank: int) -> Mapping[str, bytes]:
        """The files of the rank's newest checkpoint, by name."""
        newest = self.newest_staging(rank)
        if newest is None:
            return {}
        files = (file for file in sorted(newest.rglob("*")) if file.is_file())
        return {file.relative_to(newest).as_posix(): file.read_bytes() for file in files}

    def newest_staging(self, rank: int) -> Path | None:
        """Directory of those files; None if the rank has saved nothing."""
        return max(self.path.glob(f"checkpoint_*-rank_{rank}"), default=None)

    def whole_checkpoint(self, kind: CheckpointKind) -> Path | None:
        """Directory of the files of all ranks that write a checkpoint; None if there is none."""
        newest = [self.newest_staging(rank) for rank in range(len(self.ranks))]
        if kind is CheckpointKind.ONE_RANK or None in newest:
            return newest[0]
        whole = self.path / "whole"
        for part in filter(None, newest):
            shutil.copytree(part, whole, dirs_exist_ok=True)
        return whole


def run_world(
    backend: Backend,
    *,
    data: pa.Table,
    path: Path,
    world_size: int = 2,
    training_function: Callable[..., Any] | None = None,
    training_config: Mapping[str, Any] | None = None,
    checkpoint: Path | None = None,
    virtual_workers: int | None = None,
    seconds: float = 120,
) -> WorldRecord:
    """Run one attempt to its end, or to its first failure, in processes on this machine.

    Args:
        backend: the backend under test.
        data: the data set "train"; each rank gets its shard.
        path: a directory for the ranks' files.
        world_size: number of processes.
        training_function: run instead of `Engine.train`.
        training_config: what it is called with.
        checkpoint: directory to resume from.
        virtual_workers: as in `ScalingConfig`.
        seconds: if nothing happens for this time, everything is killed and an error is raised.

    Raises:
        TimeoutError: if nothing has happened for this time.
    """
    path.mkdir(parents=True, exist_ok=True)
    # No agent stores them: a rank's files stay in its staging directory.
    checkpoints = CheckpointConfig(written_by="every_rank", max_in_flight=sys.maxsize)
    spec = RunSpec(
        backend=backend,
        train_loop_per_worker=training_function,
        train_loop_config=training_config,
        scaling_config=ScalingConfig(virtual_workers=virtual_workers),
        run_config=RunConfig(checkpoint_config=checkpoints),
    )
    job = WorkerJob(spec=spec, checkpoints=Location.of(path), near_staging=None)
    order = LaunchOrder(
        attempt_id=AttemptId(token=0, attempt=0),
        members=members([NodeAddress(node_id="local", host=_HOST)] * world_size, cpus=1, gpus=0),
        start=StartingPoint(location=Location.of(checkpoint) if checkpoint else None),
        first_checkpoint=0,
    )
    with _World(job, order, data, path, seconds) as world:
        return world.run()


class _World:
    """The ranks of one world; all are killed at the end."""

    _processes: ProcessPool

    def __init__(
        self, job: WorkerJob, order: LaunchOrder, data: pa.Table, path: Path, seconds: float
    ) -> None:
        self._seconds = seconds
        self._path = path
        self._order = order
        self._job = job
        self._data = data
        self._opened = ExitStack()
        self._records = [RankRecord() for _ in order.members]
        self._offers: dict[int, Any] = {}

    def __enter__(self) -> _World:
        with ExitStack() as stack:
            self._processes = stack.enter_context(forked_pool(_ENTRY, *self._needs()))
            self._start_ranks()
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.close()

    def _start_ranks(self) -> None:
        world_size = len(self._order.members)
        dataset = RunDataset(source=describe("train", self._data))
        spec = dataset.spec(
            world_size=world_size,
            whole=False,
            as_tables=False,
            only_tables=False,
            virtual_workers=self._job.spec.scaling_config.virtual_workers,
        )
        for member in self._order.members:
            start = (self._job, self._order, member.rank, spec, self._data, self._path)
            written = code_of_job(self._job.spec.train_loop_per_worker, self._job.spec.backend)
            self._processes.start(member.rank, ["start", pickled_with(*written, value=start)])

    def run(self) -> WorldRecord:
        while not self._is_over():
            match self._processes.next(self._seconds):
                case Sent(number=rank, message=message):
                    self._take(rank, message)
                case Ended(number=rank, how=how):
                    self._records[rank].end = how
                case _:
                    raise TimeoutError(f"nothing has happened for {self._seconds:g} s")
        return WorldRecord(ranks=tuple(self._records), path=self._path)

    def _is_over(self) -> bool:
        records = self._records
        is_broken = any(r.failure or (r.end is not None and not r.done) for r in records)
        return is_broken or all(record.end is not None for record in records)

    def _take(self, rank: int, message: Message) -> None:
        record = self._records[rank]
        if message[0] == "left":
            record.leaks = message[1]
            return
        # A world of the kit has no agents: nothing is committed, kept or resumed.
        if message[0] not in ("offer", "report", "done", "raised"):
            return
        match to_event(message, attempt=0, rank=rank):
            case Offered(offer=offer):
                self._offers[rank] = offer
                if len(self._offers) == len(self._records):
                    roster = tuple(self._offers[r] for r in range(len(self._records)))
                    self._tell_all(SendRoster(attempt=0, offers=roster))
            case Reported() as report:
                record.reports.append(report)
            case Failed() as failed:
                record.failure = failed
            case Done():
                record.done = True
                if all(other.done for other in self._records):
                    self._tell_all(Leave(attempt=0))

    def _tell_all(self, call: ForWorker) -> None:
        for rank in range(len(self._records)):
            self._processes.send(rank, message_of(call))

    def _needs(self) -> tuple[Sequence[str], Mapping[str, str]]:
        """The modules and variables of the ranks' processes."""
        job = Job(
            num_workers=len(self._order.members),
            use_gpu=False,
            cpus_per_worker=1,
            has_training_function=self._job.spec.train_loop_per_worker is not None,
            datasets={},
        )
        demand = demand_of(self._job.spec.backend, job)
        modules = (*PRELOAD_WITH_DATA, *demand.preload)
        return modules, {"OMP_NUM_THREADS": "1", **demand.environment}
