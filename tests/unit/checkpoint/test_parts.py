"""Where a worker process says that its part of a checkpoint lies, and where it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.parts import StagedPart, misplaced_part
from polytrain.checkpoint.staging import Stagings
from polytrain.errors import FailureKind


def part(staged: Path | str) -> StagedPart:
    return StagedPart(
        attempt_id=AttemptId(token=2, attempt=1),
        rank=3,
        checkpoint=7,
        staged=Path(staged),
        stamps={},
        step=1,
        metrics={},
        positions={},
    )


def test_a_part_is_where_it_was_to_be_staged(tmp_path: Path) -> None:
    scratch, near = tmp_path / "scratch", tmp_path / "staging"
    for stagings in (Stagings(scratch=scratch, near=None), Stagings(scratch=near, near=None)):
        staged = stagings.new("checkpoint_000007-2.1", 3)
        assert misplaced_part(part(staged), scratch=scratch, near=near) is None


@pytest.mark.parametrize(
    "staged",
    [
        "/home/user",
        "/scratch",
        "/scratch/checkpoint_000007-2.1-rank_3/..",
        "/scratch/checkpoint_000007-2.1-rank_2",
        "/scratch/checkpoint_000006-2.1-rank_3",
        "scratch/checkpoint_000007-2.1-rank_3",
    ],
)
def test_a_directory_that_is_not_the_parts_is_neither_stored_nor_deleted(staged: str) -> None:
    failed = misplaced_part(part(staged), scratch=Path("/scratch"), near=Path("/near"))
    assert failed is not None
    assert (failed.attempt, failed.failure.rank) == (1, 3)
    assert failed.failure.kind is FailureKind.STORAGE
    assert staged in failed.failure.message
