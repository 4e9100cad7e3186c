"""How a checkpoint comes to be: staged, stored in parts, committed by its manifest."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from polytrain import Checkpoint
from polytrain.checkpoint.manifest import MANIFEST_NAME, Manifest, StoredFile, parse_manifest
from polytrain.checkpoint.store import CheckpointStore
from polytrain.errors import CheckpointError


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(run_path=tmp_path / "run")


def stage(store: CheckpointStore, number: int, rank: int, **files: str) -> Path:
    staging = store.new_staging(number, rank)
    for name, content in files.items():
        (staging / name).write_text(content)
    return staging


def manifest(number: int, *files: StoredFile) -> Manifest:
    return Manifest(
        number=number,
        step=1,
        metrics={},
        backend="b",
        world_size=1,
        generation=0,
        positions={},
        files=files,
    )


def committed(store: CheckpointStore, number: int, **files: str) -> Manifest:
    stage(store, number, 0, **files)
    made = manifest(number, *store.store_part(number, 0))
    store.commit(made)
    return made


def test_what_is_committed_is_what_was_staged(store: CheckpointStore) -> None:
    staging = stage(store, 4, 0, model="weights")
    (staging / "optimizer" / "deep").mkdir(parents=True)
    (staging / "optimizer" / "deep" / "state").write_bytes(b"\0\1")
    files = store.store_part(4, 0)
    assert {file.name: file.size for file in files} == {"model": 7, "optimizer/deep/state": 2}
    assert files[0].sha256 == hashlib.sha256(b"weights").hexdigest()

    directory = store.commit(manifest(4, *files))
    assert directory == store.directory(4)
    assert (directory / "model").read_text() == "weights"
    assert (directory / "optimizer" / "deep" / "state").read_bytes() == b"\0\1"
    assert parse_manifest((directory / MANIFEST_NAME).read_text()) == manifest(4, *files)
    assert not staging.exists()


def test_parts_of_several_ranks_come_together(store: CheckpointStore) -> None:
    stage(store, 0, 0, model="a")
    stage(store, 0, 1, model_1="b")
    store.store_part(0, 1)
    store.store_part(0, 0)
    assert sorted(path.name for path in store.directory(0).iterdir()) == ["model", "model_1"]


def test_without_its_manifest_it_is_no_checkpoint(store: CheckpointStore) -> None:
    kept = committed(store, 0, model="weights")
    stage(store, 1, 0, model="stored, not committed")
    store.store_part(1, 0)
    stage(store, 2, 0, model="staged, not stored")
    (store.directory(3)).mkdir()
    (store.directory(3) / f".{MANIFEST_NAME}").write_text('{"format": 1, "num')

    store.sweep()

    assert [path.name for path in (store.run_path / "checkpoints").iterdir()] == [
        store.directory(0).name
    ]
    assert not (store.run_path / "staging").exists()
    assert store.damage(kept) == ()


def test_sweeping_where_nothing_was_saved_is_fine(store: CheckpointStore) -> None:
    store.run_path.mkdir()
    store.sweep()
    assert list(store.run_path.iterdir()) == []


def test_two_ranks_cannot_write_a_file_of_the_same_name(store: CheckpointStore) -> None:
    stage(store, 0, 0, model="mine")
    stage(store, 0, 1, model="also mine")
    store.store_part(0, 0)
    with pytest.raises(CheckpointError, match=r"Rank 1 wrote 'model'.* names of their own"):
        store.store_part(0, 1)
    assert (store.directory(0) / "model").read_text() == "mine"


def test_the_manifests_own_name_is_refused(store: CheckpointStore) -> None:
    (stage(store, 0, 0) / MANIFEST_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=MANIFEST_NAME):
        store.store_part(0, 0)


def test_a_rank_that_staged_nothing_is_named(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="Rank 3 has nothing staged for checkpoint 7"):
        store.store_part(7, 3)


def test_new_staging_is_empty_whatever_a_dead_trainer_has_left(store: CheckpointStore) -> None:
    stage(store, 0, 0, half="written")
    assert list(store.new_staging(0, 0).iterdir()) == []


def test_intact_files_show_no_damage(store: CheckpointStore) -> None:
    assert store.damage(committed(store, 0, model="weights", other="")) == ()


def test_a_missing_and_a_short_file_are_damage(store: CheckpointStore) -> None:
    made = committed(store, 0, model="weights", other="x")
    (store.directory(0) / "model").write_text("wei")
    assert store.damage(made) == ("model has 3 bytes instead of 7",)
    (store.directory(0) / "other").unlink()
    assert store.damage(made) == ("model has 3 bytes instead of 7", "other is missing")


def test_a_deleted_checkpoint_is_missing_altogether(store: CheckpointStore) -> None:
    made = committed(store, 0, model="weights")
    store.delete(0)
    assert not store.directory(0).exists()
    [damage] = store.damage(made)
    assert "manifest can't be read" in damage


def test_a_torn_manifest_is_damage(store: CheckpointStore) -> None:
    made = committed(store, 0, model="weights")
    manifest = store.directory(0) / MANIFEST_NAME
    manifest.write_text(manifest.read_text()[:40])
    [damage] = store.damage(made)
    assert "manifest can't be read" in damage


def test_metrics_that_are_no_numbers_are_no_damage(store: CheckpointStore) -> None:
    """NaN is unequal to itself, and still the same metric."""
    made = committed(store, 0, model="weights")
    diverged = replace(made, metrics={"loss": float("nan")})
    store.commit(diverged)
    assert store.damage(diverged) == ()
    store.delete(0)


def test_a_deletion_that_is_cut_off_leaves_no_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(store, 0, model="weights")
    monkeypatch.setattr("polytrain.checkpoint.store.shutil.rmtree", lambda *_, **__: None)
    store.delete(0)
    assert [path.name for path in store.directory(0).iterdir()] == ["model"]


def test_a_checkpoint_of_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        Checkpoint.from_directory(tmp_path / "nowhere")


def test_a_checkpoint_is_copied_out(store: CheckpointStore, tmp_path: Path) -> None:
    committed(store, 0, model="weights")
    checkpoint = Checkpoint.from_directory(store.directory(0))
    target = checkpoint.to_directory(tmp_path / "copy")
    assert (Path(target) / "model").read_text() == "weights"
    with checkpoint.as_directory() as directory:
        assert (Path(directory) / "model").read_text() == "weights"
