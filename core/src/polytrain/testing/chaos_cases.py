"""The chaos tier's cases, as data: what befalls a run, and what is to come of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from polytrain import FailureKind
from polytrain.testing.faults import Fault, Point, kill
from polytrain.testing.strikes import Kind

Effect = Literal["restart", "maybe", "none", "failure", "other driver"]
"""What a case does to a run: another attempt, one if the framework needs what is lost, nothing, its
end, or the end of its driver, whereupon another goes on with it."""

FIRST_STEP = 2
"""The step at which a run's first fault strikes: by then there is a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What befalls a run, and what is to come of it."""

    name: str
    faults: tuple[Fault, ...]
    effect: Effect = "restart"
    kind: FailureKind | None = None
    """Of the failure that the run ends in."""

    restarts: tuple[int, ...] = (1,)
    """How many there may be."""

    max_failures: int = 1
    on_two_nodes: bool = False

    def reason(self, attempt: int) -> str | None:
        """What the journal says of an attempt's end, as a pattern; None if it doesn't end it."""
        here = [f for f in self.faults if f.attempt in (attempt, None) and f.kind in _REASONS]
        return "|".join(_REASONS[f.kind].format(rank=f.rank) for f in here) or None


_REASONS: Mapping[Kind, str] = {
    "sigkill": "rank {rank}: killed by SIGKILL",
    "segfault": "rank {rank}: killed by SIGSEGV",
    "exit": "rank {rank}: SystemExit: 0",
    "os_exit": "rank {rank}: exited with code 0",
    "exception": "rank {rank}: .*InjectedError: injected",
    "user_error": "rank {rank}: .*InjectedError: injected",
    "memory": "rank {rank}: .*(MemoryError|bad_alloc|SIGABRT)",
    "disk_full": "rank {rank}: .*No room for a checkpoint",
    # Whose trainer is noticed first is chance.
    "zygote_killed": r"rank \d+: its zygote died",
    "agent_killed": "rank {rank}: .*agent",
    "raylet_killed": "rank {rank}: .*(agent|node)",
}
"""How the journal tells what has befallen a rank. What isn't here needn't end an attempt."""


def _one(name: str, rank: int, kind: Kind, point: Point = "after_report") -> Case:
    return Case(name=name, faults=(_fault(rank, kind, point),))


def _fault(rank: int, kind: Kind, point: Point = "after_report") -> Fault:
    return Fault(rank=rank, at_step=FIRST_STEP, kind=kind, point=point)


def _again(fault: Fault) -> Fault:
    return replace(fault, attempt=None)


RESTARTED: tuple[Case, ...] = (
    _one("kill rank 1", 1, "sigkill"),
    _one("kill rank 0", 0, "sigkill"),
    Case(
        name="kill both ranks at once",
        faults=(_fault(0, "sigkill"), _fault(1, "sigkill")),
    ),
    _one("kill before the offer", 0, "sigkill", "offering"),
    _one("kill after the offer", 0, "sigkill", "offered"),
    _one("kill while others join", 1, "sigkill", "joining"),
    _one("kill rank 0 once joined", 0, "sigkill", "joined"),
    _one("kill rank 1 once joined", 1, "sigkill", "joined"),
    _one("kill before a report", 0, "sigkill", "before_report"),
    _one("kill while saving", 0, "sigkill", "saving"),
    _one("exit with code 0", 1, "os_exit"),
    _one("sys.exit(0)", 1, "exit"),
    _one("segmentation fault", 1, "segfault"),
    _one("exception on one rank", 1, "exception", "before_report"),
    _one("out of memory", 1, "memory"),
    _one("disk full", 0, "disk_full", "saving"),
    _one("zygote killed", 0, "zygote_killed"),
    _one("agent killed", 1, "agent_killed"),
)
"""Cases after which the run goes on: they can follow one another."""

CASES: tuple[Case, ...] = (
    *RESTARTED,
    Case(name="slow rank", faults=(_fault(1, "slow"),), effect="none", restarts=(0,)),
    Case(
        name="exception on all ranks",
        faults=tuple(_again(_fault(rank, "user_error", "before_report")) for rank in (0, 1)),
        effect="failure",
        kind=FailureKind.USER_ERROR,
        # The second time is one too many, if the first wasn't.
        restarts=(0, 1),
        max_failures=5,
    ),
    Case(
        name="the same rank again and again",
        faults=(_again(kill(rank=1, point="joined")),),
        effect="failure",
        kind=FailureKind.WORKER_LOST,
        restarts=(2,),
        max_failures=2,
    ),
    *(
        Case(name=name, faults=(fault,), effect="maybe", restarts=(0, 1))
        for name, fault in (
            ("port closed before others join", Fault(rank=0, kind="ports_closed", point="joining")),
            ("port stolen before others join", Fault(rank=0, kind="ports_stolen", point="joining")),
            ("tracker or store lost", _fault(0, "services_lost")),
        )
    ),
    Case(
        name="driver killed",
        faults=(_fault(0, "driver_killed"),),
        effect="other driver",
    ),
    Case(name="raylet killed", faults=(_fault(1, "raylet_killed"),), on_two_nodes=True),
)

UNTOUCHED = Case(name="nothing", faults=(), effect="none", restarts=(0,), max_failures=0)

BY_NAME: Mapping[str, Case] = {case.name: case for case in CASES}


def in_sequence(cases: Sequence[Case], *, name: str) -> Case:
    """All of these befall one run, each in an attempt of its own, further and further into it."""
    faults: list[Fault] = []
    step = FIRST_STEP
    for attempt, case in enumerate(cases):
        faults += [replace(fault, attempt=attempt, at_step=step) for fault in case.faults]
        if any(fault.point == "after_report" or fault.rank for fault in case.faults):
            # There may be a checkpoint of it: it doesn't come again.
            step += 1
    count = len(cases)
    return Case(name=name, faults=tuple(faults), restarts=(count,), max_failures=count)


def at_random(seed: int, *, steps: int) -> Case:
    """Cases that befall one run one after another, at ranks and steps that chance chooses.

    Args:
        seed: the same gives the same.
        steps: how many a run has.
    """
    random = Random(seed)
    cases = random.choices(RESTARTED, k=random.randint(1, min(4, steps - FIRST_STEP)))
    return in_sequence([_elsewhere(case, random) for case in cases], name=f"seed {seed}")


def _elsewhere(case: Case, random: Random) -> Case:
    swap = random.random() < 0.5
    faults = [
        # Only rank 0 is sure to save.
        fault if fault.point == "saving" or not swap else replace(fault, rank=1 - fault.rank)
        for fault in case.faults
    ]
    return replace(case, faults=tuple(faults))


def matches(pattern: str, reasons: Sequence[str]) -> bool:
    """Whether any of the journal's reasons is what was expected."""
    return any(re.search(pattern, reason) for reason in reasons)
