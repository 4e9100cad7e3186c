"""The state machine of a run: an event in, the next state and what to do about it out.

    Placing ──► Gathering ──► Training ──► Leaving ──► Concluded
       ▲            │             │
       │            └──► Ending ◄─┘        every failure, of whatever kind, and every resize
       └───────────────────┘ │
                             └──► Concluded

Pure: no clock, no Ray, no process. Any failure ends the attempt; once all its processes are gone
the cause is known, the failure policy decides, and the next attempt is launched. An attempt
that the run itself ends, for another number of workers or to stop, makes a checkpoint first.
"""

from __future__ import annotations

from dataclasses import replace

from polytrain.checkpoint.events import CheckpointEvent, Committed, PartStaged, PartStored, PartVoid
from polytrain.common.errors import Failure, FailureKind
from polytrain.common.events import (
    AgentLost,
    AgentsPlaced,
    Done,
    Drained,
    DrainWanted,
    Event,
    Exited,
    Failed,
    Joined,
    Offered,
    PlacementFailed,
    Purpose,
    Reported,
    SavesOnRequest,
)
from polytrain.run.actions import (
    AcquireWorkers,
    AddCheckpoint,
    AddPart,
    CountPart,
    Drain,
    DropCheckpoint,
    Leave,
    Publish,
    SendRoster,
)
from polytrain.run.ending import (
    agent_lost,
    concluded_failed,
    concluded_stopped,
    ended_as_planned,
    exited,
    failed,
    launched,
)
from polytrain.run.states import Concluded, Gathering, Leaving, Placing, State, Training
from polytrain.run.transition import Transition


def begin(state: State) -> Transition:
    """The first transition of a run."""
    return Transition(
        state=state, actions=(AcquireWorkers(),), reason=f"placing {state.world_size} workers"
    )


def step(state: State, event: Event | CheckpointEvent, *, now: float = 0.0) -> Transition:
    """Decide what follows from one event.

    Args:
        state: before it.
        event: what has happened.
        now: seconds on a clock that never goes back.
    """
    if isinstance(state.phase, Concluded) or _is_stale(state, event):
        return Transition(state=state)
    match event:
        case AgentsPlaced(nodes=nodes):
            # Where workers are now that node is about to go: it was told while they were placed.
            drain = state.drain
            is_late = drain is not None and not drain.nodes.isdisjoint(nodes)
            placed = replace(
                state, world_size=len(nodes), nodes=nodes, drain=drain if is_late else None
            )
            return launched(placed, reason=f"{len(nodes)} ranks have agents", now=now)
        case PlacementFailed():
            failure = Failure(kind=FailureKind.STARTUP, rank=None, message=event.reason)
            return concluded_failed(state, (failure,), "workers can't be placed")
        case Offered():
            return _offered(state, event)
        case Joined(rank=rank):
            steps = state.steps
            if rank not in steps:
                steps = steps.insert(rank, state.committed)
            return Transition(state=replace(state, steps=steps), reason=f"rank {rank} joined")
        case Reported():
            steps = state.steps.insert(event.rank, event.step)
            return Transition(
                state=replace(state, steps=steps, has_reported=True),
                actions=(Publish(report=event),),
            )
        case SavesOnRequest():
            return Transition(state=replace(state, saves=True))
        case PartStaged():
            return Transition(state=replace(state, saves=True), actions=(CountPart(part=event),))
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
                state=replace(state, committed=manifest.step),
                actions=(AddCheckpoint(committed=event),),
                reason=f"{manifest.directory} is committed, of step {manifest.step}",
            )
        case Done():
            return _done(state, event.rank)
        case DrainWanted():
            return _drain_wanted(state, event, now=now)
        case Drained(rank=rank):
            return _drained(state, rank, now=now)
        case Failed(failure=failure):
            return failed(state, failure, now=now)
        case Exited():
            return exited(state, event, now=now)
        case AgentLost():
            return agent_lost(state, event, now=now)


def _is_stale(state: State, event: Event | CheckpointEvent) -> bool:
    # A part of a checkpoint counts whenever it was stored: the agent outlives its worker, and
    # what was handed over is kept.
    if isinstance(event, PartStored | PartVoid | Committed):
        return False
    attempt = getattr(event, "attempt", state.attempt)
    is_launched = not isinstance(state.phase, Placing)
    return attempt != state.attempt or (hasattr(event, "attempt") and not is_launched)


def _offered(state: State, event: Offered) -> Transition:
    if not isinstance(state.phase, Gathering):
        return Transition(state=state)
    offers = state.phase.offers.insert(event.rank, event.offer)
    if len(offers) < state.world_size:
        return Transition(state=replace(state, phase=Gathering(offers=offers)))
    roster = tuple(offers[rank] for rank in range(state.world_size))
    drain = () if state.drain is None else (Drain(attempt=state.attempt),)
    return Transition(
        state=replace(state, phase=Training()),
        actions=(SendRoster(attempt=state.attempt, offers=roster), *drain),
        reason=f"all {state.world_size} ranks have made their offers",
    )


def _done(state: State, rank: int) -> Transition:
    if not isinstance(state.phase, Training):
        return Transition(state=state)
    done = state.phase.done.insert(rank)
    if len(done) < state.world_size:
        return Transition(
            state=replace(state, phase=Training(done=done)), reason=f"rank {rank} is done"
        )
    return Transition(
        state=replace(state, phase=Leaving()),
        actions=(Leave(attempt=state.attempt),),
        reason="every rank is done",
    )


def _drain_wanted(state: State, event: DrainWanted, *, now: float) -> Transition:
    before, stops = state.drain, event.purpose is Purpose.STOP
    state = replace(state, leaving_nodes=state.leaving_nodes | event.nodes)
    is_placed = not isinstance(state.phase, Placing)
    if event.nodes and is_placed and event.nodes.isdisjoint(state.nodes):
        return Transition(state=state, reason=f"{event.reason}, and hold no worker of this run")
    if before is not None and not stops:
        event = replace(before, ranks=before.ranks | event.ranks, nodes=before.nodes | event.nodes)
    state = replace(state, drain=event)
    match state.phase:
        case Placing() if stops:
            return concluded_stopped(state, event.reason)
        case Gathering() if stops:
            return ended_as_planned(state, reason=event.reason, now=now)
        case Training() if stops and not state.saves:
            reason = f"{event.reason}; no checkpoint was made, so none is waited for"
            return ended_as_planned(state, reason=reason, now=now)
        case Training() if before is None:
            told = Drain(attempt=state.attempt)
            return Transition(state=state, actions=(told,), reason=event.reason)
        case _:
            return Transition(state=state, reason=event.reason)


def _drained(state: State, rank: int, *, now: float) -> Transition:
    if not isinstance(state.phase, Training) or state.drain is None:
        return Transition(state=state)
    reason = f"rank {rank} has stopped after its checkpoint, {state.drain.purpose}"
    return ended_as_planned(state, reason=reason, now=now)
