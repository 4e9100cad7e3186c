"""Map-style data sets: objects that give item after item by number, such as PyTorch's `Dataset`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.read.pieces import Piece, Pieces
from polytrain.data.read.selection import columns_to_read, subschema
from polytrain.data.types.arrays import check_exact, column_of
from polytrain.data.types.nested import tensors_of
from polytrain.data_errors import ReadError, SourceError, one_line, raised_at
from polytrain_plugins.type_names import a_type

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

_TYPES = {bool: np.dtype(bool), int: np.dtype(np.int64), float: np.dtype(np.float64)}
"""The types of arrays that NumPy makes of Python's numbers."""


@dataclass(frozen=True, slots=True)
class IndexedPiece(Piece):
    """A map-style data set, whole."""

    dataset: Any
    rows: int
    schema: pa.Schema
    keys: frozenset[str] | None = None
    """The columns of an item; by default, the schema's."""

    @property
    def where(self) -> str:
        return type(self.dataset).__qualname__

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        return self.take(range(start, stop), columns)

    def take(self, rows: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        names = self.schema.names if columns is None else columns
        schema = subschema(self.schema, list(names))
        values = self._values(rows, schema.names)
        return pa.table(
            [self._column(rows, field, values[field.name]) for field in schema], schema=schema
        )

    def seekable(self, *, scattered: bool) -> bool:
        return True

    @property
    def reads_into_own_memory(self) -> bool:
        return True

    def _values(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Any]]:
        """The items' values, by column."""
        keys = frozenset(self.schema.names) if self.keys is None else self.keys
        values: dict[str, list[Any]] = {name: [] for name in names}
        by_name = [(name, column.append) for name, column in values.items()]
        is_numbered = keys == set(map(str, range(len(keys))))
        by_number = [(int(name), add) for name, add in by_name] if is_numbered else []
        for index in map(int, rows):
            try:
                item = self.dataset[index]
            except (Exception, SystemExit) as error:
                what = f"{raised_at(error)}: {self._item_at(index)} can't be read"
                raise ReadError(what) from error
            # Most items are as the first one. To make a dict of each would take half of the time.
            if is_numbered and type(item) is tuple and len(item) == len(keys):
                for number, add in by_number:
                    add(item[number])
                continue
            if not (type(item) is dict and item.keys() == keys):
                item = self._by_column(item, index, keys)
            for name, add in by_name:
                add(item[name])
        return values

    def _by_column(self, item: Any, index: int, keys: frozenset[str]) -> dict[str, Any]:
        found = _by_column(item)
        if found.keys() != keys:
            raise ReadError(
                f"{self._item_at(index)} has {_listed(found)}, where the first item has "
                f"{_listed(keys)}"
            )
        return found

    def _column(self, rows: Sequence[int], field: pa.Field, values: list[Any]) -> pa.Array:
        kind = _Kind.of(field.type)
        joined: Any = kind.stacked(values)
        if joined is None:
            joined = kind.joined(
                [
                    self._checked(kind, field.name, index, value)
                    for index, value in zip(rows, values, strict=True)
                ]
            )
        is_tensor = isinstance(field.type, pa.FixedShapeTensorType)
        return tensors_of(joined) if is_tensor else pa.array(joined, field.type)

    def _checked(self, kind: _Kind, name: str, index: int, value: Any) -> Any:
        """The value of an item as an array, if it is like the first item's."""
        try:
            return kind.checked(value)
        except ReadError as error:
            where = f"{self._item_at(index)}, {name!r}"
            raise ReadError(f"{where}: {error}") from error.__cause__

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
    """Describe a map-style data set by its first item."""
    rows = len(dataset)
    kind = type(dataset).__qualname__
    if rows == 0:
        return Pieces(schema=pa.schema([]), pieces=())
    try:
        item = dataset[0]
    except (Exception, SystemExit) as error:
        raise SourceError(
            f"item 0 of {kind} can't be had: {one_line(error)}",
            "Make its __getitem__ give an item for every number from 0 to its length",
        ) from error
    first = _by_column(item)
    if not first:
        raise SourceError(f"item 0 of {kind} is empty", "Give each item a value")
    everything = pa.schema([(name, pa.null()) for name in first])
    names, index = columns_to_read(everything, columns, of="item 0")
    schema = pa.schema([pa.field(name, _type_of(name, first[name])) for name in names])
    piece = IndexedPiece(dataset, rows, schema, frozenset(first))
    return Pieces(schema=schema, pieces=(piece,), index=index)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"


def _by_column(item: Any) -> dict[str, Any]:
    """An item's values by column: a dict has names, a tuple numbers, anything else is "0"."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, tuple):
        return {str(number): value for number, value in enumerate(item)}
    return {"0": item}


def _type_of(name: str, value: Any) -> pa.DataType:
    """The type of a column, by its first value."""
    if isinstance(value, str):
        return pa.string()
    if isinstance(value, bytes):
        return pa.binary()
    try:
        array = _numeric(value)
        return column_of(name, array[np.newaxis]).type
    except (SourceError, TypeError, ValueError, RuntimeError) as error:
        raise SourceError(
            f"item 0 has {a_type(value)} as {name!r}, which can't become a column: "
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
    """The type and shape of a column's values."""

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

    def stacked(self, values: list[Any]) -> list[Any] | np.ndarray[Any, Any] | None:
        """Values as a column of Arrow is made of them, if all are of exactly this type and shape.

        Returns:
            Texts as they are; numbers in an array of its own; None if values have to be looked at
            one by one.
        """
        types = set(map(type, values))
        if len(types) != 1:
            return None
        [kind] = types
        if self.plain is not None:
            return values if kind is self.plain else None
        try:
            found = _stacked(kind, values)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return None
        fits = found is not None and found.dtype == self.dtype and found.shape[1:] == self.shape
        return found if fits else None

    def joined(self, values: list[Any]) -> list[Any] | np.ndarray[Any, Any]:
        """Join checked values as in `stacked`."""
        if self.plain is not None:
            return values
        joined = np.empty((len(values), *self.shape), dtype=self.dtype)
        for row, value in enumerate(values):
            joined[row] = value
        return joined

    def __str__(self) -> str:
        return self.plain.__qualname__ if self.plain else f"{self.dtype} of shape {self.shape}"


def _stacked(kind: type, values: list[Any]) -> np.ndarray[Any, Any] | None:
    """Values of one Python type as one array; None if there is no quick way, or they differ.

    Raises:
        TypeError, ValueError, RuntimeError, OverflowError: there is no such array.
    """
    if kind is np.ndarray:
        shape = values[0].shape
        if not shape or any(value.shape != shape for value in values):
            return None
        joined = np.concatenate(values, dtype=values[0].dtype, casting="no")
        return joined.reshape(len(values), *shape)
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        if any(value.dtype != values[0].dtype for value in values):
            return None
        array: np.ndarray[Any, Any] = sys.modules["torch"].stack(values).detach().numpy()
        return array
    if kind in _TYPES or issubclass(kind, np.number | np.bool_):
        return np.array(values, dtype=_TYPES.get(kind, kind))
    return None
