"""Columns of extension types as types that every reader knows.

Ray Data's tensors, also in files that it has written: where Ray Data is imported, they have types
of its own; otherwise Arrow shows the lists in which they are stored, with the types' names and
parameters as notes. And Arrow's truth values of 8 bits, which would be numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.types.arrays import nested_list_type, nested_lists
from polytrain.data.types.lists import with_numbers
from polytrain.data.types.missing import decides_type, innermost, is_list, is_list_of_numbers
from polytrain.data.types.unreadable import PERIODS, extension_name

_FIXED = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")
_VARIABLE = "ray.data.arrow_variable_shaped_tensor"
_BOOL8 = "arrow.bool8"


def plain_columns(table: pa.Table) -> pa.Table:
    """The table with truth values, and with tensors as Arrow has them, or as nested lists if they
    differ in shape."""
    for index, field in enumerate(table.schema):
        kind = plain_type(field)
        if kind != field.type:
            chunks = [_plain(chunk, kind) for chunk in table.column(index).chunks]
            table = table.set_column(index, field.name, pa.chunked_array(chunks, kind))
    return table


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of such a table."""
    return pa.schema([field.with_type(plain_type(field)) for field in schema])


def plain_type(field: pa.Field) -> pa.DataType:
    """The type of such a column; of any other, its own."""
    if extension_name(field) == _BOOL8:
        return pa.bool_()
    name, parameter, stored = _extension_of(field)
    if name in _FIXED:
        return pa.fixed_shape_tensor(stored.value_type, parameter)
    if name == _VARIABLE:
        return nested_list_type(parameter, stored.field("data").type.value_type)
    return _without_extension(field.type)


def _without_extension(kind: pa.DataType) -> pa.DataType:
    """The type of numbers, and of categories, that what finds missing values knows."""
    if isinstance(kind, pa.BaseExtensionType):
        stored = kind.storage_type
        is_number = decides_type(stored) or is_list_of_numbers(stored)
        is_known = isinstance(kind, pa.FixedShapeTensorType) or kind.extension_name == PERIODS
        return stored if is_number and not is_known else kind
    if pa.types.is_dictionary(kind):
        values = _without_extension(kind.value_type)
        # Pandas has no categories that are intervals or structs.
        is_plain = not isinstance(values, pa.BaseExtensionType) and not pa.types.is_nested(values)
        return kind if is_plain and values == kind.value_type else values
    if is_list(kind) and pa.types.is_dictionary(innermost(kind)):
        return with_numbers(kind, innermost(kind).value_type)
    return kind


def _extension_of(field: pa.Field) -> tuple[str | None, Any, pa.DataType]:
    """The extension's name, the shape or number of dimensions, and the type that is stored."""
    kind, notes = field.type, field.metadata or {}
    if isinstance(kind, pa.BaseExtensionType):
        name = extension_name(field)
        parameter = getattr(kind, "ndim" if name == _VARIABLE else "shape", None)
        return name, parameter, kind.storage_type
    name = extension_name(field)
    if name not in (*_FIXED, _VARIABLE):
        return None, None, kind
    try:
        return name, json.loads(notes[b"ARROW:extension:metadata"]), kind
    except (KeyError, ValueError):
        # Of a version that writes them otherwise: lists, then.
        return None, None, kind


def _plain(chunk: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(chunk.type):
        return _plain(chunk.dictionary.take(chunk.indices), kind)
    stored = chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk
    if kind in (chunk.type, stored.type):
        return chunk if chunk.type == kind else stored
    if is_list(kind) and pa.types.is_dictionary(innermost(stored.type)):
        return stored.cast(kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.ExtensionArray.from_storage(kind, stored.cast(kind.storage_type))
    if pa.types.is_boolean(kind):
        return stored.cast(kind)
    return nested_lists(_rows(stored), *_dimensions(kind))


def _rows(stored: pa.StructArray) -> Sequence[np.ndarray[Any, Any] | None]:
    """Tensors that differ in shape, each stored as its values and its shape."""
    return [
        None
        if row is None
        else row["data"].values.to_numpy(zero_copy_only=False).reshape(row["shape"].as_py())
        for row in (scalar if scalar.is_valid else None for scalar in stored)
    ]


def _dimensions(kind: pa.DataType) -> tuple[int, pa.DataType]:
    if not pa.types.is_large_list(kind):
        return 0, kind
    dimensions, values = _dimensions(kind.value_type)
    return dimensions + 1, values
