"""Whether a failed attempt is followed by another, and which failure was its cause."""

from __future__ import annotations

import dataclasses
import errno
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.checkpoint.parts import storage_message
from polytrain.config.configs import FailureConfig
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import Diverged
from polytrain.events.notices import Rollback
from polytrain.policy.failed_attempts import (
    AFTER_WAIT,
    FailedAttempt,
    failed_attempt,
    root_cause,
)
from polytrain.policy.failure import FailurePolicy
from polytrain.storage.location import Location


def failure(kind: FailureKind, *, rank: int = 0, message: str = "no", step: int = 0) -> Failure:
    return Failure(kind=kind, rank=rank, message=message, step=step)


def attempt_of(*failures: Failure, **changes: Any) -> FailedAttempt:
    """An attempt of two ranks that has trained, and ended with these failures."""
    changes = {"lasted_s": 60.0, **changes}
    return dataclasses.replace(failed_attempt(failures, world_size=2), **changes)


def policy_of(*, rollbacks: tuple[str, ...] = (), **config: Any) -> FailurePolicy:
    return FailurePolicy(config=FailureConfig(**config), rollbacks=rollbacks)


LOST = attempt_of(failure(FailureKind.WORKER_LOST))
BUG = attempt_of(failure(FailureKind.USER_ERROR, message="ValueError: no", step=3))
PREEMPTED = attempt_of(failure(FailureKind.PREEMPTED))


@given(max_failures=st.integers(0, 20), failures=st.integers(1, 25))
def test_the_budget_is_spent_exactly(max_failures: int, failures: int) -> None:
    decision = policy_of(max_failures=max_failures).decide([LOST] * failures)
    assert decision.restart == (failures <= max_failures)


def test_minus_one_is_any_number() -> None:
    assert policy_of(max_failures=-1).decide([LOST] * 1000).restart


def test_reasons_name_the_number_of_the_failure_and_the_limit() -> None:
    assert "failure 1 of max_failures=2" in policy_of(max_failures=2).decide([LOST]).reason
    assert "no restart is left" in policy_of(max_failures=2).decide([LOST] * 3).reason
    assert policy_of().decide([LOST]).reason == "max_failures=0 allows no restart"
    assert "unlimited" in policy_of(max_failures=-1).decide([LOST]).reason


def test_a_bug_that_repeats_itself_is_not_retried() -> None:
    decision = policy_of(max_failures=-1).decide([BUG, BUG])
    assert not decision.restart
    assert "step 3" in decision.reason


def test_data_that_are_refused_are_not_tried_again() -> None:
    root = failure(FailureKind.USER_ERROR, message="polytrain.errors.BadDataError: label: no")
    decision = policy_of(max_failures=-1).decide([attempt_of(root)])
    assert not decision.restart
    assert "the data would be the same" in decision.reason


def test_the_time_of_day_in_a_message_makes_no_difference() -> None:
    messages = [
        attempt_of(failure(FailureKind.USER_ERROR, message=f"XGBoostError: [{time}] no"))
        for time in ("15:21:10", "15:21:14")
    ]
    assert not policy_of(max_failures=-1).decide(messages).restart


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
    assert policy_of(max_failures=2).decide([attempt_of(before), BUG]).restart


def raised(message: str, *, rank: int = 0, step: int = 3) -> Failure:
    is_lost = "gloo" in message
    kind = FailureKind.CONNECTION_LOST if is_lost else FailureKind.USER_ERROR
    return failure(kind, rank=rank, message=message, step=step)


def ended(how: str, *, rank: int = 0, step: int = 3) -> Failure:
    message = f"{how} before its training was done"
    return failure(FailureKind.WORKER_LOST, rank=rank, message=message, step=step)


SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x1)"
NO_ROOM = Failure(
    kind=FailureKind.STORAGE,
    rank=0,
    message="polytrain.errors.CheckpointError: No room for a checkpoint in /tmp/run",
    traceback="Traceback …",
    step=3,
)
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:{}"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([raised(SHAPES)], [raised(SHAPES)]),
        ([raised(SHAPES), raised(SHAPES, rank=1)], [raised(SHAPES, rank=1)]),
        (
            [raised(GLOO.format(4001)), raised(SHAPES, rank=1)],
            [raised(SHAPES, rank=1), raised(GLOO.format(4002))],
        ),
        ([ended("killed by SIGSEGV")], [ended("killed by SIGSEGV")]),
        ([ended("killed by SIGABRT")], [ended("killed by SIGABRT", rank=1)]),
        ([ended("exited with code 3")], [ended("exited with code 3")]),
        ([raised(GLOO.format(4001))], [raised(GLOO.format(4002))]),
        ([NO_ROOM], [NO_ROOM]),
    ],
    ids=["exception", "other ranks", "order", "SIGSEGV", "SIGABRT", "exit", "connection", "disk"],
)
def test_whatever_comes_again_at_the_same_step_ends_the_run(
    first: list[Failure], second: list[Failure]
) -> None:
    policy = policy_of(max_failures=-1)
    attempts = [attempt_of(*first), attempt_of(*second)]
    assert policy.decide(attempts[:1]).restart
    decision = policy.decide(attempts)
    assert not decision.restart
    assert "same error at step 3" in decision.reason
    # It is no repetition where a checkpoint was committed meanwhile.
    further = dataclasses.replace(attempts[1], progress=3)
    assert policy.decide([attempts[0], further]).restart
    assert policy_of(max_failures=-1, retry_user_errors=True).decide(attempts).restart


@pytest.mark.parametrize("where", ["rank", "agent", "driver"])
def test_a_disk_that_was_waited_for_ends_the_run(where: str) -> None:
    """Each attempt would wait as long."""
    full = OSError(errno.ENOSPC, "No space left on device")
    location = Location.of("/runs/one", retry_s=600)
    message, at_once = storage_message(full, location), NO_ROOM.message
    if where == "rank":
        message = f"{at_once} (No space left on device){AFTER_WAIT}."
    rank = None if where == "driver" else 0
    waited = Failure(kind=FailureKind.STORAGE, rank=rank, message=message)
    decision = policy_of(max_failures=-1).decide([attempt_of(waited)])
    assert not decision.restart
    assert "Make room" in decision.reason
    for passing in (at_once, storage_message(full, dataclasses.replace(location, retry_s=0))):
        other = Failure(kind=FailureKind.STORAGE, rank=rank, message=passing)
        assert policy_of(max_failures=-1).decide([attempt_of(other)]).restart


def in_function(name: str, *, line: int, step: int, message: str = "ValueError: no") -> Failure:
    """An exception that a function of a script raised."""
    frames = f'  File "/home/me/train.py", line {line}, in {name}\n    raise_it()'
    traceback = f"Traceback (most recent call last):\n{frames}\n{message}"
    kind = FailureKind.USER_ERROR
    return Failure(kind=kind, rank=0, message=message, traceback=traceback, step=step)


def test_an_error_of_the_same_line_without_progress_ends_the_run_whatever_it_says() -> None:
    before = attempt_of(in_function("read", line=7, step=5, message="ValueError: row 81 is bad"))
    again = in_function("read", line=7, step=3, message="ValueError: row 12 is bad")
    policy = policy_of(max_failures=-1)
    decision = policy.decide([before, attempt_of(again)])
    assert not decision.restart
    assert "the same error at step 5, and this one came only to step 3" in decision.reason
    # It got further, or there is a newer checkpoint.
    assert policy.decide([before, attempt_of(dataclasses.replace(again, step=6))]).restart
    assert policy.decide([before, attempt_of(again, progress=3)]).restart


def test_what_a_survivor_has_saved_is_no_progress_of_a_rank() -> None:
    """A bug two steps after each start comes again, though each start is two steps further."""
    before = attempt_of(in_function("read", line=7, step=2))
    policy = policy_of(max_failures=-1)
    decision = policy.decide([before, attempt_of(in_function("read", line=7, step=4), rescued=2)])
    assert not decision.restart
    assert "step 4, 2 of which a survivor's state had spared it" in decision.reason
    # It would have got further without that state.
    further = attempt_of(in_function("read", line=7, step=5), rescued=2)
    assert policy.decide([before, further]).restart
    # From an older start, it comes at an earlier step.
    later = attempt_of(in_function("read", line=7, step=4))
    assert not policy.decide([further, later]).restart


@pytest.mark.parametrize(
    "other",
    [
        in_function("read", line=8, step=3),
        in_function("read", line=7, step=3, message="OSError: no"),
    ],
    ids=["another line", "another exception"],
)
def test_an_error_of_another_cause_is_retried(other: Failure) -> None:
    before = attempt_of(in_function("read", line=7, step=5))
    assert policy_of(max_failures=2).decide([before, attempt_of(other)]).restart


PASSING = {
    "a service": "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='h', port={n})",
    "a loader's process": "RuntimeError: DataLoader worker (pid(s) {n}) exited unexpectedly",
    "a device": "torch.AcceleratorError: CUDA error: unspecified launch failure {n}",
}


@pytest.mark.parametrize("message", PASSING.values(), ids=PASSING)
def test_an_exception_that_may_pass_has_to_come_three_times_or_at_the_same_step(
    message: str,
) -> None:
    """On whichever rank, and at the same line; it got no further than one before."""

    def at(rank: int, step: int, *, progress: int = 0) -> FailedAttempt:
        error = in_function("fetch", line=7, step=step, message=message.format(n=rank))
        return attempt_of(dataclasses.replace(error, rank=rank), progress=progress)

    policy = policy_of(max_failures=-1)
    first, second, third = at(3, 700), at(1, 400), at(2, 500)
    assert policy.decide([first, second]).restart
    decision = policy.decide([first, second, third])
    assert not decision.restart
    assert "the same error at steps 700 and 400, and this one came only to step 500" in (
        decision.reason
    )
    assert not policy.decide([first, at(1, 700)]).restart
    # With progress, or another failure in between.
    assert policy.decide([first, second, at(2, 701)]).restart
    assert policy.decide([first, second, at(2, 500, progress=450)]).restart
    assert policy.decide([first, at(1, 400, progress=300), at(2, 350, progress=300)]).restart
    assert policy.decide([first, second, LOST, third]).restart
    assert policy_of(max_failures=-1, retry_user_errors=True).decide([first] * 9).restart


def test_memory_that_runs_out_again_has_to_do_so_at_the_same_step() -> None:
    def at(step: int, left: int) -> FailedAttempt:
        error = in_function("train", line=7, step=step, message=f"OutOfMemoryError: {left} MiB")
        return attempt_of(dataclasses.replace(error, kind=FailureKind.OUT_OF_MEMORY))

    policy = policy_of(max_failures=-1)
    assert policy.decide([at(5, 20), at(3, 22), at(2, 12)]).restart
    assert not policy.decide([at(5, 20), at(5, 22)]).restart


def test_a_hang_of_the_same_rank_at_the_same_step_ends_the_run() -> None:
    hangs = [failure(FailureKind.HANG, message=f"no progress for {s} s", step=4) for s in (300, 12)]
    policy = policy_of(max_failures=-1)
    assert not policy.decide([*map(attempt_of, hangs)]).restart
    elsewhere = [dataclasses.replace(hangs[1], step=5), dataclasses.replace(hangs[1], rank=1)]
    assert all(policy.decide([*map(attempt_of, [hangs[0], each])]).restart for each in elsewhere)


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        ("ModuleNotFoundError: No module named 'x'", 2),
        ("AttributeError: rank {} has no such thing", 2),
        ("torch.distributed.DistStoreError: timed out after 300s", 3),
        ("RuntimeError: no way from rank {}", 3),
    ],
)
def test_code_that_always_fails_at_the_start_takes_few_attempts(error: str, attempts: int) -> None:
    """A join that takes too long may pass: the step, which is the same, says nothing."""
    message = f"before it had joined the others: {error}"
    traceback = 'Traceback\n  File "/home/me/backend.py", line 3, in joined'
    starts = [
        attempt_of(
            Failure(
                kind=FailureKind.STARTUP,
                rank=rank,
                message=message.format(rank),
                traceback=traceback,
            ),
            has_reported=False,
            lasted_s=1.0,
        )
        for rank in range(attempts)
    ]
    policy = policy_of(max_failures=-1)
    assert policy.decide(starts[:-1]).restart
    assert not policy.decide(starts).restart


@given(
    attempts=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30),
    most=st.integers(1, 4),
)
def test_only_failures_since_the_last_progress_count(
    attempts: list[tuple[bool, bool]], most: int
) -> None:
    """Each attempt has made progress or not, and was lost or preempted."""
    failed, step, counted = [], 0, 0
    for is_loss, has_progressed in attempts:
        step += has_progressed
        counted = (0 if has_progressed else counted) + is_loss
        failed.append(dataclasses.replace(LOST if is_loss else PREEMPTED, progress=step))
    decision = policy_of(max_failures=most).decide(failed)
    assert decision.restart == (not failed[-1].is_charged or counted <= most)


def test_the_reason_names_the_checkpoint_that_has_freed_the_failures() -> None:
    lost = [dataclasses.replace(LOST, progress=step) for step in (0, 40, 40)]
    reason = policy_of(max_failures=2).decide(lost).reason
    assert reason == "failure 2 of max_failures=2 since the checkpoint of step 40"


FAULTS: dict[str, tuple[Failure, int]] = {
    # How often one of them may come without progress, with any number of failures allowed.
    "a misspelt column": (raised("KeyError: 'lable'", step=0), 1),
    "a missing package": (
        Failure(
            kind=FailureKind.STARTUP,
            rank=0,
            message="before it had joined the others: ModuleNotFoundError: No module named 'x'",
            traceback="Traceback",
        ),
        1,
    ),
    "a crash of native code": (ended("killed by SIGSEGV"), 1),
    "an exit": (ended("exited with code 1"), 1),
    "too large a batch": (failure(FailureKind.OUT_OF_MEMORY, message="MemoryError", step=3), 1),
    "a full disk of a node": (NO_ROOM, 1),
    "a deadlock": (failure(FailureKind.HANG, message="no progress", step=3), 1),
    "SIGKILL": (ended("killed by SIGKILL"), 100),
    "a lost host": (failure(FailureKind.NODE_LOST), 100),
    "a lost agent": (failure(FailureKind.AGENT_LOST), 100),
    "a storage that doesn't answer": (failure(FailureKind.STORAGE, message="503"), 100),
    "a preemption": (failure(FailureKind.PREEMPTED), 100),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_code_does_ends_the_run_and_what_comes_from_outside_does_not(fault: str) -> None:
    cause, retries = FAULTS[fault]
    policy = policy_of(max_failures=-1)
    assert policy.decide([attempt_of(cause)] * retries).restart
    assert policy.decide([attempt_of(cause)] * (retries + 1)).restart == (retries == 100)
    # With progress in between, it may come any number of times, even if few are allowed.
    further = [
        attempt_of(dataclasses.replace(cause, step=10 * n), progress=10 * n) for n in range(1, 101)
    ]
    assert policy_of(max_failures=1).decide(further).restart


@pytest.mark.parametrize("how", ["killed by SIGKILL", "killed by SIGTERM", "exited with code 143"])
def test_what_comes_from_outside_may_come_again(how: str) -> None:
    attempts = [attempt_of(ended(how), raised(GLOO.format(port), rank=1)) for port in (1, 2)]
    assert policy_of(max_failures=-1).decide(attempts).restart


def test_a_broken_connection_is_retried_and_the_rank_that_closed_it_is_the_cause() -> None:
    lost = raised(GLOO.format(4001))
    policy = policy_of(max_failures=3, retry_user_errors=False)
    assert policy.decide([attempt_of(lost, raised(GLOO.format(4002), rank=1))]).restart
    assert root_cause([lost, raised(SHAPES, rank=1)]).rank == 1


XGBOOST = (
    "xgboost.core.XGBoostError: [{0}] result.cc:83: [histogram.h:197|{0}]:\n\n- [allreduce.cc:135|"
    "{0}]: Ring Allreduce failed.\n- [socket.h:79|{0}]: Poll error condition:Success code:0"
)


def test_times_in_messages_make_no_other_error() -> None:
    at = [
        failure(FailureKind.CONNECTION_LOST, message=XGBOOST.format(time), step=3)
        for time in ("16:32:09", "16:40:10")
    ]
    assert not policy_of(max_failures=-1).decide([*map(attempt_of, at)]).restart


def test_only_the_attempt_before_is_compared() -> None:
    assert policy_of(max_failures=3).decide([BUG, LOST, BUG]).restart


def test_workers_that_are_lost_the_same_way_are_replaced_again() -> None:
    assert policy_of(max_failures=2).decide([LOST, LOST]).restart


@pytest.mark.parametrize(
    "kind",
    [
        FailureKind.WORKER_LOST,
        FailureKind.AGENT_LOST,
        FailureKind.NODE_LOST,
        FailureKind.OUT_OF_MEMORY,
        FailureKind.PREEMPTED,
    ],
)
def test_a_loss_is_the_cause_of_exceptions_that_came_before(kind: FailureKind) -> None:
    lost = failure(kind, rank=2)
    assert root_cause([BUG.root, failure(FailureKind.USER_ERROR, rank=1), lost]) is lost


def test_without_a_loss_the_first_failure_is_the_cause() -> None:
    storage = failure(FailureKind.STORAGE)
    assert root_cause([storage, BUG.root]) is storage


NO_START = attempt_of(failure(FailureKind.STARTUP), has_reported=False, lasted_s=1.0)
EVERYWHERE = attempt_of(BUG.root, on_every_rank=True)

kinds = st.sampled_from([LOST, BUG, PREEMPTED, NO_START, EVERYWHERE])


@given(before=st.lists(kinds, max_size=30), max_failures=st.integers(-1, 3))
def test_a_preemption_never_ends_a_run(before: list[FailedAttempt], max_failures: int) -> None:
    policy = policy_of(max_failures=max_failures, retry_user_errors=False)
    decision = policy.decide([*before, PREEMPTED])
    assert decision.restart
    assert "isn't counted" in decision.reason


@given(max_failures=st.integers(0, 5), where=st.lists(st.booleans(), max_size=20))
def test_preemptions_use_no_failure_up(max_failures: int, where: list[bool]) -> None:
    attempts = [LOST if is_loss else PREEMPTED for is_loss in where]
    decision = policy_of(max_failures=max_failures).decide([*attempts, LOST])
    assert decision.restart == (where.count(True) + 1 <= max_failures)


@pytest.mark.parametrize("kind", [FailureKind.USER_ERROR, FailureKind.CHECKPOINT_MISMATCH])
def test_errors_of_the_user_that_are_not_to_be_retried_are_not(kind: FailureKind) -> None:
    policy = policy_of(max_failures=-1, retry_user_errors=False)
    decision = policy.decide([attempt_of(failure(kind))])
    assert not decision.restart
    assert "retry_user_errors=False" in decision.reason
    # What nobody's code has done is none of its business.
    assert policy.decide([LOST]).restart
    assert policy.decide([attempt_of(failure(FailureKind.STORAGE))]).restart


@given(st.integers(1, 50), st.booleans())
def test_errors_of_the_user_that_are_to_be_retried_are_only_counted(
    count: int, on_every_rank: bool
) -> None:
    attempt = EVERYWHERE if on_every_rank else BUG
    policy = policy_of(max_failures=25, retry_user_errors=True)
    assert policy.decide([attempt] * count).restart == (count <= 25)


def test_an_error_on_every_rank_at_once_is_not_retried() -> None:
    decision = policy_of(max_failures=-1).decide([EVERYWHERE])
    assert not decision.restart
    assert "every rank" in decision.reason


def test_an_error_is_retried_once() -> None:
    policy = policy_of(max_failures=-1)
    assert policy.decide([BUG]).restart
    assert not policy.decide([BUG, BUG]).restart


def test_objects_that_lie_elsewhere_make_no_other_error() -> None:
    def attempt(address: str, *, what: str = "Net") -> FailedAttempt:
        message = f"TypeError: <{what} object at {address}> is not a tensor"
        return attempt_of(failure(FailureKind.USER_ERROR, message=message, step=3))

    policy = policy_of(max_failures=-1)
    assert not policy.decide([attempt("0x7f00aa12"), attempt("0x7EFFBB34")]).restart
    assert policy.decide([attempt("0x7f00aa12"), attempt("0x7f00aa12", what="Loss")]).restart


@given(
    trained=st.lists(st.booleans(), max_size=20),
    attempt=st.sampled_from(
        [NO_START, dataclasses.replace(LOST, has_reported=False, lasted_s=1.0)]
    ),
)
def test_five_starts_in_a_row_may_fail(trained: list[bool], attempt: FailedAttempt) -> None:
    attempts = [LOST if has_trained else attempt for has_trained in trained]
    decisions = [policy_of(max_failures=-1).decide(attempts[: n + 1]) for n in range(len(attempts))]
    five = "".join("T" if has_trained else "." for has_trained in trained).find(".....")
    first = next((n for n, decision in enumerate(decisions) if not decision.restart), None)
    assert first == (None if five < 0 else five + 4)
    if first is not None:
        assert decisions[first].reason == "5 attempts in a row have ended before they trained"


LOST_AT_START = attempt_of(
    failure(FailureKind.WORKER_LOST, message="killed by SIGKILL before it had joined the others"),
    has_reported=False,
    lasted_s=1.0,
)
CRASH_AT_START = dataclasses.replace(
    LOST_AT_START,
    root=failure(FailureKind.WORKER_LOST, message="killed by SIGSEGV before it had joined"),
)


@pytest.mark.parametrize(
    ("attempts", "pause_s"),
    [
        ([NO_START], 0.0),
        ([NO_START] * 2, 1.0),
        ([LOST, NO_START, CRASH_AT_START, NO_START], 2.0),
        ([NO_START] * 4, 4.0),
        ([NO_START, LOST, NO_START], 0.0),
        # Whoever loses workers begins again at once.
        ([NO_START, LOST_AT_START], 0.0),
        ([LOST_AT_START] * 3, 0.0),
        ([NO_START, NO_START, dataclasses.replace(PREEMPTED, has_reported=False)], 0.0),
        ([NO_START, dataclasses.replace(NO_START, unfit=frozenset({"node-1"}))], 0.0),
    ],
)
def test_starts_that_fail_again_are_paced(attempts: list[FailedAttempt], pause_s: float) -> None:
    decision = policy_of(max_failures=-1).decide(attempts)
    assert (decision.restart, decision.pause_s) == (True, pause_s)
    says = f"; the next attempt begins in {pause_s:g} s"
    assert decision.reason.endswith(says) == (pause_s > 0)


def test_no_pause_is_told_of_a_run_that_ends() -> None:
    decision = policy_of(max_failures=1).decide([NO_START] * 2)
    assert (decision.restart, decision.pause_s) == (False, 0.0)
    assert decision.reason == "failure 2 of max_failures=1: no restart is left"


@pytest.mark.parametrize(
    "long_enough",
    [
        dataclasses.replace(NO_START, lasted_s=1000.0),
        dataclasses.replace(NO_START, has_reported=True),
    ],
    ids=["it has lasted", "it has reported"],
)
def test_who_has_trained_has_started(long_enough: FailedAttempt) -> None:
    policy = policy_of(max_failures=-1)
    assert policy.decide([NO_START] * 2 + [long_enough] + [NO_START] * 2).restart


def test_starts_that_failed_are_not_in_a_row_if_a_resized_attempt_has_trained_between() -> None:
    progress = [0, 0, 3, 3, 3]
    attempts = [dataclasses.replace(NO_START, progress=step) for step in progress]
    assert policy_of(max_failures=-1).decide(attempts).restart
    assert not policy_of(max_failures=-1).decide([*attempts, *attempts[-2:]]).restart


def test_the_limit_of_starts_does_not_lift_that_of_failures() -> None:
    decision = policy_of(max_failures=2).decide([NO_START] * 3)
    assert not decision.restart
    assert "max_failures=2" in decision.reason


def summed_up(*failures: Failure, world_size: int) -> FailedAttempt:
    return failed_attempt(failures, world_size=world_size)


@given(world_size=st.integers(1, 6), ranks=st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_an_error_is_on_every_rank_if_each_has_raised_it(world_size: int, ranks: list[int]) -> None:
    raised = [
        failure(FailureKind.USER_ERROR, rank=rank % world_size, message=f"E: <x at 0x{n:x}>")
        for n, rank in enumerate(ranks)
    ]
    attempt = summed_up(*raised, world_size=world_size)
    everybody = {rank % world_size for rank in ranks} == set(range(world_size))
    # Of a single rank nothing can be told by that: it is retried once, like others.
    assert attempt.on_every_rank == (everybody and world_size > 1)
    assert attempt.root is raised[0]


@pytest.mark.parametrize(
    "other",
    [
        failure(FailureKind.USER_ERROR, rank=1, message="KeyError: 'a'"),
        failure(FailureKind.USER_ERROR, rank=1, step=2),
        failure(FailureKind.STORAGE, rank=1),
    ],
    ids=["another exception", "another step", "another kind"],
)
def test_different_errors_are_not_one_on_every_rank(other: Failure) -> None:
    one = failure(FailureKind.USER_ERROR, rank=0)
    assert not summed_up(one, other, world_size=2).on_every_rank


def test_processes_that_are_lost_everywhere_are_no_error_of_the_user() -> None:
    lost = [failure(FailureKind.WORKER_LOST, rank=rank) for rank in range(2)]
    attempt = summed_up(*lost, world_size=2)
    assert not attempt.on_every_rank
    assert policy_of(max_failures=1).decide([attempt]).restart


def test_a_run_that_another_driver_has_is_not_retried() -> None:
    """Whatever else is wrong: peers that are killed on the way are no reason to go on."""
    taken = failure(FailureKind.LEASE_LOST, message="taken over by process 7 on elsewhere")
    attempt = failed_attempt([failure(FailureKind.WORKER_LOST), taken], world_size=2)
    assert attempt.root is taken
    decision = policy_of(max_failures=-1, retry_user_errors=True).decide([attempt])
    assert not decision.restart
    assert decision.reason == "this driver has lost its lease on the run"


def test_a_reset_is_counted_once_though_ray_notices_later_that_its_connection_is_gone() -> None:
    policy = policy_of(max_failures=1)
    reset = attempt_of(failure(FailureKind.CONNECTION_LOST))
    late = failure(FailureKind.AGENT_LOST, message="its agent can't be reached any more")
    assert policy.decide([reset, attempt_of(late, has_reported=False, lasted_s=1.0)]).restart
    assert not policy.decide([reset, attempt_of(late)]).restart
    assert not policy.decide([LOST, attempt_of(late, has_reported=False, lasted_s=1.0)]).restart


def test_a_lost_node_is_counted_once_though_it_ends_the_next_attempt_as_well() -> None:
    """The next attempt had a rank on it: the loss was reported of one agent after the other."""
    gone = node_loss("c", trained=True)
    late = node_loss("c", trained=False)
    policy = policy_of(max_failures=1)
    assert policy.decide([gone, late]).restart
    assert "counted once" in policy.decide([gone, late]).reason
    # Other losses are others.
    assert not policy.decide([gone, node_loss("d", trained=False)]).restart
    assert not policy.decide([gone, node_loss("c", trained=True)]).restart
    assert not policy.decide([gone, late, node_loss("d", trained=False)]).restart
    assert policy_of(max_failures=2).decide([gone, late, node_loss("d", trained=True)]).restart
    assert not policy_of(max_failures=-1).decide([gone, *[late] * 5]).restart


def node_loss(node: str, *, trained: bool) -> FailedAttempt:
    """An attempt of ranks on nodes a and `node` that ended when the latter was lost."""
    failures = [
        failure(FailureKind.CONNECTION_LOST, rank=0),
        failure(FailureKind.NODE_LOST, rank=1, message=f"its node {node} is gone"),
    ]
    attempt = failed_attempt(failures, world_size=2, nodes=("a", node))
    return dataclasses.replace(attempt, has_reported=trained, lasted_s=1.0)


FOUND = Rollback(
    attempt=0,
    rank=0,
    step=7,
    good_step=6,
    reason="loss is nan",
    skipped={"train": ((0, 4, 8),)},
)
DIVERGED = attempt_of(
    failure(FailureKind.DIVERGED, message="training diverges", step=7),
    diverged=Diverged(attempt=0, found=FOUND),
)


@given(max_failures=st.integers(0, 3), rollbacks=st.integers(0, 3), count=st.integers(1, 8))
def test_rollbacks_have_a_limit_of_their_own(max_failures: int, rollbacks: int, count: int) -> None:
    policy = policy_of(
        max_failures=max_failures,
        on_divergence="rollback",
        max_rollbacks=4,
        rollbacks=("step 2: loss is nan",) * rollbacks,
    )
    decision = policy.decide([DIVERGED] * count)
    assert decision.restart == (rollbacks + count <= 4)
    assert f"rollback {rollbacks + count} of max_rollbacks=4" in decision.reason
    # They use no failure up, and no failure uses one of them up.
    assert policy.decide([*[DIVERGED] * 2, LOST]).restart == (max_failures > 0)


def test_the_last_rollback_names_all_that_were_before() -> None:
    policy = policy_of(on_divergence="rollback", max_rollbacks=1, rollbacks=("step 2: inf",))
    assert policy.decide([DIVERGED, DIVERGED]).reason == (
        "rollback 3 of max_rollbacks=1: none is left, after step 2: inf; step 7: training diverges"
    )


def test_a_divergence_ends_the_run_where_there_is_no_way_back() -> None:
    assert not policy_of(max_failures=-1, on_divergence="fail").decide([DIVERGED]).restart
    policy = policy_of(on_divergence="rollback", max_rollbacks=4)
    no_batch = Diverged(attempt=0, found=FOUND, problem="no batch can be left out")
    stuck = dataclasses.replace(DIVERGED, diverged=no_batch)
    assert policy.decide([stuck]).reason == "no batch can be left out"
    skipped = dataclasses.replace(FOUND, skipped={"train": ((0, 1, 3),)})
    left_out = Diverged(attempt=0, found=skipped)
    gone_back = policy.decide([dataclasses.replace(DIVERGED, diverged=left_out)])
    assert gone_back.reason == (
        "rollback 1 of max_rollbacks=4, without positions 1 to 2 of epoch 0 of 'train'"
    )
