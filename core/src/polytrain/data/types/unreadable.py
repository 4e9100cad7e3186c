"""Columns whose values arrays have no form for. They are refused before a run begins."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from polytrain.data_errors import SourceError

_OBJECTS = "ray.data.arrow_pickled_object"
PERIODS = "pandas.period"
"""The name of the extension type of pandas' periods."""


def refuse_unreadable(schema: pa.Schema) -> None:
    """Refuse columns that arrays have no form for.

    Args:
        schema: of the columns that are to be read, with their notes.

    Raises:
        SourceError: there is a column of Python's objects (which Ray Data makes of values of
            several types), of pandas' periods (which would be bare numbers) or of unions.
    """
    for field in schema:
        name = repr(field.name)
        for part in _with_parts(field):
            extension = extension_name(part)
            if extension == _OBJECTS:
                raise SourceError(
                    f"the column {name} holds Python objects, which have no type in common",
                    "Give its values one type, as with dataset.map_batches, or leave it out with "
                    "columns=[…]",
                )
            if extension == PERIODS:
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


def extension_name(field: pa.Field) -> str:
    """The name of a field's extension type, also where its library isn't imported; "" if none."""
    if isinstance(field.type, pa.BaseExtensionType):
        return str(field.type.extension_name)
    name: bytes = (field.metadata or {}).get(b"ARROW:extension:name", b"")
    return name.decode()


def _with_parts(field: pa.Field) -> Iterator[pa.Field]:
    """The field, and what its type is made of."""
    yield field
    if not isinstance(field.type, pa.BaseExtensionType):
        for number in range(field.type.num_fields):
            yield from _with_parts(field.type.field(number))
