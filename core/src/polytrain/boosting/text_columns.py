"""Finds text columns that were meant as numbers: one `?` in a file makes a column text."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from polytrain.boosting.categories import Gather
from polytrain.boosting.numbers import with_columns

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
    """Return the table with these text columns converted to float64; empty text becomes null.

    Raises:
        ValueError: some text isn't a number.
    """
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
