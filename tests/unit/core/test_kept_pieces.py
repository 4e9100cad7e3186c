"""Small windows of large row groups: how many rows are decoded for those that are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest

from polytrain.data.plan.row_plan import Plan
from polytrain.data.shards.kept_pieces import KeptPieces
from polytrain.data.shards.rows import PieceRows
from polytrain.data.sources.pieces import Piece

ROWS = 10_000


@dataclass(kw_only=True)
class RowGroup(Piece):
    """Like one of Parquet: read from its start."""

    first: int = 0
    rows: int = ROWS
    decoded: list[int] = field(default_factory=list)

    @property
    def where(self) -> str:
        return "memory"

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        self.decoded.append(stop)
        return pa.table({"id": np.arange(self.first + start, self.first + stop)})


@pytest.mark.parametrize("window", [10, 100, 1000])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("shards", [1, 4])
def test_row_groups_are_decoded_about_once(window: int, groups: int, shards: int) -> None:
    pieces = [RowGroup(first=ROWS * number) for number in range(groups)]
    rows = PieceRows(pieces, pa.schema({"id": pa.int64()}))
    plan = Plan(rows=ROWS * groups, shards=shards, shuffle="window", window=window)
    order = plan.epoch(0)
    seen: list[int] = []
    with rows.streams() as opened:
        for shard in range(shards):
            stream = opened(order.of_shard(shard), 0)
            for start in range(0, len(plan.shard_rows(shard)), 50):
                stop = min(start + 50, len(plan.shard_rows(shard)))
                picked = order.of_shard(shard).pick(range(start, stop))
                for part in stream.take_all([*picked]):
                    seen += part.region.table["id"].to_pylist()[part.start : part.stop]
    assert sorted(seen) == list(range(ROWS * groups))
    assert len(seen) <= sum(sum(piece.decoded) for piece in pieces) <= 2 * len(seen)


def test_row_groups_that_do_not_fit_are_read_in_parts() -> None:
    pieces = [RowGroup(), RowGroup(first=ROWS)]
    kept = KeptPieces(pieces, ["id"], most_bytes=ROWS * 8)
    for number in (0, 1, 0, 1, 0, 1):
        assert kept.read(number, range(20, 23))["id"].to_pylist() == [
            number * ROWS + row for row in (20, 21, 22)
        ]
    assert pieces[0].decoded == [23, ROWS]
    assert pieces[1].decoded == [23, 23, 23]
