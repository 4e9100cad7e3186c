"""One attempt watched over: stacks are asked for before anything is said to be wrong."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.run.play import Play, exited, offered, reported

from polytrain.config.configs import FailureConfig
from polytrain.errors import FailureKind
from polytrain.events.attempt import Done, Joined, Stacks, Started, WorkerStatus
from polytrain.linux.progress_page import WorkerStage
from polytrain.policy.hang_detector import (
    AttemptStatus,
    DumpStacks,
    FailAttempt,
    HangDetector,
    WarnUser,
)
from polytrain.policy.hangs import RankStatuses

LIMIT = 300.0


class Watched:
    """A world of two in a test's hands, with a clock."""

    def __init__(self, *hosts: str, **config: float | str | None) -> None:
        self.play = Play(2, max_failures=1).launched()
        self.hang_detector = HangDetector(
            config=FailureConfig(**config),  # type: ignore[arg-type]
            attempt=0,
            world_size=2,
            hosts=hosts,
        )
        self.now = 1000.0

    def started(self, *ranks: int) -> Watched:
        for rank in ranks:
            self.hang_detector.take(Started(attempt=0, rank=rank), now=self.now)
        return self

    def join(self, *ranks: int) -> Watched:
        for rank in ranks:
            self.hang_detector.take(Joined(attempt=0, rank=rank), now=self.now)
        return self

    def training(self) -> Watched:
        self.started(0, 1)
        self.play.tell(offered(0), offered(1))
        return self.join(0, 1)

    def quiet(
        self, rank: int, seconds: float = LIMIT, *, idle: bool = True, stopped: float = 0.0
    ) -> Watched:
        status = WorkerStatus(
            attempt=0,
            rank=rank,
            stage=WorkerStage.TRAINING,
            quiet_s=seconds,
            idle_s=seconds if idle else 0.0,
            stopped_s=stopped,
            cpu_s=0.0,
        )
        self.hang_detector.take(status, now=self.now)
        return self

    def stacks(self, *ranks: int, attempt: int = 0) -> Watched:
        for rank in ranks:
            text = f"stack of {rank}"
            sign = Stacks(attempt=attempt, rank=rank, text=text)
            self.hang_detector.take(sign, now=self.now)
        return self

    def look(self, after: float = 0.0) -> DumpStacks | WarnUser | FailAttempt | None:
        self.now += after
        return self.hang_detector.look(self.play.state.status, now=self.now)


def test_a_hang_is_reported_with_every_ranks_stack() -> None:
    watched = Watched().training().quiet(0).quiet(1)
    assert watched.look() == DumpStacks(pausing=True)
    assert watched.look() is None
    assert watched.stacks(0).look() is None
    found = watched.stacks(1).look()
    assert isinstance(found, FailAttempt)
    assert (found.failure.kind, found.failure.rank) == (FailureKind.HANG, None)
    assert found.failure.stacks == {0: "stack of 0", 1: "stack of 1"}
    assert watched.hang_detector.deadline is None


def test_agents_that_dont_answer_are_waited_for_until_a_deadline() -> None:
    watched = Watched().training().quiet(0).quiet(1)
    watched.look()
    assert watched.hang_detector.deadline is not None
    watched.stacks(1)
    assert watched.look(watched.hang_detector.deadline - watched.now - 0.1) is None
    found = watched.look(0.2)
    assert isinstance(found, FailAttempt)
    assert found.failure.stacks == {1: "stack of 1"}


def test_an_attempt_that_goes_on_meanwhile_is_not_ended() -> None:
    watched = Watched().training().quiet(0).quiet(1)
    watched.look()
    found = watched.quiet(1, 0.0).stacks(0, 1).look()
    assert isinstance(found, WarnUser)


def test_a_hang_is_reported_with_how_long_nobody_has_gone_on() -> None:
    watched = Watched().training().quiet(0, LIMIT + 2)
    watched.now += 1
    watched.quiet(1, LIMIT).look(after=2)
    found = watched.stacks(0, 1).look(after=0.5)
    assert isinstance(found, FailAttempt)
    assert found.failure.since_s == LIMIT + 2.5


def test_a_stopped_rank_is_ended_even_if_the_look_has_woken_it() -> None:
    watched = Watched().training().quiet(1, 12.0, stopped=10.0)
    assert watched.look() == DumpStacks(pausing=True)
    found = watched.quiet(1, 0.0).stacks(0, 1).look()
    assert isinstance(found, FailAttempt)
    assert str(found.failure) == "rank 1: has been stopped by a signal for 10 s"


def test_a_warning_is_given_once_for_each_quiet_time() -> None:
    watched = Watched().training()
    for _ in range(2):
        watched.quiet(1, idle=False)
        assert watched.look() == DumpStacks(pausing=False)
        found = watched.stacks(0, 1).look()
        assert isinstance(found, WarnUser)
        assert found.stacks == {0: "stack of 0", 1: "stack of 1"}
        assert watched.quiet(1, LIMIT + 1, idle=False).look(10.0) is None
        assert watched.quiet(1, 0.0).look() is None


def test_a_stopped_rank_is_warned_of_once_however_long_it_is_stopped() -> None:
    watched = Watched(hang_action="warn").training()
    watched.quiet(1, 12.0, stopped=10.0).look()
    assert isinstance(watched.stacks(0, 1).look(), WarnUser)
    assert watched.quiet(1, LIMIT / 2, stopped=LIMIT / 2 - 2).look() is None
    assert watched.quiet(1, LIMIT, stopped=LIMIT - 2).look() is None


def test_a_warning_about_one_rank_doesnt_hide_another() -> None:
    watched = Watched().training().quiet(1, idle=False)
    watched.look()
    watched.stacks(0, 1).look()
    assert watched.quiet(0).look() == DumpStacks(pausing=False)


def test_what_ends_otherwise_meanwhile_needs_no_verdict() -> None:
    watched = Watched().training().quiet(0).quiet(1)
    watched.look()
    watched.play.tell(exited(1, killed=False))
    assert watched.stacks(0, 1).look(60.0) is None
    assert watched.hang_detector.deadline is None


def test_another_generations_trainers_are_another_matter() -> None:
    watched = Watched().training().quiet(0)
    other = WorkerStatus(
        attempt=1, rank=1, stage=WorkerStage.TRAINING, quiet_s=999, idle_s=999, stopped_s=0, cpu_s=0
    )
    watched.hang_detector.take(other, now=watched.now)
    found = watched.look()
    assert found == DumpStacks(pausing=False)
    assert isinstance(watched.stacks(0, 1).look(), WarnUser)


def test_a_rank_that_left_is_the_cause() -> None:
    watched = Watched().training()
    done = Done(attempt=0, rank=1)
    watched.play.tell(reported(1, 5), done)
    watched.hang_detector.take(done, now=watched.now)
    watched.quiet(0).look()
    found = watched.stacks(0, 1).look()
    assert isinstance(found, FailAttempt)
    assert found.failure.rank == 1
    assert str(found.failure).startswith("rank 1: left the training function at step 5")


def test_ranks_have_their_time_to_meet_from_when_all_are_started() -> None:
    watched = Watched(rendezvous_timeout_s=20.0).started(0)
    assert watched.hang_detector.deadline is None
    watched.now += 100
    watched.started(1)
    assert watched.look(19.9) is None
    assert watched.look(0.2) == DumpStacks(pausing=True)


@pytest.mark.parametrize("timeout_s", [LIMIT, None])
def test_a_rank_that_makes_no_offer_is_named(timeout_s: float | None) -> None:
    watched = Watched(rendezvous_timeout_s=20.0, hang_timeout_s=timeout_s).started(0, 1)
    watched.play.tell(offered(0))
    assert watched.look(20.0) == DumpStacks(pausing=True)
    found = watched.stacks(0, 1).look()
    assert isinstance(found, FailAttempt)
    assert (found.failure.kind, found.failure.rank) == (FailureKind.STARTUP, 1)
    assert "has not made an offer" in found.failure.message
    assert found.failure.late == {1}
    assert found.failure.stacks[1] == "stack of 1"


def test_ranks_that_dont_join_are_named() -> None:
    watched = Watched(rendezvous_timeout_s=20.0).started(0, 1)
    watched.play.tell(offered(0), offered(1))
    watched.look(20.0)
    found = watched.stacks(0, 1).look()
    assert isinstance(found, FailAttempt)
    assert found.failure.rank is None
    assert str(found.failure).startswith("ranks 0 and 1 have not joined the others in time")
    # They wait for each other.
    assert not found.failure.late
    assert found.failure.stacks == {0: "stack of 0", 1: "stack of 1"}
    assert "doctor" not in str(found.failure)


def test_ranks_that_dont_join_over_the_network_are_named_with_their_hosts() -> None:
    watched = Watched("10.0.0.1", "10.0.0.2", rendezvous_timeout_s=20.0).started(0, 1)
    watched.play.tell(offered(0), offered(1))
    watched.look(20.0)
    found = watched.stacks(0, 1).look()
    assert isinstance(found, FailAttempt)
    assert ": rank 0 on 10.0.0.1, rank 1 on 10.0.0.2. " in str(found.failure)
    assert "`polytrain doctor --nodes all`" in str(found.failure)
    # They show how the framework waits; the journal has them.
    assert found.failure.stacks == {}
    assert found.stacks == {0: "stack of 0", 1: "stack of 1"}


def test_a_rank_elsewhere_that_makes_no_offer_does_not_wait_for_the_network() -> None:
    watched = Watched("10.0.0.1", "10.0.0.2", rendezvous_timeout_s=20.0).started(0, 1)
    watched.play.tell(offered(0))
    watched.look(20.0)
    found = watched.stacks(0, 1).look()
    assert isinstance(found, FailAttempt)
    assert "doctor" not in str(found.failure)
    assert found.failure.stacks[1] == "stack of 1"


def test_ranks_that_have_met_have_no_deadline() -> None:
    watched = Watched(rendezvous_timeout_s=20.0).training()
    assert watched.hang_detector.deadline is None
    assert watched.look(1000.0) is None


def test_a_rank_that_joins_while_stacks_are_gathered_was_late_all_the_same() -> None:
    watched = Watched(rendezvous_timeout_s=20.0).started(0, 1)
    watched.play.tell(offered(0), offered(1))
    watched.join(0).look(20.0)
    found = watched.join(1).stacks(0, 1).look()
    assert isinstance(found, FailAttempt)
    assert found.failure.rank == 1


def _sorted_anew(ranks: RankStatuses) -> RankStatuses:
    """The same ranks, of which nothing is known but their latest statuses and warnings."""
    anew = RankStatuses(config=ranks.config, world_size=ranks.world_size, warned=set(ranks.warned))
    for its in ranks.inside.values():
        anew.take(its)
    for rank in ranks.done:
        anew.left(rank)
    return anew


_SECONDS = st.sampled_from([0.0, 4.0, LIMIT / 2, LIMIT - 1, LIMIT])
_HAPPENINGS = st.one_of(
    st.builds(Done, attempt=st.just(0), rank=st.integers(0, 2)),
    st.builds(
        WorkerStatus,
        attempt=st.just(0),
        rank=st.integers(0, 2),
        stage=st.sampled_from([WorkerStage.TRAINING, WorkerStage.WAITING_FOR_DATA]),
        quiet_s=_SECONDS,
        idle_s=_SECONDS,
        stopped_s=st.sampled_from([0.0, 20.0]),
        cpu_s=st.just(0.0),
    ),
)


@given(st.lists(_HAPPENINGS, max_size=12), st.sampled_from(["kill_if_idle", "kill", "warn"]))
def test_a_look_at_every_rank_after_every_event_finds_no_more(
    happenings: list[Done | WorkerStatus], action: Literal["kill_if_idle", "kill", "warn"]
) -> None:
    """It would cost the driver of thousands of ranks the square of their number."""
    config = FailureConfig(hang_timeout_s=LIMIT, hang_action=action)
    quick, thorough = (HangDetector(config=config, attempt=0, world_size=3) for _ in range(2))
    status = AttemptStatus(attempt=0, offered=None, steps={})

    def look() -> DumpStacks | WarnUser | FailAttempt | None:
        thorough._ranks = _sorted_anew(thorough._ranks)
        found, expected = (each.look(status, now=0.0) for each in (quick, thorough))
        assert found == expected
        return found

    for happening in happenings:
        for detector in (quick, thorough):
            detector.take(happening, now=0.0)
        # A hang that is only warned of is looked at again and again.
        for _ in range(4):
            if not isinstance(look(), DumpStacks):
                break
            for rank in range(3):
                for detector in (quick, thorough):
                    detector.take(Stacks(attempt=0, rank=rank, text="at rest"), now=0.0)
            look()
