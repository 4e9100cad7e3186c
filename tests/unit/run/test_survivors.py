"""Who is asked for the newest state after a loss, in which order, and for how long."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from polytrain.checkpoint.parts import PartStored, StateWritten
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import KeepsNothing, KeepsState, KeptRead, StateUnwritten
from polytrain.linux.kept_states import KeptState
from polytrain.policy.failure import FailurePolicy
from polytrain.run import survivors
from polytrain.run.states import Ending, State
from polytrain.run.survivors import Survivors, in_order, newest_point
from polytrain.workers.agents.calls import Kill, ReadKept, WriteState


def read(rank: int, *points: int, alive: bool = True, forecast: int | None = None) -> KeptRead:
    states = [KeptState(point=each, is_forecast=False, content=b"") for each in points]
    if forecast is not None:
        states.append(KeptState(point=forecast, is_forecast=True, content=b""))
    return KeptRead(attempt=0, rank=rank, states=tuple(states), is_alive=alive)


class Run:
    """The group and the journal of a run with three ranks."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Collection[int] | None]] = []
        self.entries: list[Any] = []
        group = SimpleNamespace(call=lambda call, ranks=None: self.calls.append((call, ranks)))
        journal = SimpleNamespace(write=self.entries.append)
        self.survivors = Survivors(group=group, journal=journal)  # type: ignore[arg-type]
        self.survivors.launched(0, 3)

    def keep(self) -> None:
        for rank in range(3):
            self.survivors.take(KeepsState(attempt=0, rank=rank, size=10))

    def lose(self, kind: FailureKind = FailureKind.WORKER_LOST) -> bool:
        ending = Ending().also(Failure(kind=kind, rank=1, message="gone"))
        state = State(world_size=3, policy=FailurePolicy(max_failures=1), phase=ending)
        return self.survivors.ask(state, number=4)

    def last(self) -> tuple[Any, Collection[int] | None]:
        return self.calls[-1]


def test_a_rank_that_is_ahead_is_asked_first() -> None:
    kept = {0: read(0, 3, 4), 1: read(1, 5, alive=False), 2: read(2, 4, 5)}
    assert newest_point(kept) == 5
    assert in_order(kept) == [2, 0]


def test_a_forecast_is_no_point() -> None:
    assert newest_point({0: read(0, forecast=1)}) is None


def test_the_first_that_writes_its_state_ends_the_search() -> None:
    run = Run()
    run.keep()
    assert run.lose()
    assert isinstance(run.last()[0], ReadKept)
    for each in (read(0, 7), read(1, 7, alive=False), read(2, 7)):
        run.survivors.take(each)
    call, ranks = run.last()
    assert isinstance(call, WriteState)
    assert (call.point, call.checkpoint, ranks) == (7, 4, (0,))
    run.survivors.take(StateUnwritten(attempt=0, rank=0, reason="in a step"))
    assert run.last()[1] == (2,)
    part = PartStored(attempt=0, rank=2, checkpoint=4, step=9, metrics={}, positions={}, files=())
    run.survivors.take(StateWritten(attempt=0, rank=2, part=part, is_report=False))
    assert isinstance(run.last()[0], Kill)
    written = run.survivors.written()
    assert written is not None
    assert written.part.rank == 0
    assert [(each.rank, each.step, each.reason) for each in run.entries] == [(2, 9, "")]


def test_the_journal_says_why_nobody_could_write() -> None:
    run = Run()
    run.keep()
    run.lose()
    for each in (read(0, 7), read(1, 7, alive=False), read(2, 6, alive=False)):
        run.survivors.take(each)
    run.survivors.take(StateUnwritten(attempt=0, rank=0, reason="in a step"))
    assert isinstance(run.last()[0], Kill)
    assert [each.reason for each in run.entries] == ["rank 0: in a step"]
    assert run.survivors.written() is None


def test_a_survivor_that_does_not_answer_is_killed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(survivors, "time", clock)
    run = Run()
    run.keep()
    run.lose()
    deadline = run.survivors.deadline
    assert deadline is not None
    assert 100 < deadline < 102
    run.survivors.overdue()
    assert isinstance(run.last()[0], ReadKept)
    clock.now = deadline
    run.survivors.overdue()
    assert isinstance(run.last()[0], Kill)
    assert run.survivors.deadline is None


def test_small_states_that_are_lost_with_their_host_end_the_search() -> None:
    run = Run()
    run.keep()
    run.lose()
    run.survivors.lost(1)
    assert isinstance(run.last()[0], Kill)
    assert "rank 1" in run.entries[0].reason


@pytest.mark.parametrize("kind", [FailureKind.STORAGE, FailureKind.LEASE_LOST])
def test_nobody_is_asked_where_nothing_could_be_committed(kind: FailureKind) -> None:
    run = Run()
    run.keep()
    assert not run.lose(kind)
    assert run.calls == []


def test_nobody_is_asked_where_nobody_keeps_a_state() -> None:
    assert not Run().lose()


def test_the_journal_says_why_no_rank_keeps_its_state(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    for rank in range(3):
        run.survivors.take(KeepsNothing(attempt=0, rank=rank, reason="its tensors are on a device"))
    assert not run.lose()
    assert run.calls == []
    assert [(each.rank, each.reason) for each in run.entries] == [
        (None, "its tensors are on a device")
    ]
    assert "are repeated, if there are any: its tensors are on a device." in caplog.text
    run.survivors.launched(1, 3)
    assert not run.lose()
    assert len(run.entries) == 1
