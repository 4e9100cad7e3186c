"""What becomes of a run, from what its last driver has said and whether that is alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from polytrain.errors import FailureKind
from polytrain.record.attempts import AttemptOverview
from polytrain.record.entries import FORMAT
from polytrain.record.history import read_history
from polytrain.text import strict_json
from polytrain.view.run_state import RunState, run_state


@pytest.mark.parametrize(
    ("succeeded", "stopped", "is_held", "state"),
    [
        (None, False, True, RunState.RUNNING),
        (None, False, False, RunState.INTERRUPTED),
        (True, False, False, RunState.FINISHED),
        # It commits what is left, and releases the run.
        (True, False, True, RunState.FINISHED),
        (False, False, False, RunState.FAILED),
        (False, True, False, RunState.STOPPED),
    ],
)
def test_states(succeeded: bool | None, stopped: bool, is_held: bool, state: RunState) -> None:
    assert run_state(succeeded=succeeded, stopped=stopped, is_held=is_held) is state
    assert state.can_resume == (state in (RunState.STOPPED, RunState.INTERRUPTED))


def entry(event: str, token: int, time: float, **facts: Any) -> dict[str, Any]:
    opening = {"format": FORMAT, "identity": {}, "world_size": 2} if event == "Opened" else {}
    return {"event": event, "token": token, "time": time, **opening, **facts}


def attempts(lines: Sequence[dict[str, Any]]) -> list[AttemptOverview]:
    history = read_history([strict_json.dumps(each).encode() + b"\n" for each in lines])
    assert history is not None
    return list(history.attempts)


def launched(token: int, number: int, time: float) -> dict[str, Any]:
    return entry("Launched", token, time, attempt=number, world_size=2, step=3 * number, start=None)


def test_attempts_of_several_drivers() -> None:
    lost = {"kind": "AGENT_LOST", "rank": None, "message": "two nodes", "step": 3}
    found = attempts(
        [
            entry("Opened", 1, 0.0, anew=True),
            launched(1, 0, 1.0),
            entry("AttemptEnded", 1, 2.5, attempt=0, failure=lost, reason="failure 1 of 2"),
            launched(1, 1, 3.0),
            # This driver died.
            entry("Opened", 2, 9.0, anew=False),
            launched(2, 0, 10.0),
            entry("Concluded", 2, 12.0, succeeded=True, stopped=None, reason="done"),
        ]
    )
    assert [(each.driver, each.number, each.ended) for each in found] == [
        (1, 0, 2.5),
        (1, 1, None),
        (2, 0, 12.0),
    ]
    assert (found[0].failure and found[0].failure.kind, str(found[0].failure)) == (
        FailureKind.AGENT_LOST,
        "two nodes",
    )
    assert found[1].first_step == 3


def test_a_run_that_was_started_over_has_no_earlier_attempts() -> None:
    found = attempts(
        [
            entry("Opened", 1, 0.0, anew=True),
            launched(1, 0, 1.0),
            entry("Opened", 2, 2.0, anew=True),
            launched(2, 0, 3.0),
        ]
    )
    assert [each.driver for each in found] == [2]


CPU = "rank 0 has an Intel, and rank 1 has an AMD (CPU)"


def attempt_at(step: int, *checks: str, virtual: int | None = 4, token: int = 1) -> list[Any]:
    """An attempt from this step, whose checks have found this; "" for one that has passed."""
    start = {"attempt": 0, "world_size": 2, "step": step, "start": None}
    return [
        entry("Launched", token, 1.0, **start, virtual_workers=virtual),
        *(entry("Exactness", token, 2.0, attempt=0, why_not=each) for each in checks),
    ]


def reported(step: int, token: int = 1) -> dict[str, Any]:
    return entry("Reported", token, 3.0, n=0, rank=0, step=step, metrics={})


RESUMED = [entry("Opened", 2, 4.0, anew=False)]


@pytest.mark.parametrize(
    ("lines", "why_not"),
    [
        (attempt_at(0, "", virtual=None), None),
        (attempt_at(0), ("nothing has been checked",)),
        ([*attempt_at(0, ""), reported(3)], ()),
        (attempt_at(0, "", CPU), (CPU,)),
        # Of every attempt, also of one that a driver before has started.
        ([*attempt_at(0, CPU), *attempt_at(3, "")], (CPU,)),
        ([*attempt_at(0, CPU), *RESUMED, *attempt_at(3, "", token=2)], (CPU,)),
        ([*attempt_at(0, CPU), *attempt_at(3, "", CPU)], (CPU,)),
        # The second one repeats all steps of the first.
        ([*attempt_at(0, CPU), *attempt_at(0, "")], ()),
        ([*attempt_at(0, ""), *attempt_at(3, CPU), *attempt_at(3, "")], ()),
        ([*attempt_at(0, ""), *attempt_at(3, CPU), *attempt_at(6), *attempt_at(0, "")], ()),
        # It has left a checkpoint before anything was compared.
        ([*attempt_at(0), *attempt_at(3, "")], ("attempt 1.0 ended before a check",)),
        # It had nothing left to train.
        ([*attempt_at(0, ""), reported(3), *attempt_at(3)], ()),
        (
            [*attempt_at(0, virtual=None), *attempt_at(3, "")],
            ("attempt 1.0 had no virtual workers",),
        ),
        ([*attempt_at(0, virtual=None), *attempt_at(0, "")], ()),
    ],
)
def test_a_run_is_exact_if_every_attempt_with_steps_that_count_is(
    lines: list[dict[str, Any]], why_not: tuple[str, ...] | None
) -> None:
    opened = entry("Opened", 1, 0.0, anew=True)
    history = read_history([strict_json.dumps(each).encode() + b"\n" for each in [opened, *lines]])
    assert history is not None
    assert history.why_not_exact == why_not
