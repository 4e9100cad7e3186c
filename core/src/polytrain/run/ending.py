"""How attempts end: failures, exits, lost agents, and what follows once all is gone. Pure."""

from __future__ import annotations

from dataclasses import replace

from rpds import HashTrieMap

from polytrain.common.errors import Failure, FailureKind
from polytrain.common.events import AgentLost, DrainWanted, Exited, Purpose
from polytrain.policy.failure import classified, failed_attempt
from polytrain.policy.health import Loss, avoided
from polytrain.run.actions import AcquireWorkers, Conclude, EndAttempt, Kill, Launch
from polytrain.run.states import (
    Concluded,
    Ending,
    Gathering,
    Leaving,
    Placing,
    State,
    Training,
)
from polytrain.run.transition import Transition

# After the last rank is done only what could lose the final checkpoint still matters.
_LOSES_A_CHECKPOINT = (
    FailureKind.STORAGE,
    FailureKind.CHECKPOINT_MISMATCH,
    FailureKind.LEASE_LOST,
)

# Even if the attempt ends as planned.
_ENDS_THE_PLAN = (FailureKind.STORAGE, FailureKind.LEASE_LOST)

# What a node may be to blame for.
_OF_A_NODE = (
    FailureKind.WORKER_LOST,
    FailureKind.AGENT_LOST,
    FailureKind.NODE_LOST,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.HANG,
)


def failed(state: State, failure: Failure, *, now: float, loses_agent: bool = False) -> Transition:
    """Something has gone wrong: the attempt ends, if it isn't ending already.

    Args:
        state: before it.
        failure: what has gone wrong.
        now: seconds on the clock of the run.
        loses_agent: whether an agent is gone with what it was storing.
    """
    failure = _placed_in_time(state, classified(failure))
    match state.phase:
        case Gathering() | Training():
            return _end(state, Ending().also(failure), reason=str(failure), now=now)
        case Leaving(gone=gone) if loses_agent or failure.kind in _LOSES_A_CHECKPOINT:
            ending = Ending(gone=gone, was_dismissed=True).also(failure)
            return _end(state, ending, reason=str(failure), now=now)
        case Ending() as ending if not ending.is_planned or failure.kind in _ENDS_THE_PLAN:
            return Transition(
                state=replace(state, phase=ending.also(failure)), reason=f"also {failure}"
            )
        case _:
            return Transition(state=state, reason=f"ignored, training is over: {failure}")


def ended_as_planned(state: State, *, reason: str, now: float) -> Transition:
    """The run itself ends the attempt."""
    return _end(state, Ending(), reason=reason, now=now)


def exited(state: State, event: Exited, *, now: float) -> Transition:
    """A worker process is gone."""
    if isinstance(state.phase, Leaving):
        return _gone_while_leaving(state, event.rank)
    ending = state.phase if isinstance(state.phase, Ending) else None
    explained = ending is not None and (
        ending.was_dismissed or ending.is_planned or event.rank in ending.failed
    )
    transition = Transition(state=state)
    if not event.killed and not explained:
        transition = failed(state, _of_exit(state, event), now=now)
    return _gone_while_ending(transition, event.rank, now=now)


def agent_lost(state: State, event: AgentLost, *, now: float) -> Transition:
    """An agent is gone, and with it its worker process."""
    if isinstance(state.phase, Leaving) and event.rank in state.phase.gone:
        return Transition(state=state)
    if isinstance(state.phase, Placing):
        # Whoever places the others places this one too.
        return Transition(state=state, reason=f"rank {event.rank}: {event.reason}")
    expected = state.nodes[event.rank : event.rank + 1]
    kind = FailureKind.PREEMPTED if state.leaving_nodes.intersection(expected) else event.kind
    failure = Failure(kind=kind, rank=event.rank, message=event.reason)
    transition = failed(state, failure, now=now, loses_agent=True)
    ending = transition.state.phase
    if isinstance(ending, Ending):
        ending = replace(ending, lost_agents=ending.lost_agents.insert(event.rank))
        transition = replace(transition, state=replace(transition.state, phase=ending))
    return _gone_while_ending(transition, event.rank, now=now)


def launched(state: State, *, reason: str, now: float) -> Transition:
    """The next attempt begins."""
    return Transition(
        state=replace(
            state,
            phase=Gathering(),
            launches=state.launches + 1,
            launched_at=now,
            steps=HashTrieMap(),
            has_reported=False,
        ),
        actions=(Launch(attempt=state.attempt),),
        reason=reason,
    )


def concluded_failed(state: State, failures: tuple[Failure, ...], reason: str) -> Transition:
    """The run has failed."""
    return Transition(
        state=replace(state, phase=Concluded(succeeded=False)),
        actions=(Conclude(succeeded=False, reason=reason, failures=failures),),
        reason=reason,
    )


def concluded_stopped(state: State, reason: str) -> Transition:
    """This driver stops working on the run, as it was asked to."""
    return Transition(
        state=replace(state, phase=Concluded(succeeded=False)),
        actions=(Conclude(succeeded=False, stopped=True, reason=reason),),
        reason=reason,
    )


def _end(state: State, ending: Ending, *, reason: str, now: float) -> Transition:
    ending = replace(ending, lasted_s=now - state.launched_at)
    return Transition(
        state=replace(state, phase=ending),
        actions=(Kill(attempt=state.attempt),),
        reason=reason,
    )


def _placed_in_time(state: State, failure: Failure) -> Failure:
    """A failure with what its rank had done before; what fails before it trains is a start-up's."""
    if failure.rank is None:
        return failure
    has_joined = failure.rank in state.steps
    if failure.kind is FailureKind.USER_ERROR and not has_joined:
        message = f"before it had joined the others: {failure.message}"
        return replace(failure, kind=FailureKind.STARTUP, message=message)
    return replace(failure, step=state.steps.get(failure.rank, 0))


def _of_exit(state: State, event: Exited) -> Failure:
    kind, how = FailureKind.WORKER_LOST, event.how
    if event.out_of_memory:
        kind, how = FailureKind.OUT_OF_MEMORY, "ended by the kernel, which was out of memory,"
    before = "its training was done" if event.rank in state.steps else "it had joined the others"
    return Failure(
        kind=kind, rank=event.rank, message=f"{how} before {before}", output=event.output
    )


def _gone_while_leaving(state: State, rank: int) -> Transition:
    assert isinstance(state.phase, Leaving)
    gone = state.phase.gone.insert(rank)
    if len(gone) < state.world_size:
        return Transition(state=replace(state, phase=Leaving(gone=gone)))
    reason = "every rank finished"
    return Transition(
        state=replace(state, phase=Concluded(succeeded=True)),
        actions=(Conclude(succeeded=True, reason=reason),),
        reason=reason,
    )


def _gone_while_ending(transition: Transition, rank: int, *, now: float) -> Transition:
    """Note that a rank's process is gone; decide what follows once all are."""
    state = transition.state
    if not isinstance(state.phase, Ending):
        return transition
    ending = replace(state.phase, gone=state.phase.gone.insert(rank))
    state = replace(state, phase=ending)
    if len(ending.gone) < state.world_size:
        return replace(transition, state=state)
    after = _go_on(state, now) if ending.is_planned else _decide(state, ending, now)
    return Transition(
        state=after.state,
        actions=(*transition.actions, *after.actions),
        reason="; ".join(part for part in (transition.reason, after.reason) if part),
    )


def _decide(state: State, ending: Ending, now: float) -> Transition:
    """What follows from a failure."""
    failures = tuple(ending.failures)
    failure_of_attempt = failed_attempt(
        failures,
        world_size=state.world_size,
        has_reported=state.has_reported,
        lasted_s=ending.lasted_s,
        committed=state.committed,
    )
    root = failure_of_attempt.root
    attempts = (*state.attempts, failure_of_attempt)
    losses = state.losses
    if root.kind in _OF_A_NODE and root.rank is not None and state.nodes:
        losses = (*losses, Loss(node=state.nodes[root.rank], at=now))
    state = replace(state, attempts=attempts, losses=losses)
    if state.drain is not None and state.drain.purpose is Purpose.STOP:
        # It is to be resumed later: whether it may be is for that time.
        return _stopped(state, state.drain, root)
    decision = state.policy.decide(attempts)
    ended = EndAttempt(attempt=state.attempt, root=root, reason=decision.reason)
    if not decision.restart:
        others = tuple(failure for failure in failures if failure is not root)
        # What the peers of a lost process raise says nothing about the cause.
        told = (root,) if root.kind.is_loss else (root, *others)
        concluded = concluded_failed(state, told, decision.reason)
        return replace(concluded, actions=(ended, *concluded.actions))
    avoid = _avoid(state, now)
    if ending.lost_agents or state.drain is not None or avoid.intersection(state.nodes):
        return _placed_anew(state, ended, avoid)
    state = replace(state, attempt=state.attempt + 1)
    after = launched(state, reason=decision.reason, now=now)
    return replace(after, actions=(ended, *after.actions))


def _go_on(state: State, now: float) -> Transition:
    """What follows where the run itself has ended an attempt."""
    drain = state.drain
    assert drain is not None
    if drain.purpose is Purpose.STOP:
        return _stopped(state, drain, None)
    ended = EndAttempt(attempt=state.attempt, root=None, reason=drain.reason)
    return _placed_anew(state, ended, _avoid(state, now))


def _stopped(state: State, drain: DrainWanted, root: Failure | None) -> Transition:
    ended = EndAttempt(attempt=state.attempt, root=root, reason=drain.reason)
    stopped = concluded_stopped(state, drain.reason)
    return replace(stopped, actions=(ended, *stopped.actions))


def _placed_anew(state: State, ended: EndAttempt, avoid: frozenset[str]) -> Transition:
    """The next attempt needs other agents."""
    without = frozenset[int]() if state.drain is None else state.drain.ranks
    return Transition(
        state=replace(state, attempt=state.attempt + 1, phase=Placing(), drain=None),
        actions=(ended, AcquireWorkers(avoid=avoid, without=without)),
        reason=ended.reason,
    )


def _avoid(state: State, now: float) -> frozenset[str]:
    return state.leaving_nodes | avoided(state.losses, cooldown_s=state.node_cooldown_s, now=now)
