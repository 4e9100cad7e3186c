"""Nodes that keep losing workers are left out for a while."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.run.play import Play, exited, placed

from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import Exited, Failed, Joined, Offered
from polytrain.policy.placement import Loss, avoided
from polytrain.run.machine import step
from polytrain.run.states import AcquireWorkers, Launch, State
from polytrain_plugins import Offer

losses = st.lists(
    st.builds(lambda node, at: Loss(node=node, at=at), st.sampled_from("abc"), st.floats(0, 1000)),
    max_size=10,
)


@given(losses=losses, cooldown_s=st.floats(1, 2000), now=st.floats(1000, 3000))
def test_a_node_is_left_out_while_two_of_its_losses_are_recent(
    losses: list[Loss], cooldown_s: float, now: float
) -> None:
    out = avoided(losses, cooldown_s=cooldown_s, now=now)
    for node in "abc":
        recent = [loss for loss in losses if loss.node == node and now - loss.at < cooldown_s]
        assert (node in out) == (len(recent) >= 2)
    for node, until in out.items():
        just_before = math.nextafter(until, 0) - 1e-6
        assert node in avoided(losses, cooldown_s=cooldown_s, now=max(now, just_before))
        assert node not in avoided(losses, cooldown_s=cooldown_s, now=until + 1e-6)


def test_no_cool_down_leaves_no_node_out() -> None:
    assert avoided([Loss(node="a", at=5.0)] * 5, cooldown_s=0.0, now=5.0) == {}


def lose(state: State, rank: int, *, now: float) -> tuple[State, tuple[object, ...]]:
    """Let a rank of two be killed; what follows once both are gone."""
    attempt = state.attempt
    for each in range(2):
        offer = Offered(attempt=attempt, rank=each, offer=Offer())
        state = step(state, offer, now=now).state
    for each in range(2):
        state = step(state, Joined(attempt=attempt, rank=each), now=now).state
    ends: list[Exited] = [
        exited(rank, attempt, killed=False),
        exited(1 - rank, attempt, killed=True),
    ]
    for end in ends:
        transition = step(state, end, now=now)
        state = transition.state
    return state, transition.actions


def test_a_run_leaves_a_node_at_its_second_loss_there_and_returns_after_the_cool_down() -> None:
    play = Play(2, max_failures=-1, node_cooldown_s=60.0)
    play.tell(placed(2, per_node=1))
    state, actions = lose(play.state, 1, now=100.0)
    # One loss may befall anybody.
    assert actions[-1] == Launch(attempt=1)
    state, actions = lose(state, 0, now=110.0)
    assert actions[-1] == Launch(attempt=2)
    state, actions = lose(state, 1, now=159.0)
    assert actions[-1] == AcquireWorkers(avoid={"node-1": 160.0})
    state = step(state, placed(2, per_node=1), now=160.0).state
    state, actions = lose(state, 0, now=1000.0)
    assert actions[-1] == Launch(attempt=4)


def test_a_node_that_computes_wrongly_is_left_at_once_and_for_good() -> None:
    play = Play(3, max_failures=-1, node_cooldown_s=60.0)
    play.tell(placed(3, per_node=1))
    state = play.state
    for event in (Offered, Joined):
        for rank in range(3):
            more = {"offer": Offer()} if event is Offered else {}
            state = step(state, event(attempt=0, rank=rank, **more), now=100.0).state
    wrong = Failure(kind=FailureKind.REPLICAS_DIFFER, rank=1, message="rank 1 holds other values")
    peer = Failure(kind=FailureKind.CONNECTION_LOST, rank=0, message="rank 1 holds other values")
    for failure in (peer, wrong):
        state = step(state, Failed(attempt=0, failure=failure), now=100.0).state
    for rank in range(3):
        transition = step(state, exited(rank, 0, killed=True), now=100.0)
        state = transition.state
    assert transition.actions[-1] == AcquireWorkers(avoid={"node-1": math.inf})
    assert avoided(state.losses, cooldown_s=60.0, now=1e6) == {"node-1": math.inf}
