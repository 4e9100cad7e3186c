"""A restart waits for the state that a survivor left, but not long if the storage hangs."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.faulty_storage import FaultyFileSystem
from tests.unit.checkpoint.checkpoints import ATTEMPT, stage, store_in

from polytrain.checkpoint.manifest import directory_name
from polytrain.checkpoint.parts import PartStored, StagedPart, StateWritten
from polytrain.checkpoint.staging import Stagings
from polytrain.checkpoint.store import CheckpointStore
from polytrain.errors import FailureKind
from polytrain.events.attempt import Failed, StateUnwritten
from polytrain.storage.local import LocalStorage
from polytrain.storage.location import Location
from polytrain.workers.agents import part_storer
from polytrain.workers.agents.part_storer import PartStorer, of_state
from polytrain.workers.agents.sent_copies import Copy

REFUSED = RuntimeError("can't start new thread")


def part(store: CheckpointStore, number: int) -> StagedPart:
    return staged_part(stage(store, number, model=str(number)), number)


def staged_part(staged: Path, number: int = 1) -> StagedPart:
    return StagedPart(
        attempt_id=ATTEMPT,
        rank=0,
        checkpoint=number,
        staged=staged,
        stamps={},
        step=number,
        metrics={},
        positions={},
    )


def test_what_a_killed_process_had_begun_to_stage_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In object storage, or on another disk, nothing else deletes it before the run's end.

    What it has stored stays: the next attempt may resume from it.
    """
    stagings = Stagings(scratch=tmp_path / "scratch", near=None)
    begun, stored, others, later = (
        stagings.new(directory_name(number, attempt), rank)
        for number, attempt, rank in (
            (1, ATTEMPT, 0),
            (0, ATTEMPT, 0),
            (1, ATTEMPT, 1),
            (1, replace(ATTEMPT, attempt=1), 0),
        )
    )
    (stored / "model").write_text("weights")

    async def run() -> None:
        store = store_in(Location.of("runs/one", FaultyFileSystem(tmp_path / "bucket")))
        storer = PartStorer(store, merges_files=False, emit=Mock())
        storer.take(staged_part(stored, 0))
        await storer.finish()
        # Here, then, and at once.
        monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=REFUSED))
        storer.clear(stagings.scratch, ATTEMPT, 0)

    asyncio.run(run())
    left = {path for path in (begun, stored, others, later) if path.exists()}
    assert left == {stored, others, later}


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the storage of checkpoint 1 hang until the test is over."""
    over = threading.Event()
    real = CheckpointStore.store_part

    def store_part(self: CheckpointStore, directory: str, *given: Any, **options: Any) -> Any:
        if "000001" in directory:
            over.wait()
        return real(self, directory, *given, **options)

    monkeypatch.setattr(CheckpointStore, "store_part", store_part)
    yield
    over.set()


def told(store: CheckpointStore, *parts: tuple[StagedPart, Any]) -> list[Any]:
    """Store parts, and return what the driver hears until all are stored or late."""
    events: list[Any] = []

    async def run() -> None:
        storer = PartStorer(store, merges_files=False, emit=events.append)
        for each, as_event in parts:
            storer.take(each, as_event)
        await storer.finish()
        storer.close()

    asyncio.run(run())
    return events


@pytest.mark.usefixtures("hanging")
def test_a_state_that_the_storage_does_not_take_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_storer, "_STATE_WITHIN_S", 0.01)
    store = store_in(tmp_path)
    state, next_part = part(store, 1), part(store, 2)
    as_event = of_state(Copy(state, False, False), is_copy=True)
    before = {*threading.enumerate()}
    events = told(store, (state, as_event), (next_part, None))
    # A program that ends waits for no thread that hangs.
    # That of the next part may not have ended yet.
    assert {each.daemon for each in {*threading.enumerate()} - before} == {True}
    [late] = [each for each in events if isinstance(each, StateUnwritten)]
    assert f"{tmp_path} hasn't taken its state within 0 s" in late.reason
    # The checkpoints of the next attempt don't wait for it either.
    [stored] = [each for each in events if isinstance(each, PartStored)]
    assert stored.checkpoint == 2


def test_the_time_of_a_state_begins_when_the_one_before_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent may store its rank's copy and another's."""
    happened: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []
    limit_s, store_part = part_storer._limit_s, CheckpointStore.store_part

    def noted_limit_s(state: StagedPart) -> float:
        loops.append(asyncio.get_running_loop())
        happened.append(f"limit {state.checkpoint}")
        return limit_s(state)

    def noted_store_part(self: CheckpointStore, directory: str, *given: Any, **options: Any) -> Any:
        # Whatever can begin beside it has begun.
        has_turned = threading.Event()
        loops[0].call_soon_threadsafe(has_turned.set)
        assert has_turned.wait(60)
        happened.append("stored")
        return store_part(self, directory, *given, **options)

    monkeypatch.setattr(part_storer, "_limit_s", noted_limit_s)
    monkeypatch.setattr(CheckpointStore, "store_part", noted_store_part)
    store = store_in(tmp_path)
    states = [part(store, number) for number in (1, 2)]
    as_events = [of_state(Copy(each, False, False), is_copy=True) for each in states]
    events = told(store, *zip(states, as_events, strict=True))
    assert [type(each) for each in events] == [StateWritten, StateWritten]
    assert happened == ["limit 1", "stored", "limit 2", "stored"]


@pytest.mark.usefixtures("hanging")
def test_of_a_storage_that_hangs_all_states_wait_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    wait = asyncio.wait

    async def noted(futures: Any, *, timeout: float) -> Any:
        limits.append(timeout)
        return await wait(futures, timeout=timeout)

    monkeypatch.setattr(part_storer, "_STATE_WITHIN_S", 0.01)
    monkeypatch.setattr(asyncio, "wait", noted)
    store = store_in(tmp_path)
    states = [part(store, number) for number in (1, 2)]
    as_events = [of_state(Copy(each, False, False), is_copy=True) for each in states]
    events = told(store, *zip(states, as_events, strict=True))
    assert [type(each) for each in events] == [StateUnwritten, StateUnwritten]
    assert len(limits) == 1


def test_of_a_storage_that_fails_all_states_are_retried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def fails(self: LocalStorage, file: Path, path: str, *, move: bool) -> str:
        def put() -> str:
            calls.append(path)
            raise OSError(errno.EIO, "no answer")

        return self._retrying(put, syncs=True)

    monkeypatch.setattr(LocalStorage, "put", fails)
    store = CheckpointStore(location=Location.of(tmp_path, retry_s=0.2))
    states = [part(store, number) for number in (1, 2)]
    as_events = [of_state(Copy(each, False, False), is_copy=True) for each in states]
    events = told(store, *zip(states, as_events, strict=True))
    assert [type(each) for each in events] == [StateUnwritten, StateUnwritten]
    assert len([path for path in calls if "000002" in path]) == 1


def test_a_storage_that_failed_in_one_attempt_is_retried_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be hours later, and one call fails by chance."""
    calls: list[str] = []
    own = LocalStorage.put

    def put(self: LocalStorage, file: Path, path: str, *, move: bool) -> str:
        def once() -> str:
            calls.append(path)
            if "000001" in path or calls.count(path) == 1:
                raise OSError(errno.EIO, "no answer")
            return own(self, file, path, move=move)

        return self._retrying(once, syncs=True)

    monkeypatch.setattr(LocalStorage, "put", put)
    store = CheckpointStore(location=Location.of(tmp_path, retry_s=0.2))
    states = [part(store, number) for number in (1, 2)]
    states[1] = replace(states[1], attempt_id=replace(ATTEMPT, attempt=ATTEMPT.attempt + 1))
    as_events = [of_state(Copy(each, False, False), is_copy=True) for each in states]
    events = told(store, *zip(states, as_events, strict=True))
    assert [type(each) for each in events] == [StateUnwritten, StateWritten]


def test_a_state_is_stored_beside_the_checkpoints(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    state = part(store, 1)
    as_event = of_state(Copy(state, False, False), is_copy=False)
    [written] = told(store, (state, as_event))
    assert isinstance(written, StateWritten)
    assert written.part.step == 1


def test_a_large_state_has_more_time(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    large = part(store, 1)
    assert large.staged is not None
    with (large.staged / "weights").open("wb") as file:
        file.truncate(5_000_000_000)
    assert part_storer._limit_s(large) == pytest.approx(120)
    assert part_storer._limit_s(part(store, 2)) == pytest.approx(20)


def test_the_agent_answers_while_copies_of_older_checkpoints_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, has_deleted = threading.Event(), threading.Event()
    waited: list[bool] = []
    deleted = part_storer.remove

    def remove(staged: Path) -> None:
        waited.append(answered.wait(timeout=10))
        deleted(staged)
        has_deleted.set()

    monkeypatch.setattr(part_storer, "remove", remove)
    store = store_in(Location.of("runs/one", FaultyFileSystem(tmp_path / "bucket")))
    staging = Stagings(scratch=tmp_path, near=None).new("checkpoint", 0)
    (staging / "model").write_text("weights")
    staged = staged_part(staging)

    async def run() -> None:
        storer = PartStorer(store, merges_files=False, emit=lambda event: None)
        storer.take(staged)
        await storer.finish()
        storer.forget_copies(before=2)
        answered.set()
        storer.close()

    asyncio.run(run())
    assert has_deleted.wait(10)
    assert waited == [True]
    assert not staging.exists()


def test_what_is_staged_is_deleted_though_the_system_refuses_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both a part that is dropped, and the copy of an older checkpoint."""
    store = store_in(Location.of("runs/one", FaultyFileSystem(tmp_path / "bucket")))
    stagings = [Stagings(scratch=tmp_path, near=None).new(name, 0) for name in ("one", "two")]
    copy, dropped = (staged_part(staged, n) for n, staged in enumerate(stagings, 1))

    async def run() -> None:
        storer = PartStorer(store, merges_files=True, emit=lambda event: None)
        storer.take(copy)
        await storer.finish()
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", Mock(side_effect=REFUSED))
            storer.forget_copies(before=2)
            storer.take(replace(dropped, rank=1))
            storer.store_rest(ATTEMPT.attempt, dropped.checkpoint, None)
            await storer.finish()
        storer.close()

    asyncio.run(run())
    assert not any(staged.exists() for staged in stagings)


def test_a_thread_that_the_system_refuses_is_a_failure_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may limit the number of threads. Otherwise nobody would hear of the parts."""

    store = store_in(tmp_path)
    checkpoint, state = part(store, 1), part(store, 2)
    as_event = of_state(Copy(state, False, False), is_copy=False)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=REFUSED))
    failed, unwritten = told(store, (checkpoint, None), (state, as_event))
    assert isinstance(failed, Failed)
    assert (failed.failure.kind, failed.failure.rank) == (FailureKind.STORAGE, 0)
    assert isinstance(unwritten, StateUnwritten)
    for reason in (failed.failure.message, unwritten.reason):
        assert "can't start new thread" in reason
