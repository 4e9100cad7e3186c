"""The Parquet files that the benchmarks of data read: random numbers, which nothing shortens."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from harness import Options, positive

_SHAPE = (8, 8)
_SCHEMAS = {
    "numbers": pa.schema(
        [("id", pa.int64()), *((f"x{number:02}", pa.float64()) for number in range(20))]
    ),
    "strings": pa.schema([("id", pa.int64()), ("short", pa.string()), ("long", pa.string())]),
    "tensors": pa.schema([("id", pa.int64()), ("x", pa.fixed_shape_tensor(pa.float32(), _SHAPE))]),
}
_ROW_BYTES = {"numbers": 8 * 21, "strings": 8 + 8 + 40, "tensors": 8 + 4 * 64}
_READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A directory of Parquet files. The column `id` numbers the rows from 0."""

    directory: Path
    kind: str = "numbers"
    """Which columns there are: see `_SCHEMAS`."""

    row_groups: int = 12
    """In each file."""

    group_rows: int = 1 << 17
    number: int = 8

    @property
    def rows(self) -> int:
        """Of all files."""
        return self.number * self.row_groups * self.group_rows

    @property
    def paths(self) -> list[Path]:
        """The files, in the order of their rows."""
        return [self.directory / f"part-{number}.parquet" for number in range(self.number)]

    def make(self) -> None:
        """Write the files that aren't there yet."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for number, path in enumerate(self.paths):
            if not self._is_there(path):
                self._write(number, path)

    def warm_up(self) -> None:
        """Have the files in the page cache."""
        for path in self.paths:
            with path.open("rb", buffering=0) as file:
                while file.read(_READ_BYTES):
                    pass

    def __str__(self) -> str:
        columns, size = len(_SCHEMAS[self.kind]), self.rows * _ROW_BYTES[self.kind] / 1e9
        return (
            f"{self.rows:,} rows of {columns} columns, {size:.2g} GB: {self.number} files of "
            f"{self.row_groups} row groups of {self.group_rows:,} rows"
        )

    def _is_there(self, path: Path) -> bool:
        return path.exists() and pq.read_metadata(path).num_rows == self.rows // self.number

    def _write(self, number: int, path: Path) -> None:
        random = np.random.default_rng(number)
        unfinished = path.with_suffix(".unfinished")
        # A dictionary of numbers that are all different would only be larger than the numbers.
        with pq.ParquetWriter(unfinished, _SCHEMAS[self.kind], use_dictionary=False) as writer:
            for group in range(number * self.row_groups, (number + 1) * self.row_groups):
                first = group * self.group_rows
                ids = pa.array(np.arange(first, first + self.group_rows))
                arrays = [ids, *self._columns(random)]
                table = pa.table(arrays, schema=_SCHEMAS[self.kind])
                writer.write_table(table, row_group_size=self.group_rows)
        unfinished.rename(path)

    def _columns(self, random: np.random.Generator) -> list[pa.Array]:
        """Those of a row group, without `id`."""
        if self.kind == "tensors":
            values = random.standard_normal((self.group_rows, *_SHAPE), np.float32)
            return [pa.FixedShapeTensorArray.from_numpy_ndarray(values)]
        if self.kind == "strings":
            short, long = random.integers(10**7, 10**8, (2, self.group_rows))
            texts = pa.array(long).cast(pa.string())
            return [pa.array(short).cast(pa.string()), pc.binary_repeat(texts, 5)]
        return [pa.array(row) for row in random.standard_normal((20, self.group_rows))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of benchmarks that read these files."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="where the files are made, and found again the next time; "
        "by default they are made anew and removed",
    )
    parser.add_argument("--batch-size", type=positive, default=1024, metavar="ROWS")


@contextlib.contextmanager
def made_files(options: Options, kind: str = "numbers", row_groups: int = 12) -> Iterator[Files]:
    """The files of a benchmark, in the page cache."""
    with contextlib.ExitStack() as stack:
        directory = options.own.data or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Readers of the directory leave out what begins with an underscore.
        place = directory.resolve() / ("" if kind == "numbers" else f"_{kind}")
        files = Files(directory=place, kind=kind, row_groups=row_groups)
        if options.quick:
            files = replace(files, row_groups=2, group_rows=1 << 12)
        files.make()
        files.warm_up()
        yield files
