"""Small windows of large row groups: how many rows are decoded for those that are used."""

from __future__ import annotations

import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.descriptors import opened

from polytrain.data.plan.row_plan import Plan
from polytrain.data.read.describe import describe
from polytrain.data.read.pieces import Piece
from polytrain.data.shards.kept_pieces import KeptPieces
from polytrain.data.shards.rows import PieceRows

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

    def scan(
        self, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        yield self.read(start, stop, columns)


@pytest.mark.parametrize("window", [10, 100, 1000])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("shards", [1, 4])
def test_row_groups_are_decoded_about_once(window: int, groups: int, shards: int) -> None:
    pieces = [RowGroup(first=ROWS * number) for number in range(groups)]
    rows = PieceRows(pieces, pa.schema({"id": pa.int64()}))
    plan = Plan(rows=ROWS * groups, shards=shards, shuffle="window", window=window)
    order = plan.epoch(0)
    seen: list[int] = []
    with rows.reading(order.of_shard) as take:
        for shard in range(shards):
            for start in range(0, len(plan.shard_rows(shard)), 50):
                stop = min(start + 50, len(plan.shard_rows(shard)))
                for part in take([(shard, range(start, stop))], None):
                    seen += part.table["id"].to_pylist()
    assert sorted(seen) == list(range(ROWS * groups))
    assert len(seen) <= sum(sum(piece.decoded) for piece in pieces) <= 2 * len(seen)


def test_row_groups_that_do_not_fit_in_memory_are_kept_on_the_disk(temporary: Path) -> None:
    pieces = [RowGroup(), RowGroup(first=ROWS)]
    kept = KeptPieces(pieces, ["id"], most_bytes=ROWS * 8)
    for number in (0, 1, 0, 1, 0, 1):
        assert kept.read(number, range(20, 23))["id"].to_pylist() == [
            number * ROWS + row for row in (20, 21, 22)
        ]
    assert pieces[0].decoded == [23, ROWS]
    assert pieces[1].decoded == [23, ROWS]
    assert len(open_files(temporary)) == 1, "the first is in memory"
    assert list(temporary.iterdir()) == [], "nothing is left behind by a process that is killed"
    kept.close()
    assert open_files(temporary) == []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of temporary files, on a disk that is nearly empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=disk.total))
    return tmp_path


def open_files(directory: Path) -> list[str]:
    """Those in a directory that this process has open, with or without a name."""
    return [file for file in opened().values() if file.startswith(str(directory))]


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=disk.total // 4))


@pytest.fixture
def no_large_file() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROWS, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("disk", ["no_room", "no_large_file"])
def test_row_groups_for_which_there_is_no_room_are_read_in_parts(
    disk: str, temporary: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    request.getfixturevalue(disk)
    pieces = [RowGroup(), RowGroup(first=ROWS)]
    kept = KeptPieces(pieces, ["id"], most_bytes=0)
    for number in (0, 1, 0, 1, 0, 1):
        assert kept.read(number, range(20, 23))["id"].to_pylist() == [
            number * ROWS + row for row in (20, 21, 22)
        ]
    assert [piece.decoded[-2:] for piece in pieces] == [[23, 23], [23, 23]]
    assert open_files(temporary) == []
    [message] = caplog.messages
    assert "TMPDIR" in message
    assert "window_rows" in message


def test_every_type_comes_back_from_the_disk_as_it_was(tmp_path: Path) -> None:
    """A row group of 150,000 rows is written in three parts, each with its own categories."""
    rows = 150_000
    numbers = np.arange(rows)
    words = pa.array([f"word {row // 1000}" for row in range(rows)])
    table = pa.table(
        {
            "id": numbers,
            "word": words,
            "category": words.dictionary_encode(),
            "missing": pa.array(numbers, mask=numbers % 7 == 0),
            "truth": pa.array(numbers % 2 == 0),
            "list": pa.array([[row, row] if row % 3 else None for row in range(rows)]),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(
                np.arange(rows * 4, dtype=np.float32).reshape(rows, 2, 2)
            ),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows)
    source = describe("train", tmp_path / "a.parquet")
    whole = source.pieces[0].read(0, rows)
    kept = KeptPieces(source.pieces, source.schema.names, most_bytes=0)
    for part in (range(5), range(65_000, 66_000), range(rows - 3, rows), range(rows)):
        found = kept.read(0, part)
        assert found.schema.equals(whole.schema)
        assert found.equals(whole.slice(part.start, len(part)))
    kept.close()


def test_a_part_of_a_row_group_is_all_that_is_in_memory(tmp_path: Path) -> None:
    rows = 1_000_000
    values = np.random.default_rng(0).standard_normal((4, rows))
    table = pa.table({f"x{number}": column for number, column in enumerate(values)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows, use_dictionary=False)
    [piece] = describe("train", tmp_path / "a.parquet").pieces
    before = pa.default_memory_pool()
    watched = pa.proxy_memory_pool(before)
    pa.set_memory_pool(watched)
    try:
        assert piece.read(500_000, 500_010).num_rows == 10
        assert sum(part.num_rows for part in piece.scan(0, rows)) == rows
        most = watched.max_memory()
    finally:
        pa.set_memory_pool(before)
    assert most < table.nbytes / 2
