"""A storage that stops answering: the run ends after its time, once, and can be resumed."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.core.faulty_runs import ROUNDS, Run
from tests.faulty_storage import ERROR, Call, Faults, FaultyFileSystem, FromThenOn, out

from polytrain import (
    Checkpoint,
    InvalidJobError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)
from polytrain.checkpoint.staging import forget_aside, kept_aside, staged_in
from polytrain.storage import calls
from polytrain.testing.contract import kit_table
from polytrain.testing.processes import eventually

TIMEOUT_S = 600.0
"""`storage_timeout_s`."""


class Clock:
    """The time that retries have waited, all together."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs = threading.Lock()
        """Held by whoever doesn't want it to go on."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self.runs:
            self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Clock:
    clock = Clock()
    # What can't be stored is kept there.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("node")))
    monkeypatch.setattr("polytrain.storage.calls.time", clock)
    # Two threads that fail at the same moment would share the time.
    monkeypatch.setattr("polytrain.run.lease._BEAT_EVERY_S", 3600)
    monkeypatch.setattr("polytrain.storage.calls._CALLS", 1)
    return clock


WHEN: dict[str, Callable[[Call], bool]] = {
    "a part": lambda call: call.kind == "write" and "checkpoint_000001" in call.path,
    "a manifest": lambda call: "checkpoint_000001-1.0/polytrain-manifest" in call.path,
    "the journal": lambda call: (
        call.kind == "create" and "journal.jsonl/000001-000002" in call.path
    ),
}


@pytest.mark.parametrize("when", WHEN)
def test_the_end_waits_once_for_a_storage_that_is_dead(
    tmp_path: Path, clock: Clock, when: str
) -> None:
    run = Run(tmp_path, retry_s=TIMEOUT_S, max_failures=3)
    is_dead = False

    def dies(number: int, call: Call) -> None:
        nonlocal is_dead
        is_dead = is_dead or WHEN[when](call)
        if is_dead:
            raise out()

    with pytest.raises(TrainingFailedError, match=ERROR) as caught:
        run.fit(dies)
    assert is_dead
    assert TIMEOUT_S / 2 < clock.now <= TIMEOUT_S
    # The checkpoint that the driver knows is named, though it can't be read now.
    assert caught.value.result.checkpoint is not None
    assert "checkpoint_000000-1.0" in caught.value.result.checkpoint.path
    assert when == "a part" or "the newest checkpoint there: that of step 1" in str(caught.value)
    run.assert_nothing_is_lost()
    assert len(run.fit().history) == ROUNDS


def test_files_that_cant_be_stored_are_kept_and_named(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path)

    def no_second(number: int, call: Call) -> None:
        if "checkpoint_000001" in call.path and call.kind == "create":
            raise out()

    with pytest.raises(TrainingFailedError, match=ERROR) as caught:
        run.fit(no_second)
    named = re.search(
        r"The files of checkpoint_000001-1.0 aren't stored; they are in (\S+) on ",
        str(caught.value),
    )
    assert named is not None
    kept = Path(named[1])
    committed = run.directory / "checkpoints" / "checkpoint_000000-1.0"
    names = {path.name for path in committed.iterdir()} - {"polytrain-manifest.json"}
    assert {path.name for path in kept.iterdir()} == names


def test_a_newer_checkpoint_takes_the_place_of_what_was_kept(tmp_path: Path) -> None:
    run = tmp_path / "run-abc"
    older, newer, other = (
        staged_in(run, f"checkpoint_{number:06d}-1.0", rank)
        for number, rank in [(1, 0), (2, 0), (1, 1)]
    )
    for staged in (older, newer, other):
        staged.mkdir(parents=True)
        (staged / "model").write_text(staged.name)
    kept = [kept_aside(staged) for staged in (older, other, newer)]
    assert kept[0] is not None
    assert not kept[0].exists()
    assert [path is not None and path.exists() for path in kept[1:]] == [True, True]
    # Once newer ones are stored, nothing is left.
    forget_aside(newer)
    forget_aside(other)
    assert [path.name for path in tmp_path.iterdir()] == ["run-abc"]


def test_what_was_kept_stays_when_it_is_to_be_kept_again(tmp_path: Path) -> None:
    """A part fails on its thread while its agent ends: both want to keep its files."""
    older, newer = (
        staged_in(tmp_path / "run-abc", f"checkpoint_{number:06d}-1.0", 0) for number in (1, 2)
    )
    for staged in (older, newer):
        staged.mkdir(parents=True)
        (staged / "model").write_text(staged.name)
    kept = kept_aside(newer)
    assert kept is not None
    assert kept_aside(newer) == kept
    # One that fails after a newer one doesn't take its place.
    assert kept_aside(older) is None
    forget_aside(older)
    assert (kept / "model").read_text() == newer.name


def test_a_signal_ends_the_wait_for_a_storage_that_is_dead(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path, retry_s=TIMEOUT_S)
    signalled_at: list[float] = []

    def dies(number: int, call: Call) -> None:
        if "checkpoint_000001" not in call.path and not signalled_at:
            return
        if clock.now > 60:
            # For threads that retry, time would pass before the main thread takes the signal.
            with clock.runs:
                if not signalled_at:
                    signalled_at.append(clock.now)
                    os.kill(os.getpid(), signal.SIGTERM)
                    assert eventually(lambda: calls._limit_s() < math.inf)
        raise out()

    with pytest.raises(SystemExit) as ended:
        run.fit(dies)
    assert ended.value.code == 128 + signal.SIGTERM
    assert clock.now - signalled_at[0] <= 20
    run.assert_nothing_is_lost()
    assert len(run.fit().history) == ROUNDS


@pytest.fixture(params=[errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def dead_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From the second checkpoint on, nothing gets onto the disk any more."""
    syncs, sync = 0, os.fsync

    def fails(descriptor: int) -> None:
        nonlocal syncs
        syncs += "checkpoint_" in os.readlink(f"/proc/self/fd/{descriptor}")
        if syncs > 3:
            raise OSError(request.param, os.strerror(request.param))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        yield


@pytest.mark.usefixtures("dead_disk")
def test_the_end_waits_once_for_a_directory_that_is_dead(tmp_path: Path, clock: Clock) -> None:
    trainer = make_trainer(
        "reference",
        rounds=ROUNDS,
        label="label",
        datasets={"train": kit_table()},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="one", storage_path=tmp_path, storage_timeout_s=TIMEOUT_S, progress=False
        ),
    )
    with pytest.raises(TrainingFailedError):
        trainer.fit()
    assert TIMEOUT_S / 2 < clock.now <= TIMEOUT_S


def test_making_a_trainer_waits_seconds_for_the_storage_of_its_start(
    tmp_path: Path, clock: Clock
) -> None:
    start = Checkpoint("start", FaultyFileSystem(tmp_path, Faults(FromThenOn(0))))
    with pytest.raises(InvalidJobError, match="restore_from: it can't be read"):
        make_trainer("reference", lambda: None, restore_from=start)
    assert 1 < clock.now <= 10
