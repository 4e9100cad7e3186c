"""The state machine under random faults: a simulated group of workers, driven by hypothesis.

The group keeps what a real one promises: what one rank says arrives in order, a killed worker's
exit is told once, an agent that is lost says nothing more, and who is to stop does so after its
next report. Everything else is left to chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sweeps import examples
from tests.unit.run.test_machine_drawing import WAYS

from polytrain.config.configs import FailureConfig
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import (
    AgentLost,
    AgentsPlaced,
    Died,
    Done,
    Drained,
    DrainWanted,
    Event,
    Exited,
    Failed,
    Joined,
    Offered,
    Purpose,
    Reported,
)
from polytrain.policy.failure import FailurePolicy
from polytrain.run.machine import begin, note, step
from polytrain.run.states import (
    AcquireWorkers,
    Action,
    Conclude,
    Concluded,
    EndAttempt,
    Launch,
    State,
)
from polytrain.workers.agents.calls import DrainAttempt, Kill, Leave, SendRoster
from polytrain_plugins import Offer, Stopped

STEPS = 2
FAULTS = ("kill", "exception", "agent")
DRAINS = {purpose.name: purpose for purpose in Purpose}
MOST = 4
"""Ranks that a group may have."""


class SimulatedWorker:
    """A worker whose life is a list of things to say; it waits where a real one would."""

    def __init__(self, rank: int, attempt: int) -> None:
        self.rank = rank
        self.attempt = attempt
        self.has_roster = False
        self.may_leave = False
        self.is_to_stop = False
        self._said = 0
        self._has_stopped = False
        found: dict[str, Any] = {"attempt": attempt, "rank": rank}
        self._life: list[Event | Reported] = [
            Offered(**found, offer=Offer(details={"of": [attempt, rank]})),
            Joined(**found),
            *(Reported(**found, step=n, metrics={}) for n in range(1, STEPS + 1)),
            Done(**found),
            Exited(**found, how="exited with code 0", killed=False),
        ]

    @property
    def is_ready(self) -> bool:
        """Whether it would go on now."""
        upcoming = self._life[self._said]
        if isinstance(upcoming, Joined):
            return self.has_roster
        return self.may_leave if isinstance(upcoming, Exited) else not self._has_stopped

    def next_event(self) -> Event | Reported:
        """Say the next thing."""
        if self.is_to_stop and isinstance(self._life[self._said - 1], Reported):
            self._has_stopped = True
            return Drained(attempt=self.attempt, rank=self.rank)
        self._said += 1
        return self._life[self._said - 1]


class SimulatedGroup:
    """Workers that do what the machine wants, and check that it may want it."""

    def __init__(self, world_size: int, max_failures: int, sizes: Sequence[int] = ()) -> None:
        """
        Args:
            world_size: ranks of the first attempt.
            max_failures: that are allowed.
            sizes: ranks that are found at every placement after the first; then the last of them.
        """
        self.world_size = world_size
        self.max_failures = max_failures
        self.free_restarts = 0
        """Attempts that nobody was charged for."""

        self.stops = 0
        self._sizes = deque((world_size, *sizes))
        self.lines: list[deque[Event | Reported]] = [deque() for _ in range(MOST)]
        """What each rank has said and nobody has heard yet."""

        self.placed: deque[Event | Reported] = deque()
        self.workers: dict[int, SimulatedWorker] = {}
        """Those that are alive, by rank."""

        self.agents = set[int]()
        self.launched: list[int] = []
        self.concluded: Conclude | None = None
        self.state = State(
            world_size=world_size,
            policy=FailurePolicy(config=FailureConfig(max_failures=max_failures)),
        )
        self._follow(begin(self.state))

    def choices(self) -> list[Callable[[], None]]:
        """Everything that may happen next, faults aside."""
        lines = [line for line in (self.placed, *self.lines) if line]
        heard = [lambda line=line: self.hear(line) for line in lines]
        ready = [worker for worker in self.workers.values() if worker.is_ready]
        return [*heard, *(lambda worker=worker: self.advance(worker) for worker in ready)]

    def hear(self, line: deque[Event | Reported]) -> None:
        """One event reaches the machine."""
        event = line.popleft()
        if isinstance(event, Reported):
            self.state = note(self.state, event) or self.state
        else:
            self._follow(step(self.state, event))

    def advance(self, worker: SimulatedWorker) -> None:
        """A worker does the next thing."""
        event = worker.next_event()
        if isinstance(event, Exited):
            del self.workers[worker.rank]
        self.lines[worker.rank].append(event)

    def want(self, drain: str, node: str) -> None:
        """Somebody wants the attempt to end."""
        purpose = DRAINS[drain]
        self.stops += purpose is Purpose.STOP
        nodes = frozenset({node} if purpose is Purpose.MOVE else ())
        stopped = Stopped(by="observer", reason=drain) if purpose is Purpose.STOP else None
        wanted = DrainWanted(purpose=purpose, reason=drain, nodes=nodes, stopped=stopped)
        self._follow(step(self.state, wanted))

    def strike(self, fault: str, rank: int) -> None:
        """Something goes wrong on a rank, if there is anything left of it."""
        worker = self.workers.get(rank)
        if fault == "agent" and rank in self.agents and not self.placed:
            self.agents.remove(rank)
            self.workers.pop(rank, None)
            self.lines[rank].append(AgentLost(rank=rank, reason="node died"))
        elif fault == "kill" and worker is not None:
            self._exit(worker, killed=False)
        elif fault == "exception" and worker is not None:
            failure = Failure(
                kind=FailureKind.USER_ERROR,
                rank=rank,
                # Never the same twice: that would rightly end the run at once.
                message=f"ValueError: {worker.attempt}",
            )
            self.lines[rank].append(Failed(attempt=worker.attempt, failure=failure))
            self._exit(worker, killed=False)

    def _exit(self, worker: SimulatedWorker, *, killed: bool) -> None:
        del self.workers[worker.rank]
        if not killed and worker.attempt % 2:
            # Its parts of checkpoints wait for others.
            self.lines[worker.rank].append(
                Died(attempt=worker.attempt, rank=worker.rank, how="is gone")
            )
        self.lines[worker.rank].append(
            Exited(attempt=worker.attempt, rank=worker.rank, how="is gone", killed=killed)
        )

    def _follow(self, transition: Any) -> None:
        before, after = (type(each.phase).__name__ for each in (self.state, transition.state))
        # With one worker, an event may begin and end the phase Ending.
        through_ending = {(before, "Ending"), ("Ending", after)} <= WAYS.keys()
        drawn = before == after or (before, after) in WAYS or through_ending
        assert drawn, f"ARCHITECTURE.md doesn't draw {before} → {after}"
        self.state = transition.state
        for action in transition.actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case AcquireWorkers(avoid=avoid):
                self._place(avoid)
            case EndAttempt(root=root):
                is_free = root is None or root.kind is FailureKind.PREEMPTED
                # A node that has joined the run couldn't begin.
                self.free_restarts += is_free or bool(self.state.attempts[-1].unfit)
            case DrainAttempt(attempt=attempt):
                for worker in self.workers.values():
                    assert worker.attempt == attempt
                    worker.is_to_stop = True
            case Launch(attempt=attempt):
                assert not self.workers, "a worker of an earlier attempt is alive"
                charged = len(self.launched) - self.free_restarts
                assert charged <= self.max_failures, "no failure was left"
                assert attempt == len(self.launched)
                self.launched.append(attempt)
                self.workers = {r: SimulatedWorker(r, attempt) for r in sorted(self.agents)}
            case SendRoster(attempt=attempt, offers=offers):
                messages = [offer.details["of"] for offer in offers]
                assert messages == [[attempt, rank] for rank in range(self.world_size)]
                for worker in self.workers.values():
                    worker.has_roster = True
            case Kill(attempt=attempt):
                for worker in list(self.workers.values()):
                    assert worker.attempt == attempt
                    self._exit(worker, killed=True)
            case Leave():
                for worker in self.workers.values():
                    worker.may_leave = True
            case Conclude():
                assert not self.workers, "the run is over and a worker is alive"
                assert self.concluded is None, "the run is over twice"
                self.concluded = action

    def _place(self, avoid: Mapping[str, float]) -> None:
        assert not self.workers, "a worker of an earlier attempt is alive"
        self.world_size = self._sizes.popleft() if len(self._sizes) > 1 else self._sizes[0]
        self.agents = set(range(self.world_size))
        for rank, line in enumerate(self.lines):
            # Who is lost while agents are placed is replaced by whoever places them.
            self.lines[rank] = deque(e for e in line if not isinstance(e, AgentLost))
        nodes = [f"node-{rank % 2}" for rank in range(self.world_size)]
        better = next((node for node in ("node-0", "node-1") if node not in avoid), None)
        nodes = [node if better is None or node not in avoid else better for node in nodes]
        self.placed.append(AgentsPlaced(nodes=tuple(nodes)))


moments = st.integers(0, 60)
faults = st.lists(st.tuples(moments, st.sampled_from(FAULTS), st.integers(0, MOST - 1)), max_size=8)
drains = st.lists(
    st.tuples(moments, st.sampled_from([*DRAINS]), st.sampled_from(["node-0", "node-1", "other"])),
    max_size=4,
)
sizes = st.integers(1, MOST)


@pytest.mark.sweep
@settings(max_examples=examples(500, in_test=200))
@given(
    world_size=sizes,
    later_sizes=st.lists(sizes, max_size=4),
    max_failures=st.integers(0, 3),
    faults=faults,
    drains=drains,
    data=st.data(),
)
def test_every_run_comes_to_an_end(
    world_size: int,
    later_sizes: list[int],
    max_failures: int,
    faults: list[tuple[int, str, int]],
    drains: list[tuple[int, str, str]],
    data: st.DataObject,
) -> None:
    """Whatever fails and is wanted whenever: the run concludes, and leaves nobody behind."""
    group = SimulatedGroup(world_size, max_failures, later_sizes)
    happened = 0
    while choices := group.choices():
        for when, fault, rank in faults:
            if when == happened:
                group.strike(fault, rank % group.world_size)
        for when, drain, node in drains:
            if when == happened:
                group.want(drain, node)
        choices = group.choices()
        if choices:
            choices[data.draw(st.integers(0, len(choices) - 1))]()
        happened += 1
    assert isinstance(group.state.phase, Concluded)
    assert group.concluded is not None
    succeeded, stopped = group.concluded.succeeded, group.concluded.stopped is not None
    assert not (succeeded and stopped)
    assert (succeeded or stopped) == (not group.concluded.failures)
    assert group.stops or not stopped
    if not any(when < happened for when, _, _ in faults):
        assert succeeded or stopped
        assert group.state.attempts == ()
        if not any(when < happened for when, _, _ in drains):
            assert group.launched == [0]


@given(world_size=st.integers(1, 4), killed=st.lists(st.integers(0, 3), max_size=3))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_survives_as_many_failures_as_it_may(
    fault: str, world_size: int, killed: list[int]
) -> None:
    """One fault in each of the first attempts: the one after them finishes."""
    group = SimulatedGroup(world_size, max_failures=len(killed))
    struck = 0
    while choices := group.choices():
        everybody_lives = len(group.workers) == world_size == len(group.agents)
        if everybody_lives and struck < len(killed) and group.launched == [*range(struck + 1)]:
            group.strike(fault, killed[struck] % world_size)
            struck += 1
        else:
            choices[0]()
    assert group.concluded is not None
    assert group.concluded.succeeded
    assert group.launched == list(range(len(killed) + 1))
