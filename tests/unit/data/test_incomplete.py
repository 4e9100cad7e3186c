"""Rows that lack a value they need are found before any worker starts, where that is cheap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polytrain import DataConfig
from polytrain.data.checks import incomplete
from polytrain.data.read.describe import describe
from polytrain.data.shards.assignment import RunDataset

NAN = float("nan")
COLUMNS = {
    "floats": pa.array([1.0, NAN, None, 2.0]),
    "half precision": pa.array([1.0, NAN, None, 2.0], pa.float16()),
    "integers": pa.array([1, None, None, 2]),
    "booleans": pa.array([True, None, None, False]),
    "decimals": pa.array([1, None, None, 2], pa.decimal128(9, 2)),
    "dictionary": pa.array([1.0, None, NAN, 2.0]).dictionary_encode(),
    "a missing category": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None, 0]), pa.array([1.0, None])
    ),
}


def found_in(data: Any, **config: Any) -> list[str]:
    source = describe("train", data, **config)
    datasets = [RunDataset(source=source, config=DataConfig(**config))]
    return [str(problem) for problem in incomplete(datasets, {"label": "y"})]


@pytest.mark.parametrize("name", COLUMNS)
def test_nulls_and_nan_are_counted_together(name: str) -> None:
    table = pa.table({"x": range(4), "y": COLUMNS[name]})
    assert found_in(table) == [
        "label: in 2 of 4 rows of 'train' the column 'y' has no value (null or NaN). "
        "Leave such rows out, or give them a value"
    ]


@pytest.mark.parametrize(
    "source", [pandas.DataFrame, polars.DataFrame, dict, lambda columns: [{"y": NAN}, {"y": 1.0}]]
)
def test_all_data_in_memory_is_looked_at(source: Callable[[Any], Any]) -> None:
    [problem] = found_in(source({"y": np.array([NAN, 1.0])}))
    assert "in 1 of 2 rows" in problem


def test_files_and_transforms_are_left_to_the_workers(tmp_path: Path) -> None:
    table = pa.table({"y": [NAN, 1.0]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert found_in(tmp_path) == []
    assert found_in(table, transform=lambda batch: {"y": np.nan_to_num(batch["y"])}) == []
    assert found_in(table, transform=with_draws) == []


def with_draws(batch: dict[str, Any], rng: Any) -> dict[str, Any]:
    return {"y": np.nan_to_num(batch["y"])}
