"""The line that says how to resume a run after a signal."""

from __future__ import annotations

import dataclasses

import pytest

from polytrain import Checkpoint, Result, TrainingFailedError
from polytrain.api.shown import Resumption

NAMED = Resumption(address="/runs/first", new_name=None, starts_over=False)
STOPPED = Result(path="/runs/first", finished=False, checkpoint=Checkpoint("/runs/first/c"))
AGAIN = "run the same script or cell again"


@pytest.mark.parametrize(
    ("resumption", "result", "how"),
    [
        (NAMED, STOPPED, f"To resume it from its newest checkpoint, {AGAIN}."),
        (
            dataclasses.replace(NAMED, new_name="torch-1"),
            STOPPED,
            f"To resume it from its newest checkpoint, {AGAIN} with RunConfig(name='torch-1').",
        ),
        (
            NAMED,
            dataclasses.replace(STOPPED, checkpoint=None),
            f"To start over, {AGAIN}: the run has no checkpoint.",
        ),
        (
            NAMED,
            None,
            f"To resume it, {AGAIN}; what came after its newest checkpoint is repeated.",
        ),
        (
            dataclasses.replace(NAMED, starts_over=True),
            STOPPED,
            f'To start over, {AGAIN}; only fit(resume="auto") would resume the run.',
        ),
    ],
)
def test_a_stopped_run(resumption: Resumption, result: Result | None, how: str) -> None:
    line = resumption.after("SIGINT", result, has_failed=False)
    assert line == f"/runs/first: stopped by SIGINT. {how}"


def test_a_run_that_ended_first_is_not_called_stopped() -> None:
    finished = dataclasses.replace(STOPPED, finished=True)
    line = NAMED.after("SIGTERM", finished, has_failed=False)
    assert line == "/runs/first: the run was finished when SIGTERM ended the program."
    failed = dataclasses.replace(STOPPED, error=TrainingFailedError("no", ()))
    line = NAMED.after("SIGTERM", failed, has_failed=True)
    assert "the run has failed, see 'polytrain show /runs/first'" in line
    assert AGAIN in line
