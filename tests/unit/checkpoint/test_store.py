"""How a checkpoint comes to be: staged, stored in parts, committed by its manifest."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.faulty_storage import Call, Faults, FaultyFileSystem
from tests.unit.checkpoint.checkpoints import (
    ATTEMPT,
    commit,
    directories,
    directory_of,
    manifest,
    stage,
    store_in,
    store_part,
)

from polytrain import Checkpoint
from polytrain.checkpoint.manifest import (
    MANIFEST_NAME,
    AttemptId,
    Manifest,
    directory_name,
    parse_manifest,
)
from polytrain.checkpoint.starting_point import fetch, from_manifest, verify
from polytrain.checkpoint.store import CheckpointStore
from polytrain.errors import CheckpointError
from polytrain.storage.local import LocalStorage
from polytrain.storage.location import Location

NEXT = AttemptId(token=1, attempt=1)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return store_in(tmp_path / "run")


def test_what_is_committed_is_what_was_staged(store: CheckpointStore) -> None:
    staging = stage(store, 4, model="weights")
    (staging / "optimizer" / "deep").mkdir(parents=True)
    (staging / "optimizer" / "deep" / "state").write_bytes(b"\0\1")
    files = store.store_part(directory_name(4, ATTEMPT), 0, staging, {}).files
    assert {file.name: file.size for file in files} == {"model": 7, "optimizer/deep/state": 2}
    assert files[0].sha256 == hashlib.sha256(b"weights").hexdigest()

    made = manifest(4, files)
    store.commit(made)
    directory = directory_of(store, made)
    assert (directory / "model").read_text() == "weights"
    assert (directory / "optimizer" / "deep" / "state").read_bytes() == b"\0\1"
    assert parse_manifest((directory / MANIFEST_NAME).read_text()) == made
    assert store.find(since_token=1).manifests == (made,)


def test_another_process_finds_the_same_checkpoints(store: CheckpointStore) -> None:
    made = commit(store, 0, model="weights")
    assert pickle.loads(pickle.dumps(store)).find(since_token=1).manifests == (made,)


def test_parts_of_several_ranks_come_together(store: CheckpointStore) -> None:
    second = store_part(store, 0, 1, model_1="b")
    first = store_part(store, 0, 0, model="a")
    made = manifest(0, (*first, *second))
    store.commit(made)
    names = sorted(path.name for path in directory_of(store, made).iterdir())
    assert names == ["model", "model_1", MANIFEST_NAME]
    assert [file.rank for file in (*first, *second)] == [0, 1]


def test_a_rank_may_report_files_in_place_after_rank_0s_are_committed(
    store: CheckpointStore,
) -> None:
    directory = directory_of(store, manifest(0))
    directory.mkdir(parents=True)
    (directory / "shard-0").write_text("a")
    first = store.find_part(directory.name, 0).files
    store.commit(manifest(0, first))
    (directory / "shard-1").write_text("b")
    known = {file.name: file.sha256 for file in first}
    second = store.find_part(directory.name, 1, stored_already=known).files
    assert [(file.name, file.rank) for file in second] == [("shard-1", 1)]


def test_no_two_attempts_write_to_one_directory(store: CheckpointStore) -> None:
    """What a process does that was taken for dead does no harm."""
    made = commit(store, 0, model="weights")
    store_part(store, 0, attempt_id=NEXT, model="of another attempt")
    assert (directory_of(store, made) / "model").read_text() == "weights"
    assert store.damage(made) == ()


def test_files_that_were_not_stored_where_the_driver_looks_are_not_committed(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """A worker's node has another directory under the same path."""
    elsewhere = store_part(store_in(tmp_path / "node"), 0, model="weights")
    with pytest.raises(OSError, match=r"model is missing.*that all nodes mount"):
        store.commit(manifest(0, elsewhere))
    assert store.find(since_token=1).manifests == ()


def test_without_its_manifest_it_is_no_checkpoint(store: CheckpointStore) -> None:
    kept = commit(store, 0, model="weights")
    store_part(store, 1, model="stored, not committed")
    stage(store, 2, model="staged, not stored")
    torn = Path(store.location_of(directory_name(3, ATTEMPT)).address)
    torn.mkdir()
    (torn / f".{MANIFEST_NAME}").write_text('{"format": 2, "num')

    found = store.find(since_token=1)
    assert found.manifests == (kept,)
    assert found.damaged == {}
    assert directories(store) == [directory_name(n, ATTEMPT) for n in (0, 1, 3)]

    store.clear_staging(before=NEXT)
    store.sweep(before=NEXT)
    assert directories(store) == [kept.directory]
    assert store.near_staging is not None
    assert not store.near_staging.exists()
    assert store.damage(kept) == ()


def test_what_a_living_attempt_has_begun_is_not_swept_away(store: CheckpointStore) -> None:
    store_part(store, 1, model="of the attempt before")
    store_part(store, 1, attempt_id=NEXT, model="on its way")
    store.sweep(before=NEXT)
    assert directories(store) == [directory_name(1, NEXT)]


def test_what_is_known_to_be_committed_is_not_looked_into(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each commit of a long run sweeps, beside all checkpoints that are kept."""
    kept = {commit(store, number, model="weights").directory for number in range(2)}
    store_part(store, 2, model="stored, not committed")
    looked_into = []

    def look(self: CheckpointStore, name: str) -> bool:
        looked_into.append(name)
        return False

    monkeypatch.setattr(CheckpointStore, "_is_committed", look)
    store.sweep(before=NEXT, known=kept)
    assert looked_into == [directory_name(2, ATTEMPT)]
    assert {*directories(store)} == kept


def test_a_directory_that_a_dying_agent_has_begun_is_swept_away(store: CheckpointStore) -> None:
    """It was killed while it copied the first file, and there is no other."""
    store_part(store, 0, model="weights")
    [unstored] = Path(store.location.address, "checkpoints").iterdir()
    (unstored / "model").rename(unstored / ".polytrain-unfinished-0123456789abcdef")
    store.sweep(before=NEXT)
    assert directories(store) == []


def test_what_cannot_be_deleted_keeps_nothing_else_from_being_swept_away(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        store_part(store, number, model="stored, not committed")
    kept, delete_below = directory_name(1, ATTEMPT), LocalStorage.delete_below

    def refuse(self: LocalStorage, path: str) -> None:
        if path.endswith(kept):
            raise OSError(errno.EBUSY, "somebody has a file open")
        delete_below(self, path)

    monkeypatch.setattr(LocalStorage, "delete_below", refuse)
    with pytest.raises(OSError, match="somebody has a file open"):
        store.sweep(before=NEXT)
    assert directories(store) == [kept]


def test_what_is_not_a_runs_own_is_not_swept_away(store: CheckpointStore) -> None:
    commit(store, 0, model="weights")
    mine = Path(store.location.address, "checkpoints", "mine")
    mine.mkdir()
    (mine / "precious").touch()
    store.sweep(before=AttemptId(token=9, attempt=0))
    assert [path.name for path in mine.iterdir()] == ["precious"]


def test_sweeping_where_nothing_was_saved_is_fine(store: CheckpointStore) -> None:
    run = Path(store.location.address)
    run.mkdir()
    store.clear_staging(before=NEXT)
    store.sweep(before=NEXT)
    assert list(run.iterdir()) == []


def test_the_manifests_own_name_is_refused(store: CheckpointStore) -> None:
    staging = stage(store, 0)
    (staging / MANIFEST_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=MANIFEST_NAME):
        store.store_part(directory_name(0, ATTEMPT), 0, staging, {})


def test_a_rank_that_staged_nothing_is_named(store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Rank 3 has nothing staged for checkpoint_000007"):
        store.store_part(directory_name(7, ATTEMPT), 3, tmp_path / "nowhere", {})


def test_intact_files_show_no_damage(store: CheckpointStore) -> None:
    assert store.damage(commit(store, 0, model="weights", other="")) == ()


def test_a_missing_and_a_short_file_are_damage(store: CheckpointStore) -> None:
    made = commit(store, 0, model="weights", other="x")
    directory = directory_of(store, made)
    (directory / "model").write_text("wei")
    assert store.damage(made) == ("model has 3 bytes instead of 7",)
    (directory / "other").unlink()
    found = ("model has 3 bytes instead of 7", "other is missing")
    assert store.damage(made) == found
    assert store.find(since_token=1).damaged == {made.directory: "; ".join(found)}


def test_a_file_of_the_same_size_with_another_content_is_damage(store: CheckpointStore) -> None:
    made = commit(store, 0, model="weights")
    (directory_of(store, made) / "model").write_text("weightS")
    assert store.damage(made) == ("model differs from what was committed",)


def test_a_deleted_checkpoint_is_missing_altogether(store: CheckpointStore) -> None:
    made = commit(store, 0, model="weights")
    store.delete(made.directory)
    assert directories(store) == []
    assert store.damage(made)
    assert store.find(since_token=1).manifests == ()


def test_a_torn_manifest_is_damage(store: CheckpointStore) -> None:
    made = commit(store, 0, model="weights")
    file = directory_of(store, made) / MANIFEST_NAME
    file.write_text(file.read_text()[:40])
    [damage] = store.damage(made)
    assert "manifest can't be read" in damage
    assert "manifest can't be read" in store.find(since_token=1).damaged[made.directory]


def test_a_manifest_that_is_far_too_large_is_damage(store: CheckpointStore) -> None:
    """As somebody may have made it who may write there: reading it would take all memory."""
    made = commit(store, 0, model="weights")
    os.truncate(directory_of(store, made) / MANIFEST_NAME, 1 << 31)
    [damage] = store.damage(made)
    assert "manifest can't be read: it has more than 1,073,741,824 bytes" in damage
    assert store.find(since_token=1).damaged == {made.directory: damage}


def test_the_manifest_of_another_checkpoint_is_damage(store: CheckpointStore) -> None:
    made, other = commit(store, 0, model="weights"), commit(store, 1, model="weights")
    content = (directory_of(store, other) / MANIFEST_NAME).read_bytes()
    (directory_of(store, made) / MANIFEST_NAME).write_bytes(content)
    [damage] = store.damage(made)
    assert "another" in damage
    assert store.find(since_token=1).manifests == (other,)


def test_metrics_that_are_no_numbers_are_no_damage(store: CheckpointStore) -> None:
    """NaN is unequal to itself, and still the same metric."""
    diverged = replace(commit(store, 0, model="weights"), metrics={"loss": float("nan")})
    store.commit(diverged)
    assert store.damage(diverged) == ()


def test_a_deletion_that_is_cut_off_leaves_no_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = commit(store, 0, model="weights")
    monkeypatch.setattr("polytrain.storage.beneath.Beneath.delete_below", lambda *_: None)
    store.delete(made.directory)
    assert [path.name for path in directory_of(store, made).iterdir()] == ["model"]


def test_checkpoints_are_found_in_the_order_in_which_they_came_to_be(
    store: CheckpointStore,
) -> None:
    """A later attempt begins again at a number that an earlier one has had."""
    attempts = [AttemptId(token=1, attempt=0), AttemptId(token=2, attempt=0)]
    attempts += [AttemptId(token=2, attempt=10), AttemptId(token=10, attempt=0)]
    made = []
    for number, attempt_id in enumerate([*attempts, attempts[-1]]):
        part = store_part(store, number, attempt_id=attempt_id, model=str(number))
        made.append(manifest(number, part, attempt_id=attempt_id))
    for one in reversed(made):
        store.commit(one)
    assert store.find(since_token=1).manifests == tuple(made)


def test_those_of_a_run_that_was_started_over_do_not_count(store: CheckpointStore) -> None:
    commit(store, 0, model="weights")
    later = AttemptId(token=2, attempt=0)
    made = manifest(0, store_part(store, 0, attempt_id=later, model="x"), attempt_id=later)
    store.commit(made)
    assert store.find(since_token=2).manifests == (made,)


@pytest.mark.parametrize(
    "change", ["rewritten", "replaced", "deleted", "manifest deleted"], ids=str
)
def test_whatever_happens_to_a_file_changes_the_stamps(store: CheckpointStore, change: str) -> None:
    made = commit(store, 0, model="weights")
    before, directory = store.stamps(made), directory_of(store, made)
    assert store.stamps(made) == before
    match change:
        case "rewritten":
            (directory / "model").write_text("weightS")
        case "replaced":
            (directory / "new").write_text("weights")
            (directory / "new").replace(directory / "model")
        case "deleted":
            (directory / "model").unlink()
        case "manifest deleted":
            (directory / MANIFEST_NAME).unlink()
    assert store.stamps(made) != before


def committed_checkpoint(store: CheckpointStore) -> tuple[Manifest, Checkpoint]:
    made = commit(store, 0, model="weights")
    return made, Checkpoint.from_directory(directory_of(store, made))


def test_a_checkpoint_of_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        Checkpoint.from_directory(tmp_path / "nowhere")


def test_a_checkpoint_is_copied_out(store: CheckpointStore, tmp_path: Path) -> None:
    _, checkpoint = committed_checkpoint(store)
    target = checkpoint.to_directory(tmp_path / "copy")
    assert (Path(target) / "model").read_text() == "weights"
    with checkpoint.as_directory() as directory:
        assert (Path(directory) / "model").read_text() == "weights"


def test_a_checkpoint_is_verified(store: CheckpointStore) -> None:
    made, checkpoint = committed_checkpoint(store)
    checkpoint.verify()
    (directory_of(store, made) / "model").write_text("weightS")
    with pytest.raises(CheckpointError, match=r"model.*differs from what was committed"):
        checkpoint.verify()


def test_what_another_version_has_written_is_not_taken_for_damaged(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as another_version:
        another_version.setattr("polytrain.checkpoint.manifest.FORMAT", 99)
        commit(store, 0, model="weights")
    with pytest.raises(CheckpointError, match=r"another version.*format 99.*resume='never'"):
        store.find(since_token=1)


def test_a_field_of_a_later_version_is_no_damage(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is damaged is deleted after the next commit."""
    with monkeypatch.context() as later_version:
        later_version.setattr(
            "polytrain.checkpoint.manifest.asdict", lambda made: {**asdict(made), "later": 1}
        )
        commit(store, 0, model="weights")
    with pytest.raises(CheckpointError, match=r"another version.*'later' is unknown"):
        store.find(since_token=1)


def failing_once(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A call of a path that fails once, for the path of this name."""
    failed = []

    def maybe(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name and not failed:
            failed.append(path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return call(path, *arguments, **options)

    return maybe


def test_a_passing_error_of_a_directory_is_not_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where stamps are taken, nor where what was staged is cleared away."""
    store = CheckpointStore(location=Location.of(tmp_path, retry_s=30))
    made = commit(store, 1, model="weights")
    stamps = store.stamps(made)
    staged = stage(store, 2, model="weights")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", failing_once(Path.stat, "model"))
        assert store.stamps(made) == stamps
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", failing_once(Path.glob, "staging"))
        store.clear_staging(before=AttemptId(token=9, attempt=0))
    assert not staged.exists()


def test_a_commit_whose_files_are_swept_meanwhile_is_none(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver was paused before it wrote the manifest, and its successor cleaned up."""
    made = manifest(0, store_part(store, 0, 0, model="weights"))
    write = LocalStorage.write

    def write_late(storage: LocalStorage, path: str, data: bytes) -> None:
        store.sweep(before=AttemptId(token=2, attempt=0))
        write(storage, path, data)

    monkeypatch.setattr(LocalStorage, "write", write_late)
    with pytest.raises(CheckpointError, match=r"were deleted .*model is missing"):
        store.commit(made)
    assert store.find(since_token=0).manifests == ()
    assert store.find(since_token=0).damaged == {}


def test_many_small_files_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Each call of an object storage, and each sync of a disk, takes its time."""
    together = threading.Barrier(8)

    def meet(_: int, call: Call) -> None:
        if call.kind in meeting and "shard" in call.path:
            together.wait(timeout=10)

    meeting: set[str] = set()
    files = {f"shard_{number}": "x" for number in range(16)}
    filesystem = FaultyFileSystem(tmp_path, Faults(fault=meet))
    store = store_in(Location.of("runs/one", filesystem))
    meeting.add("create")
    committed = commit(store, 0, **files)
    assert [file.name for file in committed.files] == sorted(files)
    meeting.clear()
    meeting.add("open")
    assert store.damage(committed) == ()
    fetch(store.location_of(committed.directory), committed.files, tmp_path / "copy")
    assert {file.name for file in (tmp_path / "copy").iterdir()} == files.keys()
    verify(from_manifest(committed, store.location_of(committed.directory), own=True))
