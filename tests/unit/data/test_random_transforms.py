"""Rows that are changed at random: anew in each epoch, and the same after a restart."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from tests.shards import shard_of

from polytrain.data.read.transforms import wants_generator
from polytrain.data.shards.rows_shard import RowsShard
from polytrain.data_errors import SourceError, TransformError

ROWS = 40


def noisy(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"id": batch["id"], "noise": rng.random(len(batch["id"]))}


class Items:
    """A map-style data set."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": index}


def data_of(kind: str, directory: Path) -> Any:
    table = pa.table({"id": np.arange(ROWS)})
    if kind == "Parquet":
        pq.write_table(table, directory / "a.parquet", row_group_size=7)
        return directory
    if kind == "CSV":
        pacsv.write_csv(table, directory / "a.csv")
        return directory
    return Items() if kind == "items" else table


def noise(shard: RowsShard) -> list[list[float]]:
    """Of the batches of an epoch."""
    return [batch["noise"].tolist() for batch in shard.iter_batches(global_batch_size=8)]


@pytest.mark.parametrize("shuffle", [False, True, "window"])
@pytest.mark.parametrize("kind", ["memory", "Parquet", "CSV", "items"])
def test_each_epoch_draws_anew_and_a_restart_draws_the_same(
    tmp_path: Path, kind: str, shuffle: Any
) -> None:
    data = data_of(kind, tmp_path)
    wanted: dict[str, Any] = {"transform": noisy, "shuffle": shuffle, "world_size": 2, "rank": 1}
    uninterrupted = shard_of(data, **wanted)
    first, second = noise(uninterrupted), noise(uninterrupted)
    assert len(first) == 5
    drawn = [value for epoch in (first, second) for batch in epoch for value in batch]
    assert len(set(drawn)) == ROWS, "rank 1 has half of the rows, twice"

    interrupted = shard_of(data, **wanted)
    batches = iter(interrupted.iter_batches(global_batch_size=8))
    assert [next(batches)["noise"].tolist() for _ in range(2)] == first[:2]
    position = interrupted.cursor.position.to_plain()
    resumed = shard_of(data, **wanted, position=position)
    assert [noise(resumed), noise(resumed)] == [first[2:], second]


def test_ranks_and_seeds_draw_differently() -> None:
    table = pa.table({"id": np.arange(ROWS)})
    worlds = [
        shard_of(table, transform=noisy, seed=seed, world_size=2, rank=rank)
        for seed in (0, -1)
        for rank in (0, 1)
    ]
    drawn = [value for shard in worlds for batch in noise(shard) for value in batch]
    assert len(set(drawn)) == 2 * ROWS


def test_what_is_read_as_a_whole_is_changed_too() -> None:
    shard = shard_of({"id": np.arange(ROWS)}, transform=noisy)
    table = shard.to_arrow()
    assert shard.schema() == table.schema
    assert table.schema.names == ["id", "noise"]
    assert table["id"].to_pylist() == list(range(ROWS))
    assert shard.to_arrow().equals(table)
    assert len(set(table["noise"].to_pylist())) == ROWS


def test_a_worker_without_rows_is_not_asked() -> None:
    shard = shard_of({"id": [1]}, transform=noisy, world_size=2, rank=0)
    [batch] = shard.iter_batches(global_batch_size=2)
    assert {name: array.dtype for name, array in batch.items()} == {"id": int, "noise": float}
    assert len(batch["id"]) == 0


def test_a_failure_names_the_batch() -> None:
    def failing(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        if 20 in batch["id"]:
            raise ZeroDivisionError("of 20")
        return batch

    batches = shard_of({"id": np.arange(ROWS)}, transform=failing).iter_batches(batch_size=8)
    with pytest.raises(TransformError, match="rank 0's rows from position 16 of epoch 0 of 'train"):
        list(batches)
    with pytest.raises(SourceError, match="ZeroDivisionError"):
        shard_of({"id": [20]}, transform=failing)


def test_which_functions_want_a_generator() -> None:
    def maybe(batch: Any, rng: Any = None) -> Any: ...

    def filled(batch: Any, rng: Any = 3) -> Any: ...

    assert all(map(wants_generator, (noisy, maybe, partial(noisy))))
    own = partial(noisy, rng=np.random.default_rng(0))
    assert "rng" in inspect.signature(own).parameters
    assert not any(map(wants_generator, (filled, own, dict, lambda batch: batch)))
