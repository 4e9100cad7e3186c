"""What a report takes of the caller's files: all as it is now, and nothing away from the caller."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.checkpoint.checkpoints import ATTEMPT, directories, directory_of, manifest, store_in

from polytrain.checkpoint import staging
from polytrain.checkpoint.manifest import MANIFEST_NAME, AttemptId, directory_name
from polytrain.checkpoint.staging import Snapshots, Stamp, Stamps, is_unchanged
from polytrain.checkpoint.store import CheckpointStore, SnapshotChangedError

LARGE = 1 << 18
"""Bytes that are worth a link."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The caller's directory."""
    path = tmp_path / "source"
    path.mkdir()
    return path


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory on another file system."""
    with TemporaryDirectory(dir="/dev/shm", prefix="polytrain-test-") as path:
        yield Path(path)


class Taker:
    """A process that takes snapshots, each into a directory of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._snapshots = Snapshots()
        self._taken = 0

    def take(self, source: Path) -> tuple[Path, dict[str, Stamp]]:
        """The snapshot, and its stamps."""
        target = self._path / f"snapshot-{self._taken}"
        target.mkdir()
        self._taken += 1
        return target, self._snapshots.take(source, target)


@pytest.fixture
def taker(tmp_path: Path) -> Taker:
    return Taker(tmp_path)


def content(directory: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def unchanged(snapshot: Path, stamps: Stamps, name: str) -> bool:
    return is_unchanged((snapshot / name).stat(), stamps.get(name))


names = st.lists(st.sampled_from(["a", "b.pt", "état 1", ".hidden"]), min_size=1, max_size=3)
sizes = st.one_of(st.integers(0, 100), st.sampled_from([(1 << 16) - 1, 1 << 16, LARGE]))


@given(files=st.dictionaries(names.map("/".join), sizes, max_size=6))
def test_a_snapshot_has_all_files_with_their_content(files: dict[str, int]) -> None:
    with TemporaryDirectory(dir="/dev/shm", prefix="polytrain-test-") as directory:
        source = Path(directory, "source")
        source.mkdir()
        for number, (name, size) in enumerate(files.items()):
            file = source / name
            if any(parent.is_file() for parent in file.parents) or file.is_dir():
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes([number]) * size)
        before = content(source)
        taker = Taker(Path(directory))
        for _ in range(2):
            snapshot, _ = taker.take(source)
            assert content(snapshot) == before
        assert content(source) == before


def test_a_large_file_takes_no_time_and_no_room(taker: Taker, source: Path) -> None:
    (source / "model").write_bytes(bytes(LARGE))
    snapshot, stamps = taker.take(source)
    assert (snapshot / "model").samefile(source / "model")
    assert stamps.keys() == {"model"}
    assert unchanged(snapshot, stamps, "model")


def test_a_snapshot_that_had_no_room_is_taken_again_without_copies(
    taker: Taker, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a full disk takes then is what it takes always: links."""
    (source / "model").write_bytes(bytes(LARGE))
    (source / "step").write_text("7")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        with pytest.raises(OSError, match="No space left"):
            taker.take(source)
    _, stamps = taker.take(source)
    assert stamps.keys() == {"model"}


def test_a_small_file_may_be_written_to_at_once(taker: Taker, source: Path) -> None:
    (source / "step").write_text("7")
    snapshot, stamps = taker.take(source)
    (source / "step").write_text("8")
    assert (snapshot / "step").read_text() == "7"
    assert unchanged(snapshot, stamps, "step")


def overwrite(file: Path) -> None:
    file.write_bytes(bytes([1]) * LARGE)


def change_one_byte(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(LARGE // 2)
        opened.write(b"\1")


def append(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"\1")


def truncate(file: Path) -> None:
    os.truncate(file, 10)


def copy_over(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(bytes([1]) * LARGE)
    with other.open("rb") as reading, file.open("r+b") as writing:
        os.sendfile(writing.fileno(), reading.fileno(), 0, LARGE)


def change_mapped(file: Path) -> None:
    import mmap

    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        mapped[5] = 1
        mapped.flush()


@pytest.mark.parametrize(
    "write", [overwrite, change_one_byte, append, truncate, copy_over, change_mapped]
)
def test_a_linked_file_that_is_written_to_in_place_is_noticed(
    taker: Taker, source: Path, write: Callable[[Path], None]
) -> None:
    file = source / "model"
    file.write_bytes(bytes(LARGE))
    snapshot, stamps = taker.take(source)
    write(file)
    assert not unchanged(snapshot, stamps, "model")


def test_a_truncated_file_is_noticed_before_its_time_is_another(taker: Taker, source: Path) -> None:
    """Some file systems set it last, and large files take a while."""
    file = source / "model"
    file.write_bytes(bytes(LARGE))
    snapshot, stamps = taker.take(source)
    status = file.stat()
    file.write_bytes(b"")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not unchanged(snapshot, stamps, "model")


def test_a_write_in_the_same_tick_of_the_kernels_clock_is_noticed(
    tmp_path: Path, taker: Taker
) -> None:
    """The clock that files are stamped with stands still for milliseconds."""
    for number in range(200):
        source = tmp_path / f"source-{number}"
        source.mkdir()
        file = source / "model"
        with file.open("wb", buffering=0) as opened:
            opened.truncate(LARGE)
            snapshot, stamps = taker.take(source)
            opened.write(b"\1")
        assert not unchanged(snapshot, stamps, "model")


@pytest.mark.parametrize("gone", ["deleted", "renamed", "replaced"])
def test_what_the_caller_does_with_names_is_no_change(
    taker: Taker, source: Path, gone: str
) -> None:
    file = source / "model"
    file.write_bytes(bytes(LARGE))
    snapshot, stamps = taker.take(source)
    match gone:
        case "deleted":
            file.unlink()
        case "renamed":
            file.rename(source / "other")
        case "replaced":
            (source / "new").write_bytes(bytes([1]) * LARGE)
            (source / "new").replace(file)
    assert unchanged(snapshot, stamps, "model")
    assert (snapshot / "model").read_bytes() == bytes(LARGE)


def test_a_file_that_is_rewritten_in_place_is_copied_from_the_second_time_on(
    taker: Taker, source: Path
) -> None:
    file = source / "model"
    file.write_bytes(bytes(LARGE))
    taker.take(source)
    for number in (1, 2, 3):
        file.write_bytes(bytes([number]) * LARGE)
        snapshot, stamps = taker.take(source)
        assert stamps == {}
        overwrite(file)
        assert (snapshot / "model").read_bytes() == bytes([number]) * LARGE


def test_of_many_files_those_are_forgotten_that_were_reported_first(
    taker: Taker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_REMEMBERED", 8)
    sources = [tmp_path / f"reported-{number}" for number in range(9)]
    for source in sources:
        source.mkdir()
        (source / "model").write_bytes(bytes(LARGE))
        taker.take(source)
    for source in sources[1:]:
        _, stamps = taker.take(source)
        assert stamps == {}
    assert taker.take(sources[0])[1].keys() == {"model"}


def test_a_file_that_is_replaced_is_linked_every_time(taker: Taker, source: Path) -> None:
    for number in range(4):
        (source / "new").write_bytes(bytes([number]) * LARGE)
        (source / "new").replace(source / "model")
        snapshot, stamps = taker.take(source)
        assert stamps.keys() == {"model"}
        assert (snapshot / "model").samefile(source / "model")


@pytest.mark.parametrize("link", [os.link, os.symlink], ids=["hard link", "symbolic link"])
def test_a_file_with_two_names_is_no_file_that_was_written_to(
    taker: Taker, source: Path, link: Callable[[Path, Path], None]
) -> None:
    """As `last.ckpt` beside `epoch=3.ckpt`."""
    (source / "epoch=3.ckpt").write_bytes(bytes(LARGE))
    link(source / "epoch=3.ckpt", source / "last.ckpt")
    snapshot, stamps = taker.take(source)
    assert content(snapshot) == content(source)
    for name in ("epoch=3.ckpt", "last.ckpt"):
        assert unchanged(snapshot, stamps, name)
    change_one_byte(source / "last.ckpt")
    for name in stamps:
        assert not unchanged(snapshot, stamps, name)


@pytest.mark.parametrize("link", [os.link, os.symlink], ids=["hard link", "symbolic link"])
def test_a_file_that_several_reports_share_is_no_file_that_was_written_to(
    taker: Taker, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    """The frozen half of a model, say, while the report before is still on its way."""
    frozen = tmp_path / "frozen"
    frozen.write_bytes(bytes(LARGE))
    taken = []
    for number in range(3):
        source = tmp_path / f"source-{number}"
        source.mkdir()
        link(frozen, source / "frozen")
        taken.append(taker.take(source))
        assert all(unchanged(snapshot, stamps, "frozen") for snapshot, stamps in taken)
    change_one_byte(frozen)
    assert not any(unchanged(snapshot, stamps, "frozen") for snapshot, stamps in taken if stamps)


def test_what_several_ranks_report_of_one_directory_was_not_written_to(
    tmp_path: Path, source: Path
) -> None:
    """As shards that each rank has written into it."""
    (source / "shard").write_bytes(bytes(LARGE))
    taken = []
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        taken.append(Taker(tmp_path / str(rank)).take(source))
        assert all(unchanged(snapshot, stamps, "shard") for snapshot, stamps in taken)
    change_one_byte(source / "shard")
    assert not any(unchanged(snapshot, stamps, "shard") for snapshot, stamps in taken)


def test_a_write_between_two_ranks_reports_is_noticed(tmp_path: Path, source: Path) -> None:
    """The second rank sets the file's time once more."""
    file = source / "shard"
    taken = []
    for rank, microsecond in enumerate((100, 102)):
        (tmp_path / str(rank)).mkdir()
        file.write_bytes(bytes([rank]) * LARGE)
        os.utime(file, ns=(0, 10**18 + 1000 * microsecond))
        taken.append(Taker(tmp_path / str(rank)).take(source))
    assert [unchanged(*each, "shard") for each in taken] == [False, True]


def test_a_directory_that_cannot_be_listed_is_not_left_out(
    taker: Taker, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "shards").mkdir()
    (source / "shards" / "0").write_text("0")
    (source / "model").write_text("m")
    scan = os.scandir

    def failing(path: str | Path | int) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith("shards"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return scan(path)

    monkeypatch.setattr("os.scandir", failing)
    with pytest.raises(OSError, match=r"Stale file handle: .*source/shards"):
        taker.take(source)


def test_a_file_of_another_file_system_is_copied(taker: Taker, elsewhere: Path) -> None:
    (elsewhere / "model").write_bytes(bytes(LARGE))
    snapshot, stamps = taker.take(elsewhere)
    assert stamps == {}
    overwrite(elsewhere / "model")
    assert content(snapshot) == {"model": bytes(LARGE)}


def test_links_are_followed_and_left_alone(
    taker: Taker, source: Path, elsewhere: Path, tmp_path: Path
) -> None:
    (elsewhere / "far").write_bytes(bytes(LARGE))
    inside = tmp_path / "shared"
    inside.mkdir()
    (inside / "weights").write_bytes(bytes(LARGE))
    (source / "far").symlink_to(elsewhere / "far")
    (source / "directory").symlink_to(inside)
    snapshot, _ = taker.take(source)
    assert content(snapshot) == {"far": bytes(LARGE), "directory/weights": bytes(LARGE)}
    assert not any(path.is_symlink() for path in snapshot.rglob("*"))
    assert (source / "far").is_symlink()
    assert (source / "directory").is_symlink()
    assert content(inside) == {"weights": bytes(LARGE)}


def test_a_link_to_nothing_is_an_error_that_names_it(taker: Taker, source: Path) -> None:
    (source / "model").symlink_to(source / "deleted")
    with pytest.raises(FileNotFoundError, match="model"):
        taker.take(source)


def test_the_callers_files_stay_as_they_are(taker: Taker, source: Path) -> None:
    """But for a microsecond."""
    for name, size in (("small", 10), ("large", LARGE)):
        (source / name).write_bytes(bytes(size))
        (source / name).chmod(0o440)
    before = {path.name: path.stat() for path in source.iterdir()}
    snapshot, _ = taker.take(source)
    for path in snapshot.iterdir():
        path.unlink()
    assert content(source) == {"small": bytes(10), "large": bytes(LARGE)}
    for name, was in before.items():
        now = (source / name).stat()
        assert (now.st_ino, now.st_mode, now.st_nlink) == (was.st_ino, was.st_mode, 1)
        assert abs(now.st_mtime_ns - was.st_mtime_ns) <= 1000


def test_the_manifest_of_a_checkpoint_that_is_reported_again_stays_out(
    taker: Taker, source: Path
) -> None:
    (source / MANIFEST_NAME).write_text("{}")
    (source / "base").mkdir()
    (source / "base" / MANIFEST_NAME).write_text("of the model that this one was made from")
    snapshot, _ = taker.take(source)
    assert content(snapshot).keys() == {f"base/{MANIFEST_NAME}"}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return store_in(tmp_path / "run")


DIRECTORY = directory_name(0, ATTEMPT)


@pytest.mark.parametrize("own", ["kept", "deleted"])
def test_what_is_stored_is_not_the_callers_file(
    store: CheckpointStore, taker: Taker, source: Path, own: str
) -> None:
    """Whoever still has it open may write to it: not to the checkpoint."""
    file = source / "model"
    file.write_bytes(bytes(LARGE))
    snapshot, stamps = taker.take(source)
    if own == "deleted":
        file.unlink()
    made = manifest(0, store.store_part(DIRECTORY, 0, snapshot, stamps).files)
    store.commit(made)
    if own == "kept":
        overwrite(file)
    assert store.damage(made) == ()
    assert (directory_of(store, made) / "model").read_bytes() == bytes(LARGE)


def test_a_file_that_rank_0_has_stored_may_change_on_another_rank(
    store: CheckpointStore, taker: Taker, source: Path, tmp_path: Path
) -> None:
    """Rank 0's is kept. Only what the other rank adds must be as it was."""
    (source / "model").write_bytes(bytes(LARGE))
    own = Path(shutil.copytree(source, tmp_path / "of_rank_1"))
    made = manifest(0, store.store_part(DIRECTORY, 0, *taker.take(source)).files)
    store.commit(made)
    snapshot, stamps = taker.take(own)
    overwrite(own / "model")
    known = {file.name: file.sha256 for file in made.files}
    part = store.store_part(DIRECTORY, 1, snapshot, stamps, stored_already=known)
    assert (part.files, part.left_out) == ((), ())
    assert store.damage(made) == ()


def test_a_snapshot_that_has_changed_is_not_stored(
    store: CheckpointStore, taker: Taker, source: Path
) -> None:
    (source / "model").write_bytes(bytes(LARGE))
    snapshot, stamps = taker.take(source)
    overwrite(source / "model")
    with pytest.raises(SnapshotChangedError, match="'model' was written to before it was stored"):
        store.store_part(DIRECTORY, 0, snapshot, stamps)
    assert not list(Path(store.location_of(DIRECTORY).address).iterdir())
    store.sweep(before=AttemptId(token=2, attempt=0))
    assert directories(store) == []
