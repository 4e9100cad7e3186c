"""Columns that arrays have no form for are refused before a run, unless they aren't read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.shards import shard_of

from polytrain.data.types.plain import refuse_unreadable
from polytrain.data_errors import SourceError

PERIODS = pd.DataFrame({"bad": pd.period_range("2020-01", periods=3, freq="M"), "x": [1, 2, 3]})
UNION = pa.UnionArray.from_dense(
    pa.array([0, 1, 0], pa.int8()),
    pa.array([0, 0, 1], pa.int32()),
    [pa.array([1, 3]), pa.array(["b"])],
)
UNIONS = pa.table({"bad": UNION, "x": [1, 2, 3]})
LISTS = pa.table({"bad": pa.ListArray.from_arrays([0, 1, 2, 3], UNION), "x": [1, 2, 3]})
PERIOD_TABLE = pa.Table.from_pandas(PERIODS)


def parquet(directory: Path) -> str:
    pq.write_table(PERIOD_TABLE, directory / "rows.parquet")
    return str(directory)


def ipc_of(table: pa.Table) -> Callable[[Path], str]:
    def write(directory: Path) -> str:
        path = directory / "rows.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        return str(path)

    return write


SOURCES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "frame": (lambda _: PERIODS, "periods"),
    "dict of series": (lambda _: dict(PERIODS.items()), "periods"),
    "table": (lambda _: PERIOD_TABLE, "periods"),
    "Parquet": (parquet, "periods"),
    "IPC": (ipc_of(PERIOD_TABLE), "periods"),
    "union": (lambda _: UNIONS, "values of several types"),
    "union in lists": (lambda _: LISTS, "values of several types"),
    "union in a dict": (lambda _: {"bad": UNION, "x": [1, 2, 3]}, "values of several types"),
    "union in IPC": (ipc_of(UNIONS), "values of several types"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_column_without_a_form_is_refused_unless_it_is_left_out(
    case: str, tmp_path: Path
) -> None:
    make, found = SOURCES[case]
    data = make(tmp_path)
    with pytest.raises(SourceError, match=rf"the column 'bad' holds {found}.*columns=\["):
        shard_of(data)
    [batch] = shard_of(data, columns=["x"]).iter_batches(batch_size=3)
    assert batch["x"].tolist() == [1, 2, 3]


def test_a_transform_may_not_return_one() -> None:
    with pytest.raises(SourceError, match="the column 'p' holds periods"):
        shard_of({"x": [1, 2, 3]}, transform=lambda batch: {"p": PERIODS["bad"]})


def test_periods_are_known_where_pandas_is_not_imported() -> None:
    notes = {"ARROW:extension:name": "pandas.period"}
    with pytest.raises(SourceError, match="periods"):
        refuse_unreadable(pa.schema([pa.field("p", pa.int64(), metadata=notes)]))
