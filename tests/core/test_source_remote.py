"""Data sets at addresses: in object storage, and wherever fsspec reaches."""

from __future__ import annotations

import gzip
import multiprocessing
import pickle
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import fsspec
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from polytrain.data.filesystems import find
from polytrain.data.parquet_files import RowGroupPiece
from polytrain.data.sources import ReadError, Source, SourceError, describe

KEY = "the-key-of-the-tests"


class Bucket(ThreadingHTTPServer):
    """Object storage that speaks as much of S3's protocol as reading takes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _S3)
        self.objects: dict[str, bytes] = {}
        self.reads: list[tuple[str, int]] = []
        """Which object, and how many bytes of it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _S3(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Bucket

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self._fail(403, "AccessDenied")
        elif bucket != "bucket":
            self._fail(404, "NoSuchBucket")
        elif not key:
            self._list({name: values[0] for name, values in parse_qs(url.query).items()})
        elif key not in self.server.objects:
            self._fail(404, "NoSuchKey")
        else:
            self._object(key)

    def _object(self, key: str) -> None:
        content = self.server.objects[key]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part = content[int(wanted[1]) : int(wanted[2]) + 1] if wanted else content
        if self.command == "GET":
            self.server.reads.append((key, len(part)))
        self._send(206 if wanted else 200, part, "application/octet-stream")

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        most = int(query.get("max-keys", "1000"))
        keys = [key for key in sorted(self.server.objects) if key.startswith(prefix)]
        below = {
            prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter
            for key in keys
            if delimiter and delimiter in key[len(prefix) :]
        }
        here = [key for key in keys if not any(key.startswith(part) for part in below)][:most]
        self._xml(
            200,
            "<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>"
            f"<KeyCount>{len(here) + len(below)}</KeyCount>"
            + "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(self.server.objects[key])}</Size>"
                "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
                for key in here
            )
            + "".join(
                f"<CommonPrefixes><Prefix>{escape(part)}</Prefix></CommonPrefixes>"
                for part in sorted(below)
            )
            + "</ListBucketResult>",
        )

    def _fail(self, status: int, code: str) -> None:
        self._xml(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")

    def _xml(self, status: int, text: str) -> None:
        self._send(status, f'<?xml version="1.0"?>{text}'.encode(), "application/xml")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The bucket that s3://bucket means, according to the environment alone."""
    with Bucket() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield server
        server.shutdown()
        thread.join()


def parquet(*, row_group_size: int = 2, **columns: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, row_group_size=row_group_size)
    return sink.getvalue().to_pybytes()


def read(source: Source) -> dict[str, list[Any]]:
    pieces = pickle.loads(pickle.dumps(source.pieces))
    tables = [piece.read(0, piece.rows) for piece in pieces]
    result: dict[str, list[Any]] = pa.concat_tables(tables).to_pydict()
    return result


ODD = "été à [Genève] 100%20"


@pytest.fixture
def filled(bucket: Bucket) -> Bucket:
    bucket.objects = {
        f"{ODD}/year=2023/a b.parquet": parquet(x=[1, 2, 3]),
        f"{ODD}/year=2024/c%.parquet": parquet(x=[4]),
        f"{ODD}/_SUCCESS": b"",
        f"{ODD}/.part.parquet": b"",
        "d.csv": b"x\n5\n6\n",
        "e.csv.gz": gzip.compress(b"x\n7\n"),
    }
    return bucket


YEARS = {"x": [1, 2, 3, 4], "year": [2023, 2023, 2023, 2024]}


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (f"{ODD}", YEARS),
        (f"{ODD}/", YEARS),
        ("*100%20/year=*/*.parquet", YEARS),
        ("**/*.parquet", YEARS),
        (f"{ODD}/year=2023/a b.parquet", {"x": [1, 2, 3]}),
        (f"{ODD}/year=2024/c%.parquet", {"x": [4]}),
        ("?.csv", {"x": [5, 6]}),
        ("d.csv?region=eu-north-1", {"x": [5, 6]}),
        ("e.csv.gz", {"x": [7]}),
        ("*.csv*", {"x": [5, 6, 7]}),
    ],
)
def test_what_lies_in_a_bucket(filled: Bucket, place: str, expected: Any) -> None:
    assert read(describe("train", f"s3://bucket/{place}")) == expected


def test_a_whole_bucket(bucket: Bucket) -> None:
    bucket.objects = {"a.parquet": parquet(x=[1]), "b/c.parquet": parquet(x=[2])}
    assert read(describe("train", "s3://bucket")) == {"x": [1, 2]}


def test_local_and_remote_files_together(filled: Bucket, tmp_path: Any) -> None:
    (tmp_path / "a.csv").write_text("x\n0\n")
    places = ["s3://bucket/d.csv", tmp_path / "a.csv", "s3://bucket/e.csv.gz"]
    assert read(describe("train", places)) == {"x": [5, 6, 0, 7]}


def test_only_what_is_asked_for_is_fetched(bucket: Bucket) -> None:
    wide = list(range(200_000))
    content = parquet(row_group_size=100_000, x=wide, y=wide, z=wide)
    bucket.objects["a.parquet"] = content
    source = describe("train", "s3://bucket/a.parquet")
    # A footer, and what is fetched along with it.
    assert sum(size for _, size in bucket.reads) < len(content) / 10
    bucket.reads.clear()
    source.pieces[1].read(0, 100_000, ["y"])
    assert len(content) / 8 < sum(size for _, size in bucket.reads) < len(content) / 4


def test_a_footer_is_fetched_once(bucket: Bucket) -> None:
    bucket.objects["a.parquet"] = parquet(row_group_size=1, x=list(range(100)))
    source = describe("train", "s3://bucket/a.parquet")
    footer = sum(size for _, size in bucket.reads)
    bucket.reads.clear()
    assert [piece.read(0, 1)["x"][0].as_py() for piece in source.pieces] == list(range(100))
    assert max(size for _, size in bucket.reads) < footer


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://bucket/nothing.parquet", r"no file matches 's3://bucket/nothing\.parquet'"),
        ("s3://bucket/nothing-*", r"no file matches 's3://bucket/nothing-\*'"),
        ("s3://missing/a.parquet", r"'s3://missing/a\.parquet'"),
        ("s3://missing/*.parquet", r"'s3://missing/\*\.parquet'"),
        ("s3://missing", r"'s3://missing'"),
        ("s3://bucket/torn.parquet", r"'s3://bucket/torn\.parquet' can't be read"),
    ],
)
def test_what_is_not_there(bucket: Bucket, address: str, message: str) -> None:
    bucket.objects["torn.parquet"] = b"PAR1 and nothing more"
    with pytest.raises(SourceError, match=message) as caught:
        describe("train", address)
    assert caught.value.remedy


def test_credentials_that_are_corrected(filled: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, say: the file system of the first attempt is of no use then."""
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_ACCESS_KEY_ID", "someone-else")
        with pytest.raises(SourceError, match=r"s3://bucket/d\.csv.*ACCESS_DENIED") as caught:
            describe("train", "s3://bucket/d.csv")
    assert caught.value.remedy
    assert describe("train", "s3://bucket/d.csv").info.num_rows == 2


def test_an_object_that_has_changed(bucket: Bucket) -> None:
    bucket.objects["a.parquet"] = parquet(x=[1, 2, 3])
    piece = describe("train", "s3://bucket/a.parquet").pieces[1]
    bucket.objects["a.parquet"] = parquet(x=[1, 2], y=[0, 0])
    with pytest.raises(ReadError, match=r"s3://bucket/a\.parquet.*changed since the run began"):
        piece.read(0, 1)


def test_a_process_has_its_own_file_systems(filled: Bucket) -> None:
    """Connections that a forked process inherits would be those of its parent."""
    place = "s3://bucket/d.csv"
    assert find(place).filesystem is find(place).filesystem
    known = id(find(place).filesystem)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_has_another_than, (place, known))


def _has_another_than(place: str, known: int) -> bool:
    from polytrain.data import filesystems

    hits = filesystems._arrow.cache_info().hits
    another = find(place).filesystem
    return filesystems._arrow.cache_info().hits == hits and id(another) != known


def test_an_arrow_dataset_in_a_bucket(filled: Bucket) -> None:
    """Its file system is the user's, not what the environment tells."""
    filesystem = pafs.S3FileSystem(
        endpoint_override=filled.url, access_key=KEY, secret_key="secret", region="eu-north-1"
    )
    dataset = pads.dataset(f"bucket/{ODD}", filesystem=filesystem, partitioning="hive")
    source = describe("train", dataset)
    assert all(isinstance(piece, RowGroupPiece) for piece in source.pieces)
    assert read(source) == YEARS


def test_whatever_fsspec_reaches() -> None:
    memory = fsspec.filesystem("memory")
    for name, content in (
        ("year=2023/a b.parquet", parquet(x=[1, 2, 3])),
        ("year=2024/c%20.parquet", parquet(x=[4])),
        ("_SUCCESS", b""),
    ):
        memory.pipe_file(f"/source-test/{name}", content)
    try:
        for place in ("source-test", "source-test/year=*/*.parquet", "source-test/**/*.parquet"):
            assert read(describe("train", f"memory://{place}")) == YEARS
        assert read(describe("train", "memory://source-test/year=2024/c%20.parquet")) == {"x": [4]}
        with pytest.raises(SourceError, match=r"no file matches 'memory://source-test/none'"):
            describe("train", "memory://source-test/none")
    finally:
        memory.rm("/source-test", recursive=True)


def test_what_fsspec_would_need_is_said() -> None:
    with pytest.raises(SourceError, match=r"'oss://bucket/a\.csv' can't be read: .*ossfs"):
        describe("train", "oss://bucket/a.csv")
