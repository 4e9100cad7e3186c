"""Decides in the driver, before anybody reads them, how a run's data sets are divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.config.configs import DataConfig
from polytrain.data.plan.mixture import Mixture
from polytrain.data.plan.position import differences
from polytrain.data.plan.row_plan import Plan
from polytrain.data.read.describe import Source
from polytrain.data.read.file_pieces import UNKNOWN
from polytrain.data.read.indexed import IndexedPiece
from polytrain.data.read.pieces import Piece
from polytrain.data.shards.rows import PieceRows
from polytrain.data.shards.spec import Held, ShardSpec, StreamSpec

_WINDOW_IN_MEMORY = 1 << 16
"""Rows in a window of rows that are in memory anyway."""

_USUAL_SHARDS = 8
"""Canonical shards of shuffled rows that agents hold: 1, 2, 4 and 8 workers have the same order."""

# Small files would make windows of few rows, which always stay together.
_LEAST_WINDOW = 1 << 13
_LEAST_WINDOW_BYTES = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDataset:
    """A data set of a run: what the user passed, its options, and what was found in it."""

    source: Source
    config: DataConfig = field(default_factory=DataConfig)
    group_starts: np.ndarray[Any, Any] | None = None
    """With groups: see `groups.group_starts`."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """See `fingerprint.digests`."""

    @property
    def name(self) -> str:
        """The data set's name."""
        return self.source.info.name

    @property
    def is_split(self) -> bool:
        """Whether the user wants its rows to be divided among the workers."""
        split = self.config.datasets_to_split
        return split == "all" or self.name in split

    @property
    def num_rows(self) -> int:
        """Rows of the whole data set."""
        rows = self.source.info.num_rows
        assert rows is not None
        return rows

    @property
    def _mixture(self) -> Mixture | None:
        return None if self.source.mix is None else self.source.mix.mixture

    def is_same(self, position: Mapping[str, Any]) -> bool:
        """Return whether a position, as in a manifest, is one in this data, as far as is known."""
        return not differences(position.get("digests", {}), self.digests)

    @property
    def user_code(self) -> list[Any]:
        """Its classes and functions that a user may have written in a script."""
        pieces = (piece.unwrapped for piece in self.source.pieces)
        items = [type(piece.dataset) for piece in pieces if isinstance(piece, IndexedPiece)]
        return [*items, self.config.transform]

    def spec(
        self,
        *,
        world_size: int,
        whole: bool,
        as_tables: bool,
        only_tables: bool,
        shards: int | None = None,
        window: int | None = None,
        virtual_workers: int | None = None,
    ) -> ShardSpec:
        """Decide how it is divided.

        Args:
            as_tables: whether training reads a shard as one table.
            only_tables: whether it reads no batches.
            shards: number of canonical shards in the checkpoint. The user's own number comes first.
            window: `Plan.window` in the checkpoint, likewise.
            virtual_workers: number of virtual workers that the ranks stand for, if there are any.
        """
        held = self._held(as_tables=as_tables, only_tables=only_tables)
        starts = self.group_starts
        items = self.num_rows if starts is None else len(starts) - 1
        if whole or self._mixture is not None:
            shards = 1
        elif wanted := self.config.shards or shards:
            # No shard may be empty. Between two epochs the data may have become fewer.
            shards = min(wanted, items)
        if not window or self.config.window_rows is not None:
            # A window of groups has as many rows on average.
            window = max(1, self._window_rows() * items // self.num_rows)
        return ShardSpec(
            name=self.name,
            num_rows=self.num_rows,
            schema=self.source.schema,
            plan=Plan(
                rows=items,
                shards=shards or self._shards(held, virtual_workers or world_size, items),
                shuffle=self.config.shuffle,
                window=window,
                seed=self.config.seed,
                mix=self._mixture,
            ),
            remainder=self.config.remainder,
            held=held,
            pieces=self.source.pieces if held is Held.NOTHING else (),
            digests=self.digests,
            transform=self.source.transform,
            whole=whole,
            group_starts=starts,
            virtual_workers=virtual_workers,
        )

    def stream_spec(self) -> StreamSpec:
        """Describe it to workers if its rows aren't known before they come."""
        return StreamSpec(
            name=self.name,
            schema=self.source.schema,
            remainder=self.config.remainder,
            digests=self.digests,
        )

    def held_rows(self, spec: ShardSpec, world_size: int, rank: int) -> HeldRows:
        """The rows that the agent of a rank holds."""
        rows = spec.held_rows(world_size, rank)
        return HeldRows(pieces=self.source.pieces, schema=self.source.schema, rows=rows)

    def _held(self, *, as_tables: bool, only_tables: bool) -> Held:
        if self.source.in_memory or (self._mixture is not None and not self._can_be_read_apart):
            return Held.ALL
        if only_tables:
            return Held.SHARE
        if not as_tables and self._seekable(scattered=self.config.shuffle is True):
            return Held.NOTHING
        return Held.SHARDS

    @property
    def _can_be_read_apart(self) -> bool:
        """Whether each worker may read its rows of a mix by itself, from anywhere in it."""
        return self._seekable(scattered=self.config.shuffle is True) and not any(
            piece.in_memory for piece in self.source.pieces
        )

    def _shards(self, held: Held, world_size: int, items: int) -> int:
        """Choose the number of canonical shards, so that none is empty.

        One, if rows can be taken from anywhere at no cost: every worker's batch then comes from all
        of the data. A fixed number if agents hold shuffled rows: a batch is gathered from several
        shards at little cost, and nothing is read twice if the number of workers divides it.
        """
        anywhere = (
            items < world_size
            or held is Held.ALL
            or (held is Held.NOTHING and self._seekable(scattered=True))
        )
        if anywhere:
            return 1
        if held is Held.SHARDS and self.config.shuffle and _USUAL_SHARDS % world_size == 0:
            # A power of two, so that workers get equally many rows of each batch.
            return 1 << (min(_USUAL_SHARDS, items).bit_length() - 1)
        return world_size

    def _seekable(self, *, scattered: bool) -> bool:
        return all(piece.seekable(scattered=scattered) for piece in self.source.pieces)

    def _window_rows(self) -> int:
        """Rows in a window: as many as are read from a file at once anyway."""
        if self.config.window_rows is not None:
            return self.config.window_rows
        if self.source.in_memory:
            return _WINDOW_IN_MEMORY
        # Of a mix, items are read one by one.
        at_once = [piece for piece in self.source.pieces if not piece.seekable(scattered=True)]
        largest = max(piece.rows for piece in at_once or self.source.pieces)
        return max(largest, min(_LEAST_WINDOW, _LEAST_WINDOW_BYTES // self._row_bytes()))

    def _row_bytes(self) -> int:
        """Estimate the size of a row by its types, or by its file if that is larger."""
        files = dict(map(_file_of, self.source.pieces))
        return max(
            1,
            sum(map(_width, self.source.schema.types)),
            sum(files.values()) // sum(piece.rows for piece in self.source.pieces),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRows:
    """Rows of a data set that an agent holds, and the pieces from which it reads them."""

    pieces: tuple[Piece, ...]
    schema: pa.Schema
    rows: range

    def read(self) -> pa.Table:
        """Read the rows as one table."""
        return PieceRows(self.pieces, self.schema).read(self.rows)

    def parts(self) -> Iterator[pa.Table]:
        """Read the rows piece by piece."""
        return PieceRows(self.pieces, self.schema).parts(self.rows)


def _file_of(piece: Piece) -> tuple[str, int]:
    """The path of a piece's file, and its size in bytes; 0 if that isn't known."""
    piece = piece.unwrapped
    version = getattr(piece, "version", UNKNOWN)
    return getattr(piece, "path", ""), version.size or 0


def _width(kind: pa.DataType) -> int:
    """Bytes of a value; 0 if its type doesn't say."""
    if isinstance(kind, pa.FixedShapeTensorType):
        kind = kind.storage_type
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    return kind.bit_width // 8 if pa.types.is_primitive(kind) else 0
