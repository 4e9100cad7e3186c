"""The chaos tier: whatever befalls a run, it ends, says why, and has the model it should have.

A short selection. All cases, and others by chance, are what `python -m polytrain.testing.chaos_cli`
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from polytrain.testing.chaos_cases import BY_NAME, UNTOUCHED, Case, at_random, in_sequence
from polytrain.testing.chaos_runner import ChaosRun, Subject, Verdict, Work, judged
from polytrain.testing.contract import kit_table
from polytrain.testing.leftovers import mark_processes
from polytrain_plugins import Backend

MIN_STEPS = 6
"""Reports that a run makes at least, for faults to strike between them."""

_IN_TRAINING = (
    "kill rank 1",
    "kill while saving",
    "exception on one rank",
    "exit with code 0",
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
)


class ChaosTier:
    """What becomes of a run that faults befall, on this machine."""

    backend: Backend
    training_function: Callable[[Mapping[str, Any]], None] | None = None

    @pytest.fixture(scope="class")
    @classmethod
    def untouched(cls, tmp_path_factory: pytest.TempPathFactory) -> Verdict:
        """A run that nothing befalls."""
        verdict = cls._judged(UNTOUCHED, tmp_path_factory.mktemp("untouched"))
        assert verdict.steps >= MIN_STEPS, (
            f"{verdict.steps} steps are too few: have the backend of this test train for at least "
            f"{MIN_STEPS} rounds, or training_function report as often, with a checkpoint each"
        )
        return verdict

    def test_chaos_in_training(self, untouched: Verdict, tmp_path: Path) -> None:
        """Killed, broken, half saved, without zygote: the model is that of a run without faults.

        If this fails: training doesn't resume from the checkpoint with all it had; something of
        a dead attempt stands in the way of the next; or the journal blames another rank, because
        the engine's processes end before they say why.
        """
        cases = [BY_NAME[name] for name in _IN_TRAINING]
        case = in_sequence(cases, name="in training")
        assert self._judged(case, tmp_path, untouched=untouched).wrong == []

    def test_chaos_around_training(self, tmp_path: Path) -> None:
        """Starting, joining, out of memory, out of disk: every row is used once per epoch.

        If this fails: a rendezvous doesn't come to an end when a rank is missing, or ranks that
        have met before are taken for those of this attempt.
        """
        cases = [BY_NAME[name] for name in _AROUND_TRAINING]
        case = in_sequence(cases, name="around training")
        assert self._judged(case, tmp_path, work="rows").wrong == []

    def test_chaos_by_chance(self, untouched: Verdict, tmp_path: Path) -> None:
        """Faults that chance has chosen, the same at every call."""
        case = at_random(seed=1, steps=untouched.steps)
        assert self._judged(case, tmp_path, untouched=untouched).wrong == []

    def test_chaos_that_does_not_end(self, tmp_path: Path) -> None:
        """A rank that dies whenever it starts ends the run, when as many failures are used up."""
        case = BY_NAME["the same rank again and again"]
        assert self._judged(case, tmp_path).wrong == []

    @classmethod
    def subject(cls) -> Subject:
        """What the faults befall."""
        return Subject(
            name=cls.__name__,
            backend=cls.backend,
            training_function=cls.training_function,
            data=kit_table(),
        )

    @classmethod
    def _judged(
        cls, case: Case, path: Path, *, work: Work = "model", untouched: Verdict | None = None
    ) -> Verdict:
        mark_processes()
        run = ChaosRun(subject=cls.subject(), case=case, work=work, directory=path)
        return judged(run, expected=untouched.model if untouched is not None else None)
