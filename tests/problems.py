"""What is wrong with a job: everything that one error tells, by argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polytrain import InvalidJobError, make_trainer
from polytrain_plugins import Problem

NUMBERS = [float(row) for row in range(8)]
GOOD: dict[str, Any] = {
    "label": "label",
    "datasets": {"train": {"x0": NUMBERS, "x1": NUMBERS, "label": NUMBERS}},
}


class Problems(dict[str, Problem]):
    """What is wrong with a job, by argument."""

    def only(self, field: str) -> Problem:
        """The one problem that there is."""
        assert list(self) == [field]
        return self[field]


class FindProblems:
    """Asks for jobs that can't be run. Everything has to be told in one error."""

    def __call__(
        self, backend: str = "reference", function: Any = None, **changes: Any
    ) -> Problems:
        """What is wrong with a job that differs from a good one in these arguments."""
        arguments = {**GOOD, **changes} if function is None else changes
        return self.of(lambda: make_trainer(backend, function, **arguments))

    def of(self, make: Callable[[], Any]) -> Problems:
        """What is wrong, according to the error that a call raises."""
        with pytest.raises(InvalidJobError) as caught:
            make()
        found = Problems({problem.field: problem for problem in caught.value.problems})
        assert len(found) == len(caught.value.problems), "the same is told twice"
        assert all(problem.what and problem.remedy for problem in found.values())
        return found


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> FindProblems:
    """Finds out what is wrong with a job by itself, whether or not a cluster is up by now."""
    monkeypatch.setattr("polytrain.api.checks.cluster_problems_now", lambda scaling: ())
    return FindProblems()
