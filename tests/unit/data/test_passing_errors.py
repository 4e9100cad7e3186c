"""Files of a data set that can't be read for a while: they are read again, from where it was."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from polytrain.data.read.file_pieces import CurrentFile, FilePiece
from polytrain.data_errors import ReadError
from polytrain.linux.progress_page import Page, write_to

ROWS = 6

EOF: Any = ssl.SSLEOFError
"""A connection that has ended without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing(FilePiece):
    """Rows 0 … 5, two at a time; after some of these tables an error comes."""

    errors: dict[int, Exception] = field(default_factory=dict)
    """Number of the table, over all passes → the error in its place."""

    passes: list[range] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)

    def _stored(
        self, file: CurrentFile, rows: range, columns: Sequence[str], *, at_once: bool
    ) -> Iterator[pa.Table]:
        self.passes.append(rows)
        for first in range(rows.start, rows.stop, 2):
            error = self.errors.get(len(self.tables))
            self.tables.append(first)
            if error is not None:
                raise error
            yield pa.table({"x": [*range(first, min(first + 2, rows.stop))]})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that is there."""
    path = tmp_path / "file"
    path.write_text("")
    return path


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polytrain.storage.calls._FIRST_WAIT_S", 0)


def failing(file: Path, **errors: Exception) -> Failing:
    by_number = {int(name.removeprefix("at_")): error for name, error in errors.items()}
    schema = pa.schema({"x": pa.int64()})
    return Failing(path=str(file), rows=ROWS, schema=schema, errors=by_number)


def broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    "error",
    [
        broken(),
        OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
        OSError("AWS Error UNKNOWN (HTTP status 503) during GetObject operation"),
        OSError("google::cloud::Status(UNAVAILABLE: try again)"),
        OSError("Azure Error: [ServerBusy] 503"),
        OSError("Azure Error: [] Connection was closed by the server"),
        OSError("AWS Error UNKNOWN (HTTP status 408) during GetObject operation"),
        OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN)),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        EOF(8, "EOF occurred in violation of protocol"),
        TimeoutError("the read operation timed out"),
    ],
)
def test_rows_come_once_although_reading_them_has_failed(
    file: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    for read in (
        lambda piece: piece.read(0, ROWS),
        lambda piece: pa.concat_tables(piece.scan(0, ROWS)),
    ):
        caplog.clear()
        piece = failing(file, at_0=error, at_2=error)
        assert read(piece).to_pydict() == {"x": [*range(ROWS)]}
        assert piece.passes == [range(6), range(6), range(2, 6)]
        assert len(caplog.messages) == 2, "each outage is said once"
        assert f"{str(file)!r}: {error}. Trying again for up to 600 s." in caplog.text


def test_a_rank_that_waits_for_its_files_does_not_hang(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: Any = memoryview(bytearray(1 << 20)).cast("Q")
    monkeypatch.setattr("polytrain.linux.progress_page._page", before)
    page = Page()
    try:
        write_to(page.descriptor)
        failing(file, at_0=broken(), at_1=broken()).read(0, ROWS)
        assert page.beats == 2
    finally:
        page.close()


@pytest.mark.parametrize(
    "error",
    [
        OSError("Corrupt snappy compressed data."),
        OSError(errno.EACCES, os.strerror(errno.EACCES)),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        OSError(errno.ELOOP, os.strerror(errno.ELOOP)),
        OSError("AWS Error ACCESS_DENIED during GetObject operation"),
        OSError("AWS Error UNKNOWN (HTTP status 400): ExpiredToken: The token has expired"),
        OSError("google::cloud::Status(PERMISSION_DENIED: no access. error 503)"),
        OSError("google::cloud::Status(UNAUTHENTICATED: timed out)"),
        OSError("Azure Error: [AuthorizationFailure] 403"),
        OSError("Azure Error: [BlobNotFound] 404"),
        pa.ArrowInvalid("Invalid UTF8 payload"),
    ],
)
def test_a_file_that_stays_unreadable_is_named_at_once(file: Path, error: Exception) -> None:
    piece = failing(file, at_1=error)
    with pytest.raises(ReadError, match=f"{str(file)!r} can't be read: "):
        piece.read(0, ROWS)
    assert len(piece.passes) == 1
