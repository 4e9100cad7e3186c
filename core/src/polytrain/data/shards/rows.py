"""The rows of a worker process: in memory that it maps, or in pieces that it reads ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import accumulate, groupby
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from polytrain.data.plan.mixture import SourceOrder
from polytrain.data.plan.order import GroupOrder, Selection, ShardOrder
from polytrain.data.read.pieces import Piece
from polytrain.data.shards.decoded import Array, DecodedTable, TableRows, to_batch
from polytrain.data.shards.kept_pieces import KeptPieces
from polytrain.data.types.columns import empty_table
from polytrain.data.types.schemas import in_one_piece
from polytrain.linux.machine_resources import available_memory

_SPARE_MEMORY = 4
"""The workers of a node may use 1 / 4 of its free memory for tables in one piece."""

_READERS = 4
"""Threads that read ahead, however many canonical shards a rank reads from."""

AnyOrder: TypeAlias = ShardOrder | GroupOrder | SourceOrder

OrderOfShard: TypeAlias = Callable[[int], AnyOrder]
"""Returns the order of a canonical shard in one epoch, for its number."""

Take: TypeAlias = Callable[[Sequence[tuple[int, range]], Array | None], list[TableRows]]
"""Returns the rows at indices of canonical shards, in that order, or in the order that is given.
Called for increasing indices; those that wrap around begin at a shard's start again."""


class ReadableRows(ABC):
    """The rows of a data set that a rank may need."""

    schema: pa.Schema

    @abstractmethod
    def read(self, rows: range) -> pa.Table:
        """Return consecutive rows as one table."""

    @abstractmethod
    def count(self, rows: range) -> int:
        """Return how many of these rows exist."""

    @abstractmethod
    def reading(self, orders: OrderOfShard) -> AbstractContextManager[Take]:
        """Open one pass over the rows, in these orders."""


class MappedRows(ReadableRows):
    """Rows of one table in memory."""

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
            held: the table's rows, as rows of the data set.
            workers: number of workers of this node, each of which has such a table.
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
    def reading(self, orders: OrderOfShard) -> Iterator[Take]:
        def take(share: Sequence[tuple[int, range]], order: Array | None) -> list[TableRows]:
            found = [part.rows for shard, at in share for part in orders(shard).select(at)]
            if order is not None:
                return [self._taken(np.concatenate([*map(np.asarray, found)])[order])]
            arrays = [rows for rows in found if not isinstance(rows, range)]
            if len(arrays) > 1 and len(arrays) == len(found):
                # One gather for all shards.
                return [self._taken(np.concatenate(arrays))]
            return [self._taken(rows) for rows in found]

        yield take

    def _taken(self, rows: range | Array) -> TableRows:
        first = self._held.start
        if isinstance(rows, range):
            return TableRows(self.decoded, range(rows.start - first, rows.stop - first))
        return TableRows(self.gatherable, rows - first)

    @cached_property
    def decoded(self) -> DecodedTable:
        """All rows, in the memory in which they are."""
        return DecodedTable(self._table)

    @cached_property
    def gatherable(self) -> DecodedTable:
        """All rows, for taking them from anywhere.

        Arrow searches all chunks of a column for each row, so these are joined if there is memory
        for a copy.
        """
        chunked = [column for column in self._table.columns if column.num_chunks > 1]
        size = sum(column.nbytes for column in chunked)
        if not chunked or size * self._workers * _SPARE_MEMORY > self._available():
            return self.decoded
        return DecodedTable(in_one_piece(self._table))


class PieceRows(ReadableRows):
    """Rows that are read from pieces when they are needed, and one region ahead."""

    def __init__(self, pieces: Sequence[Piece], schema: pa.Schema) -> None:
        self.schema = schema
        self._pieces = pieces
        self._ends = list(accumulate(piece.rows for piece in pieces))

    def read(self, rows: range) -> pa.Table:
        return self._joined(self.parts(rows))

    def parts(self, rows: range) -> Iterator[pa.Table]:
        """Consecutive rows, piece by piece."""
        for piece, part in self._parts(rows):
            yield self._read_piece(piece, part)

    def scan(self, rows: range, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Consecutive rows as small tables, one at a time in memory; see `Piece.scan`."""
        for piece, part in self._parts(rows):
            yield from self._pieces[piece].scan(part.start, part.stop, columns)

    def take(self, rows: Sequence[int]) -> Iterator[pa.Table]:
        """Rows from anywhere, in this order; consecutive ones of one piece as one table."""
        for piece, some in groupby(rows, partial(bisect_right, self._ends)):
            origin = self._ends[piece] - self._pieces[piece].rows
            yield self._pieces[piece].take([row - origin for row in some], self.schema.names)

    def count(self, rows: range) -> int:
        # A piece that holds other rows than it should says so when it is read.
        return sum(len(part) for _, part in self._parts(rows))

    @contextmanager
    def reading(self, orders: OrderOfShard) -> Iterator[Take]:
        kept = KeptPieces(self._pieces, self.schema.names)
        shards: dict[int, Callable[[range], Iterable[TableRows]]] = {}

        def taking(order: AnyOrder, indices: range) -> Callable[[range], Iterable[TableRows]]:
            """Return the function that takes the rows of a shard, from these indices on."""
            region = next(order.select(indices)).region
            if all(
                self._pieces[piece].seekable(scattered=True) for piece, _ in self._parts(region)
            ):
                return partial(self._items, order)
            regions = self._regions(order, range(indices.start, len(order)))
            ahead = _ReadAhead(regions, partial(self._load, kept), readers)
            return lambda indices: map(ahead.take, self._regions(order, indices))

        def take(share: Sequence[tuple[int, range]], order: Array | None) -> list[TableRows]:
            found: list[TableRows] = []
            for shard, indices in share:
                if shard not in shards:
                    shards[shard] = taking(orders(shard), indices)
                found += shards[shard](indices)
            return _ordered(found, order)

        readers = ThreadPoolExecutor(_READERS, thread_name_prefix="polytrain-read")
        is_left = True
        try:
            yield take
            is_left = False
        finally:
            # An iterator that was left may be collected while Python starts a thread, and holds the
            # lock that is needed to wait for the end of another one.
            readers.shutdown(wait=not is_left, cancel_futures=True)
            kept.close()

    def _items(self, order: AnyOrder, indices: range) -> Iterator[TableRows]:
        """Take rows that can be read one by one, such as items of a map-style data set."""
        lends = all(piece.reads_into_own_memory for piece in self._pieces)
        for selection in order.select(indices):
            rows = selection.rows
            tables = [self.read(rows)] if isinstance(rows, range) else self.take(rows.tolist())
            yield from (TableRows.of(table, lends=lends) for table in tables)

    def _regions(self, order: AnyOrder, indices: range) -> Iterator[Selection]:
        """Select rows by the regions that are read at once: windows, or pieces if not shuffled."""
        for selection in order.select(indices):
            if selection.rows_at is not None:
                yield selection
                continue
            region, origin = selection.region, selection.region.start + selection.places.start
            for piece, part in self._parts(range(origin, region.start + selection.places.stop)):
                first = self._ends[piece] - self._pieces[piece].rows
                start = max(first, region.start)
                yield Selection(
                    region=range(start, min(self._ends[piece], region.stop)),
                    places=range(first + part.start - start, first + part.stop - start),
                    number=selection.number,
                )

    def _load(self, kept: KeptPieces, selection: Selection) -> DecodedTable:
        """Read a region, in its order."""
        rows = selection.region
        if selection.rows_at is None:
            own = all(self._pieces[piece].reads_into_own_memory for piece, _ in self._parts(rows))
            return DecodedTable(in_one_piece(self.read(rows)), lends=own)
        tables = [
            # The piece may have many windows.
            kept.read(piece, part)
            if 2 * len(rows) <= self._pieces[piece].rows
            else self._read_piece(piece, part)
            for piece, part in self._parts(rows)
        ]
        numbers = selection.rows_at(range(len(rows))) - rows.start
        table = in_one_piece(self._joined(tables)).take(pa.array(numbers))
        return DecodedTable(table.combine_chunks(), lends=True)

    def _joined(self, tables: Iterable[pa.Table]) -> pa.Table:
        tables = list(tables)
        return pa.concat_tables(tables) if tables else empty_table(self.schema)

    def _parts(self, rows: range) -> Iterator[tuple[int, range]]:
        """The numbers of the pieces that have these rows, and the rows counted within each."""
        if not rows:
            return
        for piece in range(bisect_right(self._ends, rows.start), len(self._pieces)):
            origin = self._ends[piece] - self._pieces[piece].rows
            if origin >= rows.stop:
                return
            start, stop = max(rows.start, origin), min(rows.stop, self._ends[piece])
            if start < stop:
                yield piece, range(start - origin, stop - origin)

    def _read_piece(self, piece: int, part: range) -> pa.Table:
        return self._pieces[piece].read(part.start, part.stop, self.schema.names)


def _ordered(found: list[TableRows], order: Array | None) -> list[TableRows]:
    """The rows in this order, if there is one."""
    if order is None:
        return found
    return [TableRows.of(to_batch(found, "arrow").take(pa.array(order)), lends=True)]


class _ReadAhead:
    """The regions of one canonical shard: one is in memory, the next one is being read."""

    def __init__(
        self,
        regions: Iterator[Selection],
        load: Callable[[Selection], DecodedTable],
        readers: ThreadPoolExecutor,
    ) -> None:
        self._regions = regions
        self._load = load
        self._readers = readers
        self._held: tuple[tuple[range, int], DecodedTable] | None = None
        self._taken = 0
        self._ahead: tuple[tuple[range, int], Future[DecodedTable]] | None = None
        self._read_next()

    def take(self, selection: Selection) -> TableRows:
        """Take rows of one region."""
        while self._ahead is not None and not self._holds(selection):
            key, table = self._ahead
            # The former region's memory is free before the next one is read.
            self._held, self._taken = (key, table.result()), 0
            self._read_next()
        if not self._holds(selection) or selection.places.start < self._taken:
            # Padding begins at the start again. Earlier batches may have been written to.
            self._held = _key(selection), self._load(selection)
        assert self._held is not None
        self._taken = selection.places.stop
        return TableRows(self._held[1], selection.places)

    def _holds(self, selection: Selection) -> bool:
        return self._held is not None and self._held[0] == _key(selection)

    def _read_next(self) -> None:
        selection = next(self._regions, None)
        self._ahead = None
        if selection is not None:
            self._ahead = _key(selection), self._readers.submit(self._load, selection)


def _key(selection: Selection) -> tuple[range, int]:
    """A region as it is in one pass over it."""
    return selection.region, selection.number
