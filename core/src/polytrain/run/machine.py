"""The state machine of a run: an event in, the next state and what to do about it out.

    Placing ──► Gathering ──► Training ──► Leaving ──► Concluded
       ▲            │             │
       │            └──► Ending ◄─┘        every failure, of whatever kind
       └───────────────────┘ │
                             └──► Concluded

Pure: no clock, no Ray, no process. Any failure ends the generation; once all its processes are gone
the cause is known, the failure policy decides, and the next generation is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polytrain.errors import Failure, FailureKind
from polytrain.policy.failure import root_cause
from polytrain.run.actions import (
    Action,
    AddCheckpoint,
    AddPart,
    Conclude,
    CountPart,
    DropCheckpoint,
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
    Committed,
    Done,
    Event,
    Exited,
    Failed,
    HandedIn,
    Joined,
    Offered,
    PartStored,
    PartVoid,
    PlacementFailed,
    Reported,
)
from polytrain.run.states import (
    Concluded,
    Ending,
    Gathering,
    Leaving,
    Placing,
    State,
    Training,
)

# After the last rank is done only what could lose the final checkpoint still matters.
_LOSES_A_CHECKPOINT = (
    FailureKind.STORAGE,
    FailureKind.UNMATCHED_PARTS,
    FailureKind.AGENT_LOST,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The outcome of one event."""

    state: State
    actions: tuple[Action, ...] = ()
    reason: str = ""
    """Why, for the journal; empty when nothing changed."""


def begin(state: State) -> Transition:
    """The first transition of a run."""
    return Transition(state=state, actions=(Place(),), reason=f"placing {state.world_size} workers")


def step(state: State, event: Event) -> Transition:
    """Decide what follows from one event."""
    if isinstance(state.phase, Concluded) or _is_stale(state, event):
        return Transition(state=state)
    match event:
        case AgentsPlaced():
            return _launch(state, reason="every rank has an agent")
        case PlacementFailed():
            failure = Failure(kind=FailureKind.STARTUP, rank=None, message=event.reason)
            return _conclude_failed(state, (failure,), "workers can't be placed")
        case Offered():
            return _offered(state, event)
        case Joined():
            return Transition(state=state, reason=f"rank {event.rank} joined")
        case Reported():
            steps = {**state.steps, event.rank: event.step}
            return Transition(state=replace(state, steps=steps), actions=(Publish(report=event),))
        case HandedIn():
            return Transition(state=state, actions=(CountPart(part=event),))
        case PartStored():
            return Transition(state=state, actions=(AddPart(part=event),))
        case PartVoid(checkpoint=number, rank=rank):
            return Transition(
                state=state,
                actions=(DropCheckpoint(part=event),),
                reason=f"checkpoint {number} is void: of rank {rank}'s part {event.reason}",
            )
        case Committed(manifest=manifest):
            return Transition(
                state=state,
                actions=(AddCheckpoint(committed=event),),
                reason=f"{manifest.directory} is committed, of step {manifest.step}",
            )
        case Done():
            return _done(state, event.rank)
        case Failed():
            return _failed(state, replace(event.failure, step=_step_of(state, event.failure.rank)))
        case Exited():
            return _exited(state, event)
        case AgentLost():
            return _agent_lost(state, event)


def _is_stale(state: State, event: Event) -> bool:
    # A part of a checkpoint counts whenever it was stored: the agent outlives its trainer, and
    # what was handed over is kept.
    if isinstance(event, PartStored | PartVoid | Committed):
        return False
    generation = getattr(event, "generation", state.generation)
    launched = not isinstance(state.phase, Placing)
    return generation != state.generation or (hasattr(event, "generation") and not launched)


def _launch(state: State, *, reason: str) -> Transition:
    return Transition(
        state=replace(state, phase=Gathering(), launches=state.launches + 1, steps={}),
        actions=(Launch(generation=state.generation),),
        reason=reason,
    )


def _offered(state: State, event: Offered) -> Transition:
    if not isinstance(state.phase, Gathering):
        return Transition(state=state)
    offers = {**state.phase.offers, event.rank: event.offer}
    if len(offers) < state.world_size:
        return Transition(state=replace(state, phase=Gathering(offers=offers)))
    roster = tuple(offers[rank] for rank in range(state.world_size))
    return Transition(
        state=replace(state, phase=Training()),
        actions=(SendRoster(generation=state.generation, offers=roster),),
        reason=f"all {state.world_size} ranks have made their offers",
    )


def _done(state: State, rank: int) -> Transition:
    if not isinstance(state.phase, Training):
        return Transition(state=state)
    done = state.phase.done | {rank}
    if len(done) < state.world_size:
        return Transition(
            state=replace(state, phase=Training(done=done)), reason=f"rank {rank} is done"
        )
    return Transition(
        state=replace(state, phase=Leaving()),
        actions=(Leave(generation=state.generation),),
        reason="every rank is done",
    )


def _failed(state: State, failure: Failure) -> Transition:
    match state.phase:
        case Gathering() | Training():
            return Transition(
                state=replace(state, phase=Ending(failures=(failure,))),
                actions=(Kill(generation=state.generation),),
                reason=str(failure),
            )
        case Leaving(gone=gone) if failure.kind in _LOSES_A_CHECKPOINT:
            return Transition(
                state=replace(
                    state, phase=Ending(failures=(failure,), gone=gone, told_to_leave=True)
                ),
                actions=(Kill(generation=state.generation),),
                reason=str(failure),
            )
        case Ending() as ending:
            ending = replace(ending, failures=(*ending.failures, failure))
            return Transition(state=replace(state, phase=ending), reason=f"also {failure}")
        case _:
            return Transition(state=state, reason=f"ignored, training is over: {failure}")


def _exited(state: State, event: Exited) -> Transition:
    if isinstance(state.phase, Leaving):
        return _gone_while_leaving(state, event.rank)
    ending = state.phase if isinstance(state.phase, Ending) else None
    explained = ending is not None and (
        ending.told_to_leave or any(failure.rank == event.rank for failure in ending.failures)
    )
    transition = Transition(state=state)
    if not event.killed and not explained:
        transition = _failed(
            state,
            Failure(
                kind=FailureKind.WORKER_LOST,
                rank=event.rank,
                message=f"{event.how} before its training was done",
                step=_step_of(state, event.rank),
            ),
        )
    return _gone_while_ending(transition, event.rank)


def _agent_lost(state: State, event: AgentLost) -> Transition:
    if isinstance(state.phase, Leaving) and event.rank in state.phase.gone:
        return Transition(state=state)
    failure = Failure(
        kind=FailureKind.AGENT_LOST,
        rank=event.rank,
        message=event.reason,
        step=_step_of(state, event.rank),
    )
    if isinstance(state.phase, Placing):
        return _conclude_failed(state, (failure,), "an agent was lost while workers were placed")
    transition = _failed(state, failure)
    ending = transition.state.phase
    if isinstance(ending, Ending):
        ending = replace(ending, lost_agents=ending.lost_agents | {event.rank})
        transition = replace(transition, state=replace(transition.state, phase=ending))
    return _gone_while_ending(transition, event.rank)


def _gone_while_leaving(state: State, rank: int) -> Transition:
    assert isinstance(state.phase, Leaving)
    gone = state.phase.gone | {rank}
    if len(gone) < state.world_size:
        return Transition(state=replace(state, phase=Leaving(gone=gone)))
    reason = "every rank finished"
    return Transition(
        state=replace(state, phase=Concluded(succeeded=True)),
        actions=(Conclude(succeeded=True, reason=reason),),
        reason=reason,
    )


def _gone_while_ending(transition: Transition, rank: int) -> Transition:
    """Note that a rank's process is gone; decide what follows once all are."""
    state = transition.state
    if not isinstance(state.phase, Ending):
        return transition
    ending = replace(state.phase, gone=state.phase.gone | {rank})
    state = replace(state, phase=ending)
    if len(ending.gone) < state.world_size:
        return replace(transition, state=state)
    after = _decide(state, ending)
    return Transition(
        state=after.state,
        actions=(*transition.actions, *after.actions),
        reason="; ".join(part for part in (transition.reason, after.reason) if part),
    )


def _decide(state: State, ending: Ending) -> Transition:
    root = root_cause(ending.failures)
    roots = (*state.roots, root)
    decision = state.policy.decide(roots)
    ended = EndAttempt(generation=state.generation, reason=f"{root} ({decision.reason})")
    state = replace(state, roots=roots)
    if not decision.restart:
        others = tuple(failure for failure in ending.failures if failure is not root)
        # What the peers of a lost process raise says nothing about the cause.
        told = (root,) if root.kind.is_loss else (root, *others)
        concluded = _conclude_failed(state, told, decision.reason)
        return replace(concluded, actions=(ended, *concluded.actions))
    state = replace(state, generation=state.generation + 1)
    if ending.lost_agents:
        placing = replace(state, phase=Placing())
        return Transition(state=placing, actions=(ended, Place()), reason=decision.reason)
    launched = _launch(state, reason=decision.reason)
    return replace(launched, actions=(ended, *launched.actions))


def _conclude_failed(state: State, failures: tuple[Failure, ...], reason: str) -> Transition:
    return Transition(
        state=replace(state, phase=Concluded(succeeded=False)),
        actions=(Conclude(succeeded=False, reason=reason, failures=failures),),
        reason=reason,
    )


def _step_of(state: State, rank: int | None) -> int:
    return state.steps.get(rank, 0) if rank is not None else 0
