"""The index of a run's checkpoints: what counts, what is kept, and in which order it happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.core.checkpoints import ATTEMPT, directories, store_in, store_part

from polytrain.checkpoint.keeper import CheckpointKeeper
from polytrain.checkpoint.manifest import Attempt, directory_name
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config import CheckpointConfig
from polytrain.run.events import PartStored
from polytrain_plugins import CheckpointInfo, CheckpointKind


class Kept:
    """A keeper, used as the controller does."""

    def __init__(
        self,
        path: Path,
        *,
        attempt: Attempt = ATTEMPT,
        kind: CheckpointKind = CheckpointKind.ONE_RANK,
        **config: Any,
    ) -> None:
        self.attempt = attempt
        self.keeper = CheckpointKeeper(
            store=store_in(path),
            config=CheckpointConfig(**config),
            backend="reference",
            kind=kind,
            versions={"python": "3.11"},
            world_size=2,
            claim=attempt.claim,
        )

    @property
    def store(self) -> CheckpointStore:
        return self.keeper.store

    def part(
        self, number: int, *, rank: int = 0, name: str | None = None, **metrics: Any
    ) -> PartStored:
        """One rank's part of a checkpoint, in its final place. Its step is ten times its number."""
        files = {name or f"model-{rank}": f"{number} of {rank}"}
        return PartStored(
            generation=self.attempt.generation,
            rank=rank,
            checkpoint=number,
            step=10 * number,
            metrics=metrics,
            positions={},
            files=store_part(self.store, number, rank, attempt=self.attempt, **files),
        )

    def take(self, part: PartStored) -> CheckpointInfo | None:
        """Add a part; if that makes a checkpoint, commit it and delete what may go."""
        manifest = self.keeper.add(part)
        if manifest is None:
            return None
        info, doomed = self.keeper.committed(self.keeper.commit(manifest))
        for directory in doomed:
            self.store.delete(directory)
        return info

    def save(self, number: int, **metrics: Any) -> CheckpointInfo:
        """Commit a checkpoint of rank 0's."""
        info = self.take(self.part(number, **metrics))
        assert info is not None
        return info


def names(*numbers: int, attempt: Attempt = ATTEMPT) -> list[str]:
    return [directory_name(number, attempt) for number in numbers]


def every_rank(path: Path) -> Kept:
    return Kept(path, kind=CheckpointKind.EVERY_RANK)


def test_one_rank_is_enough_where_the_state_is_replicated(tmp_path: Path) -> None:
    one = Kept(tmp_path)
    committed = one.save(1, loss=0.5)
    assert (committed.step, committed.metrics) == (10, {"loss": 0.5})
    assert one.keeper.newest_intact() == committed
    assert (Path(committed.path) / "model-0").exists()


def test_every_rank_is_needed_where_the_state_is_sharded(tmp_path: Path) -> None:
    every = every_rank(tmp_path)
    assert every.take(every.part(0, rank=1, loss=9)) is None
    assert every.keeper.newest_intact() is None
    # What one rank says twice is not what two ranks say.
    other = every.part(1, rank=1)
    assert every.take(other) is None
    assert every.take(other) is None
    committed = every.take(every.part(0, rank=0, loss=1))
    assert committed is not None
    assert committed.metrics == {"loss": 1}, "rank 0's metrics are the checkpoint's"
    [manifest] = every.keeper.checkpoints
    assert {file.name: file.rank for file in manifest.files} == {"model-0": 0, "model-1": 1}
    assert manifest.world_size == 2
    assert manifest.written_by == "every rank"


def test_what_a_manifest_tells_is_what_was_true(tmp_path: Path) -> None:
    one = Kept(tmp_path, attempt=Attempt(claim=3, generation=2))
    one.save(4, loss=0.5)
    [manifest] = one.store.find(since_claim=1).manifests
    assert manifest.attempt == Attempt(claim=3, generation=2)
    assert (manifest.number, manifest.step, manifest.metrics) == (4, 40, {"loss": 0.5})
    assert (manifest.backend, manifest.versions) == ("reference", {"python": "3.11"})
    assert manifest.written_by == "one rank"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", manifest.created)


def test_numbers_go_on_after_those_that_anybody_has_begun(tmp_path: Path) -> None:
    every = every_rank(tmp_path)
    assert every.keeper.next_number == 0
    every.take(every.part(0, rank=0))
    every.take(every.part(1, rank=1))
    assert every.keeper.next_number == 2
    every.take(every.part(0, rank=1))
    assert every.keeper.next_number == 2


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    one = Kept(tmp_path)
    first, second = one.save(0), one.save(1)
    (Path(second.path) / "model-0").unlink()
    assert one.keeper.newest_intact() == first


def test_only_the_best_and_the_newest_are_kept(tmp_path: Path) -> None:
    one = Kept(tmp_path, num_to_keep=1, checkpoint_score_attribute="auc")
    for number, auc in enumerate([0.5, 0.9, 0.7, 0.6]):
        one.save(number, auc=auc)
    assert directories(one.store) == names(1, 3)
    assert [info.metrics["auc"] for info in one.keeper.best()] == [0.9, 0.6]


def test_the_older_is_there_until_the_newer_is_committed(tmp_path: Path) -> None:
    one = Kept(tmp_path, num_to_keep=1)
    older = one.save(0)
    manifest = one.keeper.add(one.part(1))
    assert manifest is not None
    (Path(one.store.location_of(manifest.directory).address) / "model-0").unlink()
    with pytest.raises(OSError, match="model-0 is missing"):
        one.keeper.commit(manifest)
    assert one.keeper.newest_intact() == older
    assert (Path(older.path) / "model-0").exists()


def test_a_checkpoint_outlives_a_sweep_and_the_rest_does_not(tmp_path: Path) -> None:
    every = every_rank(tmp_path)
    for rank in (0, 1):
        every.take(every.part(0, rank=rank))
    every.take(every.part(1, rank=0))
    every.store.sweep(before=Attempt(claim=1, generation=1))
    assert directories(every.store) == names(0)
    assert every.keeper.newest_intact() is not None
