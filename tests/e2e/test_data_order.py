"""New runs on different numbers of workers have the same global batches."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import polytrain
from polytrain import DataConfig, RunConfig, ScalingConfig, make_trainer

TABLE = pa.table({"id": np.arange(1000)})


def write_down_batches(config: dict[str, Any]) -> None:
    shard = polytrain.get_dataset_shard("train")
    batches = [batch["id"].tolist() for batch in shard.iter_batches(global_batch_size=90)]
    rank = polytrain.get_context().get_world_rank()
    (Path(config["seen"]) / str(rank)).write_text(json.dumps(batches))
    polytrain.report({"batches": len(batches)})


def global_batches(directory: Path, data: Any, order: DataConfig, workers: int) -> list[list[int]]:
    seen = directory / f"seen-{workers}"
    seen.mkdir()
    make_trainer(
        "reference",
        write_down_batches,
        train_loop_config={"seen": str(seen)},
        datasets={"train": data},
        dataset_config={"train": order},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(directory / "runs")),
    ).fit()
    ranks = [json.loads(file.read_text()) for file in sorted(seen.iterdir())]
    return [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)]


def source(directory: Path, kind: str) -> Any:
    if kind == "Parquet":
        pq.write_table(TABLE, directory / "a.parquet", row_group_size=64)
        return directory / "a.parquet"
    if kind == "CSV":
        pacsv.write_csv(TABLE, directory / "a.csv")
        return directory / "a.csv"
    return TABLE


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        *((kind, DataConfig(shuffle=True, seed=3)) for kind in ("memory", "Parquet", "CSV")),
        *((kind, DataConfig(shuffle="window", seed=3)) for kind in ("memory", "CSV")),
        ("Parquet", DataConfig(shuffle="window", seed=3, shards=4)),
        ("memory", DataConfig()),
        *((kind, DataConfig(shards=4)) for kind in ("Parquet", "CSV")),
    ],
)
def test_one_two_and_four_workers_have_the_same_global_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, order: DataConfig
) -> None:
    monkeypatch.setenv("POLYTRAIN_LOCAL_CPUS", "4")
    data = source(tmp_path, kind)
    alone, *others = (global_batches(tmp_path, data, order, workers) for workers in (1, 2, 4))
    assert sorted(chain(*alone)) == list(range(1000))
    assert others == [alone] * 2
