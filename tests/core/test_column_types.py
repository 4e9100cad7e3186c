"""What becomes of each type of column from each source, in each library: the tables of the docs."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from tests.core.column_types import GETS, LIBRARIES, LIKE_ARROW, OTHERWISE
from tests.own_ray import own_ray
from tests.shards import shard_of
from tests.sweeps import only_in_sweep

from polytrain.boosting.columns import agreed_categories, encoded, floats, plainly_typed
from polytrain.boosting.problems import feature_problems
from polytrain.data.types.columns import column_to_numpy
from polytrain.data.types.nested import tensors_of
from polytrain_plugins import DatasetInfo, Job

ERROR = "error"

TENSORS = tensors_of(np.arange(8, dtype=np.float32).reshape(2, 2, 2))
MONDAY, TUESDAY = datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 2)
PAIRS = pa.list_(pa.int64(), 2)
BERLIN = pa.timestamp("us", "Europe/Berlin")
MORNING, NIGHT = datetime.time(1, 2, 3), datetime.time(23)
SECOND, DAY = datetime.timedelta(seconds=1), datetime.timedelta(days=1)

COLUMNS: dict[str, pa.Array] = {
    "int64": pa.array([1, 2]),
    "int64 with nulls": pa.array([1, None]),
    "float32": pa.array([0.5, 2], pa.float32()),
    "float32 with nulls": pa.array([0.5, None], pa.float32()),
    "bool": pa.array([True, False]),
    "bool with nulls": pa.array([True, None]),
    "string": pa.array(["a", "b"]),
    "string with nulls": pa.array(["a", None]),
    "category": pa.array(["a", "b"]).dictionary_encode(),
    "category with nulls": pa.array(["a", None]).dictionary_encode(),
    "timestamp": pa.array([MONDAY, TUESDAY]),
    "timestamp with nulls": pa.array([MONDAY, None]),
    "decimal": pa.array([Decimal("1.50"), Decimal("2.25")]),
    "decimal with nulls": pa.array([Decimal("1.50"), None]),
    "uint64": pa.array([2**63, 1], pa.uint64()),
    "uint64 with nulls": pa.array([1, None], pa.uint64()),
    "float16": pa.array([0.5, 2], pa.float16()),
    "float16 with nulls": pa.array([0.5, None], pa.float16()),
    "binary": pa.array([b"a\x00b", b"\xff"]),
    "binary with nulls": pa.array([b"a\x00b", None]),
    "date": pa.array([MONDAY.date(), TUESDAY.date()]),
    "date with nulls": pa.array([MONDAY.date(), None]),
    "time of day": pa.array([MORNING, NIGHT]),
    "time of day with nulls": pa.array([MORNING, None]),
    "duration": pa.array([SECOND, DAY]),
    "duration with nulls": pa.array([SECOND, None]),
    "timestamp of a zone": pa.array([MONDAY, TUESDAY], BERLIN),
    "timestamp of a zone with nulls": pa.array([MONDAY, None], BERLIN),
    "struct": pa.array([{"a": 1, "b": None}, {"a": 2, "b": "x"}]),
    "struct with nulls": pa.array([{"a": 1, "b": "x"}, None]),
    "fixed lists": pa.array([[1, 2], [3, 4]], PAIRS),
    "fixed lists with nulls": pa.array([[1, 2], None], PAIRS),
    "lists of one length": pa.array([[1, 2], [3, 4]]),
    "ragged lists": pa.array([[1], [2, 3]]),
    "ragged lists with nulls": pa.array([[1], None]),
    "tensors": TENSORS,
    "tensors with nulls": pa.ExtensionArray.from_storage(
        TENSORS.type, TENSORS.storage.take(pa.array([0, None]))
    ),
}
"""Type → two values, the second of which is the missing one."""


def in_memory(directory: Path, columns: pa.Table) -> Any:
    return columns


def frame(directory: Path, columns: pa.Table) -> Any:
    if columns.schema.field("x").type == PAIRS:
        # A frame has objects, whose length isn't part of a type.
        columns = columns.set_column(0, "x", pa.array(columns["x"].to_pylist()))
    return columns.to_pandas()


def parquet(directory: Path, columns: pa.Table) -> Any:
    pq.write_table(columns, directory / "a.parquet")
    return directory


def ipc(directory: Path, columns: pa.Table) -> Any:
    with pa.ipc.new_file(directory / "a.arrow", columns.schema) as file:
        file.write_table(columns)
    return directory


def csv(directory: Path, columns: pa.Table) -> Any:
    pacsv.write_csv(columns, directory / "a.csv")
    return directory


def json_lines(directory: Path, columns: pa.Table) -> Any:
    lines = [json.dumps(row, default=as_json) for row in dicts(directory, columns)]
    (directory / "a.jsonl").write_text("\n".join(lines))
    return directory


def as_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return float(value) if isinstance(value, Decimal) else value.isoformat()


def dicts(directory: Path, columns: pa.Table) -> Any:
    """As Python has the values: tensors are arrays."""
    rows = columns.to_pylist()
    if columns.schema.field("x").type == TENSORS.type:
        for row in rows:
            if row["x"] is not None:
                row["x"] = np.reshape(np.array(row["x"], np.float32), (2, 2))
    return rows


def arrays(directory: Path, columns: pa.Table) -> Any:
    """As NumPy has the values; lists, and what has missing rows, as Python has them."""
    column = columns.column("x")
    if column.null_count or pa.types.is_nested(column.type):
        return dict(x=[row["x"] for row in dicts(directory, columns)], row=[0, 1])
    if column.type == TENSORS.type:
        return dict(x=TENSORS.to_numpy_ndarray(), row=[0, 1])
    return {"x": column_to_numpy(column), "row": np.arange(2)}


def polars(directory: Path, columns: pa.Table) -> Any:
    return pl.from_arrow(columns)


def hugging_face(directory: Path, columns: pa.Table) -> Any:
    if columns.schema.field("x").type == TENSORS.type:
        kinds = {"x": datasets.Array2D((2, 2), "float32"), "row": datasets.Value("int64")}
        rows = dicts(directory, columns)
        return datasets.Dataset.from_list(rows, features=datasets.Features(kinds))
    return datasets.Dataset(columns)


class Items:
    """A map-style data set."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def items(directory: Path, columns: pa.Table) -> Any:
    """Values as NumPy has them, as data sets give them."""
    rows = arrays(directory, columns)
    return Items([{"x": x, "row": row} for x, row in zip(rows["x"], rows["row"], strict=True)])


def ray_data(directory: Path, columns: pa.Table) -> Any:
    import ray.data

    return ray.data.from_arrow(columns).materialize()


SOURCES = {
    "Arrow": in_memory,
    "IPC": ipc,
    "pandas": frame,
    "Parquet": parquet,
    "CSV": csv,
    "JSON": json_lines,
    "dicts": dicts,
    "arrays": arrays,
    "items": items,
    "polars": polars,
    "Hugging Face": hugging_face,
    "Ray Data": ray_data,
}

THERE_IS_NO = {
    *itertools.product(["tensors", "tensors with nulls"], ["pandas", "CSV"]),
    *((name, "CSV") for name in COLUMNS if "lists" in name),
    *((name, "JSON") for name in COLUMNS if re.match("timestamp|binary|date|time of|dura", name)),
    *((name, "CSV") for name in COLUMNS if re.match("binary|time of|duration|struct", name)),
    *itertools.product(["uint64"], ["CSV", "JSON", "dicts"]),
    ("timestamp of a zone", "arrays"),
    *((name, "items") for name in COLUMNS if "nulls" in name),
    *itertools.product(["timestamp", "timestamp of a zone", "decimal", "ragged lists"], ["items"]),
    *itertools.product(["date", "time of day", "duration", "struct"], ["items"]),
}
"""Types that a source doesn't have."""

Found = tuple[str, list[Any]]
"""What the type is called, and the values."""


def numpy(data: Any) -> Found:
    [batch] = shard_of(data).iter_batches()
    return of_array(batch["x"])


def pandas(data: Any) -> Found:
    [batch] = shard_of(data).iter_batches(format="pandas")
    column = batch["x"]
    if column.dtype == object:
        kind, values = of_array(column.to_numpy())
        if kind == "object: str" and int(pd.__version__.partition(".")[0]) < 3:
            # As the page says: what version 3 has a type for.
            return "str", [math.nan if value is None else value for value in values]
        return kind, values
    return str(column.dtype), list(column)


def arrow(data: Any) -> Found:
    [batch] = shard_of(data).iter_batches(format="arrow")
    column = batch.column("x")
    if isinstance(column.type, pa.FixedShapeTensorType):
        shape = tuple(column.type.shape)
        rows = [row and np.reshape(row, shape).tolist() for row in column.to_pylist()]
        return f"tensor<{column.type.value_type}>{shape}", rows
    # How the libraries call a list's items, and how long text may be, isn't the user's choice.
    name = re.sub("(item|element): |large_|, ordered=0", "", str(column.type))
    return re.sub(
        "dictionary<values=(.*), indices=.*>", r"dictionary<\1>", name
    ), column.to_pylist()


def torch(data: Any) -> Found:
    pytest.importorskip("torch", reason="the torch backend is not installed")
    from polytrain_torch import TorchShard

    [batch] = TorchShard(shard_of(data)).iter_torch_batches()
    return of_array(batch["x"].numpy())


def tensorflow(data: Any) -> Found:
    tf = pytest.importorskip("tensorflow", reason="the TensorFlow backend is not installed")
    from polytrain_tf.data import TensorFlowShard

    shard = TensorFlowShard(shard_of(data), tf.distribute.get_strategy())
    [batch] = shard.iter_tf_batches()
    if batch["x"].dtype == tf.string:
        values = [*batch["x"].numpy()]
        is_binary = "binary" in str(shard.schema().field("x").type)
        return "string", values if is_binary else [value.decode() for value in values]
    return of_array(batch["x"].numpy())


def boosters(data: Any) -> Found:
    """What XGBoost and LightGBM train on: numbers, or positions in a list of categories."""
    table = shard_of(data, as_tables=True).to_arrow()
    columns = tuple(table.column_names)
    info = DatasetInfo(name="train", columns=columns, num_rows=2, schema=table.schema)
    job = Job(
        num_workers=1,
        use_gpu=False,
        cpus_per_worker=1,
        has_training_function=False,
        datasets={"train": info},
    )
    if problems := list(feature_problems(job, ["row"], categorical=(), forbidden="")):
        raise TypeError(problems)
    table = plainly_typed(table, ["x"])
    categories = agreed_categories(
        {"train": table}, features=["x"], also=(), gather=lambda mine: [mine]
    )
    table = encoded(table, categories)
    if categories:
        return "category", table.column("x").to_pylist()
    return "number", floats(table.column("x")).tolist()


READERS = {
    "NumPy": numpy,
    "pandas": pandas,
    "Arrow": arrow,
    "torch": torch,
    "TensorFlow": tensorflow,
    "boosters": boosters,
}


def of_array(array: np.ndarray[Any, Any]) -> Found:
    if array.dtype != object:
        shape = "".join(f", {length}" for length in array.shape[1:])
        return f"{array.dtype}{shape and f' (rows{shape})'}", list(array)
    first = array[0]
    is_array = isinstance(first, np.ndarray)
    kind = f"{first.dtype} arrays" if is_array else type(first).__name__
    return f"object: {kind}", list(array)


def plain(value: Any) -> Any:
    """A value as Python has it; None for one that is missing."""
    if isinstance(value, np.ndarray | list):
        return [plain(each) for each in value]
    if pd.isna(value) or value == "":
        return None
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        # NumPy has times of a zone as those of UTC.
        return pd.Timestamp(value).tz_convert(None)
    return pd.Timestamp(value) if isinstance(value, np.datetime64 | datetime.date) else value


def missing(value: Any) -> str:
    """What stands for a value that is missing."""
    if value is None or value == "":
        return repr(value)
    return "NaN" if isinstance(value, float | np.floating) else "NaT"


def cell(read: Callable[[Any], Found], data: Any, column: pa.Array) -> str:
    """What a library gets, in the words of the page; the values must be those of the column."""
    try:
        kind, values = read(data)
    except TypeError:
        return ERROR
    expected = plain(
        TENSORS.to_numpy_ndarray().tolist() if column.type == TENSORS.type else column.to_pylist()
    )
    if column.null_count:
        kind = f"{kind}, {missing(values[1])}"
        expected[1] = None
    assert plain(values) == expected
    return f"`{kind}`"


def expected_cell(name: str, source: str, reader: str) -> str:
    """What the tables of the page say of a column, in the words of `cell`."""
    kind = OTHERWISE.get(name, {}).get(source, LIKE_ARROW[name])
    if reader == "Arrow":
        return f"`{kind.replace(' of several lengths', '')}`"
    gets = GETS[kind][LIBRARIES.index(reader)]
    return gets if gets == ERROR else f"`{gets}`"


CELLS = [
    (name, source, reader, expected_cell(name, source, reader))
    for name in COLUMNS
    for source in SOURCES
    if (name, source) not in THERE_IS_NO
    for reader in READERS
]


WITHOUT_RAY = [each for each in CELLS if each[1] != "Ray Data"]
SELECTED = WITHOUT_RAY[::19]
"""What `make test` tries. No number of readers or sources divides the step."""


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    import ray.data

    with own_ray(num_cpus=1):
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield


@pytest.mark.parametrize(
    ("name", "source", "reader", "expected"),
    [
        pytest.param(*each, id=label) if each in SELECTED else only_in_sweep(*each, id=label)
        for each in CELLS
        for label in ["-".join(each[:3])]
    ],
)
def test_a_cell_is_true(
    name: str,
    source: str,
    reader: str,
    expected: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if source == "Ray Data":
        request.getfixturevalue("_ray")
    column = COLUMNS[name]
    data = SOURCES[source](tmp_path, pa.table({"x": column, "row": [0, 1]}))
    assert cell(READERS[reader], data, column) == expected


def test_the_selection_has_each_type_source_and_reader() -> None:
    for column, everything in enumerate([COLUMNS, SOURCES.keys() - {"Ray Data"}, READERS]):
        assert {each[column] for each in SELECTED} == {*everything}


def test_the_tables_have_each_type_once() -> None:
    assert LIKE_ARROW.keys() == COLUMNS.keys()
    assert READERS.keys() - {"Arrow"} == {*LIBRARIES}
    assert not {(name, source) for name in OTHERWISE for source in OTHERWISE[name]} & THERE_IS_NO
    others = [kind for each in OTHERWISE.values() for kind in each.values()]
    assert {*LIKE_ARROW.values(), *others} == GETS.keys()
