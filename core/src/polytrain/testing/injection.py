"""Injects faults: a wrapper around a backend whose worker processes fail at given points."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from polytrain.checkpoint.staging import Stamps
from polytrain.testing.faults import DRIVER, Fault, Point, count_services
from polytrain.workers.processes.channel import Message, SocketChannel
from polytrain.workers.session.checkpoint_files import CheckpointFiles
from polytrain.workers.session.checkpoint_uploader import CheckpointUploader
from polytrain_plugins import (
    Backend,
    Demand,
    Engine,
    Job,
    Member,
    Offer,
    Problem,
    Session,
    Shard,
    World,
    hookimpl,
)
from polytrain_plugins.returned import (
    demand_of,
    engine_of,
    gathered,
    join,
    offered,
    problems_of,
    summed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The faults of one run, and the files in which their injections are recorded."""

    directory: Path
    """The run's own directory, on this machine. It must exist."""

    faults: tuple[Fault, ...] = ()

    @property
    def clock(self) -> FaultClock:
        """An observer that the run needs: it records the number of the current attempt."""
        return FaultClock(self)

    @property
    def injected(self) -> list[InjectedFault]:
        """The injected faults so far, in order."""
        if not self._noted.exists():
            return []
        lines = self._noted.read_text().splitlines()
        return [InjectedFault(**json.loads(line)) for line in lines]

    def note(self, fault: InjectedFault) -> None:
        """Record a fault that is about to be injected."""
        with self._noted.open("a") as file:
            file.write(json.dumps(asdict(fault)) + "\n")

    @property
    def attempts(self) -> int:
        """Number of attempts that all drivers have started."""
        return self._now()["attempts"] if self._current.exists() else 0

    @property
    def driver(self) -> int:
        """Process id of the run's driver."""
        return self._now()["driver"]

    def begin_attempt(self) -> None:
        """Record that this process starts the next attempt."""
        now = {"attempts": self.attempts + 1, "driver": os.getpid()}
        new = self._current.with_suffix(".new")
        new.write_text(json.dumps(now))
        new.replace(self._current)

    def _now(self) -> dict[str, int]:
        now: dict[str, int] = json.loads(self._current.read_text())
        return now

    @property
    def _current(self) -> Path:
        return self.directory / "attempt.json"

    @property
    def _noted(self) -> Path:
        return self.directory / "injected.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault that has happened."""

    time: float
    """On the machine's monotonic clock, in seconds."""

    attempt: int
    rank: int
    kind: str
    point: str
    step: int
    services: int
    """Number of ports on which the rank listened at that time."""


class FaultClock:
    """Records in the driver when attempts begin and when they report."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self.first_reports: dict[int, float] = {}
        """Attempt → time of rank 0's first report, on the machine's monotonic clock."""

    @hookimpl
    def polytrain_attempt_started(self) -> None:
        self._plan.begin_attempt()

    @hookimpl
    def polytrain_reported(self) -> None:
        self.first_reports.setdefault(self._plan.attempts - 1, time.monotonic())


@dataclass(frozen=True, kw_only=True)
class WithFaults(Backend):
    """A wrapper that injects faults into another backend's worker processes."""

    contract_version: ClassVar[int] = 1

    inner: Backend
    plan: FaultPlan

    def __post_init__(self) -> None:
        # These are class attributes of every other backend; here they are the inner backend's.
        for name in ("name", "capabilities", "requires", "mutable_on_resume"):
            object.__setattr__(self, name, getattr(self.inner, name))

    # What is wrong is said of the inner backend's methods.

    def problems(self, job: Job) -> Iterable[Problem]:
        return problems_of(self.inner, job)

    def demand(self, job: Job) -> Demand:
        return demand_of(self.inner, job)

    def engine(self) -> Engine[Any]:
        inner = engine_of(self.inner)
        # Errors name the class of an engine.
        named = type(type(inner).__name__, (_FaultyEngine,), {})
        engine: Engine[Any] = named(inner, self.plan)
        return engine


class Injection:
    """The faults of one worker process."""

    def __init__(self, plan: FaultPlan, rank: int) -> None:
        self.attempt = plan.attempts - 1
        """Number of the attempt, counted over all drivers of the run."""

        self._plan = plan
        self._rank = rank

    def reach(self, point: Point, step: int = 0) -> None:
        """The worker process has reached a point: inject the faults that are due."""
        for fault in self._due(point, step):
            self._plan.note(
                InjectedFault(
                    time=time.monotonic(),
                    attempt=self.attempt,
                    rank=self._rank,
                    kind=fault.kind,
                    point=point,
                    step=step,
                    services=count_services(),
                )
            )
            fault.inject(rank=self._rank, step=step, attempt=self.attempt, point=point)

    def awaits(self, point: Point, step: int) -> bool:
        """Whether a fault is due here."""
        return bool(self._due(point, step))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Call `reach` at the points around every report."""
        send, submit = SocketChannel.send, CheckpointUploader.submit

        def faulty_send(channel: SocketChannel, *messages: Message) -> None:
            steps = [message[1] for message in messages if message[0] == "report"]
            for step in steps:
                self.reach("before_report", step)
            send(channel, *messages)
            for step in steps:
                self.reach("after_report", step)

        def faulty_submit(
            uploader: CheckpointUploader, files: CheckpointFiles, **arguments: Any
        ) -> None:
            submit(uploader, self._half_way(files, arguments["step"]), **arguments)

        with (
            mock.patch.object(SocketChannel, "send", faulty_send),
            mock.patch.object(CheckpointUploader, "submit", faulty_submit),
        ):
            yield

    def _half_way(self, files: CheckpointFiles, step: int) -> CheckpointFiles:
        write = files.write
        if write is None:
            return files

        def write_half(directory: Path) -> Stamps:
            stamps = write(directory)
            if self.awaits("saving", step):
                _halve(directory)
            self.reach("saving", step)
            return stamps

        return replace(files, write=write_half)

    def _due(self, point: Point, step: int) -> list[Fault]:
        here = {"rank": self._rank, "step": step, "attempt": self.attempt}
        return [fault for fault in self._plan.faults if fault.is_due(point=point, **here)]


def current_injection() -> Injection:
    """The injection of this worker process."""
    return _injections[-1]


def sum_over_ranks(values: Sequence[int]) -> list[int]:
    """Add up numbers over all ranks with the backend's own collective operation."""
    return _sums[-1](values)


_injections: list[Injection] = []
_sums: list[Callable[[Sequence[int]], list[int]]] = []


class _FaultyEngine(Engine[Any]):
    def __init__(self, inner: Engine[Any], plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        injection = Injection(self._plan, me.rank)
        with ExitStack() as stack:
            stack.enter_context(_pushed(_injections, injection))
            stack.enter_context(mock.patch.dict(os.environ, {DRIVER: str(self._plan.driver)}))
            stack.enter_context(injection.watching())
            injection.reach("offering")
            offer = offered(stack, self._inner, me)
            injection.reach("offered")
            yield offer

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        injection = current_injection()
        injection.reach("joining")
        with ExitStack() as stack:
            join(stack, self._inner, world)
            stack.enter_context(_pushed(_sums, partial(self.sum_over_ranks, world=world)))
            injection.reach("joined")
            yield

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        return summed(self._inner, values, world)

    def gather_over_ranks(self, piece: bytes, world: World, *, call: str) -> list[bytes]:
        return gathered(self._inner, piece, world, call=call)

    def adapt(self, shard: Shard) -> Any:
        return self._inner.adapt(shard)

    def train(self, shards: Mapping[str, Shard], session: Session) -> Any:
        return self._inner.train(shards, session)

    def save(self, model: Any, directory: Path) -> None:
        self._inner.save(model, directory)

    def load(self, directory: Path) -> Any:
        return self._inner.load(directory)


@contextmanager
def _pushed(stack: list[Any], value: Any) -> Iterator[None]:
    stack.append(value)
    try:
        yield
    finally:
        stack.pop()


def _halve(directory: Path) -> None:
    """Truncate a checkpoint's files, as if they were half written."""
    for file in [path for path in directory.rglob("*") if path.is_file()]:
        content = file.read_bytes()
        # Write new files: a hard link shares its content with the caller's file.
        file.unlink()
        file.write_bytes(content[: len(content) // 2])
