"""The state machine under random faults: a simulated group of workers, driven by hypothesis.

The group keeps what a real one promises: what one rank says arrives in order, a killed trainer's
exit is told once, an agent that is lost says nothing more. Everything else is left to chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytrain.errors import Failure, FailureKind
from polytrain.policy.failure import FailurePolicy
from polytrain.run.actions import Action, Conclude, Kill, Launch, Leave, Place, SendRoster
from polytrain.run.events import (
    AgentLost,
    AgentsPlaced,
    Done,
    Event,
    Exited,
    Failed,
    Joined,
    Offered,
    Reported,
)
from polytrain.run.machine import begin, step
from polytrain.run.states import Concluded, State
from polytrain_plugins import Offer

STEPS = 2
FAULTS = ("kill", "exception", "agent")


class SimulatedTrainer:
    """A trainer whose life is a list of things to say; it waits where a real one would."""

    def __init__(self, rank: int, generation: int) -> None:
        self.rank = rank
        self.generation = generation
        self.has_roster = False
        self.may_leave = False
        self._said = 0
        told: dict[str, Any] = {"generation": generation, "rank": rank}
        self._life: list[Event] = [
            Offered(**told, offer=Offer(details={"of": [generation, rank]})),
            Joined(**told),
            *(Reported(**told, step=n, metrics={}) for n in range(1, STEPS + 1)),
            Done(**told),
            Exited(**told, how="exited with code 0", killed=False),
        ]

    @property
    def is_ready(self) -> bool:
        """Whether it would go on now."""
        upcoming = self._life[self._said]
        if isinstance(upcoming, Joined):
            return self.has_roster
        return self.may_leave if isinstance(upcoming, Exited) else True

    def go_on(self) -> Event:
        """Say the next thing."""
        self._said += 1
        return self._life[self._said - 1]


class SimulatedGroup:
    """Workers that do what the machine wants, and check that it may want it."""

    def __init__(self, world_size: int, max_failures: int) -> None:
        self.world_size = world_size
        self.max_failures = max_failures
        self.lines: list[deque[Event]] = [deque() for _ in range(world_size)]
        """What each rank has said and nobody has heard yet."""

        self.placed: deque[Event] = deque()
        self.trainers: dict[int, SimulatedTrainer] = {}
        """Those that are alive, by rank."""

        self.agents = set[int]()
        self.launched: list[int] = []
        self.concluded: Conclude | None = None
        self.state = State(world_size=world_size, policy=FailurePolicy(max_failures=max_failures))
        self._follow(begin(self.state))

    def choices(self) -> list[Callable[[], None]]:
        """Everything that may happen next, faults aside."""
        lines = [line for line in (self.placed, *self.lines) if line]
        heard = [lambda line=line: self.hear(line) for line in lines]
        ready = [trainer for trainer in self.trainers.values() if trainer.is_ready]
        return [*heard, *(lambda trainer=trainer: self.advance(trainer) for trainer in ready)]

    def hear(self, line: deque[Event]) -> None:
        """One event reaches the machine."""
        self._follow(step(self.state, line.popleft()))

    def advance(self, trainer: SimulatedTrainer) -> None:
        """A trainer does the next thing."""
        event = trainer.go_on()
        if isinstance(event, Exited):
            del self.trainers[trainer.rank]
        self.lines[trainer.rank].append(event)

    def strike(self, fault: str, rank: int) -> None:
        """Something goes wrong on a rank, if there is anything left of it."""
        trainer = self.trainers.get(rank)
        if fault == "agent" and rank in self.agents and not self.placed:
            self.agents.remove(rank)
            self.trainers.pop(rank, None)
            self.lines[rank].append(AgentLost(rank=rank, reason="node died"))
        elif fault == "kill" and trainer is not None:
            self._exit(trainer, killed=False)
        elif fault == "exception" and trainer is not None:
            failure = Failure(
                kind=FailureKind.USER_ERROR,
                rank=rank,
                # Never the same twice: that would rightly end the run at once.
                message=f"ValueError: {trainer.generation}",
            )
            self.lines[rank].append(Failed(generation=trainer.generation, failure=failure))
            self._exit(trainer, killed=False)

    def _exit(self, trainer: SimulatedTrainer, *, killed: bool) -> None:
        del self.trainers[trainer.rank]
        self.lines[trainer.rank].append(
            Exited(generation=trainer.generation, rank=trainer.rank, how="is gone", killed=killed)
        )

    def _follow(self, transition: Any) -> None:
        self.state = transition.state
        for action in transition.actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Place():
                self.agents = set(range(self.world_size))
                self.placed.append(AgentsPlaced(nodes=("node",) * self.world_size))
            case Launch(generation=generation):
                assert not self.trainers, "a trainer of the generation before is alive"
                assert len(self.launched) <= self.max_failures, "no failure was left"
                assert generation == len(self.launched)
                self.launched.append(generation)
                self.trainers = {r: SimulatedTrainer(r, generation) for r in sorted(self.agents)}
            case SendRoster(generation=generation, offers=offers):
                told = [offer.details["of"] for offer in offers]
                assert told == [[generation, rank] for rank in range(self.world_size)]
                for trainer in self.trainers.values():
                    trainer.has_roster = True
            case Kill(generation=generation):
                for trainer in list(self.trainers.values()):
                    assert trainer.generation == generation
                    self._exit(trainer, killed=True)
            case Leave():
                for trainer in self.trainers.values():
                    trainer.may_leave = True
            case Conclude():
                assert not self.trainers, "the run is over and a trainer is alive"
                self.concluded = action


faults = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(FAULTS), st.integers(0, 3)), max_size=8
)


@settings(max_examples=300)
@given(world_size=st.integers(1, 4), max_failures=st.integers(0, 3), faults=faults, data=st.data())
def test_every_run_comes_to_an_end(
    world_size: int, max_failures: int, faults: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    """Whatever fails whenever: the run concludes, within its budget, and leaves nobody behind."""
    group = SimulatedGroup(world_size, max_failures)
    happened = 0
    while choices := group.choices():
        for when, fault, rank in faults:
            if when == happened:
                group.strike(fault, rank % world_size)
        choices = group.choices()
        if choices:
            choices[data.draw(st.integers(0, len(choices) - 1))]()
        happened += 1
    assert isinstance(group.state.phase, Concluded)
    assert group.concluded is not None
    assert group.concluded.succeeded == (not group.concluded.failures)
    if not any(when < happened for when, _, _ in faults):
        assert group.concluded.succeeded
        assert group.launched == [0]


@given(world_size=st.integers(1, 4), killed=st.lists(st.integers(0, 3), max_size=3))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_survives_as_many_failures_as_it_may(
    fault: str, world_size: int, killed: list[int]
) -> None:
    """One fault in each of the first generations: the one after them finishes."""
    group = SimulatedGroup(world_size, max_failures=len(killed))
    struck = 0
    while choices := group.choices():
        everybody_lives = len(group.trainers) == world_size == len(group.agents)
        if everybody_lives and struck < len(killed) and group.launched == [*range(struck + 1)]:
            group.strike(fault, killed[struck] % world_size)
            struck += 1
        else:
            choices[0]()
    assert group.concluded is not None
    assert group.concluded.succeeded
    assert group.launched == list(range(len(killed) + 1))
