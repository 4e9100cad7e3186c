"""Category columns: every rank uses the same list of categories."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polytrain.boosting.numbers import with_columns
from polytrain_plugins import column_remedy, is_category

Gather = Callable[[Any], list[Any]]
"""Gathers a picklable object from every rank, by rank. Every rank calls it."""


def agreed_categories(
    tables: Mapping[str, pa.Table],
    *,
    features: Sequence[str],
    also: Collection[str],
    gather: Gather,
) -> dict[str, pa.Array]:
    """Agree on the categories of every category column, over all data sets and ranks.

    If all ranks have the same list, as with a pandas column, that list is kept. Otherwise the
    categories are sorted.

    Args:
        tables: a rank's shard "train", and the other data sets.
        features: the feature columns. Strings and dictionary columns are categories.
        also: numeric columns to treat as categories.
    """
    mine = {
        name: [each for table in tables.values() for each in _lists(table.column(name))]
        for name in features
        if name in also or is_category(tables["train"].schema.field(name).type)
    }
    by_rank = gather(mine)
    return {name: _agreed([each for lists in by_rank for each in lists[name]]) for name in mine}


def codes_of(column: pa.ChunkedArray, categories: pa.Array) -> pa.Array:
    """Return each value's index in the categories, int32, shape `[rows]`; null if it isn't one."""
    if len(categories) == 0:
        # An empty list may have no type.
        return pa.nulls(len(column), pa.int32())
    if pa.types.is_dictionary(column.type):
        # Before chunks are combined: one chunk's index type may not hold all categories.
        column = column.cast(column.type.value_type)
    values = _of_type(column.combine_chunks(), categories.type)
    return pc.index_in(values, value_set=categories)


def as_text(values: pa.Array) -> pa.Array:
    """Return values as strings. A whole number has the same digits as an integer and as a float.

    Arrow itself writes floats from 1e10 on with an exponent.
    """
    text = values.cast(pa.string())
    if not pa.types.is_floating(values.type):
        return text
    return pc.coalesce(_integers(values).cast(pa.string()), text)


def encoded(table: pa.Table, categories: Mapping[str, pa.Array]) -> pa.Table:
    """Return the table with category columns as Arrow dictionaries that share one list each."""
    return with_columns(
        table,
        {
            name: pa.DictionaryArray.from_arrays(codes_of(table.column(name), values), values)
            for name, values in categories.items()
        },
    )


def selected(table: pa.Table, features: Sequence[str]) -> pa.Table:
    """Return the columns that a model needs, in its order.

    Raises:
        ValueError: columns are missing.
    """
    names = dict.fromkeys(table.column_names)
    missing = [name for name in features if name not in names]
    if missing:
        raise ValueError(
            f"The data has no column {', '.join(map(repr, missing))}, which the model needs. "
            f"{column_remedy(missing[0], [*names])}."
        )
    return table.select(features)


def _of_type(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return values in the type of the categories; null where the type can't hold a value."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return as_text(values).cast(kind)
    if pa.types.is_floating(values.type) and pa.types.is_integer(kind):
        return _integers(values)
    # Integers too large for a float were rounded in the categories too.
    return values.cast(kind, safe=not pa.types.is_floating(kind))


def _integers(values: pa.Array) -> pa.Array:
    """Return floats as int64; null where a float isn't a whole number in int64's range."""
    whole = pc.and_(pc.equal(values, pc.floor(values)), pc.less(pc.abs(values), 2.0**63))
    return pc.if_else(whole, values, None).cast(pa.int64(), safe=False)


def _agreed(lists: Sequence[pa.Array]) -> pa.Array:
    values = lists[0].to_pylist()
    if any(not each.equals(lists[0]) for each in lists):
        values = sorted({value for each in lists for value in each.to_pylist()})
    kind = pa.string() if pa.types.is_large_string(lists[0].type) else lists[0].type
    if len({each.type for each in lists}) > 1:
        # A column may be int32 in one data set, and int64 or floats in another.
        kind = pa.float64() if any(map(_has_floats, lists)) else None
    # A new array: XGBoost doesn't take a slice of another array.
    return pa.array(values, kind)


def _has_floats(values: pa.Array) -> bool:
    return bool(pa.types.is_floating(values.type))


def _lists(column: pa.ChunkedArray) -> list[pa.Array]:
    """Return the distinct category lists of a column's chunks; a plain column's sorted values."""
    if not pa.types.is_dictionary(column.type):
        return [_without_missing(pc.unique(column)).sort()]
    lists: list[pa.Array] = []
    for chunk in column.chunks:
        known = _without_missing(chunk.dictionary)
        if not any(known.equals(other) for other in lists):
            lists.append(known)
    return lists


def _without_missing(values: pa.Array) -> pa.Array:
    """Return the values without nulls and NaN."""
    if pa.types.is_floating(values.type):
        return values.filter(pc.invert(pc.is_nan(values)), null_selection_behavior="drop")
    return values.drop_null()
