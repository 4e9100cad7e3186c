"""What every storage promises: directories, object storage, and what Arrow or fsspec reaches."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from tests.faulty_storage import ERROR, FaultyFileSystem, FromThenOn, Short, never
from tests.object_storage import Bucket

from polytrain.checkpoint.starting_point import fetch
from polytrain.errors import CheckpointError
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage
from polytrain.storage.remote import RemoteStorage

ODD = "été à [1] 100%20 a+b*.json"
"""A name that means something else to whoever takes it for a pattern or for an address."""


def directory(request: pytest.FixtureRequest, path: Path) -> Location:
    return Location.of(path)


def memory(request: pytest.FixtureRequest, path: Path) -> Location:
    root = f"memory:/{path}"
    request.addfinalizer(lambda: fsspec.filesystem("memory").store.clear())
    return Location.of(root)


def memory_given(request: pytest.FixtureRequest, path: Path) -> Location:
    """Whose paths begin with a slash, whether or not one was given."""
    filesystem = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)
    return Location.of("runs/one", filesystem)


def dirfs(request: pytest.FixtureRequest, path: Path) -> Location:
    return Location.of("runs/one", DirFileSystem(str(path), LocalFileSystem()))


def simple(request: pytest.FixtureRequest, path: Path) -> Location:
    return Location.of("runs/one", FaultyFileSystem(path))


def arrow(request: pytest.FixtureRequest, path: Path) -> Location:
    return Location.of(path / "runs", pafs.LocalFileSystem())


def arrow_of_fsspec(request: pytest.FixtureRequest, path: Path) -> Location:
    handler = pafs.FSSpecHandler(FaultyFileSystem(path))
    return Location.of("runs/one", pafs.PyFileSystem(handler))


def s3(request: pytest.FixtureRequest, path: Path) -> Location:
    request.getfixturevalue("bucket")
    return Location.of("s3://bucket/runs/one")


@pytest.fixture(
    params=[directory, memory, memory_given, dirfs, simple, arrow, arrow_of_fsspec, s3],
    ids=lambda make: make.__name__,
)
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    place: Location = request.param(request, tmp_path)
    return place


@pytest.fixture
def storage(location: Location) -> Storage:
    return location.open()


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local file of more than one piece, of whatever size the pieces are."""
    path = tmp_path_factory.mktemp("local") / "model"
    path.write_bytes(bytes(range(256)) * 20_000)
    return path


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_what_was_written_is_read_by_everybody(storage: Storage, location: Location) -> None:
    storage.write("deep/down/a.json", b"a long first version")
    storage.write("deep/down/a.json", b"second")
    storage.write("empty", b"")
    assert storage.read("deep/down/a.json") == b"second"
    assert location.open().read("deep/down/a.json") == b"second"
    assert location.open().read("empty") == b""


def test_the_root_says_where_it_is(storage: Storage, location: Location) -> None:
    assert storage.root == location.address
    assert storage.is_local == location.is_local


def test_what_is_not_there_is_told_apart_from_what_fails(storage: Storage, tmp_path: Path) -> None:
    storage.write("a/there", b"")
    asked: tuple[Callable[[str], object], ...] = (
        storage.read,
        storage.digest,
        lambda path: storage.get(path, tmp_path / "copy"),
    )
    for ask in asked:
        for missing in ("missing", "a/missing", "b/missing"):
            with pytest.raises(FileNotFoundError):
                ask(missing)


def test_all_files_below_are_listed_with_their_sizes(storage: Storage) -> None:
    assert storage.list("") == {}
    assert storage.list("a") == {}
    files = {"a/b/one": b"1", "a/b/c/two": b"22", "ab/three": b"333", f"a/{ODD}": b"", "top": b"4"}
    for path, content in files.items():
        storage.write(path, content)
    assert storage.list("") == {path: len(content) for path, content in files.items()}
    assert storage.list("a") == {"a/b/one": 1, "a/b/c/two": 2, f"a/{ODD}": 0}
    assert storage.list("a/b/c") == {"a/b/c/two": 2}
    assert storage.list("a/b/c/d") == {}


def test_names_that_look_like_patterns_are_names(storage: Storage, tmp_path: Path) -> None:
    for path in (ODD, f"{ODD}/{ODD}" + "x", "exp*/model", "exp1/model", "exp[1]/model"):
        storage.write(f"names/{path}x", path.encode())
    assert storage.read(f"names/{ODD}x") == ODD.encode()
    assert storage.digest("names/exp*/modelx") == digest(b"exp*/model")
    storage.delete("names/exp*/modelx")
    storage.delete_below("names/exp[1]")
    assert set(storage.list("names/exp1")) == {"names/exp1/modelx"}
    assert set(storage.list("names")) == {
        f"names/{ODD}x",
        f"names/{ODD}/{ODD}xx",
        "names/exp1/modelx",
    }


def test_a_local_file_is_stored_with_its_digest(storage: Storage, file: Path) -> None:
    content = file.read_bytes()
    storage.write("c/model", b"what was there before")
    assert storage.put(file, "c/model", move=False) == digest(content)
    assert file.read_bytes() == content
    assert storage.read("c/model") == content
    assert storage.digest("c/model") == digest(content)


def test_a_local_file_that_nobody_needs_is_stored_too(storage: Storage, file: Path) -> None:
    content = file.read_bytes()
    assert storage.put(file, f"c/{ODD}", move=True) == digest(content)
    assert storage.read(f"c/{ODD}") == content
    assert storage.list("c") == {f"c/{ODD}": len(content)}


def test_a_file_with_another_name_is_not_given_up(storage: Storage, file: Path) -> None:
    """A snapshot is such a link: what its caller writes later isn't what was stored."""
    content = file.read_bytes()
    other = file.with_name("other")
    other.hardlink_to(file)
    assert storage.put(file, "c/model", move=True) == digest(content)
    other.write_bytes(b"written later")
    assert storage.read("c/model") == content


def test_an_empty_file_is_stored(storage: Storage, file: Path) -> None:
    file.write_bytes(b"")
    assert storage.put(file, "c/model", move=True) == digest(b"")
    assert storage.list("") == {"c/model": 0}


def test_a_stored_file_is_fetched_with_its_digest(
    storage: Storage, file: Path, tmp_path: Path
) -> None:
    content = file.read_bytes()
    storage.put(file, "c/model", move=False)
    assert storage.get("c/model", tmp_path / "copy") == digest(content)
    assert (tmp_path / "copy").read_bytes() == content


def test_a_file_is_created_once(storage: Storage, location: Location) -> None:
    path = storage.create("leases/000001", b"first")
    assert path is not None
    assert path.startswith("leases/000001")
    assert location.open().create("leases/000001", b"second") is None
    assert storage.create("leases/000001", b"third") is None
    assert storage.list("leases") == {path: 5}
    assert storage.read(path) == b"first"
    assert storage.create("leases/000002", b"next") is not None


def test_of_many_who_create_a_file_at_once_at_most_one_succeeds(location: Location) -> None:
    together = threading.Barrier(8)

    def create(number: int, name: str) -> str | None:
        storage = location.open()
        together.wait()
        return storage.create(name, str(number).encode())

    with ThreadPoolExecutor(8) as threads:
        for attempt_id in range(5):
            name = f"leases/{attempt_id:06d}"
            got = [path for path in threads.map(partial(create, name=name), range(8)) if path]
            assert len(got) <= 1
            left = [path for path in location.open().list("leases") if path.startswith(name)]
            assert left == got, "who gives way takes away what he has written"


def test_a_deleted_file_is_gone_and_needs_not_be_there(storage: Storage) -> None:
    storage.write("a/one", b"1")
    storage.write("a/two", b"2")
    storage.delete("a/one")
    storage.delete("a/one")
    storage.delete("never/was")
    assert storage.list("") == {"a/two": 1}


def test_a_deleted_directory_is_gone_with_all_that_was_in_it(storage: Storage) -> None:
    for path in ("a/b/one", "a/b/c/two", "a/bc/three", "a/b-d"):
        storage.write(path, b"x")
    storage.delete_below("a/b")
    storage.delete_below("a/b")
    storage.delete_below("never/was")
    assert storage.list("") == {"a/bc/three": 1, "a/b-d": 1}
    storage.write("a/b/again", b"")
    assert storage.list("a/b") == {"a/b/again": 0}


def test_nothing_is_left_of_a_deleted_directory_on_a_file_system(tmp_path: Path) -> None:
    for filesystem in (FaultyFileSystem(tmp_path), DirFileSystem(str(tmp_path))):
        storage = Location.of("runs", filesystem).open()
        storage.write("a/b/c/one", b"")
        storage.delete_below("a")
        assert list((tmp_path / "runs").iterdir()) == []


def lines(storage: Storage) -> list[str]:
    return b"".join(storage.read_log("logs/journal")).decode(errors="replace").splitlines()


def test_a_log_that_nobody_has_opened_is_empty(storage: Storage) -> None:
    assert list(storage.read_log("logs/journal")) == []


def test_what_was_synced_to_a_log_is_read(storage: Storage, location: Location) -> None:
    with storage.open_log("logs/journal", series="000001") as log:
        log.sync()
        log.write("één\n")
        log.write("two\n")
        log.sync()
        log.sync()
        assert lines(location.open()) == ["één", "two"]
        log.write("three\n")
    assert lines(location.open()) == ["één", "two", "three"]


def test_writers_of_a_log_follow_one_another(location: Location) -> None:
    expected = []
    for writer in range(12):
        with location.open().open_log("logs/journal", series=f"{writer:06d}") as log:
            for line in range(11):
                log.write(f"{writer} {line}\n")
                log.sync()
                expected.append(f"{writer} {line}")
    assert lines(location.open()) == expected


def test_a_writer_that_dies_in_the_middle_of_a_line_spoils_no_other(location: Location) -> None:
    storage = location.open()
    with storage.open_log("logs/journal", series="000001") as log:
        log.write("whole\n")
    [path] = storage.list("logs")
    torn = storage.read(path) + '{"half": "été'.encode()[:-1]
    storage.write(path, torn)
    for writer in (2, 3):
        with location.open().open_log("logs/journal", series=f"{writer:06d}") as log:
            log.write(f"whole {writer}\n")
    first, _, *others = lines(storage)
    assert [first, *others] == ["whole", "whole 2", "whole 3"]


def test_a_log_from_object_storage_is_read_and_continued_in_a_directory(tmp_path: Path) -> None:
    """As when a run is copied out of a bucket, and back."""

    def whole_lines(storage: Storage) -> list[str]:
        return [line for line in lines(storage) if line]

    remote = RemoteStorage(pafs.LocalFileSystem(), str(tmp_path), root="a bucket", retry_s=0)
    with remote.open_log("logs/journal", series="000001") as log:
        log.write("one\n")
        log.sync()
        log.write("two\nto")
    storage = Location.of(tmp_path).open()
    assert whole_lines(storage) == ["one", "two", "to"]
    before = storage.log_state("logs/journal")
    with storage.open_log("logs/journal", series="000002") as local:
        local.write("three\n")
        local.draft("draft\n")
        assert storage.log_state("logs/journal") != before
        assert whole_lines(storage) == ["one", "two", "to", "three", "draft"]
        local.write("four\n")
    with remote.open_log("logs/journal", series="000003") as log:
        log.write("five\n")
    for each in (storage, remote):
        assert whole_lines(each) == ["one", "two", "to", "three", "four", "five"]


def test_a_draft_is_read_until_a_line_takes_its_place(location: Location) -> None:
    storage = location.open()
    with storage.open_log("logs/journal", series="000001") as log:
        log.write("one\n")
        log.sync()
        log.draft("draft 1\n")
        log.draft("draft 2\n")
        # Elsewhere not even a line survives its writer before it is synced.
        drafts = ["draft 1", "draft 2"] if storage.is_local else []
        assert [line for line in lines(location.open()) if line] == ["one", *drafts]
        log.write("two\n")
        log.sync()
        assert lines(location.open()) == ["one", "two"]
        log.draft("draft 3\n")
        log.write("three\n")
    assert lines(location.open()) == ["one", "two", "three"]
    assert all(".drafts-" not in path for path in storage.list("logs"))


def test_a_log_goes_on_where_its_run_was_copied_to(bucket: Bucket, tmp_path: Path) -> None:
    """From a directory into a bucket, back, and once more."""

    def opened(turn: int) -> Storage:
        place = f"s3://bucket/runs/{turn}" if turn % 2 else tmp_path / f"{turn}"
        return Location.of(place).open()

    expected: list[str] = []
    for turn in range(4):
        storage = opened(turn)
        if turn:
            before = opened(turn - 1)
            for path in before.list("logs"):
                storage.write(path, before.read(path))
        assert [line for line in lines(storage) if line] == expected
        # Those that follow a driver see its lines.
        states = [storage.log_state("logs/journal")]
        with storage.open_log("logs/journal", series=f"{turn:06d}") as log:
            log.write(f"{turn}\n")
            log.sync()
            states.append(storage.log_state("logs/journal"))
            expected.append(f"{turn}")
            if turn == 0:
                # Its driver dies.
                log.draft("draft\n")
                dead = {path: storage.read(path) for path in storage.list("logs")}
                expected.append("draft")
        if turn == 0:
            for path, content in dead.items():
                storage.write(path, content)
        assert states[0] != states[1]
        assert [line for line in lines(storage) if line] == expected


def test_the_state_of_a_log_changes_with_every_line(location: Location) -> None:
    storage = location.open()
    seen = [storage.log_state("logs/journal")]
    with storage.open_log("logs/journal", series="000001") as log:
        for _ in range(2):
            log.write("a line\n")
            log.sync()
            seen.append(storage.log_state("logs/journal"))
        if storage.is_local:
            log.draft("a draft\n")
            seen.append(storage.log_state("logs/journal"))
    assert all(seen.count(state) == 1 for state in seen)


def test_threads_share_a_log(storage: Storage) -> None:
    texts = [f"{thread} {'x' * 500} {line}" for thread in range(4) for line in range(50)]

    def write(start: int) -> None:
        for text in texts[start::4]:
            log.write(f"{text}\n")
            log.sync()

    # Each sync to an object storage is an object.
    texts = texts if storage.is_local else texts[:20]
    with storage.open_log("logs/journal", series="000001") as log, ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert sorted(lines(storage)) == sorted(texts)


def test_a_log_keeps_what_could_not_be_written(tmp_path: Path) -> None:
    filesystem = FaultyFileSystem(tmp_path)
    faults = filesystem.faults
    with Location.of("runs", filesystem, retry_s=0).open().open_log("l", series="1") as log:
        log.write("one\n")
        log.sync()
        log.write("two\n")
        faults.fault = FromThenOn(0)
        for _ in range(2):
            with pytest.raises(OSError, match=ERROR):
                log.sync()
        log.write("three\n")
        faults.fault = FromThenOn(0, Short.loudly, kinds=frozenset(["write"]))
        with pytest.raises(OSError, match=ERROR):
            log.sync()
        log.write("four\n")
        faults.fault = never
        log.sync()
    log_read = Location.of("runs", filesystem).open().read_log("l")
    assert b"".join(log_read) == b"one\ntwo\nthree\nfour\n"


def test_the_end_of_a_log_is_not_waited_for_twice(tmp_path: Path) -> None:
    filesystem = FaultyFileSystem(tmp_path)
    with Location.of("runs", filesystem, retry_s=0).open().open_log("l", series="1") as log:
        log.write("one\n")
        filesystem.faults.fault = FromThenOn(0)
        with pytest.raises(OSError, match=ERROR):
            log.sync()
        filesystem.faults.calls.clear()
    assert filesystem.faults.calls == []


def test_more_objects_than_one_answer_lists(bucket: Any) -> None:
    bucket.put({f"runs/one/checkpoints/{number:04d}/m": b"12" for number in range(1001)})
    listed = Location.of("s3://bucket/runs/one").open().list("checkpoints")
    assert listed == {f"checkpoints/{number:04d}/m": 2 for number in range(1001)}


def test_a_service_that_deletes_only_single_objects_frees_their_room(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket.server, "deletes_only_one", True)
    storage = Location.of("s3://bucket/run", retry_s=0).open()
    for name in ("a/model", "a/deep/state", "b/model"):
        storage.write(name, b"content")
    storage.delete_below("a")
    storage.delete_below("never/was")
    assert "POST /bucket?delete" in bucket.server.requests
    assert storage.list("") == {"b/model": 7}


def test_an_object_whose_key_leads_out_of_the_directory_is_not_fetched(
    bucket: Any, tmp_path: Path
) -> None:
    bucket.put({"runs/one/files/model": b"12", "runs/one/files/../../escaped": b"12"})
    with pytest.raises(CheckpointError, match="isn't used as a path"):
        fetch(Location.of("s3://bucket/runs/one/files"), None, tmp_path / "a" / "b" / "c")
    assert not list(tmp_path.rglob("escaped"))


def no_bucket(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    return "s3://missing/runs"


def no_such_key(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    return "s3://bucket/runs"


def wrong_secret(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
    return "s3://bucket/runs"


@pytest.mark.parametrize("mistake", [no_bucket, no_such_key, wrong_secret])
def test_nobody_waits_for_what_only_the_user_can_change(
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    file: Path,
    mistake: Callable[..., str],
) -> None:
    with bucket.server.asking_for_credentials() as right:
        for name, value in right.items():
            monkeypatch.setenv(name, value)
        storage = Location.of(mistake(bucket, monkeypatch), retry_s=600).open()
        asked: tuple[Callable[[], object], ...] = (
            lambda: storage.read("a"),
            lambda: storage.write("a", b"content"),
            lambda: storage.put(file, "a", move=False),
            lambda: storage.digest("a"),
            lambda: storage.create("a", b"content"),
        )
        for ask in asked:
            with pytest.raises(OSError, match=r"a"):
                ask()
    assert caplog.records == []
