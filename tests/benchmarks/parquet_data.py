"""The Parquet files that the benchmarks of data read: random numbers, which nothing shortens."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import Options, positive

_SCHEMA = pa.schema(
    [("id", pa.int64()), *((f"x{number:02}", pa.float64()) for number in range(20))]
)
_ROW_BYTES = 8 * len(_SCHEMA)
_READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A directory of Parquet files. The column `id` numbers the rows from 0."""

    directory: Path
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
        return (
            f"{self.rows:,} rows of {len(_SCHEMA)} columns, {self.rows * _ROW_BYTES / 1e9:.2g} GB: "
            f"{self.number} files of {self.row_groups} row groups of {self.group_rows:,} rows"
        )

    def _is_there(self, path: Path) -> bool:
        return path.exists() and pq.read_metadata(path).num_rows == self.rows // self.number

    def _write(self, number: int, path: Path) -> None:
        random = np.random.default_rng(number)
        unfinished = path.with_suffix(".unfinished")
        # A dictionary of numbers that are all different would only be larger than the numbers.
        with pq.ParquetWriter(unfinished, _SCHEMA, use_dictionary=False) as writer:
            for group in range(number * self.row_groups, (number + 1) * self.row_groups):
                first = group * self.group_rows
                numbers = random.standard_normal((len(_SCHEMA) - 1, self.group_rows))
                arrays = [np.arange(first, first + self.group_rows), *numbers]
                writer.write_table(pa.table(arrays, schema=_SCHEMA), row_group_size=self.group_rows)
        unfinished.rename(path)


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
def made_files(options: Options) -> Iterator[Files]:
    """The files of a benchmark, in the page cache."""
    with contextlib.ExitStack() as stack:
        directory = options.own.data or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = Files(directory=directory.resolve())
        if options.quick:
            files = Files(directory=files.directory, row_groups=2, group_rows=1 << 12)
        files.make()
        files.warm_up()
        yield files
