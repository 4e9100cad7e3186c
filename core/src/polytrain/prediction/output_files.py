"""The files of predictions, each stored atomically."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from polytrain.prediction.parts import Part
from polytrain.prediction.record import RECORD_FILE, PredictionRecord, record_from_json
from polytrain.storage.beneath import Beneath
from polytrain.storage.calls import at_once, retry
from polytrain.storage.location import Location

_STAGING = "_staging"
"""Directory in which files are written before a final rename, if the output is a directory."""

_LOCK = "_lock"

_SHOWN_WITHIN_S = 60.0
"""Maximum seconds until a network file system shows files that another node wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFiles:
    """An output. It holds only a location, so it can be sent to every process."""

    location: Location

    @property
    def lock(self) -> Location:
        """Return the location of the writing process's lease.

        Raises:
            ForeignFileError: it is a link.
        """
        if self.location.is_local:
            # Refuse a link here: all paths below would lead to its target.
            with Beneath(Path(self.location.address)).directory(_LOCK, make=True):
                pass
        return self.location.below(_LOCK)

    @contextmanager
    def writing(self, name: str) -> Iterator[Callable[[pa.Table], None]]:
        """Yield a function that adds rows to a new file, which is stored at the end of the block.

        A file of this name is replaced. After an error nothing is stored.
        """
        with self._staged() as (files, path):
            writer: Any = None
            with files.overwriting(path) as file:

                def write(table: pa.Table) -> None:
                    nonlocal writer
                    if writer is None:
                        writer = pq.ParquetWriter(file, table.schema)
                    writer.write_table(table)

                try:
                    yield write
                finally:
                    if writer is not None:
                        writer.close()
            self.location.open().put(files.root / path, name, move=True)

    def record(self) -> PredictionRecord | None:
        """Return the record of the files; None if there is none, or one of an unknown format.

        Raises:
            OSError: the storage failed.
        """
        try:
            return record_from_json(self.location.open().read(RECORD_FILE))
        except FileNotFoundError:
            return None

    def write_record(self, record: PredictionRecord) -> None:
        """Store the record of the files."""
        self.location.open().write(RECORD_FILE, record.to_json())

    def names(self) -> frozenset[str]:
        """Return the names of all files, except in the directories for staging and leases."""
        paths = self.location.open().list("")
        return frozenset(path for path in paths if path.partition("/")[0] not in (_STAGING, _LOCK))

    def finished(self, parts: Iterable[Part]) -> frozenset[int]:
        """Return the numbers of the parts with complete files, whose footers count all rows."""
        present = self.names()
        candidates = [part for part in parts if part.file in present]
        rows = at_once(self._rows_in, [part.file for part in candidates])
        return frozenset(
            part.number
            for part, found in zip(candidates, rows, strict=True)
            if found == len(part.rows)
        )

    def expect(self, files: Collection[str]) -> None:
        """Check that the driver sees all files, which workers may have stored on other nodes.

        Raises:
            OSError: it doesn't.
        """

        def check() -> None:
            lacking = sorted(set(files) - self.names())
            if lacking:
                raise OSError(
                    f"files that the workers stored are missing in {self.location.address} "
                    f"({len(lacking)}, such as {lacking[0]}). Give an output that all nodes reach: "
                    "an address, or a directory that they mount"
                )

        retry(check, retry_s=_SHOWN_WITHIN_S, what=self.location.address)

    def clear_staging(self) -> None:
        """Delete the unfinished files of killed processes."""
        if self.location.is_local:
            self.location.open().delete_below(_STAGING)

    @contextmanager
    def _staged(self) -> Iterator[tuple[Beneath, str]]:
        """Yield the place to write a new file, and delete it at the end if it is still there."""
        path = f"{_STAGING}/{secrets.token_hex(8)}"
        with contextlib.ExitStack() as stack:
            root = self.location.address
            if not self.location.is_local:
                made = tempfile.TemporaryDirectory(prefix="polytrain-predictions-")
                root = stack.enter_context(made)
            files = Beneath(Path(root))
            stack.callback(files.delete, path)
            yield files, path

    def _rows_in(self, name: str) -> int | None:
        """Return the number of rows of a file; None if it isn't a complete Parquet file."""
        location = self.location.below(name)

        def metadata() -> Any:
            if location.is_local:
                with Beneath(Path(self.location.address)).reading(name) as file:
                    return pq.read_metadata(file)
            filesystem, path = location.on_filesystem()
            return pq.read_metadata(path, filesystem=filesystem)

        def rows() -> int | None:
            try:
                return int(metadata().num_rows)
            except (pa.ArrowInvalid, FileNotFoundError):
                return None

        return retry(rows, retry_s=self.location.retry_s, what=self.location.address)
