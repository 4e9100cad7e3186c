"""The index of a run's checkpoints: what counts, what is kept, and in which order it happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polytrain.checkpoint.keeper import CheckpointKeeper
from polytrain.checkpoint.manifest import Manifest
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config import CheckpointConfig
from polytrain.run.events import PartStored
from polytrain_plugins import CheckpointKind


def keeper(path: Path, *, kind: CheckpointKind = CheckpointKind.ONE_RANK, **config: Any) -> Any:
    return CheckpointKeeper(
        store=CheckpointStore(run_path=path),
        config=CheckpointConfig(**config),
        backend="reference",
        kind=kind,
        world_size=2,
    )


def store(
    keeper: CheckpointKeeper, number: int, *, rank: int = 0, step: int | None = None, **metrics: Any
) -> PartStored:
    """One rank's part of a checkpoint, in its final place."""
    (keeper.store.new_staging(number, rank) / f"model-{rank}").write_text(f"{number}")
    return PartStored(
        generation=0,
        rank=rank,
        checkpoint=number,
        step=number if step is None else step,
        metrics=metrics,
        positions={},
        files=keeper.store.store_part(number, rank),
    )


def kept(keeper: CheckpointKeeper) -> list[str]:
    return sorted(path.name for path in keeper.store.run_path.glob("checkpoints/*"))


def test_one_rank_is_enough_where_the_state_is_replicated(tmp_path: Path) -> None:
    one = keeper(tmp_path)
    committed = one.add(store(one, 0, step=5, loss=0.5))
    assert committed is not None
    assert (committed.step, committed.metrics) == (5, {"loss": 0.5})
    assert one.newest_intact() == committed
    assert (Path(committed.path) / "model-0").exists()


def test_every_rank_is_needed_where_the_state_is_sharded(tmp_path: Path) -> None:
    every = keeper(tmp_path, kind=CheckpointKind.EVERY_RANK)
    assert every.add(store(every, 0, rank=1, loss=9)) is None
    assert every.newest_intact() is None
    # What one rank says twice is not what two ranks say.
    other = store(every, 1, rank=1)
    assert every.add(other) is None
    assert every.add(other) is None
    committed = every.add(store(every, 0, rank=0, loss=1))
    assert committed is not None
    assert committed.metrics == {"loss": 1}, "rank 0's metrics are the checkpoint's"
    [manifest] = every.committed
    assert [file.name for file in manifest.files] == ["model-0", "model-1"]
    assert manifest.world_size == 2


def test_numbers_go_on_after_those_that_anybody_has_begun(tmp_path: Path) -> None:
    every = keeper(tmp_path, kind=CheckpointKind.EVERY_RANK)
    assert every.next_number == 0
    every.add(store(every, 0, rank=0))
    every.add(store(every, 1, rank=1))
    assert every.next_number == 2
    every.add(store(every, 0, rank=1))
    assert every.next_number == 2


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    one = keeper(tmp_path)
    first, second = one.add(store(one, 0)), one.add(store(one, 1))
    assert first is not None
    assert second is not None
    (Path(second.path) / "model-0").unlink()
    assert one.newest_intact() == first


def test_only_the_best_and_the_newest_are_kept(tmp_path: Path) -> None:
    one = keeper(tmp_path, num_to_keep=1, checkpoint_score_attribute="auc")
    for number, auc in enumerate([0.5, 0.9, 0.7, 0.6]):
        one.add(store(one, number, auc=auc))
    assert kept(one) == ["checkpoint_000001", "checkpoint_000003"]
    assert [info.metrics["auc"] for info in one.best()] == [0.9, 0.6]


def test_the_older_is_there_until_the_newer_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = keeper(tmp_path, num_to_keep=1)
    one.add(store(one, 0))
    part = store(one, 1)

    def fail(self: CheckpointStore, manifest: Manifest) -> Path:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(CheckpointStore, "commit", fail)
        with pytest.raises(OSError, match="disk full"):
            one.add(part)
    older = one.newest_intact()
    assert older is not None
    assert Path(older.path).name == "checkpoint_000000"


def test_a_checkpoint_outlives_a_sweep_and_the_rest_does_not(tmp_path: Path) -> None:
    every = keeper(tmp_path, kind=CheckpointKind.EVERY_RANK)
    for rank in (0, 1):
        every.add(store(every, 0, rank=rank))
    every.add(store(every, 1, rank=0))
    every.store.sweep()
    assert kept(every) == ["checkpoint_000000"]
    assert every.newest_intact() is not None
