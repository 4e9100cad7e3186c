"""The chaos tier's cases, as data: the faults of a run, and the expected result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from polytrain import FailureKind
from polytrain.errors import Failure
from polytrain.testing.faults import WITHOUT_STEP, Fault, Kind, Point

Effect = Literal["restart", "maybe", "none", "failure", "other driver"]
"""The expected effect of a case: a restart, a restart if the framework needs what is lost, no
effect, a failed run, or a killed driver, whose run another driver resumes."""

FIRST_STEP = 2
"""The step at which a run's first fault is injected; there is a checkpoint by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The faults of a run, and the expected result."""

    name: str
    faults: tuple[Fault, ...]
    effect: Effect = "restart"
    kind: FailureKind | None = None
    """Kind of the failure that ends the run."""

    restarts: tuple[int, ...] = (1,)
    """Allowed numbers of restarts."""

    max_failures: int = 1
    on_two_nodes: bool = False
    cluster: Literal["auto", "local", "ray"] = "auto"
    hang_timeout_s: float | None = None

    def expected_ends(self, attempt: int) -> tuple[ExpectedEnd, ...]:
        """The causes that the journal may name for an attempt's end; empty if it needn't end."""
        here = [fault for fault in self.faults if fault.attempt in (attempt, None)]
        return tuple(
            ExpectedEnd(kinds=kinds, message=message, rank=fault.rank if is_from_it else None)
            for fault in here
            if fault.kind in _ENDINGS
            for kinds, message, is_from_it in [_ENDINGS[fault.kind]]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedEnd:
    """The cause of an attempt's end in the journal."""

    kinds: tuple[FailureKind, ...]
    message: str
    """A pattern."""

    rank: int | None
    """None if it is random which rank's loss is detected first."""

    def is_reported(self, failure: Failure) -> bool:
        """Whether the journal says so."""
        return (
            failure.kind in self.kinds
            and (self.rank is None or failure.rank == self.rank)
            and re.search(self.message, failure.message) is not None
        )


_LOST = (FailureKind.WORKER_LOST,)
_USER = (FailureKind.USER_ERROR,)

_ENDINGS: Mapping[Kind, tuple[tuple[FailureKind, ...], str, bool]] = {
    "sigkill": (_LOST, "killed by SIGKILL", True),
    "sigstop": ((FailureKind.HANG,), "stopped", True),
    "segfault": (_LOST, "killed by SIGSEGV", True),
    "exit": (_USER, "SystemExit: exited with the code 1", True),
    "os_exit": (_LOST, "exited with code 0", True),
    "exception": (_USER, "InjectedError: injected", True),
    "user_error": (_USER, "InjectedError: injected", False),
    "memory": ((FailureKind.OUT_OF_MEMORY,), "MemoryError|bad_alloc|SIGABRT", True),
    "disk_full": ((FailureKind.STORAGE,), "No room for a checkpoint", True),
    "zygote_killed": (_LOST, "its zygote died", False),
    # The agents of a node share a process.
    "agent_killed": ((FailureKind.AGENT_LOST,), "agent", False),
    "raylet_killed": ((FailureKind.NODE_LOST, FailureKind.AGENT_LOST), "node|agent", True),
}
"""Kind of fault → kinds of failure, pattern of the message, and whether the rank is known. Other
faults needn't end an attempt."""


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
    _one("sys.exit(1)", 1, "exit"),
    _one("segmentation fault", 1, "segfault"),
    _one("exception on one rank", 1, "exception", "before_report"),
    _one("out of memory", 1, "memory"),
    _one("disk full", 0, "disk_full", "saving"),
    _one("zygote killed", 0, "zygote_killed"),
)
"""Cases after which the run continues; they can follow one another."""

_AGENT_KILLED = replace(_one("agent killed", 1, "agent_killed"), cluster="ray")
"""Without Ray, agents are in the driver, so this case needs Ray."""

CASES: tuple[Case, ...] = (
    *RESTARTED,
    _AGENT_KILLED,
    Case(name="rank stopped", faults=(_fault(1, "sigstop"),), hang_timeout_s=2.0),
    Case(name="slow rank", faults=(_fault(1, "slow"),), effect="none", restarts=(0,)),
    Case(
        name="the same exception again",
        # The step doesn't come again if rank 1 has kept its state: then the next one has it. Rank 1
        # raises none. Otherwise rank 0 could report a checkpoint in between, which is progress.
        faults=tuple(
            replace(_again(_fault(0, "user_error", "before_report")), at_step=step)
            for step in range(FIRST_STEP, FIRST_STEP + 4)
        ),
        effect="failure",
        kind=FailureKind.USER_ERROR,
        # A round that a survivor's state has spared rank 0 needs a third error to be seen as none.
        restarts=(1, 2),
        max_failures=5,
    ),
    Case(
        name="the same rank again and again",
        faults=(_again(Fault(rank=1, point="joined")),),
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
    Case(
        name="raylet killed", faults=(_fault(1, "raylet_killed"),), on_two_nodes=True, cluster="ray"
    ),
)

UNTOUCHED = Case(name="nothing", faults=(), effect="none", restarts=(0,), max_failures=0)

BY_NAME: Mapping[str, Case] = {case.name: case for case in CASES}


def in_sequence(cases: Sequence[Case], *, name: str) -> Case:
    """One case with the faults of all, each in its own attempt, at later and later steps."""
    faults: list[Fault] = []
    step = FIRST_STEP
    for attempt, case in enumerate(cases):
        faults += [replace(fault, attempt=attempt, at_step=step) for fault in case.faults]
        if any(fault.point not in WITHOUT_STEP for fault in case.faults):
            # The step doesn't come again if it has a checkpoint, or a survivor has its state.
            step += 1
    count = len(cases)
    return Case(name=name, faults=tuple(faults), restarts=(count,), max_failures=count)


def at_random(seed: int, *, steps: int) -> Case:
    """Random cases that inject faults into one run, one after another, at random ranks and steps.

    Args:
        seed: the same seed gives the same case. Odd ones run without Ray.
        steps: number of steps of a run.
    """
    random = Random(seed)
    # Each at most once: a full disk at the same step again would end the run.
    is_local = seed % 2 == 1
    among = RESTARTED if is_local else (*RESTARTED, _AGENT_KILLED)
    cases = random.sample(among, k=random.randint(1, min(4, steps - FIRST_STEP)))
    case = in_sequence([_elsewhere(case, random) for case in cases], name=f"seed {seed}")
    return replace(case, cluster="local" if is_local else "ray")


def _elsewhere(case: Case, random: Random) -> Case:
    swap = random.random() < 0.5
    faults = [
        # Only rank 0 is sure to save.
        fault if fault.point == "saving" or not swap else replace(fault, rank=1 - fault.rank)
        for fault in case.faults
    ]
    return replace(case, faults=tuple(faults))
