"""Data sets at addresses: in object storage, and wherever fsspec reaches."""

from __future__ import annotations

import gzip
import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.object_storage import Bucket

from polytrain.data.read.describe import Source, describe
from polytrain.data.read.parquet_files import RowGroupPiece
from polytrain.data_errors import ReadError, SourceError
from polytrain.storage.filesystems import find


def parquet(*, row_group_size: int = 2, **columns: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, row_group_size=row_group_size)
    return sink.getvalue().to_pybytes()


def read(source: Source) -> dict[str, list[Any]]:
    pieces = pickle.loads(pickle.dumps(source.pieces))
    tables = [piece.read(0, piece.rows) for piece in pieces]
    result: dict[str, list[Any]] = pa.concat_tables(tables).to_pydict()
    return result


ODD = "été à [Genève] 100%20 a+b"


@pytest.fixture
def filled(bucket: Bucket) -> Bucket:
    objects = {
        f"{ODD}/year=2023/a b.parquet": parquet(x=[1, 2, 3]),
        f"{ODD}/year=2024/c%.parquet": parquet(x=[4]),
        f"{ODD}/_SUCCESS": b"",
        f"{ODD}/.part.parquet": b"",
        "d.csv": b"x\n5\n6\n",
        "e.csv.gz": gzip.compress(b"x\n7\n"),
    }
    bucket.put(objects)
    return bucket


YEARS = {"x": [1, 2, 3, 4], "year": [2023, 2023, 2023, 2024]}


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (f"{ODD}", YEARS),
        (f"{ODD}/", YEARS),
        ("*100%20 a+b/year=*/*.parquet", YEARS),
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
    bucket.put({"a.parquet": parquet(x=[1]), "b/c.parquet": parquet(x=[2])})
    assert read(describe("train", "s3://bucket")) == {"x": [1, 2]}


def test_more_objects_than_one_answer_lists(bucket: Bucket) -> None:
    """S3 tells of a thousand at a time; these are in between, in the order of names."""
    bucket.put({f"d/_{number}": b"" for number in range(1000)})
    bucket.put({"d/1.parquet": parquet(x=[1]), "d/z.parquet": parquet(x=[2])})
    assert read(describe("train", "s3://bucket/d")) == {"x": [1, 2]}
    assert read(describe("train", "s3://bucket/d/**/?.parquet")) == {"x": [1, 2]}


def test_local_and_remote_files_together(filled: Bucket, tmp_path: Any) -> None:
    (tmp_path / "a.csv").write_text("x\n0\n")
    places = ["s3://bucket/d.csv", tmp_path / "a.csv", "s3://bucket/e.csv.gz"]
    assert read(describe("train", places)) == {"x": [5, 6, 0, 7]}


def test_only_what_is_asked_for_is_fetched(bucket: Bucket) -> None:
    wide = list(range(200_000))
    content = parquet(row_group_size=100_000, x=wide, y=wide, z=wide)
    bucket.put({"a.parquet": content})
    source = describe("train", "s3://bucket/a.parquet")
    # A footer, and what is fetched along with it.
    assert sum(size for _, size in bucket.server.reads) < len(content) / 10
    bucket.server.reads.clear()
    source.pieces[1].read(0, 100_000, ["y"])
    assert len(content) / 8 < sum(size for _, size in bucket.server.reads) < len(content) / 4


def test_a_footer_is_fetched_once(bucket: Bucket) -> None:
    bucket.put({"a.parquet": parquet(row_group_size=1, x=list(range(100)))})
    source = describe("train", "s3://bucket/a.parquet")
    footer = sum(size for _, size in bucket.server.reads)
    bucket.server.reads.clear()
    assert [piece.read(0, 1)["x"][0].as_py() for piece in source.pieces] == list(range(100))
    assert max(size for _, size in bucket.server.reads) < footer


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
    bucket.put({"torn.parquet": b"PAR1 and nothing more"})
    with pytest.raises(SourceError, match=message) as caught:
        describe("train", address)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("address", "seconds"),
    [
        ("gs://bucket/a.parquet", 6),
        ("gcs://bucket/a.parquet?scheme=http", 6),
        ("gs://bucket/a.parquet?retry_limit_seconds=90", 90),
    ],
)
def test_google_s_own_retries_end_soon(address: str, seconds: float) -> None:
    """Without credentials they would last a quarter of an hour, in which nothing is said."""
    _, [options] = find(address).filesystem.__reduce__()
    assert options["retry_time_limit"].total_seconds() == seconds


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_credentials_that_are_corrected(
    filled: Bucket, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """In a notebook, say: the file system of the first attempt is of no use then."""
    with filled.server.asking_for_credentials() as right:
        for name, value in {**right, wrong: "someone-else's"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SourceError, match=r"s3://bucket/d\.csv.*ACCESS_DENIED") as caught:
            describe("train", "s3://bucket/d.csv")
        assert caught.value.remedy
        monkeypatch.setenv(wrong, right[wrong])
        assert describe("train", "s3://bucket/d.csv").info.num_rows == 2


def test_an_object_that_has_changed(bucket: Bucket) -> None:
    bucket.put({"a.parquet": parquet(x=[1, 2, 3])})
    piece = describe("train", "s3://bucket/a.parquet").pieces[1]
    bucket.put({"a.parquet": parquet(x=[1, 2], y=[0, 0])})
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
    from polytrain.storage import filesystems

    hits = filesystems._arrow.cache_info().hits
    another = find(place).filesystem
    return filesystems._arrow.cache_info().hits == hits and id(another) != known


def test_an_arrow_dataset_in_a_bucket(filled: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file system is the user's, not what the environment tells."""
    filesystem = pafs.S3FileSystem(
        endpoint_override=filled.server.url,
        access_key="key",
        secret_key="secret",
        region="eu-north-1",
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
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


class Remembering(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Objects in memory, with listings that are remembered, or fail."""

    protocol = "remembering"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    remembered: ClassVar[dict[str, Any]] = {}
    fails = ""
    # As most have it: from listings.
    find = fsspec.AbstractFileSystem.find

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = MemoryFileSystem._strip_protocol(path.removeprefix("remembering://"))
        return stripped

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if self.fails and path.rstrip("/").endswith(self.fails):
            raise PermissionError(path)
        if path not in self.remembered:
            self.remembered[path] = super().ls(path, detail=True)
        found = self.remembered[path]
        return found if detail else [info["name"] for info in found]

    def info(self, path: str, **options: Any) -> Any:
        directory, _, _ = path.rpartition("/")
        for info in self.remembered.get(directory, ()):
            if info["name"] == path:
                return info
        return super().info(path, **options)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.remembered.clear()


@pytest.fixture
def remembering() -> Iterator[Remembering]:
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    filesystem = Remembering()
    filesystem.pipe_file("/d/a.parquet", parquet(x=[1]))
    filesystem.pipe_file("/d/e/b.parquet", parquet(x=[2]))
    yield filesystem
    filesystem.store.clear()
    filesystem.invalidate_cache()


@pytest.mark.parametrize("place", ["d", "d/**", "d/*"])
def test_new_files_are_found_by_the_next_run(remembering: Remembering, place: str) -> None:
    assert read(describe("train", f"remembering://{place}")) == {"x": [1, 2]}
    before = dict(remembering.remembered)
    remembering.pipe_file("/d/e/c.parquet", parquet(x=[3]))
    # Another process has written it, of which this one's memory knows nothing.
    remembering.remembered.update(before)
    assert read(describe("train", f"remembering://{place}")) == {"x": [1, 2, 3]}


def test_a_file_that_was_replaced_is_read_by_the_next_run_only(remembering: Remembering) -> None:
    place = "remembering://d/*.parquet"
    source = describe("train", place)
    assert read(source) == {"x": [1]}
    remembering.ls("/d")
    before = dict(remembering.remembered)
    remembering.pipe_file("/d/a.parquet", parquet(x=list(range(1000, 2000))))
    remembering.remembered.update(before)
    with pytest.raises(ReadError, match=r"a\.parquet.* has changed since the run began"):
        read(source)
    remembering.remembered.update(before)
    assert read(describe("train", place)) == {"x": list(range(1000, 2000))}


@pytest.mark.parametrize("place", ["d", "d/**", "d/*"])
def test_a_directory_that_can_not_be_listed_is_not_left_out(
    remembering: Remembering, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Remembering, "fails", "/e")
    with pytest.raises(SourceError, match="can't be looked at: PermissionError"):
        describe("train", f"remembering://{place}")


def test_names_with_question_marks(bucket: Bucket) -> None:
    bucket.put({"a/what?.parquet": parquet(x=[1]), "b/x?y=1.parquet": parquet(x=[2])})
    for place in ("a", "a/*", "a/what?.parquet"):
        assert read(describe("train", f"s3://bucket/{place}")) == {"x": [1]}
    with pytest.raises(SourceError, match=r"'bucket/b/x\?y=1\.parquet' can't be distinguished"):
        describe("train", "s3://bucket/b")


def test_what_fsspec_would_need_is_said() -> None:
    with pytest.raises(SourceError, match=r"'oss://bucket/a\.csv' can't be read: .*ossfs"):
        describe("train", "oss://bucket/a.csv")
