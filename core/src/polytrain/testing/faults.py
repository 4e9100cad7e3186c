"""Faults as data: what goes wrong, on which rank, at which step."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

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
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that a trainer does to itself, on the first attempt only."""

    rank: int
    at_step: int
    """After this many reports."""

    kind: Literal["sigkill", "exception", "exit"] = "sigkill"

    def strike(self, *, rank: int, step: int, attempt: int) -> None:
        """Let it happen, if this is the place and the time."""
        if (rank, step, attempt) != (self.rank, self.at_step, 0):
            return
        if self.kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "exit":
            sys.exit(0)
        raise InjectedError(f"injected on rank {rank} at step {step}")


class InjectedError(Exception):
    """What a fault of the kind "exception" raises."""


@dataclass(frozen=True, kw_only=True)
class WithFault(Backend):
    """A backend whose declarative training meets a fault, and is otherwise another one."""

    contract_version: ClassVar[int] = 1

    inner: Backend
    fault: Fault

    def __post_init__(self) -> None:
        # What is the class's in every other backend is here the inner one's.
        for name in ("name", "capabilities", "requires"):
            object.__setattr__(self, name, getattr(self.inner, name))

    def problems(self, job: Job) -> Iterator[Problem]:
        yield from self.inner.problems(job)

    def demand(self, job: Job) -> Demand:
        return self.inner.demand(job)

    def engine(self) -> Engine[Any]:
        return _FaultyEngine(self.inner.engine(), self.fault)


class _FaultyEngine(Engine[Any]):
    def __init__(self, inner: Engine[Any], fault: Fault) -> None:
        self._inner = inner
        self._fault = fault

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        with self._inner.offering(me) as offer:
            yield offer

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        with self._inner.joined(world):
            yield

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        return self._inner.sum_over_ranks(values, world)

    def train(self, shards: Mapping[str, Shard], session: Session) -> Any:
        return self._inner.train(shards, _FaultySession(session, self._fault))

    def save(self, model: Any, directory: Path) -> None:
        self._inner.save(model, directory)

    def load(self, directory: Path) -> Any:
        return self._inner.load(directory)


class _FaultySession:
    def __init__(self, inner: Session, fault: Fault) -> None:
        self._inner = inner
        self._fault = fault
        self.world = inner.world
        self.checkpoint = inner.checkpoint

    def report(self, *, step: int, metrics: Mapping[str, Any], model: Any = None) -> None:
        self._inner.report(step=step, metrics=metrics, model=model)
        self._fault.strike(rank=self.world.me.rank, step=step, attempt=self.world.generation)
