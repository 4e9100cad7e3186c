"""Whether a failed attempt is followed by another, and which failure was its cause."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.errors import Failure, FailureKind
from polytrain.policy.failure import FailedAttempt, FailurePolicy, root_cause


def failure(kind: FailureKind, *, rank: int = 0, message: str = "no", step: int = 0) -> Failure:
    return Failure(kind=kind, rank=rank, message=message, step=step)


LOST = FailedAttempt(root=failure(FailureKind.WORKER_LOST))
BUG = FailedAttempt(root=failure(FailureKind.USER_ERROR, message="ValueError: no", step=3))


@given(max_failures=st.integers(0, 20), failures=st.integers(1, 25))
def test_the_budget_is_spent_exactly(max_failures: int, failures: int) -> None:
    decision = FailurePolicy(max_failures=max_failures).decide([LOST] * failures)
    assert decision.restart == (failures <= max_failures)


def test_minus_one_is_any_number() -> None:
    assert FailurePolicy(max_failures=-1).decide([LOST] * 1000).restart


def test_reasons_name_the_number_of_the_failure_and_the_limit() -> None:
    assert "failure 1 of max_failures=2" in FailurePolicy(max_failures=2).decide([LOST]).reason
    assert "no restart is left" in FailurePolicy(max_failures=2).decide([LOST] * 3).reason
    assert FailurePolicy().decide([LOST]).reason == "max_failures=0 allows no restart"
    assert "unlimited" in FailurePolicy(max_failures=-1).decide([LOST]).reason


def test_a_bug_that_repeats_itself_is_not_retried() -> None:
    decision = FailurePolicy(max_failures=-1).decide([BUG, BUG])
    assert not decision.restart
    assert "step 3" in decision.reason


@pytest.mark.parametrize(
    "before",
    [
        failure(FailureKind.USER_ERROR, message="ValueError: no", step=2),
        failure(FailureKind.USER_ERROR, message="KeyError: 'a'", step=3),
        failure(FailureKind.WORKER_LOST, message="ValueError: no", step=3),
    ],
    ids=["another step", "another exception", "another kind"],
)
def test_what_differs_from_the_attempt_before_is_retried(before: Failure) -> None:
    assert FailurePolicy(max_failures=2).decide([FailedAttempt(root=before), BUG]).restart


def test_only_the_attempt_before_is_compared() -> None:
    assert FailurePolicy(max_failures=3).decide([BUG, LOST, BUG]).restart


def test_workers_that_are_lost_the_same_way_are_replaced_again() -> None:
    assert FailurePolicy(max_failures=2).decide([LOST, LOST]).restart


@pytest.mark.parametrize("kind", [FailureKind.WORKER_LOST, FailureKind.AGENT_LOST])
def test_a_loss_is_the_cause_of_exceptions_that_came_before(kind: FailureKind) -> None:
    lost = failure(kind, rank=2)
    assert root_cause([BUG.root, failure(FailureKind.USER_ERROR, rank=1), lost]) is lost


def test_without_a_loss_the_first_failure_is_the_cause() -> None:
    storage = failure(FailureKind.STORAGE)
    assert root_cause([storage, BUG.root]) is storage
