"""Errors travel between processes and say what a person must know."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import replace

import pytest

import polytrain.errors
import polytrain_plugins.errors
from polytrain.api.result import Result
from polytrain.backends.reference import Reference
from polytrain.errors import (
    BadDataError,
    DamagedFileError,
    Failure,
    FailureKind,
    ReplicasDifferError,
    RunFormatError,
    TrainingFailedError,
)
from polytrain_plugins import InvalidJobError, PolytrainError, Problem

PROBLEMS = (
    Problem(field="label", what="it is required", remedy="Name the column to predict"),
    Problem(field="datasets", what="there is no 'train'", remedy="Pass one"),
)
FAILURES = (
    Failure(kind=FailureKind.USER_ERROR, rank=1, message="ValueError: no", traceback="Tr\n  a\n"),
    Failure(kind=FailureKind.USER_ERROR, rank=0, message="RuntimeError: peer closed"),
)
ARGUMENTS = {
    BadDataError: (PROBLEMS,),
    DamagedFileError: ("journal.jsonl", "step", "is 'x', not a whole number"),
    InvalidJobError: (PROBLEMS,),
    ReplicasDifferError: ("rank 1 holds other values", True),
    RunFormatError: (1, 2),
    TrainingFailedError: (
        "max_failures=0 allows no restart",
        FAILURES,
        Result(path="/runs/run", backend=Reference(label="y"), metrics={"loss": 1.0}),
    ),
}


def every_error() -> list[type[Exception]]:
    found = {
        cls
        for module in (polytrain.errors, polytrain_plugins.errors)
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, Exception)
    }
    return sorted(found, key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", every_error(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("how", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_every_error_survives_pickling(cls: type[Exception], how: object) -> None:
    error = cls(*ARGUMENTS.get(cls, ("what happened",)))
    again = how(error)
    assert type(again) is cls
    assert str(again) == str(error) != ""
    assert vars(again) == vars(error)


@pytest.mark.parametrize("cls", every_error(), ids=lambda cls: cls.__name__)
def test_every_error_can_be_caught_as_one(cls: type[Exception]) -> None:
    assert issubclass(cls, PolytrainError)


def test_an_invalid_job_lists_every_problem_with_its_remedy() -> None:
    text = str(InvalidJobError(PROBLEMS))
    assert "2 problems" in text
    for problem in PROBLEMS:
        assert f"{problem.field}: {problem.what}. {problem.remedy}" in text
    assert "1 problem;" in str(InvalidJobError(PROBLEMS[:1]))


def test_an_invalid_job_is_a_value_error() -> None:
    assert isinstance(InvalidJobError(PROBLEMS), ValueError)


def test_a_failed_training_begins_with_its_cause() -> None:
    text = str(TrainingFailedError("no restart is left", FAILURES))
    first, *_ = text.splitlines()
    assert first == "rank 1: ValueError: no (no restart is left)"
    assert "On rank 1:\nTr\n  a" in text
    assert "Also on rank 0: RuntimeError: peer closed" in text


def test_a_failed_training_says_where_what_was_printed_and_what_to_type() -> None:
    traceback = "Traceback:\n  train()\nValueError: no\nsuch column\n"
    cause = Failure(
        kind=FailureKind.USER_ERROR,
        rank=1,
        message="ValueError: no\nsuch column",
        traceback=traceback,
        step=7,
    )
    error = TrainingFailedError(
        "no restart is left",
        (cause,),
        path="/runs/my run",
        log="/runs/my run/logs/rank_1.log",
        host="10.0.0.3",
        last_lines=("reading", "last words"),
    )
    assert str(error) == (
        "rank 1 on 10.0.0.3: ValueError: no\nsuch column, after step 7 (no restart is left)\n"
        "\n"
        "The last lines of rank 1:\n    reading\n    last words\n"
        "\n"
        "The run's directory: /runs/my run\n"
        "To see more: polytrain logs '/runs/my run' --rank 1\n"
        "\n"
        "On rank 1:\nTraceback:\n  train()\nValueError: no\nsuch column"
    )


LOST = Failure(kind=FailureKind.WORKER_LOST, rank=1, message="killed by SIGKILL", output="b\n")


def test_a_lost_process_is_reported_once() -> None:
    assert str(TrainingFailedError("no restart is left", (LOST,), last_lines=("a", "b"))) == (
        "rank 1: killed by SIGKILL (no restart is left)\n\nThe last lines of rank 1:\n    a\n    b"
    )


def test_what_is_not_among_the_last_lines_is_reported_too() -> None:
    text = str(TrainingFailedError("no restart is left", (LOST,), last_lines=("a",)))
    assert "The last output of rank 1:\nb\n" in text
    assert text.endswith("The last lines of rank 1:\n    a")


def test_last_lines_that_are_the_end_of_what_is_reported_are_not_reported_again() -> None:
    crashed = replace(LOST, output="Fatal Python error\n  a\n  b\n")
    text = str(TrainingFailedError("no restart is left", (crashed,), last_lines=("  a", "  b")))
    assert text.endswith("output of rank 1:\nFatal Python error\n  a\n  b")


def test_peers_that_were_lost_in_the_same_way_are_reported() -> None:
    text = str(TrainingFailedError("no restart is left", (LOST, replace(LOST, rank=0, output=""))))
    assert text.count("Also on rank") == 1
    assert "Also on rank 0: killed by SIGKILL" in text


def test_a_failure_that_nobody_has_printed_anything_about_names_the_run() -> None:
    text = str(TrainingFailedError("no restart is left", FAILURES, path="/r", host="127.0.0.1"))
    # On one machine every rank is at its loopback address.
    assert text.startswith("rank 1: ValueError: no (")
    assert "\nTo see more: polytrain show /r\n" in text


def test_the_last_line_is_what_the_users_code_has_raised() -> None:
    peer = replace(FAILURES[1], traceback="Tr\n  b\nRuntimeError: peer closed\n")
    cause = replace(FAILURES[0], traceback="Tr\n  a\nValueError: no\n")
    lines = str(TrainingFailedError("no", (cause, peer), path="/r", last_lines=("z",))).splitlines()
    assert lines[-4:] == ["On rank 1:", "Tr", "  a", "ValueError: no"]
    assert lines.index("RuntimeError: peer closed") < lines.index("On rank 1:")


def test_what_ranks_have_raised_alike_is_reported_once() -> None:
    bug = Failure(kind=FailureKind.USER_ERROR, rank=0, message="KeyError: 1", traceback="Tr\n a\n")
    refused = Failure(kind=FailureKind.USER_ERROR, rank=0, message="BadDataError: label")
    for failure in (bug, refused):
        failures = tuple(replace(failure, rank=rank) for rank in (2, 0, 1))
        text = str(TrainingFailedError("no restart is left", failures))
        assert text == str(TrainingFailedError("no restart is left", failures[:1]))


def test_bad_data_are_reported_by_their_problems() -> None:
    assert str(BadDataError(PROBLEMS[:1])) == str(PROBLEMS[0])
    assert str(BadDataError(PROBLEMS)).startswith("2 problems:\n  - label: it is required")


def test_a_hang_is_reported_with_what_the_first_ranks_did() -> None:
    stacks = {rank: f"frame of {rank}\n" for rank in reversed(range(20))}
    hang = Failure(kind=FailureKind.HANG, rank=None, message="no progress", stacks=stacks)
    text = str(TrainingFailedError("no restart is left", (hang,)))
    assert text.startswith("no progress (no restart is left)\n")
    assert "Rank 0:\nframe of 0\n\nRank 1:\nframe of 1\n" in text
    assert "frame of 7" in text
    assert "frame of 8" not in text
    assert "12 more are in the run's journal" in text


def test_a_failure_of_no_rank_is_reported_without_one() -> None:
    failure = Failure(kind=FailureKind.STARTUP, rank=None, message="no room for 4 workers")
    error = TrainingFailedError("workers can't be placed", (failure,))
    assert str(error) == "no room for 4 workers (workers can't be placed)"


def test_the_last_words_of_a_process_that_could_not_say_more_are_reported() -> None:
    lost = Failure(
        kind=FailureKind.WORKER_LOST,
        rank=1,
        message="killed by SIGSEGV before its training was done",
        output="Fatal Python error: Segmentation fault\n\n",
    )
    message = str(TrainingFailedError("max_failures=0 allows no restart", (lost,)))
    assert message.startswith("rank 1: killed by SIGSEGV")
    assert message.endswith("last output of rank 1:\nFatal Python error: Segmentation fault")


def test_of_thousands_of_failures_the_first_are_shown() -> None:
    lost = [
        Failure(kind=FailureKind.NODE_LOST, rank=rank, message="its node is gone")
        for rank in range(10_000)
    ]
    text = str(TrainingFailedError("no restart is left", tuple(lost)))
    assert "Also on rank 16: its node is gone" in text
    assert "9983 more failures are in the run's journal" in text
    assert len(text.splitlines()) < 50


@pytest.mark.parametrize(
    ("rank", "host", "text"),
    [
        (1, "10.0.0.2", "rank 1 on 10.0.0.2: killed by SIGKILL"),
        # On one machine the address tells nothing.
        (1, "127.0.0.1", "rank 1: killed by SIGKILL"),
        (1, "", "rank 1: killed by SIGKILL"),
        (None, "10.0.0.2", "killed by SIGKILL"),
    ],
)
def test_a_failure_names_its_rank_and_the_node_if_there_are_several(
    rank: int | None, host: str, text: str
) -> None:
    lost = Failure(kind=FailureKind.WORKER_LOST, rank=rank, message="killed by SIGKILL", host=host)
    assert str(lost) == text
