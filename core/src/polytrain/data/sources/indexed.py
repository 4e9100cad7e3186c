"""Map-style data sets: objects that give item after item by number, such as PyTorch's `Dataset`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.common.data_errors import ReadError, SourceError, one_line, raised_at
from polytrain.data.sources.arrays import check_exact, column_of, tensors_of
from polytrain.data.sources.pieces import Piece, Pieces
from polytrain.data.sources.schemas import chosen, subschema

_NOT_ITEMS = {
    "builtins",
    "numpy",
    "pandas",
    "polars",
    "pyarrow",
    "collections",
    "array",
    "torch",
    "scipy",
}
"""Packages whose own classes have items and a length, and aren't data sets of examples. (Those
that users derive from torch's `Dataset` have modules of their own; the few data sets in
`torch.utils.data` are let through.)"""


@dataclass(frozen=True, slots=True)
class IndexedPiece(Piece):
    """All items of a map-style data set."""

    dataset: Any
    rows: int
    schema: pa.Schema
    keys: frozenset[str] | None = None
    """All that an item has; by default, the schema's columns."""

    @property
    def where(self) -> str:
        return type(self.dataset).__qualname__

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        return self.take(range(start, stop), columns)

    def take(self, rows: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        names = self.schema.names if columns is None else columns
        schema = subschema(self.schema, list(names))
        kinds = {field.name: _Kind.of(field.type) for field in schema}
        values: dict[str, list[Any]] = {name: [] for name in kinds}
        for index in rows:
            found = self._item(int(index))
            for name, kind in kinds.items():
                try:
                    values[name].append(kind.checked(found[name]))
                except ReadError as error:
                    where = f"{self._item_at(index)}, {name!r}"
                    raise ReadError(f"{where}: {error}") from error.__cause__
        arrays = [kinds[field.name].column(values[field.name], field.type) for field in schema]
        return pa.table(arrays, schema=schema)

    def seekable(self, *, scattered: bool) -> bool:
        return True

    def _item(self, index: int) -> dict[str, Any]:
        try:
            item = self.dataset[index]
        except Exception as error:
            raise ReadError(f"{raised_at(error)}: {self._item_at(index)} can't be read") from error
        found = _by_column(item)
        keys = frozenset(self.schema.names) if self.keys is None else self.keys
        if found.keys() != keys:
            raise ReadError(
                f"{self._item_at(index)} has {_listed(found)}, where the first item has "
                f"{_listed(keys)}"
            )
        return found

    def _item_at(self, index: int) -> str:
        return f"item {index} of {self.where}"


def is_map_style(data: Any) -> bool:
    """Whether an object gives items by number, and isn't one of the usual containers."""
    module = type(data).__module__
    if module.partition(".")[0] in _NOT_ITEMS and not module.startswith("torch.utils.data"):
        return False
    return (
        not isinstance(data, Mapping | str | bytes | list | tuple)
        and hasattr(type(data), "__getitem__")
        and hasattr(type(data), "__len__")
    )


def from_items(dataset: Any, columns: Sequence[str] | None) -> Pieces:
    """Find out what a map-style data set's items are like, by its first one."""
    rows = len(dataset)
    kind = type(dataset).__qualname__
    if rows == 0:
        return Pieces(schema=pa.schema([]), pieces=())
    try:
        item = dataset[0]
    except Exception as error:
        raise SourceError(
            f"item 0 of {kind} can't be had: {one_line(error)}",
            "Make its __getitem__ give an item for every number from 0 to its length",
        ) from error
    first = _by_column(item)
    if not first:
        raise SourceError(f"item 0 of {kind} is empty", "Give each item a value")
    names = list(first) if columns is None else chosen(columns, list(first), of="item 0")
    schema = pa.schema([pa.field(name, _type_of(name, first[name])) for name in names])
    return Pieces(schema=schema, pieces=(IndexedPiece(dataset, rows, schema, frozenset(first)),))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"


def _by_column(item: Any) -> dict[str, Any]:
    """An item's values: a dict has names, a tuple numbers, anything else is the column "0"."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, tuple):
        return {str(number): value for number, value in enumerate(item)}
    return {"0": item}


def _type_of(name: str, value: Any) -> pa.DataType:
    """The type of the column that this is the first value of."""
    if isinstance(value, str):
        return pa.string()
    if isinstance(value, bytes):
        return pa.binary()
    try:
        array = _numeric(value)
        return column_of(name, array[np.newaxis]).type
    except (SourceError, TypeError, ValueError, RuntimeError) as error:
        raise SourceError(
            f"item 0 has a {type(value).__qualname__} as {name!r}, which can't become a column: "
            f"{error.what if isinstance(error, SourceError) else one_line(error)}",
            "Give numbers, strings, bytes, arrays or tensors of numbers; "
            "as a tuple or dict if there are several",
        ) from error


def _numeric(value: Any) -> np.ndarray[Any, Any]:
    """A number, array or tensor as an array."""
    if hasattr(value, "detach"):
        # A tensor that has a gradient refuses to become an array.
        value = value.detach()
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise TypeError("it has masked values, which no array of numbers has a place for")
    array = np.asarray(value)
    if array.dtype.kind not in "iufb":
        raise TypeError(f"its type is {array.dtype}, its shape {array.shape}")
    return array


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the values of a column must be like."""

    plain: type | None
    """`str` or `bytes`; None for numbers."""

    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, kind: pa.DataType) -> _Kind:
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            return cls(str if pa.types.is_string(kind) else bytes)
        if isinstance(kind, pa.FixedShapeTensorType):
            return cls(None, np.dtype(kind.value_type.to_pandas_dtype()), tuple(kind.shape))
        return cls(None, np.dtype(kind.to_pandas_dtype()))

    def checked(self, value: Any) -> Any:
        """The value, if it is like the first item's.

        Raises:
            ReadError: it isn't.
        """
        if self.plain is not None:
            if isinstance(value, self.plain):
                return value
            found = type(value).__qualname__
        else:
            try:
                array = _numeric(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ReadError(
                    f"{type(value).__qualname__}, where the first item has {self}: "
                    f"{one_line(error)}"
                ) from error
            if array.shape == self.shape:
                if array.dtype == self.dtype:
                    return array
                if np.can_cast(array.dtype, self.dtype or array.dtype, "safe"):
                    return self._exactly(array)
            found = f"{array.dtype} of shape {array.shape}"
        raise ReadError(f"{found}, where the first item has {self}")

    def _exactly(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The array, if none of its whole numbers is rounded."""
        if self.dtype is not None and self.dtype.kind == "f" and array.dtype.kind in "iu":
            try:
                check_exact(array, array.astype(self.dtype))
            except ValueError as error:
                raise ReadError(one_line(error)) from error
        return array

    def column(self, values: list[Any], kind: pa.DataType) -> pa.Array:
        """Checked values as a column."""
        if self.plain is not None:
            return pa.array(values, kind)
        stacked = np.empty((len(values), *self.shape), dtype=self.dtype)
        for row, value in enumerate(values):
            stacked[row] = value
        return tensors_of(stacked) if self.shape else pa.array(stacked, kind)

    def __str__(self) -> str:
        return self.plain.__qualname__ if self.plain else f"{self.dtype} of shape {self.shape}"
