"""A state machine in a test's hands, and the events that it is fed."""

from __future__ import annotations

from polytrain.checkpoint.parts import CheckpointEvent
from polytrain.config.configs import FailureConfig
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import (
    AgentsPlaced,
    Done,
    Event,
    Exited,
    Failed,
    Joined,
    Offered,
    Reported,
)
from polytrain.policy.failure import FailurePolicy
from polytrain.run.machine import begin, note, step
from polytrain.run.states import Action, Conclude, State
from polytrain_plugins import Offer


class Play:
    """A machine that is fed events and remembers what it asked for."""

    def __init__(
        self, world_size: int, *, max_failures: int = 0, node_cooldown_s: float = 0.0
    ) -> None:
        config = FailureConfig(max_failures=max_failures, node_cooldown_s=node_cooldown_s)
        first = begin(State(world_size=world_size, policy=FailurePolicy(config=config)))
        self.state = first.state
        self.now = 0.0
        self.actions: list[Action] = list(first.actions)
        self.latest: tuple[Action, ...] = first.actions
        self.reason = first.reason
        self.phases = [type(self.state.phase).__name__]
        """The phases so far, each time that they changed."""

    def tell(self, *events: Event | Reported | CheckpointEvent) -> Play:
        """Feed the events; `latest` holds the actions that the last of them led to."""
        for event in events:
            if isinstance(event, Reported | CheckpointEvent):
                self.state = note(self.state, event) or self.state
                self.latest, self.reason = (), ""
                continue
            transition = step(self.state, event, now=self.now)
            self.state, self.latest = transition.state, transition.actions
            self.reason = transition.reason
            self.actions += transition.actions
            phase = type(self.state.phase).__name__
            if phase != self.phases[-1]:
                self.phases.append(phase)
        return self

    def launched(self) -> Play:
        """Every agent is there and the trainers have been forked."""
        return self.tell(placed(self.state.world_size))

    def training(self) -> Play:
        """Every rank of the living attempt has offered and joined."""
        ranks = range(self.state.world_size)
        attempt = self.state.attempt
        self.tell(*(offered(rank, attempt) for rank in ranks))
        return self.tell(*(Joined(attempt=attempt, rank=rank) for rank in ranks))

    def leaving(self) -> Play:
        """Every rank of the living attempt is done."""
        attempt = self.state.attempt
        ranks = range(self.state.world_size)
        return self.tell(*(Done(attempt=attempt, rank=rank) for rank in ranks))

    def conclusion(self) -> Conclude:
        """How the run ended."""
        [conclude] = [action for action in self.actions if isinstance(action, Conclude)]
        return conclude


def placed(world_size: int, *, per_node: int = 2) -> AgentsPlaced:
    """Agents for so many ranks, two on each node."""
    return AgentsPlaced(nodes=tuple(f"node-{rank // per_node}" for rank in range(world_size)))


def offered(rank: int, attempt: int = 0) -> Offered:
    return Offered(attempt=attempt, rank=rank, offer=Offer(host="host", port=1000 + rank))


def exited(rank: int, attempt: int = 0, *, killed: bool, how: str = "killed by SIGKILL") -> Exited:
    return Exited(attempt=attempt, rank=rank, how=how, killed=killed)


def raised(rank: int, message: str = "ValueError: no", attempt: int = 0) -> Failed:
    failure = Failure(kind=FailureKind.USER_ERROR, rank=rank, message=message)
    return Failed(attempt=attempt, failure=failure)


def storage_failure(rank: int | None, attempt: int = 0) -> Failed:
    failure = Failure(kind=FailureKind.STORAGE, rank=rank, message="OSError: disk full")
    return Failed(attempt=attempt, failure=failure)


def reported(rank: int, step: int, attempt: int = 0) -> Reported:
    return Reported(attempt=attempt, rank=rank, step=step, metrics={"loss": 1.0})
