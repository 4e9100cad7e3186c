"""Parts of a data set whose columns or types differ: what holds all of them, if anything does."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.shards import shard_of

from polytrain.data.read.ray_data import unified
from polytrain.data.types.nested import tensors_as_lists, tensors_of
from polytrain.data.types.schemas import conformed, unified_type
from polytrain.data_errors import ReadError, SourceError, TransformError


def schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema(types.items())


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([schema(x=pa.int64()), schema(x=pa.float64())], schema(x=pa.float64())),
        ([schema(x=pa.null()), schema(x=pa.int64())], schema(x=pa.int64())),
        ([schema(x=pa.int64()), schema(x=pa.null())], schema(x=pa.int64())),
        ([schema(x=pa.int8(), y=pa.null()), schema(y=pa.string(), x=pa.int8())], None),
    ],
)
def test_blocks_of_other_types(blocks: list[pa.Schema], expected: pa.Schema | None) -> None:
    assert unified(blocks, None) == (expected or schema(x=pa.int8(), y=pa.string()))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([schema(x=pa.int64(), y=pa.int64()), schema(x=pa.int64())], "no column 'y'"),
        ([schema(x=pa.int64()), schema(x=pa.int64(), y=pa.int64())], "no column 'y'"),
        (
            [schema(x=pa.int64()), schema(x=pa.string())],
            "'x' is int64 in block 0 and string in block 1",
        ),
        (
            [schema(x=pa.decimal128(5, 2)), schema(x=pa.float64())],
            "'x' is decimal.* in block 0 and double in block 1",
        ),
        (
            [
                schema(x=pa.struct({"a": pa.decimal128(5, 2), "b": pa.float32()})),
                schema(x=pa.struct({"a": pa.float64()})),
            ],
            "'x' is struct<a: decimal.* in block 0 and struct<a: double> in block 1",
        ),
    ],
)
def test_blocks_that_nothing_holds(blocks: list[pa.Schema], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        unified(blocks, None)


def test_columns_that_are_not_read_may_differ() -> None:
    blocks = [schema(x=pa.int64()), schema(x=pa.int64(), y=pa.int64())]
    assert unified(blocks, ["x"]) == schema(x=pa.int64())


NARROWED: dict[str, tuple[pa.Array, pa.DataType]] = {
    "floats": (pa.array([0.5, 0.1]), pa.float32()),
    "half floats": (pa.array([2049.0], pa.float32()), pa.float16()),
    "too large": (pa.array([1e300]), pa.float32()),
    "decimals": (pa.array([Decimal("0.10")]), pa.float64()),
    "whole numbers": (pa.array([2**53 + 1]), pa.float64()),
    "floats in lists": (pa.array([[[0.1]]]), pa.list_(pa.list_(pa.float32()))),
    "decimals in lists": (pa.array([[Decimal("0.10")]]), pa.list_(pa.float64())),
    "fractions": (pa.array([0.5]), pa.int64()),
    "times": (pa.array([1], pa.timestamp("ns")), pa.timestamp("us")),
}


@pytest.mark.parametrize("case", NARROWED)
def test_values_that_a_type_does_not_hold(case: str) -> None:
    values, kind = NARROWED[case]
    with pytest.raises(ReadError, match=rf"here .* 'x' .* type {re.escape(str(kind))}"):
        conformed(pa.table({"x": values}), pa.schema([("x", kind)]), "here")


def test_values_that_it_holds() -> None:
    values = pa.array([0.5, None, float("nan"), float("inf"), 2.0**100])
    found = conformed(pa.table({"x": values}), pa.schema([("x", pa.float32())]), "here")
    assert found.schema.types == [pa.float32()]
    assert str(found.column("x").to_pylist()) == str(values.to_pylist())


def test_tensors_of_narrower_numbers_fit_a_tensor_of_wider_ones() -> None:
    narrow = pa.chunked_array([tensors_of(np.arange(6, dtype=np.int32).reshape(3, 2))])
    wide = schema(x=pa.fixed_shape_tensor(pa.int64(), [2]))
    for column in (narrow, narrow.slice(1), narrow.slice(0, 0)):
        found = conformed(pa.table({"x": column}), wide, "here").column("x")
        assert found.type == wide.field("x").type
        assert tensors_as_lists(found).to_pylist() == tensors_as_lists(column).to_pylist()


def test_what_a_transform_returns_later_is_not_rounded() -> None:
    def wider(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["x"].astype(np.float32 if len(batch["x"]) < 9 else np.float64) / 10}

    with pytest.raises(TransformError, match=r"returned double as 'x' for rows 0 to 15 .* float"):
        shard_of({"x": np.arange(16.0)}, transform=wider)


def test_what_has_no_values_has_a_type_in_common_with_anything() -> None:
    for kind in (pa.fixed_shape_tensor(pa.int64(), (2,)), pa.large_list(pa.int8()), pa.string()):
        assert unified_type(pa.null(), kind) == unified_type(kind, pa.null()) == kind
        table = conformed(pa.table({"x": pa.nulls(2)}), pa.schema({"x": kind}), "a block")
        assert table["x"].to_pylist() == [None, None]
