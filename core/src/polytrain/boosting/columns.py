"""Columns as boosters take them: numbers, categories, and texts that were meant as numbers.

Every rank uses the same list of categories. One `?` in a file makes a column text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain_plugins import column_remedy, is_category, is_number

Numbers = np.ndarray[Any, Any]


def floats(column: pa.ChunkedArray) -> Numbers:
    """Return a column as float64, shape `[rows]`, NaN for nulls; without a copy if possible."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    numbers: Numbers = column.cast(pa.float64(), safe=False).to_numpy()
    return numbers


def plainly_typed(table: pa.Table, columns: Collection[str]) -> pa.Table:
    """Convert half-precision, decimal and null columns to types that frameworks know.

    Categories of these types are converted too. Other types, and columns that aren't in
    `columns`, stay as they are.
    """
    chosen = set(columns)
    kinds = {field.name: _known(field.type) for field in table.schema if field.name in chosen}
    return with_columns(
        table,
        {
            name: table.column(name).cast(kind, safe=False)
            for name, kind in kinds.items()
            if kind is not None
        },
    )


def without_categories(table: pa.Table, columns: Collection[str]) -> pa.Table:
    """Return the table with plain values in those of these columns that are dictionaries."""
    kinds = {name: table.schema.field(name).type for name in columns}
    return with_columns(
        table,
        {
            name: table.column(name).cast(kind.value_type)
            for name, kind in kinds.items()
            if pa.types.is_dictionary(kind)
        },
    )


def with_columns(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    """Return the table with these columns: they replace columns of the same name, or come last.

    It does this in one step, since each `pa.Table.set_column` copies the list of all columns.

    Args:
        columns: name → Arrow or NumPy array, shape `[rows]`.
    """
    if not columns:
        return table
    names = table.column_names
    kept = (columns.get(name, column) for name, column in zip(names, table.columns, strict=True))
    there = set(names)
    more = {name: column for name, column in columns.items() if name not in there}
    return pa.table([*kept, *more.values()], names=[*names, *more])


def one_after_another(parts: Sequence[Any]) -> Any:
    """Concatenate the ranks' arrays, in the order of ranks; None if they are None."""
    return None if parts[0] is None else np.concatenate(parts)


def rows_by_leaf(leaves: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Yield each leaf that has rows, and the indices of its rows in ascending order.

    Args:
        leaves: the leaf of each row, shape `[rows]`.
    """
    order = np.argsort(leaves, kind="stable")
    found, starts = np.unique(leaves[order], return_index=True)
    yield from zip(map(int, found), np.split(order, starts[1:]), strict=True)


def _known(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_dictionary(kind):
        values = _known(kind.value_type)
        return None if values is None else pa.dictionary(kind.index_type, values, kind.ordered)
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return pa.float64()
    return None


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

    A dictionary column, as of pandas, keeps the order of its list. If ranks have other lists, new
    categories follow, as where Arrow unifies the dictionaries of one process. The categories of
    other columns are sorted. Those that "train" lacks come last.

    Args:
        tables: a rank's shard "train", and the other data sets.
        features: the feature columns. Strings and dictionary columns are categories.
        also: numeric columns to treat as categories.
    """
    kinds = {name: tables["train"].schema.field(name).type for name in features}
    mine = {
        name: {dataset: _lists(table.column(name)) for dataset, table in tables.items()}
        for name, kind in kinds.items()
        if name in also or is_category(kind)
    }
    by_rank = gather(mine)
    return {
        name: _agreed(
            [lists[name] for lists in by_rank], keeps_order=pa.types.is_dictionary(kinds[name])
        )
        for name in mine
    }


def codes_of(column: pa.ChunkedArray, categories: pa.Array) -> pa.Array:
    """Return each value's index in the categories, int32, shape `[rows]`; null if it isn't one."""
    if len(categories) == 0:
        # An empty list may have no type.
        return pa.nulls(len(column), pa.int32())
    if pa.types.is_dictionary(column.type):
        # Before chunks are combined: one chunk's index type may not hold all categories.
        column = column.cast(column.type.value_type)
    if _is_text(column.type) and not _is_text(categories.type):
        # As `_of_type` writes numbers that are looked for among texts.
        categories = as_text(categories)
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
    if _is_text(kind):
        return as_text(values).cast(kind)
    if pa.types.is_floating(values.type) and pa.types.is_integer(kind):
        return _integers(values)
    # Integers too large for a float were rounded in the categories too.
    return values.cast(kind, safe=not pa.types.is_floating(kind))


def _integers(values: pa.Array) -> pa.Array:
    """Return floats as int64; null where a float isn't a whole number in int64's range."""
    whole = pc.and_(pc.equal(values, pc.floor(values)), pc.less(pc.abs(values), 2.0**63))
    return pc.if_else(whole, values, None).cast(pa.int64(), safe=False)


def _agreed(by_rank: Sequence[Mapping[str, Sequence[pa.Array]]], *, keeps_order: bool) -> pa.Array:
    """Return one list of a column's categories, which ranks have listed by data set."""
    lists = [
        (dataset, each) for of_rank in by_rank for dataset in of_rank for each in of_rank[dataset]
    ]
    [first, *more] = [each for dataset, each in lists if dataset == "train"]
    new = [each for each in more if not each.equals(first)]
    values = [*dict.fromkeys(value for each in (first, *new) for value in each.to_pylist())]
    if not keeps_order:
        values.sort()
    others = [each for dataset, each in lists if dataset != "train"]
    # Last, so that those of "train" have the numbers that they have without other data sets.
    values += sorted({value for each in others for value in each.to_pylist()}.difference(values))
    kind = pa.string() if pa.types.is_large_string(first.type) else first.type
    if len({each.type for _, each in lists}) > 1:
        # A column may be int32 in one data set, and int64 or floats in another.
        kind = pa.float64() if any(pa.types.is_floating(each.type) for _, each in lists) else None
    # A new array: XGBoost doesn't take a slice of another array.
    return pa.array(values, kind)


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


logger = logging.getLogger(__name__)

_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_ALMOST_ALL = 0.8
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Counts of a text column's values, on one rank or on all."""

    numbers: int
    texts: int
    examples: tuple[str, ...]
    """Some of the values that aren't numbers, without repetition."""


def warn_of_numbers_as_text(
    table: pa.Table, features: Sequence[str], *, gather: Gather, is_logging_rank: bool
) -> None:
    """Warn of text columns in which almost all values are numbers.

    Columns of pandas' type `category` are skipped: the user chose that type.
    """
    texts = [name for name in features if _is_text(table.schema.field(name).type)]
    if not texts:
        return
    by_rank = gather([counted(table.column(name)) for name in texts])
    for name, *parts in zip(texts, *by_rank, strict=True):
        found = _together(parts)
        if is_logging_rank and found.texts and found.numbers >= _ALMOST_ALL * _total(found):
            logger.warning(
                "The column %r of 'train' is text, so its values are categories. But %d of %d are "
                "numbers; the others are %s. If these stand for missing values, leave them empty "
                "in the file, or pass a DataFrame in which they are missing: "
                "pandas.read_csv(…, na_values=%s).",
                name,
                found.numbers,
                _total(found),
                ", ".join(map(repr, found.examples)),
                list(found.examples),
            )


def with_numbers(table: pa.Table, columns: Iterable[str]) -> pa.Table:
    """Return the table with plain numbers in these columns, for a model that knows numbers there.

    Text becomes float64, empty text null.

    Raises:
        ValueError: some text isn't a number, or a column has another type.
    """
    columns = [*columns]
    table = without_categories(table, columns)
    for name in columns:
        kind = table.schema.field(name).type
        if not (is_number(kind) or _is_text(kind)):
            raise ValueError(
                f"The column {name!r} is {kind}, and the model knows numbers there. Turn it into "
                "numbers, as for training."
            )
    texts = [name for name in columns if _is_text(table.schema.field(name).type)]
    converted = {}
    for name in texts:
        column = table.column(name)
        if examples := counted(column).examples:
            raise ValueError(
                f"The column {name!r} holds text, such as {examples[0]!r}, and the model knows "
                "numbers there. Give it numbers, or missing values where there are none."
            )
        text = pc.utf8_trim_whitespace(column)
        converted[name] = pc.if_else(pc.equal(text, ""), None, text).cast(pa.float64())
    return with_columns(table, converted)


def counted(column: pa.ChunkedArray) -> Counted:
    """Count a text column's numbers and other texts; empty and missing values count as neither."""
    counts = pc.value_counts(column.drop_null())
    values, rows = counts.field("values"), counts.field("counts")
    is_number = pc.match_substring_regex(values, _NUMBER)
    is_text = pc.and_(pc.invert(is_number), pc.not_equal(pc.utf8_trim_whitespace(values), ""))
    return Counted(
        numbers=pc.sum(rows.filter(is_number)).as_py() or 0,
        texts=pc.sum(rows.filter(is_text)).as_py() or 0,
        examples=tuple(values.filter(is_text)[:_SHOWN].to_pylist()),
    )


def _together(parts: Sequence[Counted]) -> Counted:
    examples = dict.fromkeys(example for part in parts for example in part.examples)
    return Counted(
        numbers=sum(part.numbers for part in parts),
        texts=sum(part.texts for part in parts),
        examples=tuple(examples)[:_SHOWN],
    )


def _total(found: Counted) -> int:
    return found.numbers + found.texts


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
