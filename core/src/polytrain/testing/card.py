"""What a run of the kit has shown of a backend: which capabilities it holds, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from statistics import median
from typing import Any

from polytrain.testing.chaos import FAULTS, RECOVERIES
from polytrain.testing.conformance import BackendConformance
from polytrain.testing.outcomes import Outcome
from polytrain_plugins import Backend, Capabilities

PROOFS: Mapping[str, tuple[str, ...]] = {
    "declarative": (
        "test_declares_what_it_has[declarative]",
        "test_declarative_training",
        "test_a_declarative_model_is_validated",
        "test_saved_model_is_loaded_by_another_process",
    ),
    "predictive": (
        "test_declares_what_it_has[predictive]",
        "test_rows_are_predicted_each_by_itself",
    ),
    "exact_resume": ("test_declarative_run_survives_a_kill", "test_chaos_in_training"),
    "exact_scaling": ("test_any_number_of_workers_ends_in_the_same_files",),
    "virtual_workers": (),
    "checkpoint": ("test_run_reports_and_checkpoints",),
    "devices": ("test_gpu",),
}
"""Capability → the tests that it holds if they pass. Whether `virtual_workers` holds is for tests
of the backend's own: the kit's training functions don't use them."""


class Held(StrEnum):
    """Whether a backend holds what it claims."""

    YES = "yes"
    NO = "no"
    NOT_TESTED = "not tested"
    NOT_CLAIMED = "not claimed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One that a backend may claim."""

    claimed: Any
    held: Held
    failed: tuple[str, ...] = ()
    """The tests that show that it isn't held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A backend's conformance."""

    backend: str
    capabilities: Mapping[str, Capability]
    tests: Mapping[str, int]
    """How tests have ended → how many."""

    failed: tuple[str, ...]
    seconds: Mapping[str, float]
    """Tier → the time of its tests."""

    faults: int
    """Injected by tests of the chaos tier."""

    survived: int
    """Those of the tests that passed."""

    recovery_s: tuple[float, float] | None
    """From a fault to the first report after it: median and maximum. None without such a fault."""

    @property
    def conforms(self) -> bool:
        """Whether tests were run, and no test has failed."""
        return bool(self.tests) and not self.failed


def card(backend: type[Backend], outcomes: Mapping[str, Outcome]) -> Card:
    """Return a backend's card.

    Args:
        backend: its class.
        outcomes: those of the kit's tests, by name.
    """
    ends = [outcome.end for outcome in outcomes.values()]
    with_faults = [each for each in outcomes.values() if FAULTS in each.properties]
    times = [time for each in with_faults for time in each.properties[RECOVERIES]]
    return Card(
        backend=backend.name,
        capabilities={
            each.name: _capability(each.name, backend.capabilities, outcomes)
            for each in fields(Capabilities)
        },
        tests={end: ends.count(end) for end in sorted({*ends})},
        failed=tuple(name for name, each in outcomes.items() if each.end == "failed"),
        seconds=_by_tier(outcomes.items()),
        faults=sum(each.properties[FAULTS] for each in with_faults),
        survived=sum(each.properties[FAULTS] for each in with_faults if each.end == "passed"),
        recovery_s=(median(times), max(times)) if times else None,
    )


def _capability(
    name: str, capabilities: Capabilities, outcomes: Mapping[str, Outcome]
) -> Capability:
    claimed = getattr(capabilities, name)
    plain = sorted(claimed) if isinstance(claimed, frozenset) else claimed
    ends = {test: outcomes[test].end if test in outcomes else None for test in PROOFS[name]}
    wrong = tuple(test for test, end in ends.items() if end in ("failed", "known failure"))
    if claimed is False:
        held = Held.NOT_CLAIMED
    elif wrong:
        held = Held.NO
    else:
        held = Held.YES if ends and {*ends.values()} == {"passed"} else Held.NOT_TESTED
    return Capability(claimed=plain, held=held, failed=wrong if held is Held.NO else ())


def _by_tier(outcomes: Iterable[tuple[str, Outcome]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for name, outcome in outcomes:
        test = getattr(BackendConformance, name.partition("[")[0])
        tier = test.__module__.rpartition(".")[2]
        seconds[tier] = seconds.get(tier, 0.0) + outcome.seconds
    return seconds
