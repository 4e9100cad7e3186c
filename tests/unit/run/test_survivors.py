"""Who is asked for the newest state after a loss, in which order, and for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.run.driver import Driver
from tests.unit.run.test_controller import lines

from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.manifest import Manifest
from polytrain.checkpoint.parts import PartStored, StateWritten
from polytrain.config.configs import CheckpointConfig, FailureConfig
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import (
    AgentLost,
    CopiesHeld,
    CopyRefused,
    CopySent,
    Exited,
    Failed,
    KeepsNothing,
    KeepsState,
    KeptRead,
    StateUnwritten,
    stop_wanted,
)
from polytrain.linux.kept_states import KeptState
from polytrain.policy.divergence import DivergenceRule
from polytrain.policy.failure import FailurePolicy
from polytrain.policy.stop_rule import Limit, StopRule
from polytrain.record.history import JOURNAL, read_as
from polytrain.record.repetition import ReportedHistory
from polytrain.run import survivors
from polytrain.run.copies import newest_common
from polytrain.run.deadlines import Deadline, Deadlines
from polytrain.run.states import Ending, State
from polytrain.run.survivors import Survivors, in_order, newest_point
from polytrain.storage.location import Location
from polytrain.workers.agents.calls import (
    AgentEvent,
    Kill,
    ReadKept,
    SendCopies,
    StoreCopy,
    WriteState,
)
from polytrain.workers.session.job import LaunchOrder
from polytrain_plugins import CheckpointKind, Stopped


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
        group = SimpleNamespace(
            call=lambda call, ranks=None: self.calls.append((call, ranks)),
            members=[SimpleNamespace(host=host) for host in "abc"],
        )
        journal = SimpleNamespace(write=self.entries.append)
        self.survivors = Survivors(group=group, journal=journal, deadlines=Deadlines())  # type: ignore[arg-type]
        self.survivors.launched(0, 3)
        self.state = State(world_size=3, policy=FailurePolicy(config=FailureConfig(max_failures=1)))

    @property
    def deadline(self) -> float | None:
        return self.survivors.deadlines.at(Deadline.SURVIVORS)

    def pass_to(self, now: float) -> None:
        """As the controller does at a time."""
        if Deadline.SURVIVORS in self.survivors.deadlines.passed(now):
            self.survivors.overdue()

    def keep(self) -> None:
        for rank in range(3):
            self.survivors.take(KeepsState(attempt=0, rank=rank, size=10))

    def lose(self, kind: FailureKind = FailureKind.WORKER_LOST) -> bool:
        ending = Ending().also(Failure(kind=kind, rank=1, message="gone"))
        self.state = replace(self.state, phase=ending)
        return self.survivors.ask(self.state, number=4)

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
    assert (call.point, call.checkpoint, call.kills, ranks) == (7, 4, True, (0,))
    run.survivors.take(StateUnwritten(attempt=0, rank=0, reason="in a step"))
    assert run.last()[1] == (2,)
    part = PartStored(attempt=0, rank=2, checkpoint=4, step=9, metrics={}, positions={}, files=())
    run.survivors.take(StateWritten(attempt=0, rank=2, part=part, is_report=False))
    assert isinstance(run.last()[0], Kill)
    written = run.survivors.written(run.state)
    assert written is not None
    assert written.part.rank == 0
    # It is news once the state is committed.
    assert run.entries == []
    run.survivors.committed(written)
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
    assert run.survivors.written(run.state) is None


def test_a_survivor_that_does_not_answer_is_killed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(survivors, "time", clock)
    run = Run()
    run.keep()
    run.lose()
    deadline = run.deadline
    assert deadline is not None
    assert 100 < deadline < 102
    run.pass_to(100.0)
    assert isinstance(run.last()[0], ReadKept)
    clock.now = deadline
    run.pass_to(clock.now)
    assert isinstance(run.last()[0], Kill)
    assert run.deadline is None


def test_a_survivor_has_all_its_time_however_late_what_is_kept_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(survivors, "time", clock)
    run = Run()
    run.keep()
    run.survivors.take(KeepsState(attempt=0, rank=0, size=5 * 10**9))
    run.lose()
    clock.now = 100.9
    for each in (read(0, 7), read(1, 7, alive=False), read(2, 7)):
        run.survivors.take(each)
    call, _ = run.last()
    assert isinstance(call, WriteState)
    assert call.settles_s == pytest.approx(0.9 * 2)
    assert call.limit_s == pytest.approx(0.9 * 12)
    assert run.deadline == pytest.approx(112.9)


def test_a_rank_that_a_stop_kills_has_the_time_to_free_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(survivors, "time", clock)
    run = Run()
    run.keep()
    run.survivors.take(KeepsState(attempt=0, rank=0, size=20 * 10**9))
    assert run.survivors.ask_at_stop(number=4)
    clock.now = 104.5
    run.pass_to(clock.now)
    assert run.last() == (Kill(attempt=0), (2,))
    run.survivors.gone(2)
    assert isinstance(run.last()[0], ReadKept)
    clock.now = 105.4
    run.pass_to(clock.now)
    for each in (read(0, 7), read(1, 7), read(2, 7, alive=False)):
        run.survivors.take(each)
    assert isinstance(run.last()[0], WriteState)


def test_a_survivor_is_given_up_in_time_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(survivors, "time", clock)
    run = Run()
    run.keep()
    run.survivors.ask_at_stop(number=4, latest=103.0)
    run.survivors.gone(2)
    for each in (read(0, 7), read(1, 7), read(2, 7, alive=False)):
        run.survivors.take(each)
    call, _ = run.last()
    assert isinstance(call, WriteState)
    assert call.limit_s <= 3
    clock.now = 103.0
    run.pass_to(clock.now)
    assert run.last() == (Kill(attempt=0), None)
    assert [each.reason for each in run.entries] == ["the survivors didn't answer in time"]


def test_survivors_are_asked_although_a_rank_is_lost_with_its_host() -> None:
    """They may know from elsewhere what it had alone."""
    run = Run()
    run.keep()
    run.lose()
    run.survivors.take(read(0, 7))
    run.survivors.take(read(2, 7))
    run.survivors.lost(1)
    call, ranks = run.last()
    assert isinstance(call, WriteState)
    assert (call.point, call.kept[1], ranks) == (7, (), (0,))
    run.survivors.take(StateUnwritten(attempt=0, rank=0, reason="rank 1 was lost"))
    run.survivors.take(StateUnwritten(attempt=0, rank=2, reason="rank 1 was lost"))
    assert isinstance(run.last()[0], Kill)
    assert "rank 1 was lost" in run.entries[0].reason


def test_a_rank_whose_host_is_lost_meanwhile_is_not_asked() -> None:
    run = Run()
    run.keep()
    run.lose()
    for each in (read(0, 7), read(1, 7, alive=False), read(2, 7)):
        run.survivors.take(each)
    run.survivors.lost(2)
    run.survivors.take(StateUnwritten(attempt=0, rank=0, reason="in a step"))
    assert isinstance(run.last()[0], Kill)
    assert [each.reason for each in run.entries] == ["rank 0: in a step"]


def test_the_next_is_asked_at_once_if_the_agent_of_the_one_that_writes_is_lost() -> None:
    run = Run()
    run.keep()
    run.lose()
    for each in (read(0, 7), read(1, 7, alive=False), read(2, 7)):
        run.survivors.take(each)
    run.survivors.lost(0)
    assert run.last()[1] == (2,)
    # What it had sent before comes too late.
    run.survivors.take(StateUnwritten(attempt=0, rank=0, reason="in a step"))
    assert run.last()[1] == (2,)


def test_a_rank_that_hangs_is_asked_last() -> None:
    """Its process may be stopped, and the others would have no time left."""
    run = Run()
    run.keep()
    run.lose(FailureKind.HANG)
    for each in (read(0, 7), read(1, 8), read(2, 7)):
        run.survivors.take(each)
    order = [run.last()[1]]
    for rank in (0, 2):
        run.survivors.take(StateUnwritten(attempt=0, rank=rank, reason="in a step"))
        order.append(run.last()[1])
    assert order == [(0,), (2,), (1,)]


@pytest.mark.parametrize(
    ("kind", "is_gone", "kills"),
    [
        (FailureKind.NODE_LOST, False, True),
        (FailureKind.HANG, False, False),
        (FailureKind.USER_ERROR, False, False),
        (FailureKind.CONNECTION_LOST, False, False),
        (FailureKind.CONNECTION_LOST, True, True),
    ],
)
def test_only_after_a_loss_is_a_survivor_killed_before_its_peers(
    kind: FailureKind, is_gone: bool, kills: bool
) -> None:
    """A process that NCCL ends for a lost peer would count as the cause."""
    run = Run()
    run.keep()
    run.lose(kind)
    if is_gone:
        run.survivors.gone(1)
    for rank in range(3):
        run.survivors.take(read(rank, 7))
    assert run.last()[0].kills is kills


def test_a_host_whose_loss_is_not_noticed_yet_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others raise an error at once, and Ray says seconds later why."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(survivors, "time", clock)
    run = Run()
    run.keep()
    run.lose()
    run.survivors.take(read(0, 7))
    run.survivors.take(read(2, 7))
    clock.now += 2
    run.pass_to(clock.now)
    assert isinstance(run.last()[0], WriteState)
    assert run.deadline is not None
    assert run.deadline > clock.now
    asked = len(run.calls)
    run.survivors.take(read(1, 7))
    run.survivors.lost(1)
    assert len(run.calls) == asked
    clock.now += 12
    run.pass_to(clock.now)
    assert isinstance(run.last()[0], Kill)


@pytest.mark.parametrize("kind", [FailureKind.STORAGE, FailureKind.LEASE_LOST])
def test_nobody_is_asked_where_nothing_could_be_committed(kind: FailureKind) -> None:
    run = Run()
    run.keep()
    assert not run.lose(kind)
    assert run.calls == []


@pytest.mark.parametrize("has_reported", [False, True])
def test_the_journal_says_that_a_training_keeps_no_state(has_reported: bool) -> None:
    run = Run()
    run.state = replace(run.state, has_reported=has_reported)
    assert not run.lose()
    assert ["keeps no state" in each.reason for each in run.entries] == [True] * has_reported


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


def rescuing(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    loss: float = 0.25,
    is_earlier: bool = False,
    reports: Sequence[tuple[int, Mapping[str, Any]]] = (),
    **options: Any,
) -> Driver:
    """A run that loses rank 0 in its first attempt, after it has reported steps 1 and 2.

    Rank 1 has the state after step 3. Step 1 has a checkpoint.

    Args:
        reports: those that rank 1 has made before; the one of rank 0 at step 2 is lost then.
    """
    run = Driver(path, monkeypatch, lambda order: [], **options)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        if order.attempt:
            return run.all_done()
        run.group.rescue = lambda call: StateWritten(
            attempt=0,
            rank=1,
            part=replace(run.stored(1, call.checkpoint, step=3, model="3"), metrics={"loss": loss}),
            is_report=False,
            is_earlier=is_earlier,
            reports=tuple(reports),
        )
        run.group.alive.discard(0)
        return [
            *(KeepsState(attempt=0, rank=rank, size=10) for rank in (0, 1)),
            run.reported(0, 1),
            run.staged(0, 0),
            run.stored(0, 0, model="1"),
            *([] if reports else [run.reported(0, 2)]),
            Exited(attempt=0, rank=0, how="killed by SIGKILL", killed=False),
        ]

    run.life = life
    return run


def test_a_state_after_steps_without_a_report_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step and its positions are those of the last checkpoint."""
    run = Driver(tmp_path, monkeypatch, lambda order: [], max_failures=1)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        if order.attempt:
            return run.all_done()
        run.group.rescue = lambda call: StateWritten(
            attempt=0,
            rank=1,
            part=run.stored(1, call.checkpoint, step=1, model="2"),
            is_report=False,
            is_ahead=True,
        )
        run.group.alive.discard(0)
        return [
            *(KeepsState(attempt=0, rank=rank, size=10) for rank in (0, 1)),
            run.reported(0, 1),
            run.staged(0, 0),
            run.stored(0, 0, model="1"),
            Exited(attempt=0, rank=0, how="killed by SIGKILL", killed=False),
        ]

    run.life = life
    assert run.conclude().succeeded
    assert [each["reason"] for each in lines(tmp_path, "SurvivorsAsked")] == [""]
    # A rank may have staged checkpoint 1 when it was asked.
    numbers = [each["checkpoint"].partition("-")[0] for each in lines(tmp_path, "Committed")]
    assert numbers == ["checkpoint_000000", "checkpoint_000002"]


def test_a_state_is_committed_also_if_no_restart_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver that resumes the run begins with it, and so does the result."""
    run = rescuing(tmp_path, monkeypatch)
    assert not run.conclude().succeeded
    assert [each["step"] for each in lines(tmp_path, "Committed")] == [1, 3]
    newest = run.manager.newest()
    assert newest is not None
    assert newest.step == 3
    [asked] = lines(tmp_path, "SurvivorsAsked")
    assert (asked["rank"], asked["step"], asked["reason"]) == (1, 3, "")


def test_the_report_that_a_survivor_makes_may_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = StopRule(limits=(Limit(metric="loss", comparison="<=", value=0.3),))
    run = rescuing(tmp_path, monkeypatch, max_failures=1, stop_rule=rule)
    conclusion = run.conclude()
    assert conclusion.succeeded
    assert conclusion.stopped is not None
    assert "loss" in conclusion.stopped.reason
    assert run.group.of("launch") == [(0, 0)]


def kills_its_process(*given: object) -> bool:
    raise AssertionError("rank 0 may have been lost in it")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"divergence_rule": DivergenceRule(spikes={"loss": 3.0})}, ""),
        ({"divergence_rule": DivergenceRule(names=("loss",))}, "it diverges: loss is nan"),
        ({"divergence_rule": DivergenceRule(function=kills_its_process)}, "a function of yours"),
        ({"stop_rule": StopRule(function=kills_its_process)}, "a function of yours"),
    ],
)
def test_a_step_whose_report_rank_0_may_not_have_passed_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, reason: str
) -> None:
    loss = math.nan if "nan" in reason else 0.25
    run = rescuing(tmp_path, monkeypatch, loss=loss, max_failures=1, **options)
    assert run.conclude().succeeded
    [asked] = lines(tmp_path, "SurvivorsAsked")
    assert reason in str(asked["reason"])
    assert run.group.of("launch") == [(0, 0), (1, 1 if reason else 3)]
    assert [each["step"] for each in lines(tmp_path, "Committed")] == ([1] if reason else [1, 3])


def test_no_checkpoint_is_committed_before_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is killed in between would resume after a step whose report is lost."""
    run = rescuing(tmp_path, monkeypatch, max_failures=1)
    steps: list[list[int]] = []
    real = CheckpointManager.commit

    def commit_(manager: CheckpointManager, manifest: Manifest) -> Any:
        steps.append(run.controller.journal.history.reports.steps().tolist())
        return real(manager, manifest)

    monkeypatch.setattr(CheckpointManager, "commit", commit_)
    assert run.conclude().succeeded
    assert steps == [[1], [1, 2, 3]]
    assert run.group.of("launch") == [(0, 0), (1, 3)]
    history = read_as(ReportedHistory, Location.of(tmp_path).open().read_log(JOURNAL))
    assert history is not None
    assert history.by_survivors == {3: 1}, "whose metrics they are"


KNOWN, LOST, MET = (1, {"loss": 1.0}), (2, {"loss": 0.5}), (2, {"loss": 0.2})


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ([KNOWN, LOST], ""),
        ([LOST], "rank 0's reports after step 1 are lost, and were too many"),
        ([KNOWN, MET], "it was made after step 2, at which a condition is met"),
    ],
)
def test_reports_that_are_lost_with_the_host_of_rank_0_are_another_ranks_or_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: Any, reason: str
) -> None:
    rule = StopRule(limits=(Limit(metric="loss", comparison="<=", value=0.22),))
    run = rescuing(tmp_path, monkeypatch, reports=reports, max_failures=1, stop_rule=rule)
    assert run.conclude().succeeded
    [asked] = lines(tmp_path, "SurvivorsAsked")
    assert asked["reason"] == reason
    assert run.group.of("launch") == [(0, 0), (1, 1 if reason else 3)]
    history = read_as(ReportedHistory, Location.of(tmp_path).open().read_log(JOURNAL))
    assert history is not None
    assert history.by_survivors == ({} if reason else {2: 1, 3: 1})
    assert list(history.reports.steps()) == ([1] if reason else [1, 2, 3])


@pytest.mark.parametrize("is_earlier", [False, True])
def test_a_state_behind_the_reports_of_rank_0_is_committed_if_its_rank_has_made_some_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_earlier: bool
) -> None:
    """If a rank reports nothing, its step says nothing. Else a restart reports again."""
    run = rescuing(tmp_path, monkeypatch, max_failures=1, is_earlier=is_earlier)
    life = run.life

    def far(order: LaunchOrder) -> Sequence[AgentEvent]:
        events = list(life(order))
        return [*events[:-1], *(run.reported(0, step) for step in (3, 4)), events[-1]] * (
            order.attempt == 0
        ) or events

    run.life = far
    assert run.conclude().succeeded
    [asked] = lines(tmp_path, "SurvivorsAsked")
    refusal = "rank 0 had reported step 4, and this state is that of step 3"
    assert (asked["rank"], asked["reason"]) == ((1, "") if is_earlier else (None, refusal))
    assert run.group.of("launch") == [(0, 0), (1, 3 if is_earlier else 1)]


def advancing(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[LaunchOrder], AgentEvent],
    *,
    is_report: bool,
    num_to_keep: int | None = None,
) -> Driver:
    """A run whose attempts take one step each, which rank 1 has when rank 0 is lost.

    Before that, the first reports step 1 with a checkpoint.
    """
    config = CheckpointConfig(num_to_keep=num_to_keep)
    run = Driver(path, monkeypatch, lambda order: [], max_failures=2, checkpoint_config=config)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        attempt, step = order.attempt, max(2, order.start.step + 1)
        if attempt == 5:
            return run.all_done()
        run.group.rescue = lambda call: StateWritten(
            attempt=attempt,
            rank=1,
            part=run.stored(1, call.checkpoint, step=step, model=str(step)),
            is_report=is_report,
        )
        first = [run.reported(0, 1), run.staged(0, 0), run.stored(0, 0, model="1")]
        reported = [] if is_report else [run.reported(0, step)]
        return [
            *(KeepsState(attempt=attempt, rank=rank, size=10) for rank in (0, 1)),
            *(first if attempt == 0 else ()),
            *reported,
            end(order),
        ]

    run.life = life
    return run


# Rank 0 is lost after its report of the step, or while it makes it, with a checkpoint.
AT_A_REPORT = pytest.mark.parametrize("is_report", [False, True])


@AT_A_REPORT
def test_losses_with_a_state_each_spend_the_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_report: bool
) -> None:
    """Each attempt comes one step further: without a limit, it would restart for ever."""

    def killed(order: LaunchOrder) -> AgentEvent:
        run.group.alive.discard(0)
        return Exited(attempt=order.attempt, rank=0, how="killed by SIGKILL", killed=False)

    run = advancing(tmp_path, monkeypatch, killed, is_report=is_report)
    conclusion = run.conclude()
    assert "failure 3 of max_failures=2" in conclusion.reason
    assert run.group.of("launch") == [(0, 0), (1, 2), (2, 3)]


@AT_A_REPORT
@pytest.mark.parametrize("num_to_keep", [None, 1])
def test_an_exception_after_each_state_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_report: bool, num_to_keep: int | None
) -> None:
    """The step that it has spared the rank isn't the rank's own progress."""

    def raises(order: LaunchOrder) -> AgentEvent:
        failure = Failure(
            kind=FailureKind.USER_ERROR,
            rank=0,
            message="OSError: the address is gone",
            step=max(2, order.start.step + 1) - is_report,
        )
        return Failed(attempt=order.attempt, failure=failure)

    run = advancing(tmp_path, monkeypatch, raises, is_report=is_report, num_to_keep=num_to_keep)
    conclusion = run.conclude()
    assert "it would come again" in conclusion.reason
    assert "2 of which a survivor's state had spared it" in conclusion.reason
    assert run.group.of("launch") == [(0, 0), (1, 2), (2, 3)]


@pytest.mark.parametrize("num_to_keep", [None, 1])
def test_a_state_takes_no_place_of_a_reported_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_to_keep: int | None
) -> None:
    """It is kept while it is the newest; the next checkpoint that is reported replaces it."""
    config = CheckpointConfig(num_to_keep=num_to_keep)
    run = rescuing(tmp_path, monkeypatch, max_failures=1, checkpoint_config=config)
    life, kept = run.life, []

    def reports(order: LaunchOrder) -> Sequence[AgentEvent]:
        if order.attempt == 0:
            return life(order)
        kept.append([each.step for each in run.manager.checkpoints])
        kept.append([each.step for each in run.manager.best()])
        assert len(run.manager.reported()) == 1
        newest = run.stored(0, 2, step=4, model="2")
        return [run.reported(0, 4), run.staged(0, 2), newest, *run.all_done()]

    run.life = reports
    assert run.conclude().succeeded
    assert kept == [[1, 3], [1]]
    last = [4] if num_to_keep else [1, 4]
    assert [each.step for each in run.manager.checkpoints] == last
    assert [each.step for each in run.manager.store.find(since_token=0).manifests] == last


def test_a_state_after_the_start_counts_as_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five attempts in a row that end before they train end a run."""
    run = Driver(tmp_path, monkeypatch, lambda order: [], world_size=1, max_failures=-1)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        attempt = order.attempt
        if attempt == 6:
            return run.all_done()
        run.group.alive.discard(0)
        copied = run.stored(0, attempt, step=0, model=str(attempt))
        part = replace(copied, positions={"train": {"start": attempt}})
        return [
            StateWritten(attempt=attempt, rank=0, part=part, is_report=False, is_copy=True),
            Exited(attempt=attempt, rank=0, how="killed by SIGKILL", killed=False),
        ]

    run.life = life
    assert run.conclude().succeeded
    assert len(run.group.of("launch")) == 7


def copying(
    path: Path, monkeypatch: pytest.MonkeyPatch, *last: AgentEvent, **options: Any
) -> Driver:
    """A run with one worker, whose agent stores the copy after step 2 once the process is gone.

    The run has reported steps 1 to 3. Step 1 has a checkpoint.
    """
    config = CheckpointConfig(memory="auto")
    run = Driver(
        path, monkeypatch, lambda order: [], world_size=1, checkpoint_config=config, **options
    )

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        if order.attempt:
            return run.all_done()
        run.group.alive.discard(0)
        return [
            KeepsState(attempt=0, rank=0, size=10),
            run.reported(0, 1),
            run.staged(0, 0),
            run.stored(0, 0, model="1"),
            run.reported(0, 2),
            run.reported(0, 3),
            *last,
            StateWritten(
                attempt=0,
                rank=0,
                part=run.stored(0, 1, step=2, model="2"),
                is_report=False,
                is_copy=True,
            ),
            Exited(attempt=0, rank=0, how="killed by SIGKILL", killed=bool(last)),
        ]

    run.life = life
    return run


def raised(kind: FailureKind) -> Failed:
    return Failed(attempt=0, failure=Failure(kind=kind, rank=0, message="no"))


@pytest.mark.parametrize("last", [(), (raised(FailureKind.HANG),)], ids=["killed", "hangs"])
def test_a_copy_is_committed_also_if_it_is_behind_the_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: tuple[AgentEvent, ...]
) -> None:
    run = copying(tmp_path, monkeypatch, *last, max_failures=1)
    assert run.conclude().succeeded
    assert run.group.of("launch") == [(0, 0), (1, 2)]
    # The only process isn't asked for what its agent has.
    [asked] = lines(tmp_path, "SurvivorsAsked")
    assert (asked["rank"], asked["step"], asked["reason"]) == (0, 2, "")


def test_the_journal_says_why_the_only_copy_could_not_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copying(tmp_path, monkeypatch, max_failures=1)
    life = run.life

    def hangs(order: LaunchOrder) -> Sequence[AgentEvent]:
        late = StateUnwritten(attempt=0, rank=0, reason="/runs hasn't taken it within 20 s")
        return [late if isinstance(each, StateWritten) else each for each in life(order)]

    run.life = hangs
    assert run.conclude().succeeded
    assert run.group.of("launch") == [(0, 0), (1, 1)]
    [asked] = lines(tmp_path, "SurvivorsAsked")
    assert asked["reason"] == "/runs hasn't taken it within 20 s"


def test_a_copy_of_what_has_diverged_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copying(tmp_path, monkeypatch, raised(FailureKind.DIVERGED), max_failures=1)
    run.conclude()
    assert [each["step"] for each in lines(tmp_path, "Committed")] == [1]


def test_a_stop_that_waits_for_no_checkpoint_keeps_the_copy() -> None:
    run = Run()
    run.survivors.launched(0, 1)
    part = PartStored(attempt=0, rank=0, checkpoint=1, step=9, metrics={}, positions={}, files=())
    run.survivors.take(
        StateWritten(attempt=0, rank=0, part=part, is_report=False, is_copy=True),
    )
    assert run.survivors.written(replace(run.state, phase=Ending())) is not None


def test_a_copy_that_is_no_newer_than_the_checkpoint_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copying(tmp_path, monkeypatch, max_failures=1)
    life = run.life

    def saves_again(order: LaunchOrder) -> Sequence[AgentEvent]:
        events = list(life(order))
        if order.attempt == 0:
            stored = run.stored(0, 1, step=3, model="3")
            events[-2:] = [run.staged(0, 1), stored, *events[-2:]]
        return events

    run.life = saves_again
    assert run.conclude().succeeded
    assert run.group.of("launch") == [(0, 0), (1, 3)]
    [asked] = lines(tmp_path, "SurvivorsAsked")
    assert "the checkpoint of step 3 is as new" in str(asked["reason"])


def sharing(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    held: dict[int, tuple[int, ...]],
    *last: AgentEvent,
    step_of_rank_1: int = 2,
    unstored: str = "",
) -> Driver:
    """A run with two workers, of which rank 1 is killed after step 3. Step 1 has a checkpoint.

    Args:
        path: where it lies.
        monkeypatch: the test's.
        held: rank → the copies that its agent has.
        last: what happens before the last process is gone.
        step_of_rank_1: the step of rank 1's copy; that of rank 0 is 2.
        unstored: why rank 1's copy can't be stored; empty if it can.
    """
    config = CheckpointConfig(memory=1, written_by="every_rank")
    kind = CheckpointKind.EVERY_RANK
    run = Driver(
        path,
        monkeypatch,
        lambda order: [],
        checkpoint_config=config,
        kind=kind,
        merges_files=False,
        max_failures=1,
    )

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        if order.attempt:
            return run.all_done()
        run.group.alive.discard(1)
        run.group.store_copies = store
        return [
            *(event for rank in (0, 1) for event in (run.reported(rank, 1), run.staged(rank, 0))),
            *(run.stored(rank, 0, **{f"part-{rank}": "1"}) for rank in (0, 1)),
            run.reported(0, 2),
            run.reported(0, 3),
            *(CopiesHeld(attempt=0, rank=rank, numbers=held[rank]) for rank in held),
            Exited(attempt=0, rank=1, how="killed by SIGKILL", killed=False),
            *last,
        ]

    def store(call: StoreCopy) -> Sequence[AgentEvent]:
        written = []
        for rank, step in ((0, 2), (1, step_of_rank_1)):
            files = {f"part-{rank}": f"copy of {call.number}"}
            part = run.stored(rank, call.checkpoint, step=step, **files)
            written.append(
                StateWritten(attempt=0, rank=rank, part=part, is_report=False, is_copy=True)
            )
        # An answer to what a rank was asked for before it was lost changes nothing.
        late = StateUnwritten(attempt=0, rank=0, reason="its process is gone")
        if unstored:
            refusal = StateUnwritten(attempt=0, rank=1, reason=unstored, is_copy=True)
            return [late, written[0], refusal]
        return [late, *written]

    run.life = life
    return run


def test_the_newest_copy_that_all_ranks_have_is_committed_with_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sharing(tmp_path, monkeypatch, {0: (4, 5), 1: (3, 4)})
    assert run.conclude().succeeded
    assert run.group.of("launch") == [(0, 0), (1, 2)]
    [(number, copy)] = run.group.of("store_copy")
    assert copy == 4
    [asked] = lines(tmp_path, "SurvivorsAsked")
    assert (asked["step"], asked["reason"]) == (2, "")
    [_, committed] = run.manager.checkpoints[:2]
    assert (committed.number, committed.step, committed.is_rescue) == (number, 2, True)
    assert {(file.name, file.rank) for file in committed.files} == {("part-0", 0), ("part-1", 1)}


LOST, ALSO_LOST = (AgentLost(rank=rank, reason="its node is gone") for rank in (1, 0))


@pytest.mark.parametrize(
    ("held", "last", "options", "reason"),
    [
        ({0: (4, 5), 1: (2, 3)}, (), {}, "no step of which every rank has left a copy"),
        ({0: (4, 5)}, (), {}, "no step of which every rank has left a copy"),
        ({0: (4,), 1: (4,)}, (LOST,), {}, "no step of which every rank has left a copy"),
        (
            {},
            (LOST, ALSO_LOST),
            {},
            "rank 0's copies were lost with its agent; rank 1's copies were lost with its agent",
        ),
        ({0: (4,), 1: (4,)}, (), {"step_of_rank_1": 3}, "ranks 0 and 1 made their copies at diff"),
        ({}, (), {}, "this training keeps no state that another rank could hand on"),
        ({0: (4,), 1: (4,)}, (), {"unstored": "the disk is full"}, "rank 1: the disk is full"),
    ],
    ids=[
        *("none in common", "none of a rank", "host lost", "both hosts lost"),
        *("other places", "none", "unstored"),
    ],
)
def test_without_a_copy_of_every_rank_the_run_resumes_from_its_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    held: dict[int, tuple[int, ...]],
    last: tuple[AgentEvent, ...],
    options: dict[str, Any],
    reason: str,
) -> None:
    run = sharing(tmp_path, monkeypatch, held, *last, **options)
    assert run.conclude().succeeded
    assert run.group.of("launch") == [(0, 0), (1, 1)]
    [asked] = lines(tmp_path, "SurvivorsAsked")
    assert reason in str(asked["reason"])


def refused(rank: int, number: int, reason: str, *, is_last: bool = False) -> CopyRefused:
    return CopyRefused(attempt=0, rank=rank, number=number, reason=reason, is_last=is_last)


def test_all_ranks_drop_the_copy_that_one_could_not_make() -> None:
    run = Run()
    run.survivors.take(refused(1, 4, "a weight isn't finite"))
    run.survivors.take(refused(2, 4, "a weight isn't finite"))
    run.survivors.take(refused(0, 5, "the disk is full", is_last=True))
    run.survivors.take(refused(2, 6, "the disk is full", is_last=True))
    told = [(call.number, call.is_last, sorted(ranks or ())) for call, ranks in run.calls]
    # The rank that waits for it is told last.
    assert told == [(4, False, [0, 2]), (4, False, [1]), (5, True, [1, 2]), (5, True, [0])]


def test_the_journal_says_which_rank_could_not_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sharing(tmp_path, monkeypatch, {0: (4, 5)}, refused(1, 4, "the disk is full"))
    assert run.conclude().succeeded
    [asked] = lines(tmp_path, "SurvivorsAsked")
    assert "rank 1 couldn't copy: the disk is full" in str(asked["reason"])


def test_copies_of_what_has_diverged_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sharing(tmp_path, monkeypatch, {0: (4,), 1: (4,)}, raised(FailureKind.DIVERGED))
    run.conclude()
    assert run.group.of("store_copy") == []


def test_if_all_ranks_are_lost_while_some_are_asked_their_copies_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {0: (4,), 1: (4,)}
    also = Exited(attempt=0, rank=0, how="killed by SIGKILL", killed=False)
    run = sharing(tmp_path, monkeypatch, held, also)
    life = run.life

    def keeps(order: LaunchOrder) -> Sequence[AgentEvent]:
        if order.attempt:
            return life(order)
        run.group.alive.clear()
        return [*(KeepsState(attempt=0, rank=rank, size=10) for rank in (0, 1)), *life(order)]

    run.life = keeps
    assert run.conclude().succeeded
    assert run.group.of("launch") == [(0, 0), (1, 2)]
    [asked] = lines(tmp_path, "SurvivorsAsked")
    assert (asked["step"], asked["reason"]) == (2, "")


def test_a_rank_is_killed_at_a_stop_so_that_the_others_can_be_asked() -> None:
    run = Run()
    run.keep()
    stopped = Stopped(by="signal", reason="SIGINT")
    drain = stop_wanted(stopped)
    run.state = replace(run.state, phase=Ending(), drain=drain, saves=False)
    assert run.survivors.ask(run.state, number=4)
    assert run.last() == (Kill(attempt=0), (2,))
    run.survivors.gone(2)
    assert isinstance(run.last()[0], ReadKept)
    # A training that makes checkpoints has stopped after one.
    run.survivors.launched(1, 3)
    run.survivors.take(KeepsState(attempt=1, rank=0, size=10))
    assert not run.survivors.ask(replace(run.state, saves=True), number=5)
    assert run.deadline is None


def sent(rank: int, number: int, *, newest: int = 0, reason: str = "") -> CopySent:
    """Rank 0's copies lie with rank 1, those of rank 1 with rank 2, and those of rank 2 with 0."""
    holder = None if reason else (rank + 1) % 3
    return CopySent(
        attempt=0, rank=rank, number=number, newest=newest, holder=holder, reason=reason
    )


def lending(*lost: int) -> Run:
    """A run whose ranks have sent copies of steps 4 and 6, and which loses hosts."""
    run = Run()
    run.survivors.has_copies = True
    for number in (4, 6):
        for rank in range(3):
            run.survivors.take(sent(rank, number, newest=number + 1))
    for rank in sorted({0, 1, 2}.difference(lost)):
        run.survivors.take(CopiesHeld(attempt=0, rank=rank, numbers=(6, 8, 9)))
    for rank in lost:
        run.survivors.copies_lost(rank)
    ending = Ending().also(Failure(kind=FailureKind.NODE_LOST, rank=1, message="gone"))
    run.state = replace(run.state, phase=ending)
    return run


def test_all_ranks_are_asked_to_send_the_next_copy_once_the_last_has_arrived() -> None:
    run = lending()
    asked = [(call.number, ranks) for call, ranks in run.calls if isinstance(call, SendCopies)]
    assert asked == [(6, None), (8, None)]


def test_after_an_uneven_round_the_last_copy_that_all_have_is_still_there() -> None:
    run = Run()
    run.survivors.has_copies = True
    for numbers in ((4, 4, 4), (6, 7, 6)):
        for rank, number in enumerate(numbers):
            run.survivors.take(sent(rank, number, newest=number))
    asked = [call.common for call, _ in run.calls if isinstance(call, SendCopies)]
    assert asked == [4, 4]
    for rank in (0, 2):
        run.survivors.take(sent(rank, 9, newest=9))
        run.survivors.take(CopiesHeld(attempt=0, rank=rank, numbers=(4, 9)))
    run.survivors.copies_lost(1)
    ending = Ending().also(Failure(kind=FailureKind.NODE_LOST, rank=1, message="gone"))
    assert run.survivors.store_copies(replace(run.state, phase=ending), number=9)
    assert [call.number for call, _ in run.calls if isinstance(call, StoreCopy)] == [4, 4]


def test_the_copy_of_a_lost_host_is_stored_by_its_neighbour() -> None:
    run = lending(1)
    assert run.survivors.store_copies(run.state, number=9)
    (own, ranks), (lent, holder) = run.calls[-2:]
    assert (own.number, own.of_rank, sorted(ranks or ())) == (6, None, [0, 2])
    assert (lent.number, lent.of_rank, holder) == (6, 1, (2,))
    for rank in range(3):
        part = PartStored(
            attempt=0, rank=rank, checkpoint=9, step=6, metrics={}, positions={}, files=()
        )
        run.survivors.take(
            StateWritten(attempt=0, rank=rank, part=part, is_report=False, is_copy=True)
        )
    written = run.survivors.written(run.state)
    assert written is not None
    run.survivors.committed(written)
    [noted] = run.entries
    assert (noted.step, noted.hosts) == (6, ("a", "c"))


def test_a_copy_that_is_lost_with_its_neighbour_is_not_there() -> None:
    run = lending(1, 2)
    assert not run.survivors.store_copies(run.state, number=9)
    [noted] = run.entries
    assert "no step of which every rank has left a copy" in noted.reason


def test_the_run_says_once_that_copies_lie_on_one_host(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    for rank in range(3):
        run.survivors.take(sent(rank, 4, reason="b has room for 1 MB"))
    assert caplog.text.count("b has room for 1 MB") == 1
    assert run.calls == []


def test_a_copy_counts_only_if_every_rank_has_it() -> None:
    assert newest_common({0: (1, 2), 1: (2, 3), 2: (1, 2)}, 3) == 2
    assert newest_common({0: (1, 2), 1: (2, 3)}, 3) is None
    assert newest_common({0: (1,), 1: (2,)}, 2) is None
    assert newest_common({}, 2) is None
