"""Attempts that the run itself ends: to grow, to move away, to stop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.unit.checkpoint.checkpoints import manifest
from tests.unit.run.play import Play, exited, offered, placed, raised, reported, storage_failure

from polytrain.checkpoint.parts import Committed, PartStaged
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import (
    AgentLost,
    AgentsPlaced,
    ConditionMet,
    Done,
    Drained,
    DrainWanted,
    Event,
    Failed,
    Joined,
    PlacementFailed,
    Purpose,
    SavesOnRequest,
    move_wanted,
    stop_wanted,
)
from polytrain.events.notices import LeavingNode, PreemptionInfo
from polytrain.record.entries import DrainRequested, Transitioned
from polytrain.run.machine import step
from polytrain.run.states import (
    AcquireWorkers,
    Conclude,
    Concluded,
    EndAttempt,
    Ending,
    Gathering,
    Launch,
    Leaving,
    Placing,
    Training,
    entries_of,
)
from polytrain.workers.agents.calls import DrainAttempt, Kill
from polytrain_plugins import Stopped


def wanted(purpose: Purpose, *nodes: str, ranks: frozenset[int] = frozenset()) -> DrainWanted:
    return DrainWanted(
        purpose=purpose, reason=f"because of {purpose}", nodes=frozenset(nodes), ranks=ranks
    )


RESIZE = wanted(Purpose.RESIZE)
STOP = stop_wanted(Stopped(by="observer", reason="enough"))
SIGNAL = stop_wanted(Stopped(by="signal", reason="SIGINT"))

MOVE = wanted(Purpose.MOVE, "node-1")
ALL = pytest.mark.parametrize("drain", [RESIZE, MOVE, STOP], ids=lambda d: d.purpose.name)


def drained(rank: int = 0, attempt: int = 0) -> Drained:
    return Drained(attempt=attempt, rank=rank)


def killed(ranks: int, attempt: int = 0) -> list[Event]:
    return [exited(rank, attempt, killed=True) for rank in range(ranks)]


@ALL
def test_trainers_are_told_once_and_killed_after_the_first_has_stopped(drain: DrainWanted) -> None:
    play = Play(4).launched().training().tell(drain)
    [told] = play.latest
    assert isinstance(told, DrainAttempt)
    assert play.tell(drain).latest == ()
    assert play.tell(drained()).latest == (Kill(attempt=0),)
    assert play.tell(drained(1)).latest == ()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_resize_goes_on_with_as_many_as_are_placed_and_charges_nothing(size: int) -> None:
    play = Play(2).launched().training().tell(RESIZE, drained(), *killed(2))
    ended, place = play.latest
    assert ended == EndAttempt(attempt=0, reason=RESIZE.reason, root=None)
    assert place == AcquireWorkers()
    assert play.tell(placed(size)).latest == (Launch(attempt=1),)
    assert play.state.world_size == size
    play.training()
    # The new attempt isn't told to stop for the old one's reason.
    assert [action for action in play.actions if isinstance(action, DrainAttempt)] == [
        DrainAttempt(attempt=0)
    ]
    play.leaving().tell(*(exited(rank, 1, killed=False) for rank in range(size)))
    assert play.conclusion().succeeded
    assert play.state.attempts == ()


def test_a_move_avoids_the_nodes_that_go_from_then_on() -> None:
    play = Play(4, max_failures=1).launched().training().tell(MOVE, drained(), *killed(4))
    assert play.latest[-1] == AcquireWorkers(avoid={"node-1": math.inf})
    play.tell(AgentsPlaced(nodes=("node-0",) * 4)).training()
    play.tell(AgentLost(rank=2, reason="gone"), *killed(2, 1), exited(3, 1, killed=True))
    assert play.latest[-1] == AcquireWorkers(avoid={"node-1": math.inf})


@pytest.mark.parametrize("phase", ["gathering", "training"])
def test_nodes_without_a_worker_of_the_run_may_go(phase: str) -> None:
    play = Play(4).launched()
    if phase == "training":
        play.training()
    before = play.state.phase
    play.tell(wanted(Purpose.MOVE, "node-7", "node-8"))
    assert play.latest == ()
    assert play.state.phase == before
    if phase == "gathering":
        play.tell(*(offered(rank) for rank in range(4)))
    assert not any(isinstance(action, DrainAttempt) for action in play.actions)
    # They get no worker later either.
    play.tell(RESIZE, drained(), *killed(4))
    assert play.latest[-1] == AcquireWorkers(avoid={"node-7": math.inf, "node-8": math.inf})


def test_a_move_that_is_wanted_while_workers_are_placed_there_follows_at_once() -> None:
    play = Play(4).tell(MOVE)
    assert play.latest == ()
    play.launched().training()
    assert told_of({"node-1": [2, 3]}, deadline_ms=None) in play.actions
    play.tell(drained(), *killed(4))
    assert play.latest[-1] == AcquireWorkers(avoid={"node-1": math.inf})


def test_workers_that_must_stay_on_nodes_that_go_are_not_moved_again_and_again() -> None:
    play = Play(4).launched().training().tell(MOVE, drained(), *killed(4))
    play.launched().training()
    assert [action for action in play.actions if isinstance(action, DrainAttempt)] == [
        told_of({"node-1": [2, 3]}, deadline_ms=None)
    ]


@pytest.mark.parametrize("drain", [RESIZE, STOP], ids=lambda d: d.purpose.name)
def test_a_drain_while_ranks_gather(drain: DrainWanted) -> None:
    """To grow they go on until they have met; to stop there is nothing to wait for."""
    play = Play(2).launched().tell(offered(0), drain)
    if drain is RESIZE:
        assert isinstance(play.state.phase, Gathering)
        assert play.tell(offered(1)).latest[-1] == DrainAttempt(attempt=0)
    else:
        assert play.latest == (Kill(attempt=0),)
        play.tell(*killed(2))
        assert play.conclusion().stopped
        assert play.conclusion().failures == ()


def test_stopping_while_workers_are_placed_is_at_once() -> None:
    play = Play(2).tell(STOP)
    assert play.latest == (Conclude(succeeded=False, stopped=STOP.stopped, reason=STOP.reason),)


@ALL
def test_after_the_last_rank_is_done_nothing_is_drained(drain: DrainWanted) -> None:
    play = Play(4).launched().training().leaving().tell(drain)
    assert play.latest == ()
    assert isinstance(play.state.phase, Leaving)
    play.tell(*(exited(rank, killed=False) for rank in range(4)))
    assert play.conclusion().succeeded


@ALL
def test_all_ranks_may_be_done_before_the_drain_reaches_them(drain: DrainWanted) -> None:
    play = Play(4).launched().training().tell(drain)
    play.tell(*(Done(attempt=0, rank=rank) for rank in range(4)), drained())
    assert isinstance(play.state.phase, Leaving)
    play.tell(*(exited(rank, killed=False) for rank in range(4)))
    assert play.conclusion().succeeded
    assert not play.conclusion().stopped


@pytest.mark.parametrize("first", [RESIZE, MOVE], ids=lambda d: d.purpose.name)
def test_who_is_to_stop_does_not_go_on_first(first: DrainWanted) -> None:
    play = Play(4).launched().training().tell(first, STOP, drained(), *killed(4))
    assert play.conclusion().stopped
    assert play.conclusion().reason == STOP.reason


@pytest.mark.parametrize("later", [RESIZE, MOVE], ids=lambda d: d.purpose.name)
def test_nothing_makes_a_run_forget_that_it_is_to_stop(later: DrainWanted) -> None:
    play = Play(4).launched().training().tell(STOP, later, drained(), *killed(4))
    assert play.conclusion().stopped
    assert play.conclusion().reason == STOP.reason


def test_of_two_requests_to_stop_the_first_is_named() -> None:
    play = Play(4).launched().training().tell(STOP, SIGNAL, drained(), *killed(4))
    assert play.conclusion().stopped == STOP.stopped
    assert [each for each in play.actions if isinstance(each, DrainAttempt)] == [
        DrainAttempt(attempt=0)
    ]


@pytest.mark.parametrize(
    "before",
    [(), (RESIZE,), (MOVE,), (RESIZE, MOVE)],
    ids=["nothing", "a resize", "a move", "both"],
)
def test_only_a_signal_hurries_ranks_whatever_they_were_told_before(
    before: tuple[DrainWanted, ...],
) -> None:
    """Who plans a stop wants the last checkpoint, also if it takes long."""
    hurried = Play(4).launched().training().tell(*before, SIGNAL)
    assert hurried.latest == (DrainAttempt(attempt=0, ends_run=True),)
    assert hurried.tell(SIGNAL, MOVE).latest == ()
    planned = Play(4).launched().training().tell(*before, STOP)
    assert planned.latest == (() if before else (DrainAttempt(attempt=0),))


def test_a_resize_that_becomes_a_move_is_both() -> None:
    replaced = wanted(Purpose.MOVE, "node-0", ranks=frozenset({3}))
    play = Play(4).launched().training().tell(RESIZE, MOVE, replaced, RESIZE, drained())
    ended, place = play.tell(*killed(4)).latest
    assert place == AcquireWorkers(
        avoid={"node-0": math.inf, "node-1": math.inf}, without=frozenset({3})
    )
    # Where the workers leave nodes, these are named.
    assert ended == EndAttempt(attempt=0, reason=MOVE.reason, root=None)


@ALL
def test_a_failure_before_the_last_checkpoint_is_a_failure(drain: DrainWanted) -> None:
    play = Play(4, max_failures=1).launched().training().tell(drain, raised(1))
    assert play.latest == (Kill(attempt=0),)
    play.tell(drained(), *killed(4))
    [ended] = [action for action in play.actions if isinstance(action, EndAttempt)]
    assert ended.root is not None
    assert ended.root.rank == 1
    if drain is STOP:
        assert play.conclusion().stopped
    else:
        # What was wanted is done all the same.
        assert play.latest[-1] == AcquireWorkers(avoid=dict.fromkeys(drain.nodes, math.inf))


def test_a_failure_that_is_one_too_many_while_the_run_is_to_stop_leaves_it_stopped() -> None:
    play = Play(2, max_failures=0).launched().training().tell(STOP, raised(0), *killed(2))
    assert play.conclusion().stopped
    assert not play.conclusion().succeeded
    assert play.conclusion().failures == ()


def test_a_stop_while_a_failed_generation_ends_leaves_it_stopped() -> None:
    play = Play(2, max_failures=0).launched().training()
    play.tell(raised(0), exited(0, killed=True), STOP)
    assert isinstance(play.state.phase, Ending)
    play.tell(exited(1, killed=True))
    assert play.conclusion().stopped


@pytest.mark.parametrize(
    "event",
    [raised(1), exited(1, killed=False), AgentLost(rank=1, reason="its agent has died")],
    ids=lambda event: type(event).__name__,
)
def test_what_fails_after_the_last_checkpoint_is_not_charged(event: Event) -> None:
    play = Play(2).launched().training().tell(RESIZE, drained(), event, *killed(2))
    assert play.actions[-1] == AcquireWorkers()
    assert play.state.attempts == ()
    assert isinstance(play.state.phase, Placing)


def test_a_drained_generation_whose_checkpoint_is_lost_has_failed() -> None:
    play = Play(2).launched().training().tell(RESIZE, drained(), storage_failure(0), *killed(2))
    assert play.conclusion().failures[0].kind is FailureKind.STORAGE


def test_workers_that_can_not_be_had_after_a_resize_end_the_run() -> None:
    play = Play(2).launched().training().tell(RESIZE, drained(), *killed(2))
    play.tell(PlacementFailed(reason="no room"))
    assert play.conclusion().failures[0].kind is FailureKind.STARTUP


def test_a_rank_that_was_not_asked_to_stop_stops_nothing() -> None:
    play = Play(2).launched().training()
    before = play.state
    assert play.tell(drained()).latest == ()
    assert play.state == before


def test_an_agent_that_is_lost_with_a_node_that_was_to_go_is_free() -> None:
    play = Play(4, max_failures=0).launched().training().tell(reported(0, 1), MOVE)
    play.tell(AgentLost(rank=2, reason="node died", kind=FailureKind.NODE_LOST))
    play.tell(*(exited(rank, killed=True) for rank in (0, 1, 3)))
    ended, place = play.latest
    assert isinstance(ended, EndAttempt)
    assert ended.root is not None
    assert ended.root.kind is FailureKind.PREEMPTED
    assert place == AcquireWorkers(avoid={"node-1": math.inf})


@pytest.mark.parametrize(
    ("rank", "how", "kind"),
    [
        (2, "killed by SIGTERM", FailureKind.PREEMPTED),
        (2, "its zygote died", FailureKind.PREEMPTED),
        # It has handled SIGTERM.
        (2, "exited with code 143", FailureKind.PREEMPTED),
        (2, "exited with code 1", FailureKind.WORKER_LOST),
        (2, "killed by SIGSEGV", FailureKind.WORKER_LOST),
        (0, "killed by SIGTERM", FailureKind.WORKER_LOST),
    ],
)
def test_a_process_that_ends_before_the_agent_of_a_node_that_goes_is_free(
    rank: int, how: str, kind: FailureKind
) -> None:
    """A host that shuts down sends SIGTERM to all its processes, and some end first."""
    play = Play(4, max_failures=0).launched().training().tell(reported(0, 1), MOVE)
    play.tell(exited(rank, killed=False, how=how))
    play.tell(*(exited(other, killed=True) for other in range(4) if other != rank))
    ended = play.latest[0]
    assert isinstance(ended, EndAttempt)
    assert ended.root is not None
    assert ended.root.kind is kind
    assert isinstance(play.state.phase, Concluded) == (kind is FailureKind.WORKER_LOST)


def test_a_node_that_was_to_go_and_stays_restarts_a_run_twice_at_most() -> None:
    """No other node holds its workers; a limit of memory ends them, or somebody does."""
    play = Play(4, max_failures=0).launched().training().tell(MOVE)
    nodes = play.state.nodes
    for attempt in range(2):
        play.tell(exited(2, attempt, killed=False, how="killed by SIGKILL"))
        play.tell(*(exited(rank, attempt, killed=True) for rank in (0, 1, 3)))
        assert play.state.attempts[-1].root.kind is FailureKind.PREEMPTED
        play.tell(AgentsPlaced(nodes=nodes)).training()
    play.tell(exited(2, 2, killed=False, how="killed by SIGKILL"))
    play.tell(*(exited(rank, 2, killed=True) for rank in (0, 1, 3)))
    assert play.conclusion().failures[0].kind is FailureKind.WORKER_LOST


def test_an_agent_that_is_lost_on_another_node_meanwhile_is_not() -> None:
    play = Play(4, max_failures=0).launched().training().tell(MOVE)
    play.tell(AgentLost(rank=0, reason="node died", kind=FailureKind.NODE_LOST))
    play.tell(*(exited(rank, killed=True) for rank in (1, 2, 3)))
    assert isinstance(play.state.phase, Concluded)
    assert play.conclusion().failures[0].kind is FailureKind.NODE_LOST


@pytest.mark.parametrize(
    "kind",
    [
        FailureKind.AGENT_LOST,
        FailureKind.NODE_LOST,
        FailureKind.OUT_OF_MEMORY,
        FailureKind.PREEMPTED,
    ],
)
def test_however_an_agent_is_lost_while_ranks_leave_the_run_goes_on(kind: FailureKind) -> None:
    """What it was storing is gone with it, and its rank's end is never told."""
    play = Play(2, max_failures=1).launched().training().leaving()
    play.tell(AgentLost(rank=0, reason="gone", kind=kind), exited(1, killed=True))
    assert isinstance(play.state.phase, Placing)


def test_memory_that_ran_out_is_the_cause_of_what_its_peers_raise() -> None:
    play = Play(2).launched().training().tell(raised(0, "RuntimeError: connection reset by peer"))
    gone = exited(1, killed=False)
    play.tell(type(gone)(attempt=0, rank=1, how=gone.how, killed=False, out_of_memory=True))
    play.tell(exited(0, killed=True))
    [failure] = play.conclusion().failures
    assert (failure.kind, failure.rank) == (FailureKind.OUT_OF_MEMORY, 1)


def test_training_goes_on_while_a_drain_waits_for_a_checkpoint() -> None:
    play = Play(2).launched().training().tell(RESIZE)
    assert isinstance(play.state.phase, Training)
    assert play.tell(reported(0, 5)).state.steps[0] == 5


def not_saving() -> Play:
    play = Play(2).launched().training()
    play.state = replace(play.state, saves=False)
    return play


def test_a_stop_does_not_wait_for_a_checkpoint_that_nobody_makes() -> None:
    play = not_saving().tell(STOP)
    assert play.latest == (Kill(attempt=0),)
    assert "no checkpoint was made" in play.reason
    play.tell(*killed(2))
    assert (play.conclusion().succeeded, play.conclusion().stopped) == (False, STOP.stopped)


@pytest.mark.parametrize(
    "event",
    [
        PartStaged(attempt=0, rank=0, checkpoint=0, waits=False),
        SavesOnRequest(attempt=0, rank=1),
    ],
)
def test_a_stop_waits_for_who_makes_checkpoints(event: Event) -> None:
    assert not_saving().tell(event, STOP).latest == (DrainAttempt(attempt=0),)


def test_other_drains_wait_whoever_makes_checkpoints() -> None:
    """They can't be had without: the run is to be resumed from what it has reached."""
    assert not_saving().tell(RESIZE).latest == (DrainAttempt(attempt=0),)


MET = ConditionMet(attempt=0, rank=0, stopped=Stopped(by="condition", reason="loss <= 0.1", step=5))


def test_a_condition_ends_the_run_with_the_checkpoint_of_rank_0() -> None:
    """Nobody is asked for a checkpoint: another rank's, which may be behind, would be too early."""
    play = Play(2, max_failures=1).launched().training().tell(MET)
    assert play.latest == ()
    assert play.tell(drained()).latest == (Kill(attempt=0),)
    play.tell(*killed(2))
    conclusion = play.conclusion()
    assert (conclusion.succeeded, conclusion.stopped) == (True, MET.stopped)
    assert [a for a in play.actions if isinstance(a, DrainAttempt)] == []


@pytest.mark.parametrize(("committed", "restarts"), [(4, True), (5, False), (6, False)])
def test_a_failure_before_that_checkpoint_is_committed_costs_an_attempt(
    committed: int, restarts: bool
) -> None:
    play = Play(2, max_failures=1).launched().training().tell(MET)
    play.state = replace(play.state, committed=committed)
    play.tell(raised(1), exited(0, 0, killed=True), exited(1, 0, killed=True))
    assert (play.latest[-1] == Launch(attempt=1)) == restarts
    if restarts:
        assert play.state.drain is None
    else:
        assert play.conclusion().stopped == MET.stopped


@pytest.mark.parametrize("committed", [4, 5])
def test_a_rank_that_has_stopped_for_a_move_ends_no_run_before_its_condition(
    committed: int,
) -> None:
    """Rank 0 met it in a step that the other one doesn't take any more."""
    play = Play(2).launched().training().tell(MOVE, MET)
    play.state = replace(play.state, committed=committed)
    assert play.tell(drained(1)).latest == (Kill(attempt=0),)
    play.tell(*killed(2))
    if committed == 5:
        assert play.conclusion().stopped == MET.stopped
    else:
        assert isinstance(play.latest[-1], AcquireWorkers)
        assert play.state.drain is None
        met_at = "step 5, at which a condition is met"
        assert f"rank 1 has stopped before {met_at}: the next attempt meets it" in play.reason


@pytest.mark.parametrize("before", [(), (MOVE,)], ids=["", "after a move"])
@pytest.mark.parametrize("committed", [4, 5])
def test_who_asks_to_stop_after_a_condition_is_not_forgotten_with_its_checkpoint(
    before: tuple[DrainWanted, ...], committed: int
) -> None:
    play = Play(2, max_failures=1).launched().training().tell(*before, MET, STOP)
    assert play.reason == f"{STOP.reason}, as is requested already"
    play.state = replace(play.state, committed=committed)
    play.tell(drained(1) if before else raised(1), *killed(2))
    assert play.conclusion().stopped == (MET if committed == 5 else STOP).stopped
    assert play.conclusion().succeeded == (committed == 5)


def test_a_condition_ends_a_run_without_checkpoints_at_once() -> None:
    play = Play(1).launched()
    play.state = replace(play.state, saves=False)
    assert play.training().tell(MET).latest == (Kill(attempt=0),)
    assert play.tell(*killed(1)).conclusion().succeeded


def test_a_condition_that_comes_with_the_first_checkpoint_ends_the_run_with_it() -> None:
    """The report says that there is one; the other ranks' parts of it may still come."""
    play = Play(2).launched()
    play.state = replace(play.state, saves=False)
    play.training().tell(replace(reported(0, 5), has_checkpoint=True), MET)
    assert play.latest == ()
    assert play.tell(drained()).latest == (Kill(attempt=0),)


def test_a_signal_that_came_before_a_condition_is_the_reason() -> None:
    play = Play(1).launched().training().tell(STOP, MET, drained(), *killed(1))
    conclusion = play.conclusion()
    assert (conclusion.succeeded, conclusion.stopped) == (False, STOP.stopped)


def test_a_lost_node_that_ends_the_next_attempt_as_well_is_one_failure() -> None:
    """Its other agent is reported after a rank of that one was launched."""
    play = Play(4, max_failures=1).launched().training().tell(reported(0, 1), node_loss(3))
    play.tell(*(exited(rank, killed=True) for rank in (0, 1, 2)))
    play.launched().tell(node_loss(3))
    play.tell(*(exited(rank, attempt=1, killed=True) for rank in (0, 1, 2)))
    assert isinstance(play.state.phase, Placing)
    # The next one is another.
    play.launched().training().tell(node_loss(0))
    play.tell(*(exited(rank, attempt=2, killed=True) for rank in (1, 2, 3)))
    assert "failure 2 of max_failures=1" in play.conclusion().reason


def node_loss(rank: int) -> AgentLost:
    return AgentLost(rank=rank, reason="its node is gone", kind=FailureKind.NODE_LOST)


def test_a_node_that_is_to_go_is_named_and_so_are_several() -> None:
    play = Play(4).launched().training()
    play.tell(move_wanted({"node-1": LeavingNode(address="10.77.0.3")}))
    assert play.reason == "the node 10.77.0.3 is about to be taken away"
    assert play.state.leaving_nodes == {"node-1"}
    play.tell(
        move_wanted(
            {
                "node-8": LeavingNode(address="10.77.0.9"),
                "node-7": LeavingNode(address="10.77.0.8"),
            }
        )
    )
    assert play.reason == (
        "the nodes 10.77.0.8, 10.77.0.9 are about to be taken away; no worker of this run is there"
    )


def test_only_an_attempt_that_is_to_end_is_recorded_as_one() -> None:
    """An autoscaler takes idle nodes away all the time."""
    play = Play(4).launched().training().tell(MOVE, drained(), *killed(4)).launched().training()
    known = entries_of(MOVE, step(play.state, MOVE))
    elsewhere = wanted(Purpose.MOVE, "node-7")
    for state in (play.state, play.tell(RESIZE).state):
        idle = entries_of(elsewhere, step(state, elsewhere))
        assert [type(each) for each in idle] == [Transitioned]
    assert [type(each) for each in known] == [Transitioned]
    here = wanted(Purpose.MOVE, "node-0")
    for event in (here, STOP, SIGNAL):
        assert [type(each) for each in entries_of(event, step(play.state, event))] == [
            DrainRequested
        ]


def test_ranks_learn_which_of_them_go_and_when_the_first_does() -> None:
    play = Play(4).launched().training()
    play.tell(move_wanted({"node-1": LeavingNode(address="b", deadline_ms=9_000)}))
    assert play.latest == (told_of({"node-1": [2, 3]}, deadline_ms=9_000),)
    play.tell(
        move_wanted(
            {
                "node-7": LeavingNode(address="h"),
                "node-0": LeavingNode(address="a", deadline_ms=5_000),
            }
        )
    )
    assert play.latest == (told_of({"node-0": [0, 1], "node-1": [2, 3]}, deadline_ms=5_000),)


@pytest.mark.parametrize("first_ms", [9_000, None])
def test_ranks_learn_that_a_node_goes_sooner(first_ms: int | None) -> None:
    def notice(deadline_ms: int | None) -> DrainWanted:
        return move_wanted({"node-1": LeavingNode(address="b", deadline_ms=deadline_ms)})

    play = Play(4).launched().training().tell(notice(first_ms), notice(4_000))
    assert play.latest == (told_of({"node-1": [2, 3]}, deadline_ms=4_000),)
    assert play.tell(notice(6_000)).latest == ()
    # No other node could hold its workers, so they aren't moved once more.
    play.tell(drained(), *killed(4)).launched().training()
    assert play.tell(notice(3_000)).latest == ()
    assert play.reason.endswith("taken away, as was known when its workers were placed there")


def test_ranks_that_meet_later_learn_of_a_preemption_too() -> None:
    play = Play(2).launched().tell(offered(0))
    play.tell(move_wanted({"node-0": LeavingNode(address="a")}))
    assert play.tell(offered(1)).latest[-1] == told_of({"node-0": [0, 1]}, deadline_ms=None)


def told_of(nodes: dict[str, list[int]], *, deadline_ms: int | None) -> DrainAttempt:
    preemption = PreemptionInfo(deadline_ms=deadline_ms, preempted_node_to_ranks=nodes)
    return DrainAttempt(attempt=0, preemption=preemption)


def grown(*, joined_at: float | None = 0.0) -> Play:
    """A run that has trained on a node, and is joined by others.

    Args:
        joined_at: when all ranks have joined, after a launch at 0; None if they haven't.
    """
    play = Play(2).launched().training().tell(reported(0, 1), RESIZE)
    play.tell(drained(), *killed(2), placed(4, per_node=1))
    if joined_at is None:
        return play.tell(*(offered(rank, 1) for rank in range(4)))
    play.now = joined_at
    return play.training()


@pytest.mark.parametrize(
    ("rank", "kind", "message"),
    [
        (2, FailureKind.USER_ERROR, "ModuleNotFoundError: No module named 'timm'"),
        (2, FailureKind.OUT_OF_MEMORY, "OutOfMemoryError: CUDA out of memory"),
        (2, FailureKind.WORKER_LOST, "killed by SIGILL before its training was done"),
    ],
)
def test_a_node_that_joins_and_cannot_begin_ends_no_run(
    rank: int, kind: FailureKind, message: str
) -> None:
    play = grown()
    play.tell(failed(rank, kind, message), *killed(4, 1))
    ended, place = play.latest
    assert isinstance(ended, EndAttempt)
    assert "a node on which the run hadn't trained before" in ended.reason
    assert place == AcquireWorkers(avoid={"node-2": math.inf})
    # The run goes on where it has trained, and may fail as often as before: not at all.
    play.tell(placed(2, per_node=1)).training().tell(reported(0, 2, 2), raised(1, attempt=2))
    play.tell(*killed(2, 2))
    assert play.conclusion().reason == "max_failures=0 allows no restart"


def test_all_nodes_that_join_are_left_if_ranks_do_not_find_each_other() -> None:
    """They wait for each other, so nobody knows on which of them it fails."""
    assert grown().tell(late(), *killed(4, 1)).latest[-1] == without_nodes(1, 2, 3)


@pytest.mark.parametrize(("ranks", "left"), [({2, 3}, (2, 3)), ({3}, (3,))])
def test_nodes_whose_ranks_are_late_by_themselves_are_left(
    ranks: set[int], left: tuple[int, ...]
) -> None:
    assert grown().tell(late(*ranks), *killed(4, 1)).latest[-1] == without_nodes(*left)


def test_ranks_that_are_late_where_the_run_has_trained_are_no_fault_of_another_node() -> None:
    play = grown().tell(late(0, 1, 2), *killed(4, 1))
    assert play.conclusion().reason == "max_failures=0 allows no restart"


def test_an_error_of_every_rank_is_no_fault_of_a_node() -> None:
    message = "RuntimeError: batch can't be divided by 4"
    play = grown().tell(*(raised(rank, message, attempt=1) for rank in (2, 0, 1, 3)))
    play.tell(*killed(4, 1))
    assert play.conclusion().reason == "max_failures=0 allows no restart"


def test_an_error_where_the_run_has_trained_is_counted_whichever_rank_is_first() -> None:
    play = grown().tell(raised(2, "RuntimeError: a", attempt=1))
    play.tell(raised(0, "RuntimeError: b", attempt=1), *killed(4, 1))
    assert play.conclusion().reason == "max_failures=0 allows no restart"


def test_errors_that_follow_on_other_ranks_do_not_excuse_a_node() -> None:
    broken = Failure(kind=FailureKind.CONNECTION_LOST, rank=0, message="ConnectionError: reset")
    play = grown().tell(raised(2, attempt=1), Failed(attempt=1, failure=broken), *killed(4, 1))
    assert play.latest[-1] == without_nodes(2)


@pytest.mark.parametrize("ranks", [(), (2,), (2, 3)])
def test_however_long_ranks_are_late_their_nodes_are_left(ranks: tuple[int, ...]) -> None:
    play = grown()
    play.now = 3600.0
    left = ranks or (1, 2, 3)
    assert play.tell(late(*ranks), *killed(4, 1)).latest[-1] == without_nodes(*left)


def test_ranks_that_wait_long_for_each_other_have_not_trained_meanwhile() -> None:
    play = grown(joined_at=300.0)
    play.now = 305.0
    assert play.tell(raised(2, attempt=1), *killed(4, 1)).latest[-1] == without_nodes(2)


def test_a_process_that_crashes_before_all_have_joined_has_not_trained() -> None:
    play = grown(joined_at=None)
    play.tell(*(Joined(attempt=1, rank=rank) for rank in (0, 1, 3)))
    play.now = 60.0
    play.tell(exited(2, 1, killed=False, how="killed by SIGILL"), *killed(4, 1))
    assert play.latest[-1] == without_nodes(2)


def test_an_attempt_that_has_trained_for_long_without_a_report_is_counted() -> None:
    play = grown(joined_at=300.0)
    play.now = 330.0
    play.tell(raised(2, attempt=1), *killed(4, 1))
    assert play.conclusion().reason == "max_failures=0 allows no restart"


def test_only_some_nodes_in_a_row_that_cannot_begin_are_free() -> None:
    """An autoscaler may replace each by another that can't begin either."""
    play = Play(2, max_failures=0).launched().training().tell(reported(0, 1))
    for number in range(6):
        assert not isinstance(play.state.phase, Concluded)
        attempt = play.state.attempt
        play.tell(RESIZE, Drained(attempt=attempt, rank=0), *killed(2, attempt))
        play.tell(AgentsPlaced(nodes=("node-0", "node-0", f"new-{number}"))).training()
        play.tell(raised(2, attempt=attempt + 1), *killed(3, attempt + 1))
        if number < 5:
            play.tell(placed(2)).training().tell(
                reported(0, number + 2, attempt + 2),
                Committed(manifest=manifest(2, step=number + 2), stamps={}),
            )
    assert play.conclusion().reason == "max_failures=0 allows no restart"


def late(*ranks: int) -> Failed:
    failure = Failure(
        kind=FailureKind.STARTUP, rank=None, message="ranks are late", late=frozenset(ranks)
    )
    return Failed(attempt=1, failure=failure)


def without_nodes(*numbers: int) -> AcquireWorkers:
    return AcquireWorkers(avoid={f"node-{number}": math.inf for number in numbers})


@pytest.mark.parametrize(
    ("rank", "kind", "message"),
    [
        # It has trained on this node before.
        (0, FailureKind.USER_ERROR, "ConnectionError: no answer"),
        (2, FailureKind.WORKER_LOST, "killed by SIGKILL before its training was done"),
        (2, FailureKind.STORAGE, "OSError: disk full"),
    ],
)
def test_what_another_node_or_somebody_has_caused_is_counted(
    rank: int, kind: FailureKind, message: str
) -> None:
    play = grown().tell(failed(rank, kind, message), *killed(4, 1))
    assert play.conclusion().reason == "max_failures=0 allows no restart"


def test_a_node_that_has_joined_and_trained_is_like_others() -> None:
    play = grown().tell(reported(0, 2, 1), raised(2, attempt=1), *killed(4, 1))
    assert play.conclusion().reason == "max_failures=0 allows no restart"


def test_a_node_that_cannot_begin_and_has_to_stay_ends_the_run() -> None:
    """No other has room for its workers."""
    play = grown().tell(raised(2, attempt=1), *killed(4, 1))
    play.tell(placed(4, per_node=1)).training().tell(raised(2, attempt=2), *killed(4, 2))
    assert isinstance(play.state.phase, Concluded)


def failed(rank: int | None, kind: FailureKind, message: str) -> Failed:
    return Failed(attempt=1, failure=Failure(kind=kind, rank=rank, message=message))
