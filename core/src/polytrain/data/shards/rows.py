"""Where a worker process gets rows from: memory that it maps, or pieces that it reads ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.plan.order import Order, RowSelection
from polytrain.data.read.pieces import Piece
from polytrain.data.shards.kept_pieces import KeptPieces
from polytrain.data.shards.regions import Excerpt, Region, RowSlice, ScatteredRows
from polytrain.data.types.columns import empty_table
from polytrain.data.types.wide_types import in_one_piece
from polytrain.linux.control_groups import available_memory

_SPARE_MEMORY = 4
"""The workers of a node may take one part in so many of its free memory for tables in one piece."""

_READERS = 4
"""Threads that read ahead, however many canonical shards a rank reads from."""


class Stream(ABC):
    """One pass over rows, mostly forwards."""

    @abstractmethod
    def take(self, picked: RowSelection) -> Sequence[Excerpt]:
        """These rows, one after another."""

    def take_all(self, parts: Sequence[RowSelection]) -> list[Excerpt]:
        """The rows of several selections, one after another."""
        return [rows for picked in parts for rows in self.take(picked)]


class Rows(ABC):
    """The rows of a data set, as far as this rank may need them."""

    schema: pa.Schema

    @abstractmethod
    def read(self, rows: range) -> pa.Table:
        """Consecutive rows as one table."""

    @abstractmethod
    def count(self, rows: range) -> int:
        """How many of these rows are really there."""

    @abstractmethod
    def streams(self) -> AbstractContextManager[Callable[[Order, int], Stream]]:
        """What opens passes over the rows of an order, from a place of it on."""


class MappedRows(Rows):
    """Rows that lie in one table."""

    def __init__(
        self,
        table: pa.Table,
        held: range,
        *,
        workers: int = 1,
        available: Callable[[], int] = available_memory,
    ) -> None:
        """
        Args:
            table: in this process, or mapped.
            held: which rows of the data set these are.
            workers: of this node, each of which has such rows.
            available: returns the free memory that they share, in bytes.
        """
        self.schema = table.schema
        self._table = table
        self._held = held
        self._workers = workers
        self._available = available

    def read(self, rows: range) -> pa.Table:
        return self._table.slice(rows.start - self._held.start, len(rows))

    def count(self, rows: range) -> int:
        return int(self.read(rows).num_rows)

    @contextmanager
    def streams(self) -> Iterator[Callable[[Order, int], Stream]]:
        # One for all shards: rows of several of them are gathered at once.
        stream = _TableStream(self, self._held.start)
        yield lambda order, first: stream

    @cached_property
    def region(self) -> Region:
        """All rows, where they lie."""
        return Region(self._table)

    @cached_property
    def scattered(self) -> Region:
        """The same, to take rows from anywhere: Arrow looks for each in all chunks of a column, so
        that these become one, if there is memory for a copy."""
        chunked = [column for column in self._table.columns if column.num_chunks > 1]
        size = sum(column.nbytes for column in chunked)
        if not chunked or size * self._workers * _SPARE_MEMORY > self._available():
            return self.region
        return Region(in_one_piece(self._table))


class PieceRows(Rows):
    """Rows that are read from pieces when they are needed, and one region ahead."""

    def __init__(self, pieces: Sequence[Piece], schema: pa.Schema) -> None:
        self.schema = schema
        self._pieces = pieces
        self._ends = list(accumulate(piece.rows for piece in pieces))

    def read(self, rows: range) -> pa.Table:
        tables = [*self.parts(rows)]
        return pa.concat_tables(tables) if tables else empty_table(self.schema)

    def parts(self, rows: range) -> Iterator[pa.Table]:
        """The same, piece by piece."""
        for piece, part in self._parts(rows):
            yield self._read_piece(piece, part)

    def scan(self, rows: range, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Consecutive rows in one pass, of which little is in memory at once; see `Piece.scan`."""
        for piece, part in self._parts(rows):
            yield from self._pieces[piece].scan(part.start, part.stop, columns)

    def take(self, rows: Sequence[int]) -> Iterator[pa.Table]:
        """Rows from anywhere, in this order: those of one piece together."""
        of_piece = partial(bisect_right, self._ends)
        for piece, some in groupby(rows, of_piece):
            origin = self._ends[piece] - self._pieces[piece].rows
            yield self._pieces[piece].take([row - origin for row in some], self.schema.names)

    def count(self, rows: range) -> int:
        # A piece that holds other rows than it should says so when it is read.
        return sum(len(part) for _, part in self._parts(rows))

    @contextmanager
    def streams(self) -> Iterator[Callable[[Order, int], Stream]]:
        if all(piece.seekable(scattered=True) for piece in self._pieces):
            lends = all(piece.reads_into_own_memory for piece in self._pieces)
            yield lambda order, first: _ItemStream(self, lends=lends)
            return
        kept = KeptPieces(self._pieces, self.schema.names)
        with ThreadPoolExecutor(_READERS, thread_name_prefix="polytrain-read") as readers:

            def opened(order: Order, first: int) -> Stream:
                return _ReadAhead(self, self._regions(order, first), readers, kept)

            try:
                yield opened
            finally:
                readers.shutdown(wait=True, cancel_futures=True)
                kept.close()

    def _regions(self, order: Order, first: int) -> Iterator[RowSelection]:
        """What is read at once: windows as they are, rows in their order piece by piece."""
        for region in order.regions(first):
            if region.arrange is not None:
                yield region
                continue
            for piece, part in self._parts(region.region):
                origin = self._ends[piece] - self._pieces[piece].rows
                rows = range(origin + part.start, origin + part.stop)
                yield RowSelection(region=rows, place=range(len(rows)))

    def read_window(self, rows: range, kept: KeptPieces) -> pa.Table:
        """Consecutive rows, whose pieces may be kept if they have many windows."""
        tables = [
            kept.read(piece, part)
            if 2 * len(rows) <= self._pieces[piece].rows
            else self._read_piece(piece, part)
            for piece, part in self._parts(rows)
        ]
        return pa.concat_tables(tables) if tables else empty_table(self.schema)

    def reads_into_own_memory(self, rows: range) -> bool:
        """See `Piece.reads_into_own_memory`."""
        return all(self._pieces[piece].reads_into_own_memory for piece, _ in self._parts(rows))

    def _parts(self, rows: range) -> Iterator[tuple[int, range]]:
        """The pieces that hold these rows, and which rows of theirs."""
        if not rows:
            return
        for piece in range(bisect_right(self._ends, rows.start), len(self._pieces)):
            origin = self._ends[piece] - self._pieces[piece].rows
            if origin >= rows.stop:
                return
            part = range(
                max(rows.start, origin) - origin, min(rows.stop, self._ends[piece]) - origin
            )
            if part:
                yield piece, part

    def _read_piece(self, piece: int, part: range) -> pa.Table:
        return self._pieces[piece].read(part.start, part.stop, self.schema.names)


class _TableStream(Stream):
    def __init__(self, rows: MappedRows, first_row: int) -> None:
        self._rows = rows
        self._first = first_row

    def take(self, picked: RowSelection) -> list[Excerpt]:
        rows = picked.rows
        if isinstance(rows, range):
            start, stop = rows.start - self._first, rows.stop - self._first
            return [RowSlice(self._rows.region, start, stop)]
        return [self._gathered(rows)]

    def take_all(self, parts: Sequence[RowSelection]) -> list[Excerpt]:
        rows = [picked.rows for picked in parts]
        arrays = [some for some in rows if not isinstance(some, range)]
        if len(arrays) < max(2, len(rows)):
            return super().take_all(parts)
        return [self._gathered(np.concatenate(arrays))]

    def _gathered(self, rows: np.ndarray[Any, Any]) -> Excerpt:
        return ScatteredRows(self._rows.scattered, rows - self._first)


class _ItemStream(Stream):
    """Rows that can be read one by one, such as items of a map-style data set."""

    def __init__(self, rows: PieceRows, *, lends: bool) -> None:
        self._rows = rows
        self._lends = lends

    def take(self, picked: RowSelection) -> list[RowSlice]:
        rows = picked.rows
        if isinstance(rows, range):
            return [RowSlice.of(self._rows.read(rows), lends=self._lends)]
        tables = self._rows.take(rows.tolist())
        return [RowSlice.of(table, lends=self._lends) for table in tables]


class _ReadAhead(Stream):
    """Holds the region that rows are taken from, arranged, while the next one is being read."""

    def __init__(
        self,
        rows: PieceRows,
        regions: Iterator[RowSelection],
        reader: ThreadPoolExecutor,
        kept: KeptPieces,
    ) -> None:
        self._rows = rows
        self._kept = kept
        self._regions = regions
        self._reader = reader
        self._ahead: tuple[RowSelection, Future[Region]] | None = None
        self._held = range(0)
        self._taken = 0
        self._region = Region(empty_table(rows.schema))
        self._ask_next()

    def take(self, picked: RowSelection) -> list[RowSlice]:
        if picked.arrange is not None:
            self._advance_to(picked, picked.region, picked.place.start)
            return [self._slice(picked.place.start, picked.place.stop)]
        excerpts = []
        rows = picked.region[picked.place.start : picked.place.stop]
        while rows:
            self._advance_to(picked, rows[:1])
            start = rows.start - self._held.start
            stop = min(rows.stop, self._held.stop) - self._held.start
            excerpts.append(self._slice(start, stop))
            rows = rows[stop - start :]
        return excerpts

    def _slice(self, start: int, stop: int) -> RowSlice:
        self._taken = stop
        return RowSlice(self._region, start, stop)

    def _advance_to(self, picked: RowSelection, rows: range, place: int | None = None) -> None:
        """Hold a region that contains these rows, from this place on; by default where they lie."""
        while not _contains(self._held, rows):
            if self._ahead is None:
                self._hold(picked)
                return
            ahead, region = self._ahead
            # The old region's memory is free before the next one is asked for.
            self._held, self._taken, self._region = ahead.region, 0, region.result()
            self._ask_next()
        if (rows.start - self._held.start if place is None else place) < self._taken:
            # A batch has these rows, and may have been written to.
            self._hold(picked)

    def _hold(self, picked: RowSelection) -> None:
        """Padding begins at the start again."""
        self._held, self._taken, self._region = picked.region, 0, self._load(picked.whole)

    def _ask_next(self) -> None:
        region = next(self._regions, None)
        self._ahead = None if region is None else (region, self._reader.submit(self._load, region))

    def _load(self, region: RowSelection) -> Region:
        rows = region.region
        if region.arrange is None:
            table = in_one_piece(self._rows.read(rows))
            return Region(table, lends=self._rows.reads_into_own_memory(rows))
        table = in_one_piece(self._rows.read_window(rows, self._kept))
        numbers = region.arrange(region.place) - rows.start
        return Region(table.take(pa.array(numbers)).combine_chunks(), lends=True)


def _contains(outer: range, inner: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop and bool(inner)
