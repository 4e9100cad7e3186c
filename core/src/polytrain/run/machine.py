"""The state machine of a run: an event in, the next state and its actions out.

Its phases are Placing, Gathering, Training, Leaving, Ending and Concluded; ARCHITECTURE.md has a
table of the transitions.

Pure: no clock, no Ray, no process. Any failure ends the attempt. Once all its processes are gone
the cause is known, the failure policy decides, and the next attempt is launched. Before a planned
end, to resize, move or stop, the attempt makes a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rpds import HashTrieMap

from polytrain.checkpoint.parts import (
    CheckpointEvent,
    Committed,
    PartStaged,
    PartStored,
    PartVoid,
)
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import (
    AgentLost,
    AgentsPlaced,
    ConditionMet,
    Died,
    Diverged,
    Done,
    Drained,
    DrainWanted,
    Event,
    Exited,
    Failed,
    Joined,
    OfEnd,
    Offered,
    PlacementFailed,
    Purpose,
    Reported,
    SavesOnRequest,
    stop_wanted,
)
from polytrain.events.notices import PreemptionInfo, earliest
from polytrain.policy.failed_attempts import (
    NOT_JOINED,
    are_too_many,
    failed_attempt,
    is_crash,
    unfit_nodes,
)
from polytrain.policy.placement import Loss, avoided
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
    State,
    Training,
    Transition,
)
from polytrain.text.described import numbered
from polytrain.workers.agents.calls import DrainAttempt, Kill, Leave, SendRoster

# After the last rank is done, only failures that could lose the final checkpoint count.
_LOSES_A_CHECKPOINT = (
    FailureKind.STORAGE,
    FailureKind.CHECKPOINT_MISMATCH,
    FailureKind.LEASE_LOST,
)

# These count even at a planned end.
_ENDS_THE_PLAN = (FailureKind.STORAGE, FailureKind.LEASE_LOST)

# A node that leaves ends at most as many attempts: one with its processes, one with its agents.
_PREEMPTIONS_OF_A_NODE = 2

# Failures that a node may have caused.
_OF_A_NODE = (
    FailureKind.WORKER_LOST,
    FailureKind.AGENT_LOST,
    FailureKind.NODE_LOST,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.HANG,
    FailureKind.REPLICAS_DIFFER,
)


def begin(state: State) -> Transition:
    """Return the first transition of a run."""
    return Transition(
        state=state,
        actions=(AcquireWorkers(),),
        reason=f"placing {numbered(state.world_size, 'worker')}",
    )


def step(state: State, event: Event, *, now: float = 0.0) -> Transition:
    """Return the transition for one event.

    Args:
        now: seconds on a monotonic clock.
    """
    if isinstance(state.phase, Concluded) or _is_stale(state, event):
        return Transition(state=state)
    match event:
        case AgentsPlaced(nodes=nodes):
            # Keep the drain if a node that now has workers was announced as draining meanwhile.
            drain = state.drain
            is_late = drain is not None and not drain.nodes.isdisjoint(nodes)
            placed = replace(
                state, world_size=len(nodes), nodes=nodes, drain=drain if is_late else None
            )
            return _launched(placed, reason=f"agents for {numbered(len(nodes), 'rank')}", now=now)
        case PlacementFailed():
            failure = Failure(kind=FailureKind.STARTUP, rank=None, message=event.reason)
            return _concluded_failed(state, (failure,), "workers can't be placed")
        case Offered():
            return _offered(state, event)
        case Joined(rank=rank):
            steps = state.steps
            if rank not in steps:
                steps = steps.insert(rank, state.committed)
            joined_at = now if len(steps) == state.world_size else math.inf
            state = replace(state, steps=steps, joined_at=joined_at)
            return Transition(state=state, reason=f"rank {rank} joined")
        case SavesOnRequest():
            return Transition(state=replace(state, saves=True))
        case ConditionMet():
            return _condition_met(state, event, now=now)
        case Done():
            return _done(state, event.rank)
        case DrainWanted():
            return _drain_wanted(state, event, now=now)
        case Drained(rank=rank):
            return _drained(state, rank, now=now)
        case Diverged():
            return _diverged(state, event, now=now)
        case Failed(failure=failure):
            return _failed(state, failure, now=now)
        case Died():
            return _died(state, event, now=now)
        case Exited():
            return _exited(state, event, now=now)
        case AgentLost():
            return _agent_lost(state, event, now=now)


def note(state: State, event: Reported | CheckpointEvent) -> State | None:
    """Return the state after an event that needs no decision; None if the event is stale."""
    if isinstance(state.phase, Concluded):
        return None
    match event:
        case Reported(attempt=attempt) | PartStaged(attempt=attempt) if _is_over(state, attempt):
            return None
        case Reported(rank=rank, step=reached, has_checkpoint=has_checkpoint):
            return replace(
                state,
                steps=state.steps.insert(rank, reached),
                has_reported=True,
                # Its part comes with it, but after a condition that it may meet.
                saves=state.saves or has_checkpoint,
            )
        case PartStaged():
            return replace(state, saves=True)
        case Committed(manifest=manifest):
            if _has_diverged_before(state, manifest.step):
                return state
            progress = state.progress if manifest.is_left else manifest.step
            return replace(state, committed=manifest.step, progress=progress)
        case PartStored() | PartVoid():
            # These always count: the agent outlives its worker process.
            return state


def taken_back(state: State, *, committed: int, progress: int) -> State:
    """Return the state after a commit may have been taken back.

    Args:
        committed: step of the newest checkpoint that is left.
        progress: step of the newest one of these that was reported.
    """
    if state.progress <= committed:
        # Retention may have deleted the checkpoint of the progress.
        progress = state.progress
    return replace(state, committed=min(state.committed, committed), progress=progress)


def _has_diverged_before(state: State, step: int) -> bool:
    """Return whether a rank has found that the attempt had diverged before or at a step."""
    diverged = state.phase.diverged if isinstance(state.phase, Ending) else None
    return diverged is not None and step > diverged.found.good_step


def _is_stale(state: State, event: Event) -> bool:
    attempt = getattr(event, "attempt", None)
    return attempt is not None and _is_over(state, attempt)


def _is_over(state: State, attempt: int) -> bool:
    """Return whether an attempt's events are ignored because it has ended or not started."""
    return attempt != state.attempt or isinstance(state.phase, Placing)


def _launched(state: State, *, reason: str, now: float) -> Transition:
    """Launch the next attempt."""
    return Transition(
        state=replace(
            state,
            phase=Gathering(),
            launches=state.launches + 1,
            launched_at=now,
            joined_at=math.inf,
            steps=HashTrieMap(),
            has_reported=False,
        ),
        actions=(Launch(attempt=state.attempt),),
        reason=reason,
    )


def _offered(state: State, event: Offered) -> Transition:
    if not isinstance(state.phase, Gathering):
        return Transition(state=state)
    offers = state.phase.offers.insert(event.rank, event.offer)
    if len(offers) < state.world_size:
        return Transition(state=replace(state, phase=Gathering(offers=offers)))
    roster = tuple(offers[rank] for rank in range(state.world_size))
    drain = () if state.drain is None else (_drain_attempt(state, state.drain),)
    return Transition(
        state=replace(state, phase=Training()),
        actions=(SendRoster(attempt=state.attempt, offers=roster), *drain),
        reason="every rank has made its offer",
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
    was_known = bool(event.nodes) and event.nodes <= state.leaving_nodes
    state = replace(state, leaving_nodes=state.leaving_nodes | event.nodes)
    is_placed = not isinstance(state.phase, Placing)
    if event.nodes and is_placed and event.nodes.isdisjoint(state.nodes):
        return Transition(state=state, reason=f"{event.reason}; no worker of this run is there")
    if before is None and was_known and is_placed:
        known = "as was known when its workers were placed there"
        return Transition(state=state, reason=f"{event.reason}, {known}")
    if before is not None and stops and before.purpose is Purpose.STOP:
        if not event.until_step:
            state = replace(state, drain=replace(before, otherwise=event.stopped))
        return Transition(state=state, reason=f"{event.reason}, as is requested already")
    if before is not None and not stops:
        names_nodes = bool(event.nodes) and before.purpose is not Purpose.STOP
        event = replace(
            event if names_nodes else before,
            ranks=before.ranks | event.ranks,
            nodes=before.nodes | event.nodes,
            deadline_ms=earliest([before.deadline_ms, event.deadline_ms]),
        )
    # After a condition is met, ranks other than 0 have to continue.
    may_repeat = before is not None and before.purpose is not Purpose.STOP
    is_news = before is None or (
        may_repeat
        and (
            _hurries(event)
            or not event.nodes <= before.nodes
            or (not stops and event.deadline_ms != before.deadline_ms)
        )
    )
    state = replace(state, drain=event)
    match state.phase:
        case Placing() if stops:
            return _concluded_stopped(state, event)
        case Gathering() if stops:
            return _ended_as_planned(state, reason=event.reason, now=now)
        case Training() if stops and not state.saves:
            reason = f"{event.reason}; no checkpoint was made, so none is waited for"
            return _ended_as_planned(state, reason=reason, now=now)
        case Training() if is_news:
            drain = _drain_attempt(state, event)
            return Transition(state=state, actions=(drain,), reason=event.reason)
        case _:
            return Transition(state=state, reason=event.reason)


def _drain_attempt(state: State, drain: DrainWanted) -> DrainAttempt:
    ranks: dict[str, list[int]] = {
        node: [] for node in sorted(drain.nodes.intersection(state.nodes))
    }
    for rank, node in enumerate(state.nodes):
        if node in ranks:
            ranks[node].append(rank)
    preemption = PreemptionInfo(deadline_ms=drain.deadline_ms, preempted_node_to_ranks=ranks)
    return DrainAttempt(
        attempt=state.attempt,
        preemption=preemption if ranks else None,
        ends_run=_hurries(drain),
    )


def _hurries(drain: DrainWanted) -> bool:
    """Return whether somebody waits for the end: who plans a stop wants its checkpoint first."""
    return drain.stopped is not None and drain.stopped.by == "signal"


def _condition_met(state: State, event: ConditionMet, *, now: float) -> Transition:
    wanted = stop_wanted(event.stopped, until_step=event.stopped.step or 0)
    transition = _drain_wanted(state, wanted, now=now)
    # Rank 0 stops by itself. The others have to continue: its checkpoint may need their parts.
    actions = tuple(each for each in transition.actions if not isinstance(each, DrainAttempt))
    return replace(transition, actions=actions)


def _drained(state: State, rank: int, *, now: float) -> Transition:
    if not isinstance(state.phase, Training) or state.drain is None:
        return Transition(state=state)
    drain = state.drain
    reason = f"rank {rank} has stopped after its checkpoint, {drain.purpose}"
    if rank != 0 and state.committed < drain.until_step:
        # It was asked before rank 0 met a condition, which the next attempt meets again.
        if drain.otherwise is not None:
            drain = stop_wanted(drain.otherwise)
        else:
            met_at = f"step {drain.until_step}, at which a condition is met"
            reason = f"rank {rank} has stopped before {met_at}: the next attempt meets it"
            drain = replace(drain, purpose=Purpose.MOVE, reason=reason, stopped=None, until_step=0)
    state = replace(state, drain=drain)
    return _ended_as_planned(state, reason=reason, now=now)


def _failed(state: State, failure: Failure, *, now: float, loses_agent: bool = False) -> Transition:
    """Handle a failure: the attempt ends, if it isn't ending already.

    Args:
        now: seconds on a monotonic clock.
        loses_agent: whether an agent is lost, with the parts that it was storing.
    """
    failure = _placed_in_time(state, failure)
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


def _diverged(state: State, event: Diverged, *, now: float) -> Transition:
    """End the attempt, or add the divergence to it: several ranks may have found one."""
    # Checkpoints of this attempt that were made after the last good report don't count.
    good = event.found.good_step
    state = replace(state, committed=min(state.committed, good), progress=min(state.progress, good))
    transition = _failed(state, event.failure, now=now)
    ending = transition.state.phase
    if not isinstance(ending, Ending):
        return transition
    known = ending.diverged
    if known is None or event.found.good_step < known.found.good_step:
        ending = replace(ending, diverged=event)
    return replace(transition, state=replace(transition.state, phase=ending))


def _ended_as_planned(state: State, *, reason: str, now: float) -> Transition:
    """End the attempt as planned."""
    return _end(state, Ending(), reason=reason, now=now)


def _exited(state: State, event: Exited, *, now: float) -> Transition:
    """Handle the end of a worker process."""
    if isinstance(state.phase, Leaving):
        return _gone_while_leaving(state, event.rank)
    transition = Transition(state=state) if event.killed else _died(state, event, now=now)
    return _gone_while_ending(transition, event.rank, now=now)


def _died(state: State, event: OfEnd, *, now: float) -> Transition:
    """Handle that a worker process has ended by itself."""
    ending = state.phase if isinstance(state.phase, Ending) else None
    explained = ending is not None and (
        ending.was_dismissed or ending.is_planned or event.rank in ending.failed
    )
    if explained or isinstance(state.phase, Leaving):
        return Transition(state=state)
    return _failed(state, _of_exit(state, event), now=now)


def _agent_lost(state: State, event: AgentLost, *, now: float) -> Transition:
    """Handle the loss of an agent, and so of its worker process."""
    if isinstance(state.phase, Leaving) and event.rank in state.phase.gone:
        return Transition(state=state)
    if isinstance(state.phase, Placing):
        # The pool replaces this agent while it places the others.
        return Transition(state=state, reason=f"rank {event.rank}: {event.reason}")
    kind = FailureKind.PREEMPTED if _is_preempted(state, event.rank) else event.kind
    failure = Failure(kind=kind, rank=event.rank, message=event.reason)
    transition = _failed(state, failure, now=now, loses_agent=True)
    ending = transition.state.phase
    if isinstance(ending, Ending):
        ending = replace(ending, lost_agents=ending.lost_agents.insert(event.rank))
        transition = replace(transition, state=replace(transition.state, phase=ending))
    return _gone_while_ending(transition, event.rank, now=now)


def _is_preempted(state: State, rank: int) -> bool:
    """Return whether a rank's end is taken for its node's leaving.

    A node that was to leave may stay, and its workers if no other node holds them. What ends them
    again and again must not restart the run for ever.
    """
    leaving = state.leaving_nodes.intersection(state.nodes[rank : rank + 1])
    ended = [
        attempt
        for attempt in state.attempts
        if attempt.root.kind is FailureKind.PREEMPTED and leaving <= attempt.nodes
    ]
    return bool(leaving) and len(ended) < _PREEMPTIONS_OF_A_NODE


def _concluded_failed(state: State, failures: tuple[Failure, ...], reason: str) -> Transition:
    """Conclude the run as failed."""
    return Transition(
        state=replace(state, phase=Concluded(succeeded=False)),
        actions=(Conclude(succeeded=False, reason=reason, failures=failures),),
        reason=reason,
    )


def _concluded_stopped(state: State, drain: DrainWanted) -> Transition:
    """Conclude this driver's work after a requested stop."""
    finishes = drain.stopped is not None and drain.stopped.is_final
    return Transition(
        state=replace(state, phase=Concluded(succeeded=finishes)),
        actions=(Conclude(succeeded=finishes, stopped=drain.stopped, reason=drain.reason),),
        reason=drain.reason,
    )


def _end(state: State, ending: Ending, *, reason: str, now: float) -> Transition:
    ending = replace(ending, lasted_s=now - state.launched_at)
    return Transition(
        state=replace(state, phase=ending),
        actions=(Kill(attempt=state.attempt),),
        reason=reason,
    )


def _placed_in_time(state: State, failure: Failure) -> Failure:
    """Mark a failure of a rank that hasn't joined as a failure to start."""
    if failure.kind is FailureKind.HANG and failure.rank is None:
        return replace(failure, step=max(state.steps.values(), default=0))
    if failure.rank is None:
        return failure
    has_joined = failure.rank in state.steps
    if failure.kind is FailureKind.USER_ERROR and not has_joined:
        message = f"{NOT_JOINED}{failure.message}"
        return replace(failure, kind=FailureKind.STARTUP, message=message)
    return replace(failure, step=state.steps.get(failure.rank, 0))


def _of_exit(state: State, event: OfEnd) -> Failure:
    kind, how = FailureKind.WORKER_LOST, event.how
    if event.out_of_memory:
        kind, how = FailureKind.OUT_OF_MEMORY, "ended by the kernel, which was out of memory,"
    elif _is_preempted(state, event.rank) and not is_crash(how):
        # The node's processes end in any order: its agent may be lost later.
        kind = FailureKind.PREEMPTED
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
    """Note that a rank's process is gone; decide the next phase once all are."""
    state = transition.state
    if not isinstance(state.phase, Ending):
        return transition
    ending = replace(state.phase, gone=state.phase.gone.insert(rank))
    state = replace(state, phase=ending)
    if len(ending.gone) < state.world_size:
        return replace(transition, state=state)
    if ending.is_planned and ending.diverged is not None:
        # It was found while the attempt ended: what the plan was about is of no use any more.
        ending = ending.also(ending.diverged.failure)
    if state.has_reported:
        state = replace(state, trained_on=state.trained_on.union(state.nodes))
    after = (
        _after_planned_end(state, now) if ending.is_planned else _after_failure(state, ending, now)
    )
    return Transition(
        state=after.state,
        actions=(*transition.actions, *after.actions),
        reason="; ".join(part for part in (transition.reason, after.reason) if part),
    )


def _after_failure(state: State, ending: Ending, now: float) -> Transition:
    """Decide the next phase after a failure."""
    failures = tuple(ending.failures)
    failure_of_attempt = replace(
        failed_attempt(failures, world_size=state.world_size, nodes=state.nodes),
        has_reported=state.has_reported,
        lasted_s=ending.lasted_s,
        progress=state.progress,
        rescued=state.rescued,
        diverged=ending.diverged,
    )
    root = failure_of_attempt.root
    unfit = unfit_nodes(
        failure_of_attempt,
        failures,
        nodes=state.nodes,
        trained_on=state.trained_on,
        left={loss.node for loss in state.losses if loss.is_last},
        trained_s=state.launched_at + ending.lasted_s - state.joined_at,
    )
    if not are_too_many(state.attempts):
        failure_of_attempt = replace(failure_of_attempt, unfit=unfit)
    attempts = (*state.attempts, failure_of_attempt)
    losses = state.losses
    if unfit:
        losses = (*losses, *(Loss(node=node, at=now, is_last=True) for node in sorted(unfit)))
    elif root.kind in _OF_A_NODE and root.rank is not None and state.nodes:
        is_last = root.kind is FailureKind.REPLICAS_DIFFER
        losses = (*losses, Loss(node=state.nodes[root.rank], at=now, is_last=is_last))
    state = replace(state, attempts=attempts, losses=losses)
    others = tuple(failure for failure in failures if failure is not root)
    ended = EndAttempt(attempt=state.attempt, root=root, reason="", failures=(root, *others))
    if state.drain is not None and state.drain.purpose is Purpose.STOP:
        good_step = math.inf if ending.diverged is None else ending.diverged.found.good_step
        for drain in _stops(state.drain):
            stopped = drain.stopped
            # What has diverged is no end of a run, whatever condition it has met.
            is_void = stopped is not None and stopped.is_final and (stopped.step or 0) > good_step
            if state.committed >= drain.until_step and not is_void:
                # The driver that resumes the run, if it is resumed, applies the failure policy.
                return _stopped(replace(state, drain=drain), drain, ended)
        # The run's last checkpoint is lost, or bad: the next attempt makes it.
        state = replace(state, drain=None)
    decision = state.policy.decide(attempts)
    ended = replace(ended, reason=decision.reason)
    if not decision.restart:
        # Errors of a lost process's peers don't show the cause.
        shown = (root,) if root.kind.is_loss else (root, *others)
        concluded = _concluded_failed(state, shown, decision.reason)
        return replace(concluded, actions=(ended, *concluded.actions))
    avoid = _nodes_to_avoid(state, now)
    if (
        decision.pause_s
        or ending.lost_agents
        or state.drain is not None
        or not avoid.keys().isdisjoint(state.nodes)
    ):
        return _placed_anew(state, ended, avoid, pause_s=decision.pause_s)
    state = replace(state, attempt=state.attempt + 1)
    after = _launched(state, reason=decision.reason, now=now)
    return replace(after, actions=(ended, *after.actions))


def _after_planned_end(state: State, now: float) -> Transition:
    """Decide the next phase after a planned end."""
    drain = state.drain
    assert drain is not None
    if drain.purpose is Purpose.STOP:
        return _stopped(state, drain, EndAttempt(attempt=state.attempt, root=None, reason=""))
    ended = EndAttempt(attempt=state.attempt, root=None, reason=drain.reason)
    return _placed_anew(state, ended, _nodes_to_avoid(state, now))


def _stops(drain: DrainWanted) -> Iterator[DrainWanted]:
    """Yield a request to stop, and the later one that counts if its checkpoint is lost."""
    yield drain
    if drain.otherwise is not None:
        yield stop_wanted(drain.otherwise)


def _stopped(state: State, drain: DrainWanted, ended: EndAttempt) -> Transition:
    stopped = _concluded_stopped(state, drain)
    return replace(stopped, actions=(replace(ended, reason=drain.reason), *stopped.actions))


def _placed_anew(
    state: State, ended: EndAttempt, avoid: Mapping[str, float], *, pause_s: float = 0.0
) -> Transition:
    """Acquire agents for the next attempt."""
    without = frozenset[int]() if state.drain is None else state.drain.ranks
    return Transition(
        state=replace(state, attempt=state.attempt + 1, phase=Placing(), drain=None),
        actions=(ended, AcquireWorkers(avoid=avoid, without=without, pause_s=pause_s)),
        reason=ended.reason,
    )


def _nodes_to_avoid(state: State, now: float) -> dict[str, float]:
    cooldown_s = state.policy.config.node_cooldown_s
    leaving = dict.fromkeys(state.leaving_nodes, math.inf)
    return avoided(state.losses, cooldown_s=cooldown_s, now=now) | leaving
