"""Arrow's types as every reader knows them, and the refusal of those that no array can hold.

- Extension types: tensors of Ray Data (also in files that it has written, where its types are only
  noted unless Ray Data is imported), tensors whose axes are stored in another order, truth values
  of 8 bits, and numbers of other libraries.
- Views of strings, bytes and lists, and run lengths, which parts of Arrow and other libraries can't
  read.
- Categories of values that pandas or lists have no categories for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.types.nested import (
    dimensions_of,
    has_fixed_shape,
    innermost,
    is_list,
    is_list_of_numbers,
    nested_list_type,
    nested_lists,
    numbers_in,
    with_numbers,
    with_parts,
)
from polytrain.data.types.schemas import with_wide_categories
from polytrain.data_errors import SourceError

_ROWS = b"polytrain.missing"
_NUMBERS = b"polytrain.missing_in_lists"
_TRUE = b"true"


class InLists(NamedTuple):
    """The lists of a column lack numbers."""

    column: str


Missing: TypeAlias = str | InLists
"""A column in which values are missing, or in whose lists they are."""


def noted(schema: pa.Schema, missing: Collection[Missing]) -> pa.Schema:
    """Return the schema, with notes at these columns of what is missing there.

    NumPy has no missing whole number, truth value or tensor: an array of them has another type
    where a value is missing. Which batches hold such a row is chance, so the whole column is noted,
    and has that type in all batches. Numbers that lists lack are noted too.
    """
    fields = []
    for field in schema:
        notes = dict(field.metadata or {})
        if field.name in missing:
            notes[_ROWS] = _TRUE
        if InLists(field.name) in missing:
            notes[_NUMBERS] = _TRUE
        fields.append(field.with_metadata(notes) if notes else field)
    return pa.schema(fields)


def may_be_missing(field: pa.Field) -> bool:
    """Whether a column has a note that values are missing."""
    return (field.metadata or {}).get(_ROWS) == _TRUE


def may_lack_numbers(field: pa.Field) -> bool:
    """Whether a column has a note that its lists lack numbers."""
    return (field.metadata or {}).get(_NUMBERS) == _TRUE


def missing_in(schema: pa.Schema) -> set[Missing]:
    """What is missing by the notes in a schema. Columns without a type have no values at all."""
    return {
        *(each.name for each in schema if may_be_missing(each) or pa.types.is_null(each.type)),
        *(InLists(each.name) for each in schema if may_lack_numbers(each)),
    }


def decides_type(kind: pa.DataType) -> bool:
    """Whether an array of these values has another type if one is missing."""
    if pa.types.is_dictionary(kind):
        return decides_type(kind.value_type)
    return bool(
        _is_whole_or_truth(kind)
        or isinstance(kind, pa.FixedShapeTensorType)
        or (is_list_of_numbers(kind) and has_fixed_shape(kind))
    )


def decides_type_in_lists(kind: pa.DataType) -> bool:
    """Whether arrays of these lists have another type if they lack a number."""
    return is_list(kind) and _is_whole_or_truth(innermost(kind))


def found_missing(table: pa.Table) -> set[Missing]:
    """Find the columns of a table in which values are missing, where that decides a type."""
    found: set[Missing] = set()
    for field, column in zip(table.schema, table.columns, strict=True):
        if (decides_type(field.type) or pa.types.is_null(field.type)) and has_missing(column):
            found.add(field.name)
        if decides_type_in_lists(field.type) and lacks_numbers(column):
            found.add(InLists(field.name))
    return found


def has_missing(column: pa.ChunkedArray) -> bool:
    """Whether a value is missing, be it the category that is."""
    if column.null_count:
        return True
    return pa.types.is_dictionary(column.type) and any(
        chunk.dictionary.null_count for chunk in column.chunks
    )


def lacks_numbers(column: pa.ChunkedArray) -> bool:
    """Whether lists, nested to any depth, lack a number."""
    return any(numbers_in(chunk).null_count for chunk in column.chunks)


def _is_whole_or_truth(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


_BOOL8 = "arrow.bool8"
_FIXED = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")
_VARIABLE = "ray.data.arrow_variable_shaped_tensor"
_OBJECTS = "ray.data.arrow_pickled_object"
_PERIODS = "pandas.period"


def plain_columns(table: pa.Table) -> pa.Table:
    """The table in plain types.

    Tensors have Arrow's own type, or are nested lists if they differ in shape.
    """
    for index, field in enumerate(table.schema):
        kind = _plain_type(field)
        if kind != field.type:
            column = _plain(table.column(index), kind)
            table = table.set_column(index, field.name, column)
    return table


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column without a name in its plain type."""
    return _plain(column, _plain_type(pa.field("", column.type)))


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The names and plain types of columns, without notes: those differ from file to file.

    Categories have room for those of other parts.
    """
    return pa.schema(
        [pa.field(field.name, with_wide_categories(_plain_type(field))) for field in schema]
    )


def refuse_unreadable(schema: pa.Schema) -> None:
    """Refuse columns that arrays have no form for.

    Raises:
        SourceError: there is a column of Python's objects (which Ray Data makes of values of
            several types), of pandas' periods (which would be bare numbers) or of unions.
    """
    for field in schema:
        name = repr(field.name)
        for part in _with_parts(field):
            extension = _extension_name(part)
            if extension == _OBJECTS:
                raise SourceError(
                    f"the column {name} holds Python objects, which have no type in common",
                    "Give its values one type, as with dataset.map_batches, or leave it out with "
                    "columns=[…]",
                )
            if extension == _PERIODS:
                raise SourceError(
                    f"the column {name} holds periods of pandas, which arrays have no form for",
                    f"Make times or text of them before: frame[{name}].dt.to_timestamp() or "
                    f".astype(str). Or leave the column out with columns=[…]",
                )
            if pa.types.is_union(part.type):
                raise SourceError(
                    f"the column {name} holds values of several types ({part.type}), which "
                    "arrays have no form for",
                    "Give each type a column of its own, or leave it out with columns=[…]",
                )


def _with_parts(field: pa.Field) -> Iterator[pa.Field]:
    """Yield the field, and the fields that its type is made of."""
    yield field
    if not isinstance(field.type, pa.BaseExtensionType):
        for number in range(field.type.num_fields):
            yield from _with_parts(field.type.field(number))


def _extension_name(field: pa.Field) -> str:
    """The name of a field's extension type, also where its library isn't imported; "" if none."""
    if isinstance(field.type, pa.BaseExtensionType):
        return str(field.type.extension_name)
    name: bytes = (field.metadata or {}).get(b"ARROW:extension:name", b"")
    return name.decode()


def _plain_type(field: pa.Field) -> pa.DataType:
    name = _extension_name(field)
    if name == _BOOL8:
        return pa.bool_()
    if isinstance(field.type, pa.FixedShapeTensorType):
        shape = [field.type.shape[axis] for axis in _axes(field.type)]
        return pa.fixed_shape_tensor(field.type.value_type, shape)
    if name in (*_FIXED, _VARIABLE) and (parameter := _parameter(field, name)) is not None:
        is_extension = isinstance(field.type, pa.BaseExtensionType)
        stored = field.type.storage_type if is_extension else field.type
        if name == _VARIABLE:
            return nested_list_type(parameter, stored.field("data").type.value_type)
        return pa.fixed_shape_tensor(stored.value_type, parameter)
    return _without_views(_without_extension(field.type))


def _axes(kind: pa.FixedShapeTensorType) -> Sequence[int]:
    """The place of each axis among those that are stored."""
    return kind.permutation or range(len(kind.shape))


def _parameter(field: pa.Field, name: str) -> Any:
    """The shape of Ray Data's tensors, or their number of dimensions; None if it isn't known."""
    if isinstance(field.type, pa.BaseExtensionType):
        return getattr(field.type, "ndim" if name == _VARIABLE else "shape", None)
    try:
        return json.loads((field.metadata or {})[b"ARROW:extension:metadata"])
    except (KeyError, ValueError):
        # Of a version that writes them otherwise: lists, then.
        return None


def _without_extension(kind: pa.DataType) -> pa.DataType:
    """The type of the numbers, or of the values of categories, that the type stores."""
    if isinstance(kind, pa.BaseExtensionType):
        stored = kind.storage_type
        is_number = decides_type(stored) or is_list_of_numbers(stored)
        is_known = isinstance(kind, pa.FixedShapeTensorType) or kind.extension_name == _PERIODS
        return stored if is_number and not is_known else kind
    if pa.types.is_dictionary(kind):
        values = _without_extension(kind.value_type)
        # Pandas has no categories that are intervals or structs.
        is_plain = not isinstance(values, pa.BaseExtensionType) and not pa.types.is_nested(values)
        return kind if is_plain and values == kind.value_type else values
    if is_list(kind) and pa.types.is_dictionary(innermost(kind)):
        return with_numbers(kind, innermost(kind).value_type)
    return kind


def _without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        # Offsets of 32 bits end at 2 GiB, which a chunk may well exceed.
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_run_end_encoded(kind):
        return _without_views(kind.value_type)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(_without_views(kind.value_type))
    plain = with_parts(kind, _without_views)
    if plain == kind:
        return kind
    if pa.types.is_dictionary(plain):
        index = with_wide_categories(kind).index_type
        return pa.dictionary(index, plain.value_type, ordered=kind.ordered)
    return pa.large_list(plain.value_type) if pa.types.is_list(plain) else plain


def _plain(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([_converted(chunk, kind) for chunk in column.chunks], kind)


def _converted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array in its plain type."""
    own = array.type
    if own == kind:
        return array
    if isinstance(own, pa.FixedShapeTensorType):
        return _with_axes_in_order(array, kind)
    if isinstance(own, pa.BaseExtensionType):
        return _converted(array.storage, kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.ExtensionArray.from_storage(kind, array.cast(kind.storage_type))
    if pa.types.is_run_end_encoded(own):
        return _converted(pc.run_end_decode(array), kind)
    if pa.types.is_dictionary(own):
        if not pa.types.is_dictionary(kind):
            return _converted(array.dictionary, kind).take(array.indices)
        indices = array.indices.cast(kind.index_type)
        values = _converted(array.dictionary, kind.value_type)
        return pa.DictionaryArray.from_arrays(indices, values, ordered=own.ordered)
    if pa.types.is_struct(own):
        if not pa.types.is_struct(kind):
            return _converted_tensors(array, kind)
        fields = [kind.field(number) for number in range(kind.num_fields)]
        parts = [
            _converted(part, field.type)
            for part, field in zip(array.flatten(), fields, strict=True)
        ]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null())
    if pa.types.is_map(own):
        return _converted_map(array, kind)
    if pa.types.is_fixed_size_list(own):
        size, first = own.list_size, array.offset * own.list_size
        items = _converted(array.values.slice(first, len(array) * size), kind.value_type)
        return pa.FixedSizeListArray.from_arrays(items, size, mask=array.is_null())
    if pa.types.is_large_list(kind):
        # Arrow's own cast of list views loses values that come after an empty or missing list.
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        items = _converted(array.flatten(), kind.value_type)
        return pa.LargeListArray.from_arrays(pa.array(offsets), items, mask=array.is_null())
    return array.cast(kind)


def _with_axes_in_order(array: pa.FixedShapeTensorArray, kind: pa.DataType) -> pa.Array:
    """Tensors whose values lie in the order of their axes; missing ones stay missing."""
    if list(_axes(array.type)) == sorted(_axes(array.type)):
        # Only the axes' names are left out.
        return pa.ExtensionArray.from_storage(kind, array.storage)
    stored, values, size = array.type.shape, array.storage.values, math.prod(array.type.shape)
    places = pa.array(np.arange(size).reshape(stored).transpose(_axes(array.type)).reshape(-1))
    rows = range(array.storage.offset, array.storage.offset + len(array))
    tensors = [values.slice(row * size, size).take(places) for row in rows]
    storage = pa.FixedSizeListArray.from_arrays(
        pa.concat_arrays([values.slice(0, 0), *tensors]), size, mask=array.is_null()
    )
    return pa.ExtensionArray.from_storage(kind, storage)


def _converted_map(array: pa.MapArray, kind: pa.DataType) -> pa.MapArray:
    # The offsets of a slice begin anywhere, and those of missing maps may hold entries.
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    offsets = pa.array(np.asarray(array.offsets) - first, pa.int32())
    keys = _converted(array.keys.slice(first, last - first), kind.key_type)
    items = _converted(array.items.slice(first, last - first), kind.item_type)
    return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=array.is_null())


def _converted_tensors(array: pa.StructArray, kind: pa.DataType) -> pa.Array:
    """Tensors that differ in shape, each stored as its values and its shape, as nested lists."""
    tensors = [
        row["data"].values.to_numpy(zero_copy_only=False).reshape(row["shape"].as_py())
        if row.is_valid
        else None
        for row in array
    ]
    return nested_lists(tensors, *dimensions_of(kind))
