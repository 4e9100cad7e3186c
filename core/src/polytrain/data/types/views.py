"""Columns of views and of run lengths, which parts of Arrow and other libraries can't read."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.types.wide_types import with_wide_categories


def without_views(table: pa.Table) -> pa.Table:
    """The table with strings, bytes and lists as everybody knows them."""
    for index, field in enumerate(table.schema):
        if _has_views(field.type):
            table = table.set_column(index, field.name, without_view(table.column(index)))
    return table


def without_view(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same of one column."""
    return pa.chunked_array([_converted(chunk) for chunk in column.chunks], _plain(column.type))


def _has_views(kind: pa.DataType) -> bool:
    return bool(_plain(kind) != kind)


def _plain(kind: pa.DataType) -> pa.DataType:
    if kind == pa.string_view():
        # Offsets of 32 bits end at 2 GiB, which a chunk may well exceed.
        return pa.large_string()
    if kind == pa.binary_view():
        return pa.large_binary()
    if pa.types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    if _is_view(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = _plain(kind.value_type)
        if item == kind.value_type and not _is_view(kind):
            return kind
        return pa.large_list(item)
    if pa.types.is_fixed_size_list(kind) and _has_views(kind.value_type):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(
            kind.key_field.with_type(_plain(kind.key_type)),
            kind.item_field.with_type(_plain(kind.item_type)),
            keys_sorted=kind.keys_sorted,
        )
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([field.with_type(_plain(field.type)) for field in fields])
    if pa.types.is_dictionary(kind) and _has_views(kind.value_type):
        values = _plain(kind.value_type)
        return pa.dictionary(with_wide_categories(kind).index_type, values, ordered=kind.ordered)
    return kind


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _converted(array: pa.Array) -> pa.Array:
    kind = array.type
    if not _has_views(kind):
        return array
    if pa.types.is_run_end_encoded(kind):
        return _converted(pc.run_end_decode(array))
    if pa.types.is_struct(kind):
        plain = _plain(kind)
        fields = [plain.field(number) for number in range(plain.num_fields)]
        parts = [_converted(part) for part in array.flatten()]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null())
    if pa.types.is_dictionary(kind):
        plain = _plain(kind)
        indices = array.indices.cast(plain.index_type)
        values = _converted(array.dictionary)
        return pa.DictionaryArray.from_arrays(indices, values, ordered=kind.ordered)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return array.cast(_plain(kind))
    if pa.types.is_fixed_size_list(kind):
        size, first = kind.list_size, array.offset * kind.list_size
        items = array.values.slice(first, len(array) * size)
        return pa.FixedSizeListArray.from_arrays(_converted(items), size, mask=array.is_null())
    if pa.types.is_map(kind):
        return _converted_map(array)
    # Arrow's own cast of list views loses values that come after an empty or missing list.
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), _converted(array.flatten()), mask=array.is_null()
    )


def _converted_map(array: pa.MapArray) -> pa.MapArray:
    # The offsets of a slice begin anywhere, and those of missing maps may hold entries.
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    offsets = pa.array(np.asarray(array.offsets) - first, pa.int32())
    parts = [_converted(part.slice(first, last - first)) for part in (array.keys, array.items)]
    return pa.MapArray.from_arrays(offsets, *parts, type=_plain(array.type), mask=array.is_null())
