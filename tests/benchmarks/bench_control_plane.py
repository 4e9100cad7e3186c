"""What an event costs the state machine of a run, and how that grows with the number of workers.

A whole run, without Ray and processes: all ranks offer, join and report, one is lost, its peers
raise and are killed, and the next attempt does the same and finishes. The machine answers every
event with a state and actions, which nobody carries out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller

from harness import OURS, Bound, Figure, conclude, durations, event_rates, parse, take_turns

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
from polytrain.run.states import Concluded, State
from polytrain_plugins import Offer

_WORLD_SIZES = (10, 100, 1_000, 10_000)
_STEPS = 5
_EVENTS = 200_000
_OF_A_LOSS = ("lost", "raised", "killed")
"""What is told from the death of a rank to the launch of the next attempt."""

_ONCE = ("placed", "lost")
"""Told of the run, not by every rank."""

_OF_TEN = f"{_WORLD_SIZES[0]} workers"
# Looking a rank up is logarithmic, and ten thousand of them are more than the caches hold.
_HARDLY_MORE = Bound(factor=1.5, of=_OF_TEN)


@dataclass(slots=True)
class Costs:
    """Seconds and events by the kind of event."""

    seconds: dict[str, float] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    runs: int = 0

    def add(self, kind: str, seconds: float, events: int) -> None:
        """Count what so many events of one kind have taken."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
        self.events[kind] = self.events.get(kind, 0) + events

    def of(self, kind: str) -> float:
        """Seconds of one event of that kind."""
        return self.seconds[kind] / self.events[kind]

    def in_a_run(self, kind: str) -> float:
        """Seconds of all events of that kind in one run."""
        return self.seconds[kind] / self.runs

    @property
    def of_all(self) -> float:
        """Seconds of one event."""
        return sum(self.seconds.values()) / sum(self.events.values())


def simulate(world_size: int, events: int) -> Costs:
    """Simulate runs, as many as it takes to have that many events."""
    costs = Costs()
    while sum(costs.events.values()) < events:
        _run(world_size, costs)
    return costs


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__.splitlines()[0], repetitions=5)
    events = 1 if options.quick else _EVENTS
    taken = take_turns(
        {
            f"{size:,} workers": partial(simulate, size, events)
            for size in (_WORLD_SIZES[:3] if options.quick else _WORLD_SIZES)
        },
        repetitions=options.repetitions,
        what="events",
    )
    figures = [
        *_figures(taken, "an event", lambda costs: costs.of_all, bound=not options.quick),
        *_figures(taken, "events", lambda costs: 1 / costs.of_all, show=event_rates),
        *_figures(taken, "a loss", lambda costs: sum(map(costs.in_a_run, _OF_A_LOSS))),
    ]
    most = list(taken)[-1]
    for kind in taken[most][0].events:
        if kind not in _ONCE:
            ends = {name: taken[name] for name in (_OF_TEN, most)}
            figures += _figures(ends, kind, methodcaller("of", kind))[1:]
    return conclude(f"The state machine alone, {_STEPS} reports of every rank", figures)


def _figures(
    taken: Mapping[str, list[Costs]],
    what: str,
    take: Callable[[Costs], float],
    *,
    show: Callable[..., str] = durations,
    bound: bool = False,
) -> list[Figure]:
    """A figure of each size, beside the smallest."""
    samples = {name: [take(costs) for costs in runs] for name, runs in taken.items()}
    return [
        Figure(
            what=f"{name}: {what}",
            samples={OURS: values} | ({_OF_TEN: samples[_OF_TEN]} if name != _OF_TEN else {}),
            bounds=[_HARDLY_MORE] if bound else [],
            show=show,
        )
        for name, values in samples.items()
    ]


def _run(world_size: int, costs: Costs) -> None:
    state = begin(State(world_size=world_size, policy=FailurePolicy(max_failures=1))).state
    for kind, events in _events(world_size):
        begun = time.perf_counter()
        for event in events:
            if isinstance(event, Reported):
                state = note(state, event) or state
            else:
                state = step(state, event).state
        costs.add(kind, time.perf_counter() - begun, len(events))
    costs.runs += 1
    # A machine that is quick because it has stopped listening would be no achievement.
    assert state.phase == Concluded(succeeded=True)
    assert state.launches == 2


def _events(world_size: int) -> Iterator[tuple[str, Sequence[Event | Reported]]]:
    """What a run of two attempts tells, by kind."""
    yield "placed", [AgentsPlaced(nodes=("node",) * world_size)]
    yield from _training(0, world_size)
    lost, *others = range(world_size)
    yield "lost", [Exited(attempt=0, rank=lost, how="killed by SIGKILL", killed=False)]
    yield "raised", [Failed(attempt=0, failure=_consequence(rank)) for rank in others]
    yield (
        "killed",
        [Exited(attempt=0, rank=rank, how="killed by SIGKILL", killed=True) for rank in others],
    )
    yield from _training(1, world_size)
    ranks = range(world_size)
    yield "done", [Done(attempt=1, rank=rank) for rank in ranks]
    yield (
        "left",
        [Exited(attempt=1, rank=rank, how="exited with code 0", killed=False) for rank in ranks],
    )


def _training(attempt: int, world_size: int) -> Iterator[tuple[str, Sequence[Event | Reported]]]:
    ranks = range(world_size)
    offer = Offer(host="host", port=1)
    yield "offered", [Offered(attempt=attempt, rank=rank, offer=offer) for rank in ranks]
    yield "joined", [Joined(attempt=attempt, rank=rank) for rank in ranks]
    for done in range(1, _STEPS + 1):
        yield (
            "reported",
            [
                Reported(attempt=attempt, rank=rank, step=done, metrics={"loss": 1.0})
                for rank in ranks
            ],
        )


def _consequence(rank: int) -> Failure:
    message = "RuntimeError: connection closed by peer"
    return Failure(kind=FailureKind.USER_ERROR, rank=rank, message=message)


if __name__ == "__main__":
    sys.exit(main())
