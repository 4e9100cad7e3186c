"""What becomes of a run, from what its last driver has said and whether that is alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from polytrain.errors import FailureKind
from polytrain.record.entries import FORMAT
from polytrain.record.history import read_history
from polytrain.record.overviews import AttemptOverview
from polytrain.record.state import RunState, run_state
from polytrain.text import strict_json


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
