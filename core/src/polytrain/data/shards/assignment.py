"""How the data sets of a run are shared out: decided in the driver, before anybody reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.config.configs import DataConfig
from polytrain.data.plan.row_plan import Plan
from polytrain.data.read.describe import Source
from polytrain.data.read.file_pieces import UNKNOWN
from polytrain.data.read.indexed import IndexedPiece
from polytrain.data.read.pieces import Piece
from polytrain.data.read.transforms import TransformedPiece
from polytrain.data.shards.rows import PieceRows
from polytrain.data.shards.spec import Held, ShardSpec
from polytrain.data.streams.stream import StreamSpec

# Of rows that lie in memory anyway, a window may hold many.
_WINDOW_IN_MEMORY = 1 << 16

# Of shuffled rows that agents hold, so that 1, 2, 4 and 8 workers have the same order.
_USUAL_SHARDS = 8

# Files of a few rows each would make windows of as few, whose rows always stay together.
_LEAST_WINDOW = 1 << 13
_LEAST_WINDOW_BYTES = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDataset:
    """A data set of a run: what the user gave, what is wanted of it, and where groups begin."""

    source: Source
    config: DataConfig = field(default_factory=DataConfig)
    group_starts: np.ndarray[Any, Any] | None = None
    marks: Mapping[str, str] = field(default_factory=dict)
    """What it is known by: see `fingerprint.marks`."""

    @property
    def name(self) -> str:
        """The data set's name."""
        return self.source.info.name

    @property
    def is_split(self) -> bool:
        """Whether its rows are split over the workers, as far as the user decides."""
        split = self.config.datasets_to_split
        return split == "all" or self.name in split

    def spec(
        self,
        *,
        world_size: int,
        whole: bool,
        as_tables: bool,
        only_tables: bool,
        shards: int | None = None,
    ) -> ShardSpec:
        """How it is shared out.

        Args:
            world_size: number of ranks.
            whole: every rank gets all rows.
            as_tables: training takes a shard as one table.
            only_tables: and does nothing else with it.
            shards: canonical shards, if they have been cut before. What the user chooses comes
                first.
        """
        held = self._held(as_tables=as_tables, only_tables=only_tables)
        starts = self.group_starts
        items = self.num_rows if starts is None else len(starts) - 1
        return ShardSpec(
            name=self.name,
            num_rows=self.num_rows,
            schema=self.source.schema,
            plan=Plan(
                rows=items,
                shards=1
                if whole
                else self._chosen_shards(items) or shards or self._shards(held, world_size, items),
                shuffle=self.config.shuffle,
                window=self._window(items),
                seed=self.config.seed,
            ),
            remainder=self.config.remainder,
            held=held,
            pieces=self.source.pieces if held is Held.NOTHING else (),
            data=self.marks,
            transform=self.source.transform,
            whole=whole,
            group_starts=starts,
        )

    def stream_spec(self) -> StreamSpec:
        """How it is shared out when its rows are not known before they come."""
        return StreamSpec(
            name=self.name,
            schema=self.source.schema,
            remainder=self.config.remainder,
            data=self.marks,
        )

    @property
    def user_code(self) -> list[Any]:
        """What travels with it that a user may have written in a script."""
        items = [type(p.dataset) for p in self.source.pieces if isinstance(p, IndexedPiece)]
        return [*items, self.config.transform]

    @property
    def num_rows(self) -> int:
        """Rows of the whole data set."""
        rows = self.source.info.num_rows
        assert rows is not None
        return rows

    def _held(self, *, as_tables: bool, only_tables: bool) -> Held:
        if self.source.in_memory:
            return Held.ALL
        if only_tables:
            return Held.SHARE
        if not as_tables and self._seekable(scattered=self.config.shuffle is True):
            return Held.NOTHING
        return Held.SHARDS

    def _chosen_shards(self, items: int) -> int | None:
        """Canonical shards that the user asks for. None of them may be empty."""
        return None if self.config.shards is None else min(self.config.shards, items)

    def _shards(self, held: Held, world_size: int, items: int) -> int:
        """Canonical shards. One, where it costs nothing to take rows from anywhere: then every
        worker's batch comes from all over the data. As many whatever the number of workers, where
        agents hold the rows: to gather them from several shards costs little, and what divides the
        number of shards reads nothing twice. None may be empty."""
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

    def _window(self, items: int) -> int:
        """Items in a window: of groups, as many as have so many rows on average."""
        return max(1, self._window_rows() * items // self.num_rows)

    def _window_rows(self) -> int:
        """Rows in a window: as many as are read from a file at once anyway."""
        if self.config.window_rows is not None:
            return self.config.window_rows
        if self.source.in_memory:
            return _WINDOW_IN_MEMORY
        largest = max(piece.rows for piece in self.source.pieces)
        return max(largest, min(_LEAST_WINDOW, _LEAST_WINDOW_BYTES // self._row_bytes()))

    def _row_bytes(self) -> int:
        """About how much memory a row takes: by its types, or by its file if that tells more."""
        files = dict(map(_file_of, self.source.pieces))
        return max(
            1, sum(map(_width, self.source.schema.types)), sum(files.values()) // self.num_rows
        )


def _file_of(piece: Piece) -> tuple[str, int]:
    """The file that a piece is in, and its bytes; 0 where that isn't known."""
    while isinstance(piece, TransformedPiece):
        piece = piece.piece
    version = getattr(piece, "version", UNKNOWN)
    return getattr(piece, "path", ""), version.size or 0


def _width(kind: pa.DataType) -> int:
    """Bytes of a value, as far as its type tells."""
    if isinstance(kind, pa.FixedShapeTensorType):
        kind = kind.storage_type
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    return kind.bit_width // 8 if pa.types.is_primitive(kind) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRows:
    """Rows of a data set that an agent is to hold, and the pieces in which it finds them."""

    pieces: tuple[Piece, ...]
    schema: pa.Schema
    rows: range

    def read(self) -> pa.Table:
        """The rows as one table."""
        return PieceRows(self.pieces, self.schema).read(self.rows)

    def parts(self) -> Iterator[pa.Table]:
        """The same, piece by piece."""
        return PieceRows(self.pieces, self.schema).parts(self.rows)


def holding(dataset: RunDataset, spec: ShardSpec, world_size: int, rank: int) -> CachedRows:
    """What the agent of a rank is to hold of a data set."""
    return CachedRows(
        pieces=dataset.source.pieces,
        schema=dataset.source.schema,
        rows=spec.held_rows(world_size, rank),
    )
