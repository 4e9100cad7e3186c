"""Where a run stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polytrain.errors import Failure
from polytrain.policy.failure import FailurePolicy
from polytrain_plugins import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Waiting for an agent for every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Trainers are starting; their offers come in."""

    offers: Mapping[int, Offer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Everybody has the roster and trains; some ranks may be done."""

    done: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Every rank is done. Only the loss of an unstored checkpoint can still fail the run."""

    gone: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Something failed. All trainers are being killed; until they are gone more may come up."""

    failures: tuple[Failure, ...]
    gone: frozenset[int] = frozenset()
    told_to_leave: bool = False
    """Whether every rank was done before: a trainer that ends by itself then does as told."""

    lost_agents: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Concluded:
    """The run is over."""

    succeeded: bool


Phase = Placing | Gathering | Training | Leaving | Ending | Concluded


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that the machine remembers."""

    world_size: int
    policy: FailurePolicy
    phase: Phase = field(default_factory=Placing)
    generation: int = 0
    """The generation that lives, or the next one to be launched while there is none."""

    roots: tuple[Failure, ...] = ()
    """Root cause of every failed attempt, the oldest first."""

    launches: int = 0
    """Generations that were launched."""

    steps: Mapping[int, int] = field(default_factory=dict)
    """Last step that each rank of this generation has reported."""

    @property
    def restarts(self) -> int:
        """Generations that were launched after a failure."""
        return max(0, self.launches - 1)
