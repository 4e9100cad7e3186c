"""Chooses the columns of a data set that are read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import pyarrow as pa

from polytrain.data.types.plain import Missing, missing_in, noted
from polytrain.data.types.schemas import merged_schema
from polytrain.data_errors import SourceError
from polytrain_plugins import column_remedy


def columns_to_count(columns: Sequence[str] | None, names: list[str]) -> list[str]:
    """The columns of a file that are read to count its rows and find their types.

    Those that it lacks may be in the names of its directories, and a file without rows needs none.

    Returns:
        The file's own columns among those; if there is none, its first: rows are counted all the
        same.
    """
    if columns is None:
        return names
    return [name for name in columns if name in names] or names[:1]


def chosen(columns: Sequence[str], names: Sequence[str], *, of: str = "") -> list[str]:
    """The columns that a user asks for, which must all be there.

    Raises:
        SourceError: a column is missing, or asked for twice.
    """
    if isinstance(columns, str) or not all(isinstance(column, str) for column in columns):
        raise SourceError(f"columns={columns!r} is no list of names", 'Pass columns=["…", …]')
    if not columns:
        raise SourceError("columns is empty", "Name at least one column, or leave columns out")
    if repeated := twice(columns):
        raise SourceError(f"columns names {repeated} more than once", "Name each column once")
    for column in columns:
        if column not in names:
            raise SourceError(
                f"{of or 'it'} has no column {column!r}", column_remedy(column, names)
            )
    return list(columns)


def agreed_schema(
    parts: Sequence[tuple[str, pa.Schema]],
    columns: Sequence[str] | None,
    *,
    whole: str,
    way: str = "",
    missing: Iterable[Missing] = (),
) -> pa.Schema:
    """The schema that holds the rows of all parts of a data set, with notes of what is missing.

    Args:
        parts: their places, for messages, and schemas.
        columns: what the user asks for; None for all, which all parts must have.
        whole: all parts, for messages.
        way: how to give their columns the same types.
        missing: what is missing in the parts, beside what their schemas say.

    Raises:
        SourceError: a part lacks a column, or has another type.
    """
    (first, one), *rest = parts
    for place, schema in parts if columns is not None else ():
        chosen(columns or (), schema.names, of=place)
    names = [*one.names] if columns is None else [*columns]
    for other, schema in rest if columns is None else ():
        for less, more, lacking in (
            (other, first, {*names} - {*schema.names}),
            (first, other, {*schema.names} - {*names}),
        ):
            if lacking:
                raise SourceError(
                    f"{less} has no column {', '.join(map(repr, sorted(lacking)))}, which {more} "
                    "has",
                    f"Give {whole} the same columns, or name those that all have in "
                    "DataConfig(columns=[…])",
                )
    schema = merged_schema(parts, f"Give the columns of {whole} the same types{way}", names)
    return noted(schema, {*missing, *(each for _, part in parts for each in missing_in(part))})


def twice(names: Sequence[str]) -> list[str]:
    """The names that are there more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def refuse_repeated(names: Sequence[str], where: str) -> None:
    """Refuse columns of the same name."""
    if repeated := twice(names):
        raise SourceError(
            f"{where} has more than one column {', '.join(map(repr, repeated))}",
            "Give each column a name of its own",
        )


def subschema(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """The schema of these columns alone."""
    return pa.schema([schema.field(name) for name in names])


_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0(\.\d+)*")
"""The names that Arrow and pandas give to the column of an index without a name."""


def index_columns(schema: pa.Schema) -> tuple[str, ...]:
    """The columns that hold the index of a DataFrame; none if there are no others.

    Pandas' notes name them in Parquet and Arrow. Where these are lost, an index without a name is
    known by its column's name: in CSV files it is the first column, with an empty name.
    """
    try:
        noted = json.loads((schema.metadata or {})[b"pandas"])["index_columns"]
    except (KeyError, TypeError, ValueError):
        # None, or not as pandas writes them.
        noted = ()
    known = [name for name in noted if isinstance(name, str)] if isinstance(noted, list) else []
    found = tuple(
        name
        for number, name in enumerate(schema.names)
        if name in known or _INDEX.fullmatch(name) or (name == "" and number == 0)
    )
    return found if len(found) < len(schema.names) else ()


def columns_to_read(
    schema: pa.Schema, columns: Sequence[str] | None, *, of: str = ""
) -> tuple[list[str], tuple[str, ...]]:
    """The columns that are read, and those that are left out because they hold an index.

    Args:
        columns: what the user asks for; None for all but an index.

    Raises:
        SourceError: a column is missing, or asked for twice.
    """
    if columns is not None:
        return chosen(columns, schema.names, of=of), ()
    index = index_columns(schema)
    return without(schema.names, index), index


def without(names: Sequence[str], left_out: Collection[str]) -> list[str]:
    """The names but for these."""
    return [name for name in names if name not in left_out]
