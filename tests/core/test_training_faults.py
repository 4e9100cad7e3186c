"""A training goes on or fails with the cause, whichever call to its storage fails, and however."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.committed import intact_checkpoints
from tests.core.faulty_runs import KEPT, ROUNDS, Run
from tests.faulty_storage import (
    ERROR,
    Call,
    Fault,
    FromThenOn,
    Kind,
    Once,
    Short,
    full,
    out,
)
from tests.sweeps import Selected

from polytrain import (
    InvalidJobError,
    Result,
    TrainingFailedError,
)


def outcome(result: Result) -> object:
    """What counts in the end."""
    assert result.checkpoint is not None
    result.checkpoint.verify()
    return result.metrics, result.history, result.load_model().tolist()


@pytest.fixture(scope="module", autouse=True)
def countable() -> Iterator[None]:
    """The calls of a run come in one order, so that the n-th is the same every time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polytrain.storage.calls._CALLS", 1)
        # On a slow machine there would be one more now and then.
        patch.setattr("polytrain.run.lease._BEAT_EVERY_S", 3600)
        yield


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The outcome of a run that nothing happens to."""
    result = Run(tmp_path_factory.mktemp("undisturbed")).fit()
    assert len(result.history) == ROUNDS
    return outcome(result)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """What a run asks of its storage."""
    run = Run(tmp_path_factory.mktemp("calls"))
    run.fit()
    return run.filesystem.faults.calls


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, calls: list[Call]) -> Path:
    """Where a run has been interrupted in the middle of its third checkpoint."""
    run = Run(tmp_path_factory.mktemp("interrupted"))
    third = [at for at, call in enumerate(calls) if "checkpoint_000002" in call.path]
    with pytest.raises(KeyboardInterrupt):
        run.fit(Once(third[3], KeyboardInterrupt))
    assert run.committed.directories == ["checkpoint_000000-1.0", "checkpoint_000001-1.0"]
    return run.root


@pytest.fixture(scope="module")
def calls_of_resuming(interrupted: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """What the driver asks of the storage that goes on with the interrupted run."""
    run = resumed(interrupted, tmp_path_factory.mktemp("resumed") / "run")
    run.fit()
    assert {call.kind for call in run.filesystem.faults.calls} == set(get_args(Kind)) - {"info"}
    return run.filesystem.faults.calls


def resumed(interrupted: Path, root: Path, **how: Any) -> Run:
    """Another driver for a copy of the interrupted run."""
    shutil.copytree(interrupted, root)
    return Run(root, **how)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ask again at once; and don't wait for whoever has left half a claim."""
    # What can't be stored is kept there.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("node")))
    monkeypatch.setattr("polytrain.storage.calls._FIRST_WAIT_S", 0)
    monkeypatch.setattr("polytrain.run.lease._DEAD_AFTER_S", 0)


ONE_IN = 7
"""Of the calls that may fail, one in so many does so in `make test`."""

Runs = Callable[..., Iterator[tuple[int, Call, Run]]]


@pytest.fixture(params=["new", "resumed"])
def runs(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    interrupted: Path,
    calls: list[Call],
    calls_of_resuming: list[Call],
    selected: Selected,
) -> Runs:
    """As many runs as there are calls to the storage: in each, another one is to fail.

    With `among`, only for those calls. Unless it is a sweep, for one in `one_in` of these.
    """
    is_new = request.param == "new"

    def of_calls(
        *, one_in: int = ONE_IN, among: Callable[[Call], bool] = lambda call: True, **how: Any
    ) -> Iterator[tuple[int, Call, Run]]:
        numbered = enumerate(calls if is_new else calls_of_resuming)
        chosen = selected([(at, call) for at, call in numbered if among(call)], one_in)
        assert chosen
        for at, call in chosen:
            root = tmp_path / str(at)
            yield at, call, Run(root, **how) if is_new else resumed(interrupted, root, **how)

    return of_calls


def stores_a_checkpoint(call: Call) -> bool:
    return "/checkpoints/" in call.path and call.kind in ("create", "write")


def is_looked_at_first(call: Call) -> bool:
    """Whether the call is made before a run begins: nobody is kept waiting then."""
    return call.path == "runs" or "probe" in call.path


def fitted_or_reported(run: Run, fault: Fault, cause: str) -> Result | None:
    """What came of it; None if it failed with that cause."""
    try:
        return run.fit(fault)
    except (TrainingFailedError, InvalidJobError) as error:
        message = str(error)
    assert cause in message
    return None


@pytest.mark.sweep
def test_a_passing_error_of_any_call_changes_nothing(runs: Runs, expected: object) -> None:
    for at, call, run in runs(retry_s=600):
        if is_looked_at_first(call):
            with pytest.raises(InvalidJobError, match=ERROR):
                run.fit(Once(at))
        else:
            assert outcome(run.fit(Once(at))) == expected, call
        run.assert_nothing_is_lost()
        assert outcome(run.fit()) == expected, call


def half(at: int) -> Fault:
    return Once(at, Short.loudly)


def of_the_client(at: int) -> Fault:
    return Once(at, lambda: ValueError("a client's words"))


def full_from_then_on(at: int) -> Fault:
    return FromThenOn(at, full, kinds=frozenset(["create", "mkdir", "write"]))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("make", "cause", "kinds"),
    [
        (Once, ERROR, get_args(Kind)),
        (FromThenOn, ERROR, get_args(Kind)),
        (half, ERROR, ["read", "write"]),
        (of_the_client, "a client's words", ["ls", "open", "create"]),
        (full_from_then_on, "No space left on device", ["create", "mkdir", "write"]),
    ],
    ids=["once", "for ever", "half", "of the client", "full"],
)
def test_whatever_fails_for_good_is_reported_and_nothing_is_lost(
    runs: Runs, expected: object, make: Callable[[int], Fault], cause: str, kinds: list[Kind]
) -> None:
    for at, call, run in runs(among=lambda call: call.kind in kinds):
        result = fitted_or_reported(run, make(at), cause)
        assert result is None or outcome(result) == expected, call
        run.assert_nothing_is_lost()
        assert outcome(run.fit()) == expected, call
        run.assert_nothing_is_lost()


@pytest.mark.sweep
def test_another_attempt_makes_up_for_a_checkpoint_that_failed(
    runs: Runs, expected: object
) -> None:
    for at, call, run in runs(one_in=4, among=stores_a_checkpoint, max_failures=1):
        result = run.fit(Once(at))
        assert outcome(result) == expected, call
        assert len(run.committed.directories) == len(set(run.committed.directories))
        run.assert_nothing_is_lost()
        assert outcome(run.fit()) == expected, call


@pytest.mark.sweep
def test_a_short_write_that_nobody_tells_of_is_no_checkpoint(runs: Runs, expected: object) -> None:
    def is_a_write(call: Call) -> bool:
        return stores_a_checkpoint(call) and call.kind == "write"

    for at, call, run in runs(one_in=2, among=is_a_write):
        with pytest.raises(TrainingFailedError, match=r"\d+ bytes instead of \d+"):
            run.fit(Once(at, Short.silently))
        run.assert_nothing_is_lost()
        assert outcome(run.fit()) == expected, call


def test_nobody_trains_on_what_was_cut_off_on_its_way(
    interrupted: Path, calls_of_resuming: list[Call], expected: object, tmp_path: Path
) -> None:
    """The checkpoint is read twice: to see whether it is whole, and to be used."""
    second = "checkpoint_000001-1.0/coefficients.npy"
    reads = [at for at, call in enumerate(calls_of_resuming) if call[1].endswith(second)]
    fetched = [at for at in reads if calls_of_resuming[at].kind == "read"]
    for at in fetched:
        run = resumed(interrupted, tmp_path / str(at))
        result = fitted_or_reported(
            run, Once(at, Short.silently), "differs from what was committed"
        )
        assert result is None or outcome(result) == expected
        assert outcome(run.fit()) == expected


@pytest.mark.sweep
def test_a_run_that_is_interrupted_at_any_call_goes_on(runs: Runs, expected: object) -> None:
    for at, call, run in runs():
        with pytest.raises(KeyboardInterrupt):
            run.fit(Once(at, KeyboardInterrupt))
        run.assert_nothing_is_lost()
        assert outcome(run.fit()) == expected, call


def test_whatever_a_call_is_in_the_middle_of_a_reader_sees_only_checkpoints(
    tmp_path: Path, expected: object, calls: list[Call]
) -> None:
    run = Run(tmp_path)
    seen: list[tuple[set[str], set[str], set[str]]] = []

    def look(number: int, call: Call) -> None:
        kept = set(run.committed.directories[-KEPT:])
        seen.append((kept, run.accepted(), intact_checkpoints(run.directory)))

    assert outcome(run.fit(look)) == expected
    assert len(seen) == len(calls)
    for kept, accepted, intact in seen:
        assert kept <= accepted <= intact


def test_what_cannot_be_deleted_delays_no_commit_and_is_deleted_later(tmp_path: Path) -> None:
    """As on NFS, while a process of this machine has a file open."""
    run, refused = Run(tmp_path, retry_s=1, kept=1), []

    def fault(number: int, call: Call) -> None:
        is_early = len(run.committed.directories) < ROUNDS
        is_first = is_early and "000000-1.0/coef" in call.path
        # No commit follows: it is deleted at the run's end.
        is_last = "000001-1.0/polytrain-manifest" in call.path and len(refused) < 2
        if call.kind == "rm" and (is_first or is_last):
            refused.append(call)
            raise out()

    run.fit(fault)
    assert len(refused) == 2
    assert [each.name for each in run.directory.glob("checkpoints/*")] == ["checkpoint_000002-1.0"]


def test_a_full_storage_is_called_full(tmp_path: Path, calls: list[Call]) -> None:
    third = [at for at, call in enumerate(calls) if "checkpoint_000002" in call.path]
    run = Run(tmp_path)
    with pytest.raises(TrainingFailedError, match="runs/one is full") as caught:
        run.fit(full_from_then_on(third[0]))
    assert "the checkpoints there are intact" in str(caught.value)
    assert run.accepted() == set(run.committed.directories)
    assert len(run.committed.directories) == 2
    result = caught.value.result
    assert result is not None
    assert result.checkpoint is not None
    result.checkpoint.verify()
