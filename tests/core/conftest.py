"""What the tests of the core share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from tests.object_storage import Bucket, S3Server, s3_server

from polytrain import InvalidJobError, make_trainer
from polytrain_plugins import Problem

# A busy machine makes an example slow without making it wrong; the suite's own timeout remains.
settings.register_profile("polytrain", deadline=None)
settings.load_profile("polytrain")

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
    monkeypatch.setattr("polytrain.request.cluster_problems_now", lambda scaling: ())
    return FindProblems()


@pytest.fixture(scope="session")
def object_storage() -> Iterator[S3Server]:
    """The S3 server of all tests here that need one."""
    with s3_server() as server:
        yield server


@pytest.fixture
def bucket(object_storage: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The bucket that s3://bucket means, according to the environment alone."""
    object_storage.set_environment(monkeypatch)
    yield object_storage.make_bucket("bucket")
    object_storage.reset()
