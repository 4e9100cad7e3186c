"""Which checkpoints are to be validated, and what has become of it: decisions alone."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polytrain.policy.validation import Validation, Validations, ValidationStatus
from polytrain.record.entries import FORMAT
from polytrain.record.history import RunHistory, read_history
from polytrain.validation.coordinator import collision

ENDS = (ValidationStatus.VALIDATED, ValidationStatus.TIMED_OUT, ValidationStatus.FAILED)
NAMES = [f"checkpoint_{number:06d}-1.0" for number in range(4)]


def requested(*names: str) -> Validations:
    validations = Validations()
    for step, name in enumerate(names, start=1):
        assert validations.request(Validation(checkpoint=name, step=step))
    return validations


def test_the_oldest_committed_checkpoint_is_next() -> None:
    validations = requested(*NAMES)
    due = validations.due({NAMES[2], NAMES[1]})
    assert due is not None
    assert due.checkpoint == NAMES[1]
    assert validations.due(set()) is None


def test_a_second_request_for_a_checkpoint_changes_nothing() -> None:
    """Files of a rank that come late are committed into the same directory."""
    validations = requested(NAMES[0])
    validations.end(
        Validation(checkpoint=NAMES[0], step=1, status=ValidationStatus.VALIDATED, metrics={"v": 1})
    )
    assert not validations.request(Validation(checkpoint=NAMES[0], step=1))
    assert not validations.pending


def test_only_failed_validations_are_tried_again() -> None:
    validations = requested(*NAMES)
    for name, status in zip(NAMES, ENDS, strict=False):
        validations.end(Validation(checkpoint=name, step=1, status=status, reason="because"))
    validations.retry_failed()
    known = [validations.of(name) for name in NAMES]
    assert [each and each.status.value for each in known] == [
        "validated",
        "pending",
        "pending",
        "pending",
    ]
    assert {each.reason for each in validations.pending} == {""}


def test_metrics_that_the_report_has_are_named() -> None:
    assert collision({"val": 1.0}, {"loss": 2.0}) is None
    why = collision({"val": 1.0, "loss": 3.0}, {"loss": 2.0})
    assert why is not None
    assert "'loss'" in why
    assert "'val_loss'" in why


def test_a_name_with_a_slash_is_that_of_a_nested_metric() -> None:
    why = collision({"val/loss": 3.0}, {"val": {"loss": 2.0}})
    assert why is not None
    assert "'val/loss'" in why


def line(event: str, **fields: Any) -> dict[str, Any]:
    return {"time": 0.0, "token": 1, "event": event, **fields}


def request_line(number: int) -> dict[str, Any]:
    return line("ValidationRequested", checkpoint=NAMES[number], step=number + 1, task={})


def end_line(number: int, status: str = "validated") -> dict[str, Any]:
    metrics = {"val": number / 10} if status == "validated" else {}
    return line(
        "ValidationEnded",
        checkpoint=NAMES[number],
        step=number + 1,
        status=status,
        metrics=metrics,
        reason="",
        traceback="",
    )


def history_of(*lines: dict[str, Any]) -> RunHistory:
    opened = line("Opened", format=FORMAT, anew=False, identity={}, world_size=1, began=0.0)
    reports = [
        line("Reported", n=number, step=number + 1, metrics={"loss": 1.0}) for number in range(4)
    ]
    text = "".join(json.dumps(entry) + "\n" for entry in (opened, *reports, *lines))
    history = read_history([text.encode()])
    assert history is not None
    return history


def test_metrics_are_in_the_history_at_the_step_of_their_checkpoint() -> None:
    history = history_of(*map(request_line, range(3)), end_line(2), end_line(0))
    assert [dict(report) for report in history.reports] == [
        {"loss": 1.0, "val": 0.0},
        {"loss": 1.0},
        {"loss": 1.0, "val": 0.2},
        {"loss": 1.0},
    ]
    assert history.reports[-2]["val"] == 0.2
    assert [each.checkpoint for each in history.validations.pending] == [NAMES[1]]


def test_a_restart_from_an_earlier_step_drops_metrics_of_later_ones() -> None:
    restart = line("Launched", attempt=1, step=2, start=None, world_size=1)
    again = line("Reported", n=4, step=3, metrics={"loss": 0.5})
    history = history_of(request_line(0), request_line(2), end_line(0), end_line(2), restart, again)
    assert [dict(report) for report in history.reports] == [
        {"loss": 1.0, "val": 0.0},
        {"loss": 1.0},
        {"loss": 0.5},
    ]
    # None of them meets a condition of the next driver.
    assert history.validations.newest is not None
    assert history.validations.newest.step == 1


@given(ends=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ENDS))))
def test_a_checkpoint_is_due_until_it_has_ended(ends: list[tuple[int, ValidationStatus]]) -> None:
    """Whatever is read, and in whichever order: what the next driver does is what is left."""
    lines = [end_line(number, status.value) for number, status in ends]
    validations = history_of(*map(request_line, range(4)), *lines).validations
    last = dict(ends)
    left = [NAMES[number] for number in range(4) if number not in last]
    assert [each.checkpoint for each in validations.pending] == left
    for number, status in last.items():
        ended = validations.of(NAMES[number])
        assert ended is not None
        assert ended.status is status


def test_a_line_without_a_request_is_left_out() -> None:
    """An earlier driver's, of a run that was started over since."""
    assert len(history_of(end_line(0)).validations) == 0
