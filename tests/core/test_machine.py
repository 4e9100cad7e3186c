"""The state machine of a run, scenario by scenario: events in, phases and actions out."""

from __future__ import annotations

import pytest
from tests.core.play import Play, exited, offered, placed, raised, reported, storage_failure

from polytrain.errors import FailureKind
from polytrain.run.actions import (
    Conclude,
    EndAttempt,
    Kill,
    Launch,
    Leave,
    Place,
    Publish,
    SendRoster,
)
from polytrain.run.events import (
    AgentLost,
    Done,
    Event,
    HandedIn,
    Joined,
    PlacementFailed,
)
from polytrain.run.states import Concluded, Ending, Gathering, Leaving, Placing, Training
from polytrain_plugins import Offer


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_run_without_failures_goes_through_all_phases(world_size: int) -> None:
    play = Play(world_size)
    assert isinstance(play.state.phase, Placing)
    assert play.latest == (Place(),)

    play.tell(placed(world_size))
    assert isinstance(play.state.phase, Gathering)
    assert play.latest == (Launch(generation=0),)

    play.tell(*(offered(rank) for rank in reversed(range(world_size))))
    assert isinstance(play.state.phase, Training)
    offers = tuple(Offer(host="host", port=1000 + rank) for rank in range(world_size))
    assert play.latest == (SendRoster(generation=0, offers=offers),)

    play.tell(*(Joined(generation=0, rank=rank) for rank in range(world_size)))
    play.tell(*(Done(generation=0, rank=rank) for rank in range(world_size)))
    assert isinstance(play.state.phase, Leaving)
    assert play.latest == (Leave(generation=0),)

    play.tell(*(exited(rank, killed=False, how="exited") for rank in range(world_size)))
    assert play.state.phase == Concluded(succeeded=True)
    assert play.conclusion().succeeded
    assert play.conclusion().failures == ()
    kinds = [type(action) for action in play.actions]
    assert kinds == [Place, Launch, SendRoster, Leave, Conclude]


def test_nobody_leaves_before_the_last_rank_is_done() -> None:
    play = Play(3).launched().training()
    play.tell(Done(generation=0, rank=2), Done(generation=0, rank=0), Done(generation=0, rank=2))
    assert isinstance(play.state.phase, Training)
    assert Leave(generation=0) not in play.actions


def test_a_report_is_published_as_it_is() -> None:
    play = Play(2).launched().training().tell(reported(1, 4))
    assert play.latest == (Publish(report=reported(1, 4)),)


def test_a_lost_rank_is_replaced_with_all_others() -> None:
    play = Play(3, max_failures=1).launched().training()

    play.tell(exited(1, killed=False))
    assert isinstance(play.state.phase, Ending)
    assert play.latest == (Kill(generation=0),)

    play.tell(exited(0, killed=True))
    assert play.latest == ()

    play.tell(exited(2, killed=True))
    ended, launch = play.latest
    assert isinstance(ended, EndAttempt)
    assert str(ended.root).startswith("rank 1: killed by SIGKILL")
    assert launch == Launch(generation=1)
    assert isinstance(play.state.phase, Gathering)
    assert play.state.restarts == 1


@pytest.mark.parametrize("when", ["gathering", "training"])
def test_a_lost_rank_ends_a_run_that_has_no_failures_left(when: str) -> None:
    play = Play(2).launched()
    if when == "training":
        play.training()
    play.tell(exited(0, killed=False), exited(1, killed=True))
    ended, concluded = play.latest
    assert isinstance(ended, EndAttempt)
    assert isinstance(concluded, Conclude)
    assert not concluded.succeeded
    assert "max_failures=0" in concluded.reason
    [root] = concluded.failures
    assert (root.kind, root.rank) == (FailureKind.WORKER_LOST, 0)


def test_the_budget_counts_every_failed_attempt() -> None:
    play = Play(1, max_failures=2).launched()
    for generation in range(3):
        play.training().tell(exited(0, generation, killed=False))
    launches = [action for action in play.actions if isinstance(action, Launch)]
    assert [launch.generation for launch in launches] == [0, 1, 2]
    assert "failure 3 of max_failures=2" in play.conclusion().reason


def test_the_lost_worker_is_the_cause_though_its_peers_raised_first() -> None:
    play = Play(3).launched().training()
    play.tell(raised(0, "RuntimeError: peer closed"), raised(2, "RuntimeError: peer closed"))
    play.tell(exited(0, killed=True), exited(2, killed=True), exited(1, killed=False))
    assert play.conclusion().failures[0].rank == 1
    # What the peers raised says nothing about the cause.
    assert [failure.kind for failure in play.conclusion().failures] == [FailureKind.WORKER_LOST]


def test_of_two_exceptions_the_first_is_the_cause_and_both_are_told() -> None:
    play = Play(2).launched().training()
    play.tell(raised(1, "KeyError: 'a'"), raised(0, "RuntimeError: peer closed"))
    play.tell(exited(0, killed=True), exited(1, killed=True))
    assert [failure.rank for failure in play.conclusion().failures] == [1, 0]


def test_a_trainer_that_raised_and_then_exits_is_one_failure() -> None:
    play = Play(2).launched().training()
    play.tell(raised(1), exited(1, killed=False, how="exited with code 0"), exited(0, killed=True))
    assert [failure.kind for failure in play.conclusion().failures] == [FailureKind.USER_ERROR]


def test_the_same_exception_at_the_same_step_is_not_met_a_third_time() -> None:
    play = Play(2, max_failures=-1).launched()
    for generation in (0, 1):
        play.training()
        play.tell(reported(1, 7, generation), raised(1, generation=generation))
        play.tell(exited(0, generation, killed=True), exited(1, generation, killed=True))
    assert "same error at step 7" in play.conclusion().reason
    assert Launch(generation=2) not in play.actions


@pytest.mark.parametrize("second", [(8, "ValueError: no"), (7, "ValueError: another")])
def test_another_exception_or_another_step_is_retried(second: tuple[int, str]) -> None:
    at_step, message = second
    play = Play(1, max_failures=-1).launched()
    play.training().tell(reported(0, 7), raised(0), exited(0, killed=True))
    play.training().tell(reported(0, at_step, 1), raised(0, message, 1), exited(0, 1, killed=True))
    assert Launch(generation=2) in play.actions


def test_steps_are_counted_anew_in_every_generation() -> None:
    """The second time it fails before its first report: that is another failure."""
    play = Play(1, max_failures=-1).launched()
    play.training().tell(reported(0, 7), raised(0), exited(0, killed=True))
    play.training().tell(raised(0, generation=1), exited(0, 1, killed=True))
    assert Launch(generation=2) in play.actions


@pytest.mark.parametrize(
    "stale",
    [
        offered(0),
        Joined(generation=0, rank=0),
        reported(0, 3),
        HandedIn(generation=0, rank=0, checkpoint=4, waits=False),
        Done(generation=0, rank=0),
        raised(0),
        storage_failure(0),
        exited(0, killed=False),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_of_a_dead_generation_are_ignored(stale: Event) -> None:
    play = Play(2, max_failures=1).launched().training()
    play.tell(exited(0, killed=False), exited(1, killed=True)).training()
    before = play.state
    play.tell(stale)
    assert play.state == before
    assert play.latest == ()


def test_a_lost_agent_is_placed_again_before_the_next_launch() -> None:
    play = Play(2, max_failures=1).launched().training()
    play.tell(AgentLost(rank=1, reason="node died"))
    assert play.latest == (Kill(generation=0),)

    play.tell(exited(0, killed=True))
    ended, place = play.latest
    assert isinstance(ended, EndAttempt)
    assert str(ended.root) == "rank 1: node died"
    assert place == Place()
    assert isinstance(play.state.phase, Placing)

    assert play.tell(placed(2)).latest == (Launch(generation=1),)


def test_an_agent_that_is_lost_after_its_trainer_is_placed_again_too() -> None:
    play = Play(2, max_failures=1).launched().training()
    play.tell(exited(0, killed=False), AgentLost(rank=0, reason="node died"))
    play.tell(exited(1, killed=True))
    assert play.latest[-1] == Place()


def test_workers_that_cannot_be_placed_end_the_run() -> None:
    play = Play(2).tell(PlacementFailed(reason="no room for 2 workers"))
    [failure] = play.conclusion().failures
    assert failure.kind is FailureKind.STARTUP
    assert str(failure) == "no room for 2 workers"
    assert play.state.restarts == 0


def test_a_restart_that_could_not_be_placed_is_no_restart() -> None:
    play = Play(1, max_failures=1).launched().training()
    play.tell(AgentLost(rank=0, reason="node died"), PlacementFailed(reason="no node is left"))
    assert not play.conclusion().succeeded
    assert [action for action in play.actions if isinstance(action, Launch)] == [
        Launch(generation=0)
    ]
    assert play.state.restarts == 0


@pytest.mark.parametrize("killed", [False, True])
def test_however_a_rank_exits_after_all_are_done_is_success(killed: bool) -> None:
    play = Play(2).launched().training().leaving()
    play.tell(exited(1, killed=killed, how="killed by SIGSEGV"), exited(0, killed=False))
    assert play.conclusion().succeeded


def test_an_exception_while_leaving_is_too_late_to_matter() -> None:
    play = Play(2).launched().training().leaving().tell(raised(0))
    assert play.latest == ()
    assert "ignored" in play.reason
    play.tell(exited(0, killed=False), exited(1, killed=False))
    assert play.conclusion().succeeded


def test_a_checkpoint_that_is_lost_while_leaving_fails_the_attempt() -> None:
    play = Play(2).launched().training().leaving().tell(storage_failure(0))
    assert play.latest == (Kill(generation=0),)
    play.tell(exited(0, killed=True), exited(1, killed=True))
    assert [failure.kind for failure in play.conclusion().failures] == [FailureKind.STORAGE]


def test_a_peer_that_leaves_in_time_does_not_hide_the_lost_checkpoint() -> None:
    """Rank 1 was told to leave, and does so before the kill reaches it."""
    play = Play(2).launched().training().leaving().tell(storage_failure(0))
    play.tell(exited(1, killed=False, how="exited with code 0"), exited(0, killed=True))
    assert play.conclusion().failures[0].kind is FailureKind.STORAGE


def test_an_agent_that_is_lost_after_its_trainer_left_changes_nothing() -> None:
    play = Play(2).launched().training().leaving()
    play.tell(exited(0, killed=False), AgentLost(rank=0, reason="node died"))
    assert isinstance(play.state.phase, Leaving)
    assert play.tell(exited(1, killed=False)).conclusion().succeeded


def test_an_agent_that_is_lost_before_its_trainer_left_fails_the_attempt() -> None:
    play = Play(2).launched().training().leaving().tell(AgentLost(rank=0, reason="node died"))
    assert play.latest == (Kill(generation=0),)
    play.tell(exited(1, killed=True))
    assert play.conclusion().failures[0].kind is FailureKind.AGENT_LOST


@pytest.mark.parametrize("event", [placed(1), AgentLost(rank=0, reason="late"), raised(0)])
def test_nothing_happens_after_the_end(event: Event) -> None:
    play = Play(1).launched().training().leaving().tell(exited(0, killed=False))
    before = play.state
    assert play.tell(event).latest == ()
    assert play.state == before
