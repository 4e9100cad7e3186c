"""Somebody else writes to a run's directory, too: nothing there is followed out of it."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.fs as pafs
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from tests.unit.checkpoint.checkpoints import commit, stage, store_in

from polytrain.checkpoint.manifest import MANIFEST_NAME, AttemptId, directory_name
from polytrain.checkpoint.staging import Snapshots, Stagings
from polytrain.errors import CheckpointError
from polytrain.output.rank_log import RankLog
from polytrain.prediction.output_files import OutputFiles
from polytrain.run.lease import leased
from polytrain.run.requests import RemoteRequests, RequestKind, ask
from polytrain.storage.beneath import Beneath, ForeignFileError
from polytrain.storage.local import LocalStorage
from polytrain.storage.location import Location, storage_problems
from polytrain.trackers.csv_file import CSV
from polytrain.trackers.tensorboard import EventFiles
from polytrain.trackers.tracker import Row, TrackedRun

SECRET = "nobody else's\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory of the user's beside the run, with files in it."""
    home = tmp_path / "home"
    (home / "deep").mkdir(parents=True)
    for name in ("secret", "deep/secret", MANIFEST_NAME):
        (home / name).write_text(SECRET)
    return home


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    return run


@pytest.fixture
def storage(run: Path) -> LocalStorage:
    return LocalStorage(run, retry_s=0)


@pytest.fixture(autouse=True)
def _home_stays(home: Path) -> object:
    """Whatever a test plants: the user's other files are as they were."""
    yield
    files = {path.relative_to(home).as_posix(): path for path in home.rglob("*") if path.is_file()}
    assert {*files} == {"secret", "deep/secret", MANIFEST_NAME}
    assert {path.read_text() for path in files.values()} == {SECRET}


def calls(storage: LocalStorage, path: str, file: Path) -> dict[str, Callable[[], object]]:
    """Everything that a storage does with one file."""
    file.write_text("new")
    return {
        "read": lambda: storage.read(path),
        "write": lambda: storage.write(path, b"new"),
        "create": lambda: storage.create(path, b"new"),
        "put": lambda: storage.put(file, path, move=False),
        "move": lambda: storage.put(file, path, move=True),
        "get": lambda: storage.get(path, file.with_name("copy")),
        "digest": lambda: storage.digest(path),
        "delete": lambda: storage.delete(path),
        "delete_below": lambda: storage.delete_below(path),
        "open_log": lambda: storage.open_log(path, series="1"),
        "read_log": lambda: list(storage.read_log(path)),
        "log_state": lambda: storage.log_state(path),
    }


NAMES = tuple(calls(LocalStorage(Path(), retry_s=0), "", Path(os.devnull)))


@pytest.mark.parametrize("name", NAMES)
def test_no_call_goes_through_a_linked_directory(
    storage: LocalStorage, run: Path, home: Path, tmp_path: Path, name: str
) -> None:
    (run / "inner").mkdir()
    (run / "inner" / "linked").symlink_to(home)
    call = calls(storage, "inner/linked/deep/secret", tmp_path / "file")[name]
    with pytest.raises(PermissionError, match=r"inner/linked is a symbolic link.*Remove it"):
        call()


@pytest.mark.parametrize("name", ["read", "get", "digest", "open_log", "read_log", "log_state"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_file_is_a_file(
    storage: LocalStorage, run: Path, home: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """A pipe that nobody writes to would be waited for without end."""
    if kind == "link":
        (run / "file").symlink_to(home / "secret")
    else:
        os.mkfifo(run / "file")
    call = calls(storage, "file", tmp_path / "local")[name]
    what = "a symbolic link" if kind == "link" else "a named pipe"
    with pytest.raises(PermissionError, match=rf"run/file is {what}.*Remove it"):
        call()


@pytest.mark.parametrize("name", ["write", "put", "move"])
def test_a_file_takes_the_place_of_a_link(
    storage: LocalStorage, run: Path, home: Path, tmp_path: Path, name: str
) -> None:
    (run / "file").symlink_to(home / "secret")
    calls(storage, "file", tmp_path / "local")[name]()
    assert not (run / "file").is_symlink()
    assert (run / "file").read_text() == "new"


def test_a_lease_is_not_created_through_a_link(
    storage: LocalStorage, run: Path, home: Path
) -> None:
    (run / "leases").mkdir()
    (run / "leases" / "000001").symlink_to(home / "new")
    assert storage.create("leases/000001", b"mine") is None


@pytest.mark.parametrize("name", ["read", "write", "delete", "delete_below", "put"])
@pytest.mark.parametrize("path", ["../home/secret", "a/../../home/secret", ""])
def test_no_name_leads_out_of_the_run(
    storage: LocalStorage, run: Path, tmp_path: Path, name: str, path: str
) -> None:
    (run / "a").mkdir()
    call = calls(storage, path, tmp_path / "file")[name]
    with pytest.raises(PermissionError, match="isn't used as a path"):
        call()
    assert run.is_dir()


def test_what_is_planted_is_not_listed_and_is_named(
    storage: LocalStorage, run: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage.write("c/real", b"1")
    (run / "c" / "file").symlink_to(home / "secret")
    (run / "c" / "directory").symlink_to(home)
    os.mkfifo(run / "c" / "pipe")
    with caplog.at_level(logging.WARNING):
        assert storage.list("") == {"c/real": 1}
        storage.list("c")
    named = sorted(record.getMessage() for record in caplog.records)
    assert [text.partition(": ")[0] for text in named] == [
        f"{run}/c/directory is a symbolic link",
        f"{run}/c/file is a symbolic link",
        f"{run}/c/pipe is a named pipe",
    ]


def test_directories_in_too_many_levels_are_left_out(
    run: Path, storage: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """As many as no recursive code could follow."""
    storage.write("/".join(["a"] * 99), b"a file of the run's own")
    (run / "b").mkdir()
    at = os.open(run / "b", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("deep", dir_fd=at)
        inner = os.open("deep", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
    assert len(storage.list("")) == 1
    assert f"{run}/b/deep/deep has directories in more than 100 levels" in caplog.text
    for refused in (Beneath(run).check, lambda: storage.delete_below("b")):
        with pytest.raises(ForeignFileError, match="has directories in more than 100 levels"):
            refused()
    storage.delete_below("a")
    assert not storage.list("")
    # What else cleans up may be recursive.
    os.rename(run / "b", run.with_name("planted"))
    subprocess.run(["rm", "-rf", run.with_name("planted")], check=True)


def test_the_root_may_be_reached_through_links(run: Path, tmp_path: Path) -> None:
    """Home directories are, on many clusters."""
    (tmp_path / "linked").symlink_to(run)
    linked = LocalStorage(tmp_path / "linked", retry_s=0)
    linked.write("a/b", b"1")
    assert linked.read("a/b") == (run / "a" / "b").read_bytes() == b"1"
    assert linked.list("") == {"a/b": 1}


def test_deleting_a_directory_deletes_links_and_not_what_they_lead_to(
    storage: LocalStorage, run: Path, home: Path
) -> None:
    storage.write("c/real", b"1")
    (run / "c" / "directory").symlink_to(home)
    storage.delete_below("c")
    assert list(run.iterdir()) == []


def test_a_file_that_has_a_name_elsewhere_is_not_appended_to(
    storage: LocalStorage, run: Path, home: Path
) -> None:
    (run / "journal").hardlink_to(home / "secret")
    with pytest.raises(PermissionError, match=r"run/journal.*hard link.*copy"):
        storage.open_log("journal", series="1")


ON_ARROW: Sequence[Callable[[Path], Location]] = (
    lambda run: Location.of(run, pafs.LocalFileSystem(), retry_s=0),
    lambda run: Location.of(
        run.name, pafs.SubTreeFileSystem(str(run.parent), pafs.LocalFileSystem()), retry_s=0
    ),
    lambda run: Location.of(run.name, DirFileSystem(str(run.parent)), retry_s=0),
)


@pytest.mark.parametrize("location", ON_ARROW, ids=["local", "below a directory", "fsspec"])
def test_a_local_file_system_that_is_passed_is_no_way_around(
    run: Path, home: Path, location: Callable[[Path], Location]
) -> None:
    storage = location(run).open()
    storage.write("c/real", b"1")
    (run / "c" / "directory").symlink_to(home)
    (run / "c" / "file").symlink_to(home / "secret")
    assert storage.list("") == {"c/real": 1}
    storage.delete_below("c")
    assert storage.list("") == {}


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_draft_that_was_planted_gets_into_no_journal(
    storage: LocalStorage, run: Path, home: Path, kind: str
) -> None:
    draft = run / "journal.drafts-0"
    draft.symlink_to(home / "secret") if kind == "symbolic" else draft.hardlink_to(home / "secret")
    with storage.open_log("journal", series="1") as log:
        log.write("line\n")
    assert (run / "journal").read_text() == "line\n"
    assert b"".join(storage.read_log("journal")) == b"line\n"
    draft.unlink()


def test_a_driver_deletes_no_requests_but_its_own(
    run: Path, home: Path, storage: LocalStorage
) -> None:
    """Those of earlier drivers it deletes within a second, and everything else stays."""
    other = "requests/000002/0123456789abcdef"
    storage.write(other, b"{}")
    storage.write(f"{other}.answer", b"{}")
    storage.write("requests/notes.txt", b"mine")
    storage.write("requests/000002/notes.txt", b"mine")
    (run / "requests" / "000003").symlink_to(home)
    with RemoteRequests(storage, 4, stop=lambda _: None, stacks=lambda _: None):
        ask(storage, 4, RequestKind.STOP, timeout_s=30)
    assert storage.list("requests") == {"requests/notes.txt": 4, "requests/000002/notes.txt": 4}


def test_linked_requests_empty_no_directory(run: Path, home: Path, storage: LocalStorage) -> None:
    (run / "requests").symlink_to(home)
    looked = threading.Event()
    listed = storage.list

    def list_requests(below: str) -> dict[str, int]:
        try:
            return listed(below)
        finally:
            looked.set()

    storage.list = list_requests  # type: ignore[method-assign]
    with RemoteRequests(storage, 4, stop=lambda _: None, stacks=lambda _: None):
        assert looked.wait(30)


def test_a_run_whose_leases_are_a_link_is_not_taken(
    run: Path, home: Path, storage: LocalStorage
) -> None:
    (run / "leases").symlink_to(home)
    with (
        pytest.raises(PermissionError, match="leases is a symbolic link"),
        leased(storage, storage),
    ):
        pass


CHECKPOINT = directory_name(1, AttemptId(token=1, attempt=0))


def test_a_checkpoint_with_a_link_in_the_place_of_a_file_is_damaged(run: Path, home: Path) -> None:
    store = store_in(run)
    made = commit(store, 1, model="x" * len(SECRET))
    (run / "checkpoints" / made.directory / "model").unlink()
    (run / "checkpoints" / made.directory / "model").symlink_to(home / "secret")
    assert {*store.find(since_token=0).damaged} == {made.directory}


def test_what_is_swept_is_no_link(run: Path, home: Path) -> None:
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / CHECKPOINT).symlink_to(home)
    store_in(run).sweep(before=AttemptId(token=9, attempt=0))
    (run / "checkpoints" / CHECKPOINT).unlink()
    (run / "checkpoints").rmdir()
    (run / "checkpoints").symlink_to(home)
    (home / CHECKPOINT).mkdir()
    with pytest.raises(PermissionError, match="checkpoints is a symbolic link"):
        store_in(run).sweep(before=AttemptId(token=9, attempt=0))
    (home / CHECKPOINT).rmdir()


def test_what_earlier_attempts_have_staged_is_not_deleted_through_a_link(
    run: Path, home: Path
) -> None:
    (home / f"{CHECKPOINT}-rank_0").mkdir()
    (run / "staging").symlink_to(home)
    with pytest.raises(OSError, match="staging is a symbolic link"):
        store_in(run).clear_staging(before=AttemptId(token=9, attempt=0))
    (home / f"{CHECKPOINT}-rank_0").rmdir()


def test_nothing_is_staged_through_a_link(run: Path, home: Path, tmp_path: Path) -> None:
    (run / "staging").symlink_to(home)
    with pytest.raises(PermissionError, match="staging is a symbolic link"):
        Stagings(scratch=tmp_path, near=run / "staging").new(CHECKPOINT, 0)


def test_a_staged_link_is_not_stored(run: Path, home: Path) -> None:
    store = store_in(run)
    staged = stage(store, 1, model="weights")
    (staged / "more").symlink_to(home / "secret")
    with pytest.raises(PermissionError, match="more is a symbolic link"):
        store.store_part(CHECKPOINT, 0, staged, {})
    assert not list((run / "checkpoints").rglob("more"))


@pytest.mark.parametrize("move", [True, False])
def test_a_link_is_not_put(storage: LocalStorage, run: Path, home: Path, move: bool) -> None:
    (run / "staged").symlink_to(home / "secret")
    with pytest.raises(PermissionError, match="staged is a symbolic link"):
        storage.put(run / "staged", "stored", move=move)
    assert storage.list("") == {}


def test_a_committed_checkpoint_with_a_link_in_it_is_not_loaded(run: Path, home: Path) -> None:
    from polytrain import Checkpoint

    store = store_in(run)
    made = commit(store, 1, model="weights")
    directory = run / "checkpoints" / made.directory
    (directory / "history.json").symlink_to(home / "secret")
    with (
        pytest.raises(CheckpointError, match=r"history\.json is a symbolic link"),
        Checkpoint(str(directory)).as_directory(),
    ):
        pass


def tracked(run: Path, run_id: str = "") -> TrackedRun:
    return TrackedRun(
        name="run",
        address=str(run),
        key="key",
        run_id=run_id,
        directory=run,
        manifest_of=lambda address: None,
    )


def test_a_tracker_overwrites_no_other_file(run: Path, home: Path) -> None:
    (run / ".metrics.csv.new").symlink_to(home / "secret")
    sink = CSV().open(tracked(run))
    sink.write([Row(step=1, time=1.0, metrics={"loss": 1.0})])
    sink.write([Row(step=2, time=2.0, metrics={"new": 1.0})])
    sink.rewind(1)
    sink.close()
    assert "loss" in (run / "metrics.csv").read_text()


@pytest.mark.parametrize("kind", ["symbolic", "hard", "pipe"])
def test_a_tracker_writes_to_its_own_file(run: Path, home: Path, kind: str) -> None:
    file = run / "metrics.csv"
    if kind == "symbolic":
        file.symlink_to(home / "secret")
    elif kind == "hard":
        file.hardlink_to(home / "secret")
    else:
        os.mkfifo(file)
    with pytest.raises(PermissionError, match=file.name):
        CSV().open(tracked(run)).write([Row(step=1, time=1.0, metrics={"loss": 1.0})])
    file.unlink()


def test_event_files_are_not_written_through_a_link(run: Path, home: Path) -> None:
    pytest.importorskip("tensorboard")
    (home / "events.out.tfevents.1.host.polytrain").write_text(SECRET)
    (run / "tensorboard").symlink_to(home)
    with pytest.raises(PermissionError, match="tensorboard is a symbolic link"):
        EventFiles(run, "tensorboard")
    (home / "events.out.tfevents.1.host.polytrain").unlink()


@pytest.mark.parametrize("kind", ["directory", "file", "hard", "pipe"])
def test_a_rank_log_is_no_link(run: Path, home: Path, kind: str) -> None:
    if kind == "directory":
        (run / "logs").symlink_to(home)
    else:
        (run / "logs").mkdir()
    log = run / "logs" / "rank_0.log"
    if kind == "file":
        log.symlink_to(home / "secret")
    elif kind == "hard":
        log.hardlink_to(home / "secret")
    elif kind == "pipe":
        os.mkfifo(log)
    errors: list[OSError] = []
    file = RankLog(log, warn=errors.append)
    file.write("text\n", retry_s=0)
    file.close(deadline=0)
    assert all(isinstance(error, PermissionError) for error in errors)
    assert errors
    log.unlink(missing_ok=True)


def test_predictions_are_not_staged_through_a_link(run: Path, home: Path) -> None:
    import pyarrow as pa

    (run / "_staging").symlink_to(home)
    output = OutputFiles(location=Location.of(run, retry_s=0))
    with pytest.raises(PermissionError, match="_staging is a symbolic link"):
        output.clear_staging()
    with (
        pytest.raises(PermissionError, match="_staging is a symbolic link"),
        output.writing("part-0.parquet") as write,
    ):
        write(pa.table({"x": [1]}))


def test_a_snapshot_is_not_written_through_a_link(run: Path, home: Path, tmp_path: Path) -> None:
    reported = tmp_path / "reported"
    (reported / "deep").mkdir(parents=True)
    (reported / "secret").write_text("weights")
    (reported / "deep" / "secret").write_text("weights")
    (run / "deep").symlink_to(home / "deep")
    with pytest.raises(PermissionError, match="deep is a symbolic link"):
        Snapshots().take(reported, run)
    (run / "deep").unlink()
    (run / "secret").unlink()
    (run / "secret").symlink_to(home / "secret")
    with pytest.raises(FileExistsError):
        Snapshots().take(reported, run)


def test_a_directory_with_a_link_in_it_is_not_taken_for_a_new_run(run: Path, home: Path) -> None:
    (run / "data").symlink_to(home)
    [problem] = storage_problems(Location.of(run), num_workers=0)
    assert "exists already, and isn't a run" in problem.what
