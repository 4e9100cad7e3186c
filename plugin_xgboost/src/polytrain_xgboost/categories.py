"""Columns of categories: the same list of them on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.collecting import Ranks


def agreed_categories(
    tables: Mapping[str, pa.Table], options: XGBoost, ranks: Ranks
) -> dict[str, pa.Array]:
    """The categories of every column that has some, over all data sets and ranks.

    Where everybody has the same list of them, as a pandas column brings it along, it is that list;
    otherwise they are sorted.

    Args:
        tables: a rank's shard "train", and the other data sets.
        options: which columns mean what.
        ranks: all of which call this.
    """
    mine = {
        name: [each for table in tables.values() for each in _lists(table.column(name))]
        for name in _names(tables["train"].schema, options)
    }
    everybodys = ranks.gathered(mine)
    return {name: _agreed([each for lists in everybodys for each in lists[name]]) for name in mine}


def encoded(table: pa.Table, categories: Mapping[str, pa.Array]) -> pa.Table:
    """The table with its columns of categories as XGBoost takes them, all with the same list."""
    for name, values in categories.items():
        column = table.column(name).combine_chunks()
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        codes = pc.index_in(column.cast(values.type), value_set=values)
        encoded_column = pa.DictionaryArray.from_arrays(codes, values)
        table = table.set_column(table.column_names.index(name), name, encoded_column)
    return table


def _agreed(lists: Sequence[pa.Array]) -> pa.Array:
    values = lists[0].to_pylist()
    if any(not each.equals(lists[0]) for each in lists):
        values = sorted({value for each in lists for value in each.to_pylist()})
    # Made anew: XGBoost takes no list that was cut out of another.
    return pa.array(values)


def _names(schema: pa.Schema, options: XGBoost) -> list[str]:
    besides = options.columns_besides_features
    return [
        field.name
        for field in schema
        if field.name not in besides
        and (
            field.name in options.categorical
            or pa.types.is_dictionary(field.type)
            or pa.types.is_string(field.type)
            or pa.types.is_large_string(field.type)
        )
    ]


def _lists(column: pa.ChunkedArray) -> list[pa.Array]:
    """The lists of categories of a column's chunks; of one without lists, what it has, sorted."""
    if not pa.types.is_dictionary(column.type):
        return [pc.unique(column).drop_null().sort()]
    lists: list[pa.Array] = []
    for chunk in column.chunks:
        if not any(chunk.dictionary.equals(other) for other in lists):
            lists.append(chunk.dictionary)
    return lists
