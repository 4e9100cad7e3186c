"""The state machine of a run, scenario by scenario: events in, phases and actions out."""

from __future__ import annotations

import pytest

from polytrain.errors import Failure, FailureKind
from polytrain.policy.failure import FailurePolicy
from polytrain.run.actions import (
    Action,
    AddPart,
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
    AgentsPlaced,
    Done,
    Event,
    Exited,
    Failed,
    Joined,
    Offered,
    PartStored,
    PlacementFailed,
    Reported,
)
from polytrain.run.machine import begin, step
from polytrain.run.states import Concluded, Ending, Gathering, Leaving, Placing, State, Training
from polytrain_plugins import Offer


class Play:
    """A machine that is fed events and remembers what it asked for."""

    def __init__(self, world_size: int, *, max_failures: int = 0) -> None:
        policy = FailurePolicy(max_failures=max_failures)
        first = begin(State(world_size=world_size, policy=policy))
        self.state = first.state
        self.actions: list[Action] = list(first.actions)
        self.latest: tuple[Action, ...] = first.actions
        self.reason = first.reason

    def tell(self, *events: Event) -> Play:
        """Feed the events; `latest` holds the actions that the last of them led to."""
        for event in events:
            transition = step(self.state, event)
            self.state, self.latest = transition.state, transition.actions
            self.reason = transition.reason
            self.actions += transition.actions
        return self

    def launched(self) -> Play:
        """Every agent is there and the trainers have been forked."""
        return self.tell(AgentsPlaced())

    def training(self) -> Play:
        """Every rank of the living generation has offered and joined."""
        ranks = range(self.state.world_size)
        generation = self.state.generation
        self.tell(*(offered(rank, generation) for rank in ranks))
        return self.tell(*(Joined(generation=generation, rank=rank) for rank in ranks))

    def leaving(self) -> Play:
        """Every rank of the living generation is done."""
        generation = self.state.generation
        ranks = range(self.state.world_size)
        return self.tell(*(Done(generation=generation, rank=rank) for rank in ranks))

    def conclusion(self) -> Conclude:
        """How the run ended."""
        [conclude] = [action for action in self.actions if isinstance(action, Conclude)]
        return conclude


def offered(rank: int, generation: int = 0) -> Offered:
    return Offered(generation=generation, rank=rank, offer=Offer(host="host", port=1000 + rank))


def exited(
    rank: int, generation: int = 0, *, killed: bool, how: str = "killed by SIGKILL"
) -> Exited:
    return Exited(generation=generation, rank=rank, how=how, killed=killed)


def raised(rank: int, message: str = "ValueError: no", generation: int = 0) -> Failed:
    failure = Failure(kind=FailureKind.USER_ERROR, rank=rank, message=message)
    return Failed(generation=generation, failure=failure)


def storage_failure(rank: int | None, generation: int = 0) -> Failed:
    failure = Failure(kind=FailureKind.STORAGE, rank=rank, message="OSError: disk full")
    return Failed(generation=generation, failure=failure)


def reported(rank: int, step: int, generation: int = 0) -> Reported:
    return Reported(generation=generation, rank=rank, step=step, metrics={"loss": 1.0})


def part(rank: int, generation: int = 0) -> PartStored:
    return PartStored(
        generation=generation, rank=rank, checkpoint=0, step=1, metrics={}, positions={}, files=()
    )


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_run_without_failures_goes_through_all_phases(world_size: int) -> None:
    play = Play(world_size)
    assert isinstance(play.state.phase, Placing)
    assert play.latest == (Place(),)

    play.tell(AgentsPlaced())
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
    assert "rank 1: killed by SIGKILL" in ended.reason
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
    assert "same exception at step 7" in play.conclusion().reason
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


def test_a_part_of_a_checkpoint_counts_whenever_it_was_stored() -> None:
    play = Play(2, max_failures=1).launched().training()
    assert play.tell(part(0)).latest == (AddPart(part=part(0)),)
    assert play.tell(exited(1, killed=False), part(1)).latest == (AddPart(part=part(1)),)
    play.tell(exited(0, killed=True)).training()
    assert play.state.generation == 1
    assert play.tell(part(0)).latest == (AddPart(part=part(0)),)


def test_a_lost_agent_is_placed_again_before_the_next_launch() -> None:
    play = Play(2, max_failures=1).launched().training()
    play.tell(AgentLost(rank=1, reason="node died"))
    assert play.latest == (Kill(generation=0),)

    play.tell(exited(0, killed=True))
    ended, place = play.latest
    assert isinstance(ended, EndAttempt)
    assert "rank 1: node died" in ended.reason
    assert place == Place()
    assert isinstance(play.state.phase, Placing)

    assert play.tell(AgentsPlaced()).latest == (Launch(generation=1),)


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


@pytest.mark.parametrize("event", [AgentsPlaced(), AgentLost(rank=0, reason="late"), raised(0)])
def test_nothing_happens_after_the_end(event: Event) -> None:
    play = Play(1).launched().training().leaving().tell(exited(0, killed=False))
    before = play.state
    assert play.tell(event).latest == ()
    assert play.state == before
