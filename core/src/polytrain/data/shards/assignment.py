"""How the data sets of a run are shared out: decided in the driver, before anybody reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.common.config import DataConfig
from polytrain.data.plan.row_plan import Plan
from polytrain.data.shards.rows import PieceRows
from polytrain.data.shards.spec import Held, ShardSpec
from polytrain.data.sources.describe import Source
from polytrain.data.sources.indexed import IndexedPiece
from polytrain.data.sources.pieces import Piece
from polytrain.data.streams.stream import StreamSpec

# Of rows that lie in memory anyway, a window may hold many.
_WINDOW_IN_MEMORY = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDataset:
    """A data set of a run: what the user gave, what is wanted of it, and where groups begin."""

    source: Source
    config: DataConfig = field(default_factory=DataConfig)
    group_starts: np.ndarray[Any, Any] | None = None

    @property
    def name(self) -> str:
        """The data set's name."""
        return self.source.info.name

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
            shards: canonical shards, if they have been cut before.
        """
        held = self._held(as_tables=as_tables, only_tables=only_tables)
        starts = self.group_starts
        return ShardSpec(
            name=self.name,
            num_rows=self.num_rows,
            schema=self.source.schema,
            plan=Plan(
                rows=self.num_rows if starts is None else len(starts) - 1,
                shards=shards or self._shards(held, 1 if whole else world_size),
                shuffle=self.config.shuffle,
                window=self._window(),
                seed=self.config.seed,
            ),
            remainder=self.config.remainder,
            held=held,
            pieces=self.source.pieces if held is Held.NOTHING else (),
            whole=whole,
            group_starts=starts,
        )

    def stream_spec(self) -> StreamSpec:
        """How it is shared out when its rows are not known before they come."""
        return StreamSpec(
            name=self.name, schema=self.source.schema, remainder=self.config.remainder
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

    def _shards(self, held: Held, world_size: int) -> int:
        """Canonical shards. One, where it costs nothing to take rows from anywhere: then every
        worker's batch comes from all over the data."""
        anywhere = held is Held.ALL or (held is Held.NOTHING and self._seekable(scattered=True))
        return 1 if anywhere else world_size

    def _seekable(self, *, scattered: bool) -> bool:
        return all(piece.seekable(scattered=scattered) for piece in self.source.pieces)

    def _window(self) -> int:
        """Rows in a window: as many as are read from a file at once anyway."""
        if self.config.window_rows is not None:
            return self.config.window_rows
        if self.source.in_memory:
            return _WINDOW_IN_MEMORY
        return max(piece.rows for piece in self.source.pieces)


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
