"""Columns of categories: the same list of them on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polytrain_plugins import is_category

Gather = Callable[[Any], list[Any]]
"""Everybody's piece, by rank. Every rank calls it, with whatever can be pickled."""


def agreed_categories(
    tables: Mapping[str, pa.Table],
    *,
    features: Sequence[str],
    also: Collection[str],
    gather: Gather,
) -> dict[str, pa.Array]:
    """The categories of every column that has some, over all data sets and ranks.

    Where everybody has the same list of them, as a pandas column brings it along, it is that list;
    otherwise they are sorted.

    Args:
        tables: a rank's shard "train", and the other data sets.
        features: the columns to look at. Strings are categories, and columns with a list of them.
        also: those that are categories although they are numbers.
        gather: of all ranks.
    """
    mine = {
        name: [each for table in tables.values() for each in _lists(table.column(name))]
        for name in features
        if name in also or is_category(tables["train"].schema.field(name).type)
    }
    everybodys = gather(mine)
    return {name: _agreed([each for lists in everybodys for each in lists[name]]) for name in mine}


def codes_of(column: pa.ChunkedArray, categories: pa.Array) -> pa.Array:
    """The position of every value in the list of categories, int32; null where it has none."""
    if len(categories) == 0:
        # Of no type, maybe.
        return pa.nulls(len(column), pa.int32())
    combined = column.combine_chunks()
    if pa.types.is_dictionary(combined.type):
        combined = combined.dictionary_decode()
    return pc.index_in(combined.cast(categories.type), value_set=categories)


def encoded(table: pa.Table, categories: Mapping[str, pa.Array]) -> pa.Table:
    """The table with its columns of categories as Arrow's dictionaries, all with the same list."""
    for name, values in categories.items():
        codes = codes_of(table.column(name), values)
        encoded_column = pa.DictionaryArray.from_arrays(codes, values)
        table = table.set_column(table.column_names.index(name), name, encoded_column)
    return table


def selected(table: pa.Table, features: Sequence[str]) -> pa.Table:
    """The columns that a model needs, in its order.

    Raises:
        ValueError: some of them aren't there.
    """
    missing = [name for name in features if name not in table.column_names]
    if missing:
        raise ValueError(
            f"The data has no column {', '.join(map(repr, missing))}, which the model needs. Its "
            f"columns: {', '.join(table.column_names)}."
        )
    return table.select(features)


def _agreed(lists: Sequence[pa.Array]) -> pa.Array:
    values = lists[0].to_pylist()
    if any(not each.equals(lists[0]) for each in lists):
        values = sorted({value for each in lists for value in each.to_pylist()})
    kind = pa.string() if pa.types.is_large_string(lists[0].type) else lists[0].type
    if len({each.type for each in lists}) > 1 and any(map(_has_floats, lists)):
        # Whole numbers in one data set may be others elsewhere.
        kind = pa.float64()
    # Made anew: XGBoost takes no list that was cut out of another.
    return pa.array(values, kind)


def _has_floats(values: pa.Array) -> bool:
    return bool(pa.types.is_floating(values.type))


def _lists(column: pa.ChunkedArray) -> list[pa.Array]:
    """The lists of categories of a column's chunks; of one without lists, what it has, sorted."""
    if not pa.types.is_dictionary(column.type):
        return [_without_missing(pc.unique(column)).sort()]
    lists: list[pa.Array] = []
    for chunk in column.chunks:
        known = _without_missing(chunk.dictionary)
        if not any(known.equals(other) for other in lists):
            lists.append(known)
    return lists


def _without_missing(values: pa.Array) -> pa.Array:
    """The values that are some: neither null nor NaN."""
    if pa.types.is_floating(values.type):
        return values.filter(pc.invert(pc.is_nan(values)), null_selection_behavior="drop")
    return values.drop_null()
