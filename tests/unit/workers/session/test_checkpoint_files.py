"""Which directories a report takes as a checkpoint, and which of them it may delete."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain import Checkpoint
from polytrain.checkpoint.staging import Snapshots
from polytrain.errors import CheckpointError
from polytrain.storage.location import Location
from polytrain.workers.session.checkpoint_files import directory_to_delete, files_of
from polytrain.workers.session.context import RunStorage


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    run = tmp_path / "results" / "run"
    (run / "checkpoints" / "checkpoint_000000-1.0").mkdir(parents=True)
    return RunStorage(
        location=Location.of(run),
        next_directory=lambda: Location.of(run / "checkpoints" / "checkpoint_000001-1.0"),
    )


@pytest.mark.parametrize("inside", [".", "results", "results/run", "link"])
def test_a_directory_with_the_run_in_it_is_not_a_checkpoint(
    storage: RunStorage, tmp_path: Path, inside: str
) -> None:
    """Its checkpoints would be in the checkpoint, each with those before it."""
    (tmp_path / "link").symlink_to(tmp_path / "results")
    checkpoint = Checkpoint.from_directory(tmp_path / inside)
    with pytest.raises(CheckpointError, match=r"has this run in it.* directory of their own"):
        files_of(checkpoint, storage, Snapshots())
    with pytest.raises(ValueError, match="deletes a directory outside of the storage"):
        directory_to_delete(checkpoint, storage)


def test_a_committed_checkpoint_can_be_reported_and_is_not_deleted(
    storage: RunStorage, tmp_path: Path
) -> None:
    committed = tmp_path / "results" / "run" / "checkpoints" / "checkpoint_000000-1.0"
    checkpoint = Checkpoint.from_directory(committed)
    assert files_of(checkpoint, storage, Snapshots()).directory == committed
    with pytest.raises(ValueError, match="deletes a directory outside of the storage"):
        directory_to_delete(checkpoint, storage)


def test_a_directory_beside_the_run_is_taken_and_may_be_deleted(
    storage: RunStorage, tmp_path: Path
) -> None:
    (beside := tmp_path / "results" / "run-files").mkdir()
    checkpoint = Checkpoint.from_directory(beside)
    assert files_of(checkpoint, storage, Snapshots()).directory == beside
    assert directory_to_delete(checkpoint, storage) == beside
