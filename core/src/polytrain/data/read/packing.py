"""Packs sequences of tokens into rows of one length: joined in their order, and cut.

A row is known by its number alone, so plans treat it as any other. Whoever reads a row reads the
sequences that it is made of; only their lengths are known before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.read.pieces import Piece, Pieces
from polytrain.data.read.selection import subschema
from polytrain.data.types.nested import dimensions_of, numbers_in, tensors_as_lists, tensors_of
from polytrain.data_errors import ReadError, SourceError, TransformError
from polytrain.text.described import numbered

POSITIONS = "position_ids"
"""The column that packing adds."""

Offsets: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPiece(Piece):
    """The packed rows that begin in a piece."""

    pieces: tuple[Piece, ...]
    """The piece, and those after it that its last row reaches into."""

    starts: Offsets
    """The number of tokens before each sequence that the rows reach into, and before the next."""

    first_row: int
    """The number of the first packed row in the data set."""

    rows: int
    length: int
    """Tokens in a row."""

    schema: pa.Schema

    @property
    def piece(self) -> Piece:
        """The piece in which the rows begin."""
        return self.pieces[0]

    @property
    def where(self) -> str:
        return self.piece.where

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        names = self.schema.names if columns is None else list(columns)
        tokens = range(
            (self.first_row + start) * self.length, (self.first_row + stop) * self.length
        )
        # The sequences from that of the first token to that of the last.
        first = int(np.searchsorted(self.starts, tokens.start, "right")) - 1
        after = int(np.searchsorted(self.starts, tokens.stop, "left")) if tokens else first
        parts = [*self._sequences(first, after, [name for name in names if name != POSITIONS])]
        cut = slice(tokens.start - self.starts[first], tokens.stop - self.starts[first])
        values = (
            self._positions(tokens, self.starts[first : after + 1])
            if name == POSITIONS
            else self._tokens(name, parts, cut)
            for name in names
        )
        arrays = [tensors_of(each.reshape(-1, self.length)) for each in values]
        return pa.table(arrays, schema=subschema(self.schema, names))

    def seekable(self, *, scattered: bool) -> bool:
        return all(piece.seekable(scattered=scattered) for piece in self.pieces)

    @property
    def in_memory(self) -> bool:
        return self.piece.in_memory

    @property
    def unwrapped(self) -> Piece:
        return self.piece.unwrapped

    def _sequences(self, first: int, after: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        ends = [*accumulate(piece.rows for piece in self.pieces)]
        for piece, end in zip(self.pieces, ends, strict=True):
            begin = end - piece.rows
            rows = range(max(first, begin) - begin, min(after, end) - begin)
            if rows and columns:
                yield piece.read(rows.start, rows.stop, columns)

    def _tokens(self, name: str, parts: Sequence[pa.Table], cut: slice) -> np.ndarray[Any, Any]:
        kind = self.schema.field(name).type.value_type.to_pandas_dtype()
        columns = [_lists(part.column(name)) for part in parts]
        chunks = [numbers_in(chunk) for column in columns for chunk in column.chunks]
        found = np.concatenate([np.empty(0, kind), *(chunk.to_numpy() for chunk in chunks)])[cut]
        if len(found) != cut.stop - cut.start:
            raise ReadError(
                f"the lists of the column {name!r} in {self.where} have other lengths than when "
                "the run began. Give a run data that stay as they are"
            )
        return found

    def _positions(self, tokens: range, starts: Offsets) -> Offsets:
        """The place of each token after the last start of a sequence or a row."""
        steps = np.ones(len(tokens), np.int64)
        begun = starts[(starts > tokens.start) & (starts < tokens.stop)]
        borders = np.union1d(begun, np.arange(tokens.start, tokens.stop, self.length))
        # The sum of all steps to a border is 0.
        steps[:1] = 0
        steps[borders[1:] - tokens.start] -= np.diff(borders)
        return np.cumsum(steps, out=steps)


def packed(found: Pieces, length: int) -> Pieces:
    """Pack the lists of a data set; reads all of them once, for their lengths.

    Args:
        found: columns of lists of whole numbers, which are equally long in each row.
        length: tokens in a packed row.

    Raises:
        SourceError: it has other columns or lists, or too few tokens for one row.
    """
    _check_columns(found.schema)
    try:
        lengths = [_lengths(piece, found.schema.names) for piece in found.pieces]
    except (ReadError, TransformError) as error:
        raise SourceError(str(error), "Correct the data, which are read once before") from error
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
    rows = int(starts[-1]) // length
    if rows == 0:
        raise SourceError(
            f"its {numbered(int(starts[-1]), 'token', 'fill')} no row of pack={length}",
            "Give a smaller number, or more data",
        )
    types = {field.name: dimensions_of(field.type)[1] for field in found.schema}
    types[POSITIONS] = pa.int64()
    schema = pa.schema(
        [(name, pa.fixed_shape_tensor(kind, [length])) for name, kind in types.items()]
    )
    borders = [*accumulate(map(len, lengths), initial=0)]
    pieces = []
    for number, (first, after) in enumerate(pairwise(borders)):
        own = range(*(min(rows, -(-int(starts[border]) // length)) for border in (first, after)))
        last = max(after, int(np.searchsorted(starts, own.stop * length, "left"))) if own else after
        reached = bisect_left(borders, last)
        pieces.append(
            PackedPiece(
                pieces=found.pieces[number : max(reached, number + 1)],
                starts=starts[first : last + 1],
                first_row=own.start,
                rows=len(own),
                length=length,
                schema=schema,
            )
        )
    return Pieces(schema=schema, pieces=tuple(pieces), index=found.index)


def _check_columns(schema: pa.Schema) -> None:
    for field in schema:
        dimensions, kind = dimensions_of(field.type)
        if dimensions != 1 or not pa.types.is_integer(kind):
            raise SourceError(
                f"pack joins lists of whole numbers, and the column {field.name!r} is {field.type}",
                "Name the columns of tokens, as in DataConfig(columns=['input_ids'], pack=…), or "
                "turn texts into lists of tokens with transform=…",
            )
        if field.name == POSITIONS:
            raise SourceError(
                f"pack adds the column {POSITIONS!r}, which is there already",
                "Leave it out of DataConfig(columns=[…])",
            )


def _lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Lists that all have one length may be tensors."""
    is_tensor = isinstance(column.type, pa.FixedShapeTensorType)
    return tensors_as_lists(column) if is_tensor else column


def _lengths(piece: Piece, names: Sequence[str]) -> Offsets:
    """The length of each list of a piece, the same in all columns.

    Raises:
        SourceError: lists, or numbers in them, are missing, or columns differ.
    """
    found = []
    for table in piece.scan(0, piece.rows, names):
        of_column = []
        for name, held in zip(table.column_names, table.columns, strict=True):
            column = _lists(held)
            if held.null_count or any(numbers_in(chunk).null_count for chunk in column.chunks):
                raise SourceError(
                    f"the column {name!r} lacks lists, or numbers in them, in {piece.where}",
                    "Fill them in, or leave these rows out, where the data are written",
                )
            of_column.append(pc.list_value_length(column).to_numpy().astype(np.int64))
            if not np.array_equal(of_column[0], of_column[-1]):
                row = int(np.flatnonzero(of_column[0] != of_column[-1])[0])
                raise SourceError(
                    f"a row in {piece.where} has {of_column[0][row]} numbers in the column "
                    f"{names[0]!r} and {of_column[-1][row]} in {name!r}",
                    "Give all lists of a row one length, or leave a column out with "
                    "DataConfig(columns=[…])",
                )
        found.append(of_column[0])
    return np.concatenate(found) if found else np.empty(0, np.int64)
