"""Where groups begin, in data sets of every kind, and what is no group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain import DataConfig, InvalidJobError, ScalingConfig, Trainer
from polytrain.backends.reference import Reference
from polytrain.data.read.describe import describe
from polytrain.data.shards.groups import group_sizes, group_starts
from polytrain.data_errors import SourceError


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=40), words=st.booleans())
def test_groups_begin_where_the_value_changes(sizes: list[int], words: bool) -> None:
    numbers = np.repeat(np.arange(len(sizes))[::-1], sizes)
    values: Any = [f"query {n}" for n in numbers] if words else numbers
    source = describe("train", pa.table({"query": pa.array(values)}))
    starts = group_starts(source, "query")
    assert starts.tolist() == [0, *np.cumsum(sizes).tolist()]
    assert group_sizes(source.pieces[0].read(0, len(numbers)).column("query")).tolist() == sizes


def test_groups_go_on_from_one_file_to_the_next(tmp_path: Path) -> None:
    """Row groups and files end in the middle of groups."""
    query = np.repeat(np.arange(10), 7)
    for part, rows in enumerate(np.array_split(query, 3)):
        pq.write_table(pa.table({"query": rows}), tmp_path / f"{part}.parquet", row_group_size=4)
    assert group_starts(describe("train", tmp_path), "query").tolist() == list(range(0, 71, 7))


@pytest.mark.parametrize("kind", [pa.decimal32(5, 1), pa.decimal64(9, 2), pa.float16()], ids=str)
def test_types_that_arrow_hardly_knows_name_groups(kind: pa.DataType) -> None:
    values = pa.array([2, 2, 1, 3, 3], pa.decimal128(9, 1)).cast(pa.float64()).cast(kind)
    source = describe("train", pa.table({"query": values}))
    assert group_starts(source, "query").tolist() == [0, 2, 3, 5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 1, 2, 1], r"group 1 .*begins at row 0 and again at row 3"),
        (["b", "a", "b"], r"group 'b' .*begins at row 0 and again at row 2"),
        ([1.0, float("nan"), 2.0], r"1 row.* no value in the column 'query'"),
        ([1, None, 2], r"1 row.* no value in the column 'query'"),
    ],
)
def test_what_is_no_grouping_is_refused(values: list[Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        group_starts(describe("train", pa.table({"query": pa.array(values)})), "query")


def test_a_missing_group_column_is_reported_before_the_start() -> None:
    with pytest.raises(InvalidJobError, match=r"no column 'qurey' to group by.*query, y"):
        Trainer(
            Reference(label="y"),
            datasets={"train": {"query": [1, 1, 2], "y": [1, 2, 3]}},
            dataset_config={"train": DataConfig(group="qurey")},
        )


def test_fewer_groups_than_workers_are_reported_before_the_start() -> None:
    with pytest.raises(InvalidJobError, match=r"its 2 groups can't be divided among 3 workers"):
        Trainer(
            Reference(label="y"),
            datasets={"train": {"query": [1, 1, 2], "y": [1, 2, 3]}},
            dataset_config={"train": DataConfig(group="query")},
            scaling_config=ScalingConfig(num_workers=3),
        )
