"""Widens types of columns that are put together, so that offsets and categories have room for all.

Arrow's usual strings and lists end at 2 GiB of text, or as many items, in one array, and a category
of 8 bits at 128. What is read in parts, or lies in chunks, may well be more.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.types.nested import with_parts

LARGE = 1 << 28
"""Bytes of a column from which on its offsets get 64 bits: so many bits may be a list's items."""


def widened(table: pa.Table) -> pa.Table:
    """The table with room in its types, where its columns are large or their categories differ."""
    for index, field in enumerate(table.schema):
        column = table.column(index)
        kind = field.type
        if column.num_chunks > 1:
            kind = with_wide_categories(kind)
        if _has_offsets(kind) and column.nbytes >= LARGE:
            kind = _with_wide_offsets(kind)
        if kind != field.type:
            table = table.set_column(index, field.with_type(kind), column.cast(kind))
    return table


def in_one_piece(table: pa.Table) -> pa.Table:
    """The table with each column in one chunk."""
    for index, field in enumerate(table.schema):
        column = table.column(index)
        # Arrow doesn't unify categories of which one is missing.
        if pa.types.is_dictionary(field.type) and column.num_chunks > 1:
            table = table.set_column(index, field, without_missing_categories(column))
    return widened(table).unify_dictionaries().combine_chunks()


def without_missing_categories(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of categories; values of a category that is missing are missing themselves."""
    chunks = [_without_missing_category(chunk) for chunk in column.chunks]
    return pa.chunked_array(chunks, column.type)


def _without_missing_category(chunk: pa.DictionaryArray) -> pa.DictionaryArray:
    if not chunk.dictionary.null_count:
        return chunk
    known = chunk.dictionary.is_valid()
    numbers = pc.subtract(pc.cumulative_sum(known.cast(pa.int64())), 1)
    numbers = pc.if_else(known, numbers, None).cast(chunk.indices.type)
    return pa.DictionaryArray.from_arrays(
        numbers.take(chunk.indices), chunk.dictionary.drop_null(), ordered=chunk.type.ordered
    )


def with_wide_categories(kind: pa.DataType) -> pa.DataType:
    """A type whose categories, if it has any, may be more than those of one part.

    With signed numbers, since pandas knows no others.
    """
    if pa.types.is_dictionary(kind) and (
        kind.index_type.bit_width < 32 or pa.types.is_unsigned_integer(kind.index_type)
    ):
        return pa.dictionary(pa.int32(), kind.value_type, ordered=kind.ordered)
    return kind


def _has_offsets(kind: pa.DataType) -> bool:
    return bool(_with_wide_offsets(kind) != kind)


def _with_wide_offsets(kind: pa.DataType) -> pa.DataType:
    # Of maps only keys and values: Arrow knows no map with offsets of 64 bits.
    kind = with_parts(kind, _with_wide_offsets)
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    return pa.large_list(kind.value_field) if pa.types.is_list(kind) else kind
