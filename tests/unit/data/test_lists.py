"""Columns of lists and tensors in batches: what becomes one array, and what doesn't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.shards import shard_of

from polytrain.data.shards.tensor_shapes import TensorShapes
from polytrain.data.types.columns import column_to_numpy
from polytrain.data.types.nested import (
    dimensions_of,
    nested_lists,
    tensors_as_lists,
    tensors_of,
)
from polytrain.data.types.plain import plain_column
from polytrain.data.types.schemas import conformed, unified_type
from polytrain.data_errors import ReadError

ROWS = 6

TOKENS = [[row, row + 1, row + 2] for row in range(ROWS)]
PAIRS = [[[row, 0.5], [1.5, row]] for row in range(ROWS)]
RAGGED = [list(range(row + 1)) for row in range(ROWS)]

ONE_SHAPE = {
    "list": pa.array(TOKENS, pa.list_(pa.int64())),
    "large list": pa.array(TOKENS, pa.large_list(pa.int32())),
    "list of a fixed size": pa.array(TOKENS, pa.list_(pa.int16(), 3)),
    "list of lists": pa.array(PAIRS, pa.list_(pa.list_(pa.float32()))),
    "fixed sizes within lists": pa.array(PAIRS, pa.list_(pa.list_(pa.float64(), 2))),
    "booleans": pa.array([[True, False]] * ROWS, pa.list_(pa.bool_())),
    "empty lists": pa.array([[]] * ROWS, pa.list_(pa.int64())),
    "tensors": tensors_of(np.array(PAIRS)),
}

DIFFERENT = {
    "lengths": pa.array(RAGGED, pa.list_(pa.int64())),
    "missing lists": pa.array([TOKENS[0], None] * 3, pa.list_(pa.int64())),
    "missing lists of a fixed size": pa.array([None, TOKENS[0]] * 3, pa.list_(pa.int64(), 3)),
    "inner lengths": pa.array([[[1.0], [2.0, 3.0]]] * ROWS, pa.list_(pa.list_(pa.float64()))),
    "outer lengths": pa.array([PAIRS[0] * (n + 1) for n in range(ROWS)]),
    "no lists in some lists": pa.array([PAIRS[0], []] * 3, pa.list_(pa.list_(pa.float32()))),
    "inner lengths in some lists": pa.array(
        [[[1.0], [2.0, 3.0]], [[4.0]], []] * 2, pa.list_(pa.list_(pa.float32()))
    ),
}

if int(pa.__version__.partition(".")[0]) < 26:
    # Arrow can't write them to Parquet before.
    del DIFFERENT["missing lists of a fixed size"]


def in_memory(table: pa.Table, directory: Path) -> Any:
    return table


def in_chunks(table: pa.Table, directory: Path) -> Any:
    return pa.concat_tables([table.slice(0, 1), table.slice(1, 2), table.slice(3)])


def in_files(table: pa.Table, directory: Path) -> Any:
    pq.write_table(table, directory / "a.parquet", row_group_size=4)
    return directory


SOURCES = [in_memory, in_chunks, in_files]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", ONE_SHAPE)
def test_lists_of_one_shape_are_one_array(
    case: str, source: Callable[..., Any], shuffle: bool, tmp_path: Path
) -> None:
    column = ONE_SHAPE[case]
    data = source(pa.table({"x": column}), tmp_path)
    batches = [b["x"] for b in shard_of(data, shuffle=shuffle).iter_batches(batch_size=5)]
    expected = np.stack([np.array(row) for row in rows_of(column)])
    assert {batch.dtype.kind for batch in batches} <= {"i", "f", "b"}
    assert sorted(np.concatenate(batches).tolist()) == expected.tolist()
    assert all(batch.flags.writeable for batch in batches)
    # A batch of one row is cut from the same rows.
    first = next(iter(shard_of(data).iter_batches(batch_size=1)))["x"]
    assert first.tolist() == expected[:1].tolist()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", DIFFERENT)
def test_lists_that_differ_are_arrays_in_an_array(
    case: str, source: Callable[..., Any], tmp_path: Path
) -> None:
    column = DIFFERENT[case]
    data = source(pa.table({"x": column}), tmp_path)
    found = [row for b in shard_of(data).iter_batches(batch_size=5) for row in b["x"]]
    assert [as_lists(row) for row in found] == rows_of(column)
    for row in found:
        assert row is None or row.flags.writeable


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_done_to_a_batch_stays_in_it(source: Callable[..., Any], tmp_path: Path) -> None:
    table = pa.table({**ONE_SHAPE, **DIFFERENT, "plain": range(ROWS)})
    shard = shard_of(source(table, tmp_path), remainder="pad")
    before = shard.to_arrow().to_pylist()
    loader = shard.iter_batches(batch_size=4)
    epochs: list[Any] = []
    for _ in range(2):
        epochs.append([])
        for batch in loader:
            epochs[-1].append({name: as_lists(rows) for name, rows in batch.items()})
            for rows in batch.values():
                for array in [rows] if rows.dtype != object else filter(is_array, rows):
                    array.fill(0)
    assert str(epochs[0]) == str(epochs[1])
    assert shard.to_arrow().to_pylist() == before


@pytest.mark.parametrize("case", [*ONE_SHAPE, *DIFFERENT])
def test_lists_go_through_a_transform(case: str) -> None:
    column = (ONE_SHAPE | DIFFERENT)[case]
    table = pa.table({"x": pa.chunked_array([column.slice(0, 1), column])})
    shard = shard_of(table, transform=dict)
    assert dimensions_of(shard.schema().field("x").type) == dimensions_of(column.type)
    found = [row for batch in shard.iter_batches(batch_size=4) for row in batch["x"]]
    assert [as_lists(row) for row in found] == [*rows_of(column.slice(0, 1)), *rows_of(column)]


@pytest.mark.parametrize(
    "rows",
    [
        [[5, 2], [7], [], None],
        [[[1], [2, 3]], [[4]]],
        [[], [[1, 2]], np.ones((2, 2)), np.array([])],
        [np.ones((2, 1)), np.ones((2, 3))],
        (np.arange(2), np.arange(3)),
    ],
)
def test_python_s_lists_of_different_lengths_are_a_column(rows: Any) -> None:
    [batch] = shard_of({"x": rows}).iter_batches()
    assert [as_lists(row) for row in batch["x"]] == [as_lists(row) for row in rows]


def test_words_in_lists_stay_words() -> None:
    [batch] = shard_of(pa.table({"x": [["a"], ["b", "c"]]})).iter_batches()
    assert [list(row) for row in batch["x"]] == [["a"], ["b", "c"]]


def test_a_transform_gets_lists_in_a_form_that_no_batch_changes() -> None:
    """Whatever is read together: of the first rows alone, all have one length here."""
    seen = []

    def padded(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append((batch["x"].dtype, batch["fixed"].shape[1:]))
        rows = [np.pad(row, (0, 9 - len(row))) for row in batch["x"]]
        return {"x": np.stack(rows), "as it was": batch["x"]}

    table = pa.table(
        {"x": [[1, 2]] * 10 + [[3]], "fixed": pa.array([[1, 2]] * 11, pa.list_(pa.int8(), 2))}
    )
    shard = shard_of(table, transform=padded)
    rows = np.concatenate([batch["x"] for batch in shard.iter_batches(batch_size=4)])
    assert rows.shape == (11, 9)
    assert set(seen) == {(np.dtype(object), (2,))}
    assert shard.to_arrow()["as it was"].to_pylist() == table["x"].to_pylist()


def test_tensors_of_different_shapes_become_nested_lists() -> None:
    one, other = (
        pa.chunked_array([tensors_of(np.ones((2, *shape)))]) for shape in ((2, 3), (2, 4))
    )
    both = unified_type(one.type, other.type)
    assert both == unified_type(both, one.type) == pa.large_list(pa.large_list(pa.float64()))
    table = conformed(pa.table({"x": other}), pa.schema([("x", both)]), "here")
    assert column_to_numpy(table["x"]).shape == (2, 2, 4)
    assert unified_type(one.type, pa.fixed_shape_tensor(pa.float64(), (6,))) is None
    assert unified_type(one.type, pa.float64()) is None


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 3, 4)])
def test_tensors_keep_their_places_as_lists(shape: tuple[int, ...]) -> None:
    tensors = np.arange(5 * np.prod(shape)).reshape(5, *shape)
    column = pa.chunked_array([tensors_of(tensors)]).slice(1)
    assert tensors_as_lists(column).to_pylist() == tensors[1:].tolist()
    assert nested_lists([*tensors, None], len(shape), pa.int64()).to_pylist() == [
        *tensors.tolist(),
        None,
    ]


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        ([pa.array(RAGGED)], "one row has length 1, another length 2"),
        ([pa.array(TOKENS), pa.array([[1, 2]])], "one row has length 3, another length 2"),
        ([pa.array([[1], None])], "one row has length 1, another no list"),
        ([pa.array([PAIRS[0], PAIRS[0] * 2])], r"shape \(2, 2\), another shape \(4, 2\)"),
        ([DIFFERENT["inner lengths"]], "lists in one row differ in length"),
    ],
)
def test_what_can_be_no_tensor_is_refused(batches: list[pa.Array], why: str) -> None:
    shapes = TensorShapes("train", "Do this.")
    *fine, wrong = (column_to_numpy(pa.chunked_array([column])) for column in batches)
    for column in fine:
        shapes.check("x", column)
    with pytest.raises(TypeError, match=rf"'x' of the data set 'train' .*{why}\. Do this\."):
        shapes.check("x", wrong)


def rows_of(column: pa.Array) -> list[Any]:
    if isinstance(column, pa.FixedShapeTensorArray):
        return column.to_numpy_ndarray().tolist()  # type: ignore[no-any-return]
    return column.to_pylist()  # type: ignore[no-any-return]


def as_lists(row: Any) -> Any:
    return [as_lists(item) for item in row] if isinstance(row, list) or is_array(row) else row


def is_array(row: Any) -> bool:
    return isinstance(row, np.ndarray)


@pytest.mark.parametrize("source", [in_memory, in_chunks, in_files])
@pytest.mark.parametrize("format", ["numpy", "pandas"])
@pytest.mark.parametrize("missing_row", [False, True])
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [(pa.int64(), [1, None]), (pa.float32(), [1.5, None]), (pa.bool_(), [True, None])],
)
def test_tensors_that_lack_numbers_are_refused(
    kind: pa.DataType,
    numbers: list[Any],
    missing_row: bool,
    format: Any,
    source: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """A zero would take the place of such a number."""
    rows = [numbers, None if missing_row else numbers[:1] * 2] * 3
    storage = pa.array(rows, pa.list_(kind, 2))
    column = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(kind, (2,)), storage)
    try:
        data = source(pa.table({"x": column}), tmp_path)
    except pa.ArrowNotImplementedError:
        pytest.skip("Arrow before 26 writes no Parquet file with missing tensors")
    shard = shard_of(data)
    with pytest.raises(ReadError, match="lacks some of its numbers"):
        list(shard.iter_batches(batch_size=2, format=format))


@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
def test_tensors_that_are_stored_with_other_axes(dtype: Any, tmp_path: Path) -> None:
    """Arrow stores channels first, say, of a tensor that has them last."""
    values = (np.arange(24).reshape(4, 2, 3) % 5).astype(dtype)
    kind = pa.fixed_shape_tensor(pa.from_numpy_dtype(dtype), (2, 3), permutation=[1, 0])
    storage = pa.array([[*row.reshape(-1).tolist()] for row in values], kind.storage_type)
    table = pa.table({"x": pa.ExtensionArray.from_storage(kind, storage)})
    wanted = values.transpose(0, 2, 1)
    [batch] = shard_of(table.slice(1)).iter_batches(batch_size=4)
    np.testing.assert_array_equal(batch["x"], wanted[1:])
    # In another file they are stored as they are.
    pq.write_table(table, tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": tensors_of(wanted)}), tmp_path / "1.parquet")
    [batch] = shard_of(str(tmp_path)).iter_batches(batch_size=8)
    np.testing.assert_array_equal(batch["x"], [*wanted, *wanted])


@pytest.mark.parametrize("axes", [None, (0, 1)])
def test_tensors_whose_axes_have_names_are_not_copied(axes: tuple[int, ...] | None) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 3), dim_names=["y", "x"], permutation=axes)
    tensors = pa.ExtensionArray.from_storage(kind, tensors_of(np.zeros((4, 2, 3), "i4")).storage)
    plain = plain_column(pa.chunked_array([tensors.slice(1)])).chunk(0)
    assert plain.type == pa.fixed_shape_tensor(pa.int32(), (2, 3))
    assert plain.storage.values.buffers()[1].address == tensors.storage.values.buffers()[1].address
    assert plain.to_numpy_ndarray().shape == (3, 2, 3)
