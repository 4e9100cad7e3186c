"""The chaos tier: with faults, a run still ends, says why, and has the right model.

This is a short selection. `python -m polytrain.testing.chaos_cli` runs all cases, and random ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from polytrain.testing.chaos_cases import BY_NAME, UNTOUCHED, Case, at_random, in_sequence
from polytrain.testing.chaos_runner import CaseResult, ChaosRun, Subject, Work, judged
from polytrain.testing.contract import kit_table
from polytrain.testing.processes import mark_processes
from polytrain_plugins import Backend

MIN_STEPS = 6
"""Minimum number of reports of a run, so that faults can be injected between them."""

FAULTS, RECOVERIES = "faults", "recoveries_s"
"""Properties of the chaos tier's tests: the number of faults, and for each that led to another
attempt the seconds from it to that attempt's first report."""

Record = Callable[[str, object], None]
"""pytest's `record_property`."""

_IN_TRAINING = (
    "kill rank 1",
    "kill while saving",
    "exception on one rank",
    "kill both ranks at once",
    "zygote killed",
)

_AROUND_TRAINING = (
    "kill after the offer",
    "kill rank 1 once joined",
    "segmentation fault",
    "disk full",
    "out of memory",
    "kill before a report",
    "exit with code 0",
)


class FaultyRuns:
    """What tiers of tests with faults share."""

    backend: Backend
    training_function: Callable[[Mapping[str, Any]], None] | None = None

    @pytest.fixture(scope="class")
    @classmethod
    def untouched(cls, tmp_path_factory: pytest.TempPathFactory) -> CaseResult:
        """A run without faults."""
        outcome = cls._judged(UNTOUCHED, tmp_path_factory.mktemp("untouched"))
        assert outcome.steps >= MIN_STEPS, (
            f"{outcome.steps} steps are too few: the backend of this test must train at least "
            f"{MIN_STEPS} rounds, or training_function report as often, each with a checkpoint"
        )
        return outcome

    @classmethod
    def subject(cls) -> Subject:
        """The backend and data of the runs."""
        return Subject(
            name=cls.__name__,
            backend=cls.backend,
            training_function=cls.training_function,
            data=kit_table(),
        )

    @classmethod
    def _judged(
        cls, case: Case, path: Path, *, work: Work = "model", untouched: CaseResult | None = None
    ) -> CaseResult:
        mark_processes()
        run = ChaosRun(subject=cls.subject(), case=case, work=work, directory=path)
        return judged(run, expected=untouched.model if untouched is not None else None)


class ChaosTier(FaultyRuns):
    """Tests of runs with faults, on this machine."""

    def test_chaos_in_training(
        self, untouched: CaseResult, tmp_path: Path, record_property: Record
    ) -> None:
        """After kills, exceptions, half-saved files, a lost zygote: the model is still the same.

        If this fails: the checkpoint lacks some of the state; something of a dead attempt blocks
        the next; or the journal names the wrong rank, because the engine's processes end before
        they report why.
        """
        cases = [BY_NAME[name] for name in _IN_TRAINING]
        case = in_sequence(cases, name="in training")
        assert _wrong(self._judged(case, tmp_path, untouched=untouched), record_property) == []

    def test_chaos_around_training(self, tmp_path: Path, record_property: Record) -> None:
        """Faults at the start, at joining, in memory, on disk: every row is used once per epoch.

        If this fails: a rendezvous doesn't end when a rank is missing, or accepts ranks of an
        earlier attempt.
        """
        cases = [BY_NAME[name] for name in _AROUND_TRAINING]
        case = in_sequence(cases, name="around training")
        assert _wrong(self._judged(case, tmp_path, work="rows"), record_property) == []

    def test_chaos_by_chance(
        self, untouched: CaseResult, tmp_path: Path, record_property: Record
    ) -> None:
        """Random faults, with a fixed seed."""
        case = at_random(seed=1, steps=untouched.steps)
        assert _wrong(self._judged(case, tmp_path, untouched=untouched), record_property) == []

    def test_chaos_that_does_not_end(self, tmp_path: Path, record_property: Record) -> None:
        """A rank that dies at every start ends the run after `max_failures` restarts."""
        case = BY_NAME["the same rank again and again"]
        assert _wrong(self._judged(case, tmp_path), record_property) == []


def _wrong(result: CaseResult, record: Record) -> list[str]:
    """Record what a run has gone through; return what is wrong with it."""
    record(FAULTS, result.struck)
    record(RECOVERIES, result.recoveries_s)
    return result.wrong
