"""The node's own disk: what nobody holds doesn't stay there, and what somebody holds does."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from polytrain.checkpoint.scratch import (
    Scratch,
    directory_of_attempt,
    temporary_directories_in,
)
from polytrain.checkpoint.staging import Stagings

HOLD = """
import sys
from polytrain.checkpoint.scratch import Scratch

scratch = Scratch.hold(sys.argv[1])
(scratch.path / "snapshot").write_text("large")
print(scratch.path, flush=True)
sys.stdin.read()
"""

Holder = Callable[[str], subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's directory for temporary files is the test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def holder() -> Iterator[Holder]:
    """Starts processes that hold a run's directory until they are killed."""
    processes: list[subprocess.Popen[str]] = []

    def hold(token: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert Path(process.stdout.readline().strip(), "snapshot").exists()
        return process

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def runs(temporary: Path) -> list[str]:
    """Tokens of the runs that have a directory on this node."""
    return sorted(path.name.removeprefix("run-") for path in temporary.glob("polytrain-*/*"))


def test_a_directory_is_its_users_alone() -> None:
    scratch = Scratch.hold("run")
    for directory in (scratch.path, scratch.path.parent):
        assert directory.stat().st_mode & 0o777 == 0o700
    scratch.release()


@pytest.mark.parametrize("deleted", [".", "run-run", "run-run/in-use"])
def test_what_the_system_deletes_as_old_is_made_again(deleted: str, temporary: Path) -> None:
    """A run may outlast what stays in the system's directory for temporary files."""
    scratch = Scratch.hold("run")
    home = scratch.path.parent

    def delete() -> None:
        path = home / deleted
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def make_attempt() -> None:
        directory_of_attempt(scratch.path, rank=0, attempt=1)

    def make_staged() -> None:
        Stagings(scratch=scratch.path, near=None).new("checkpoint", 0)

    for make in (make_attempt, make_staged, scratch.hold_again):
        delete()
        make()
        for directory in (scratch.path, home):
            assert directory.stat().st_mode & 0o777 == 0o700
    Scratch.hold("next").release()
    assert runs(temporary) == ["run"]
    delete()
    scratch.release()
    assert list(temporary.iterdir()) == []


def test_a_directory_goes_with_its_last_holder(temporary: Path) -> None:
    first, second = Scratch.hold("run"), Scratch.hold("run")
    assert first.path == second.path
    (first.path / "snapshot").write_text("large")
    first.release()
    assert (second.path / "snapshot").exists()
    second.release()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_has_left_is_removed_by_the_next_run(
    temporary: Path, holder: Holder
) -> None:
    dead, living = holder("dead"), holder("living")
    dead.kill()
    dead.wait()
    assert runs(temporary) == ["dead", "living"]
    scratch = Scratch.hold("next")
    assert runs(temporary) == ["living", "next"]
    assert (scratch.path.parent / "run-living" / "snapshot").exists()
    living.kill()
    living.wait()
    Scratch.hold("another").release()
    assert runs(temporary) == ["next"]
    scratch.release()


def test_a_process_that_is_killed_takes_nothing_from_the_others_of_its_run(
    temporary: Path, holder: Holder
) -> None:
    scratch = Scratch.hold("run")
    dead = holder("run")
    dead.kill()
    dead.wait()
    Scratch.hold("next").release()
    assert runs(temporary) == ["run"]
    assert (scratch.path / "snapshot").exists()
    scratch.release()
    assert runs(temporary) == []


def test_a_child_of_the_holder_does_not_hold(temporary: Path) -> None:
    """A lock would outlive its process in one that it has started."""
    scratch = Scratch.hold("run")
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        scratch.release()
        assert runs(temporary) == []
    finally:
        child.communicate(b"\n")


@contextmanager
def forked_child() -> Iterator[None]:
    """Have a child of this process meanwhile, with all that children of it inherit."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"x")
        signal.pause()
    try:
        os.read(reader, 1)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_forked_child_of_the_holder_does_not_hold(temporary: Path) -> None:
    """One of a user's driver may outlive the run, whose files would stay as long."""
    scratch = Scratch.hold("run")
    with forked_child():
        scratch.release()
        assert runs(temporary) == []


def test_a_forked_child_does_not_keep_the_others_from_their_turn() -> None:
    scratch = Scratch.hold("run")
    with ExitStack() as stack:
        with scratch.one_at_a_time("restore"):
            stack.enter_context(forked_child())
        with (scratch.path / "restore.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    scratch.release()


def test_whoever_holds_has_a_directory_whoever_tidies_up(temporary: Path) -> None:
    """Runs begin and end on one node all the time."""

    def begin_and_end(number: int) -> None:
        for turn in range(200):
            scratch = Scratch.hold(f"run-{(number + turn) % 3}")
            file = scratch.path / f"snapshot-{number}"
            file.write_text(f"{turn}")
            assert file.read_text() == f"{turn}"
            scratch.release()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(begin_and_end, range(6)))
    assert runs(temporary) == []


def test_another_users_directory_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may make directories there, of whatever name."""
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(
        PermissionError, match=f"polytrain-{me + 1} belongs to another user.*TMPDIR"
    ):
        Scratch.hold("run")


def test_a_file_system_without_locks_is_refused_with_the_remedy(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=f"in {temporary}/.*Function not implemented.*set TMPDIR"):
        Scratch.hold("a")


def test_a_thing_is_done_by_one_at_a_time() -> None:
    scratches = [Scratch.hold("run") for _ in range(4)]
    inside: list[int] = []
    begin = threading.Barrier(len(scratches))

    def do(number: int) -> None:
        begin.wait()
        for _ in range(50):
            with scratches[number].one_at_a_time("restore"):
                inside.append(number)
                assert inside == [number]
                inside.remove(number)

    with ThreadPoolExecutor(len(scratches)) as threads:
        list(threads.map(do, range(len(scratches))))
    with scratches[0].one_at_a_time("restore"), scratches[1].one_at_a_time("another thing"):
        pass
    for scratch in scratches:
        scratch.release()


def files_below(directory: Path) -> list[str]:
    """Everything in a directory and below, by its name relative to it."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def make_valuable(directory: Path) -> list[str]:
    """Put directories of the user's own into one; returns what `files_below` says of it."""
    for name in (".ssh", "photos", "run-photos", "0123456789abcdef"):
        (directory / name).mkdir(parents=True)
        (directory / name / "valuable").write_text("mine")
    return files_below(directory)


def test_a_link_in_place_of_the_directory_is_refused_and_nothing_is_deleted(
    temporary: Path,
) -> None:
    valuable = temporary / "home"
    before = make_valuable(valuable)
    link = temporary / f"polytrain-{os.getuid()}"
    link.symlink_to(valuable)
    with pytest.raises(PermissionError, match=f"{link.name} is a symbolic link.*TMPDIR"):
        Scratch.hold("run")
    assert files_below(valuable) == before


def test_a_link_in_place_of_a_runs_directory_is_refused(temporary: Path) -> None:
    first = Scratch.hold("run")
    elsewhere = temporary / "elsewhere"
    first.path.rename(elsewhere)
    first.path.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="is a symbolic link"):
        Scratch.hold("run")
    first.release()


def test_a_directory_that_others_may_enter_is_refused(temporary: Path) -> None:
    home = temporary / f"polytrain-{os.getuid()}"
    home.mkdir()
    home.chmod(0o755)
    with pytest.raises(PermissionError, match=f"{home.name} has mode 0755.*chmod 700.*TMPDIR"):
        Scratch.hold("run")


def test_only_directories_that_a_run_has_made_are_removed(temporary: Path, holder: Holder) -> None:
    """By their name and by the mark in them: either alone isn't enough."""
    dead = holder("dead")
    dead.kill()
    dead.wait()
    home = temporary / f"polytrain-{os.getuid()}"
    left = next(home.iterdir())
    elsewhere = temporary / "elsewhere"
    shutil.copytree(left, elsewhere)
    shutil.copytree(left, home / "photos of a run")
    make_valuable(home)
    (home / "run-link").symlink_to(elsewhere)
    (home / "run-file").write_text("mine")
    (left / "link").symlink_to(home / "photos")
    before = files_below(home), files_below(elsewhere)
    Scratch.hold("next").release()
    after = files_below(home), files_below(elsewhere)
    assert not left.exists()
    assert after == ([name for name in before[0] if not name.startswith(left.name)], before[1])


def test_what_cannot_be_removed_now_is_removed_by_the_next_run(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a deleted file in its directory while somebody has it open, as here the lock."""

    def refuse(directory: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(directory))

    scratch = Scratch.hold("a")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", refuse)
        scratch.release()
    assert len(runs(temporary)) == 1
    Scratch.hold("b").release()
    assert runs(temporary) == []


def test_what_was_left_by_a_process_that_died_while_it_removed_is_removed(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it had marked a directory, or in the middle of removing one."""
    remove = shutil.rmtree
    for number in range(3):
        scratch = Scratch.hold(f"dead-{number}")
        for name in ("a", "restored", "z"):
            (scratch.path / name).mkdir()
        calls = 0

        def dies(path: Path, number: int = number, **kwargs: bool) -> None:
            nonlocal calls
            calls += 1
            if calls > number:
                raise KeyboardInterrupt
            remove(path, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(shutil, "rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            scratch.release()
        monkeypatch.setattr(shutil, "rmtree", remove)
        # The next one removes what this one has left.
        assert len(runs(temporary)) == 1
    (temporary / f"polytrain-{os.getuid()}" / "run-unmarked").mkdir()
    Scratch.hold("next").release()
    assert list(temporary.iterdir()) == []


def test_temporary_directories_of_an_attempt_are_in_the_runs(temporary: Path) -> None:
    """Those with a name of their own too. The next attempt and the end of the run remove them."""
    scratch = Scratch.hold("a")
    for attempt, left in enumerate([{}, {"prefix": "mine-"}, {"suffix": ".model"}]):
        with temporary_directories_in(scratch.path, rank=0, attempt=attempt):
            made = Path(tempfile.TemporaryDirectory(**left, ignore_cleanup_errors=True).name)
            kept = Path(tempfile.mkdtemp(dir=made.parent))
        assert scratch.path in made.parents
        assert [each.name for each in kept.parent.parent.iterdir()] == [str(attempt)]
    scratch.release()
    assert list(temporary.iterdir()) == []


def test_temporary_directories_are_where_they_are_asked_for(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory that the function chooses; of other kinds than `TemporaryDirectory` all."""
    chosen = temporary / "chosen"
    chosen.mkdir()
    scratch = Scratch.hold("a")
    with temporary_directories_in(scratch.path, rank=0, attempt=0):
        with tempfile.TemporaryDirectory(dir=chosen) as directory:
            assert Path(directory).parent == chosen
        with tempfile.TemporaryDirectory(prefix=b"bytes-") as directory:
            assert Path(os.fsdecode(directory)).parent == temporary
        with tempfile.NamedTemporaryFile() as file:
            assert Path(file.name).parent == temporary
        assert Path(tempfile.mkdtemp()).parent == temporary
        shutil.rmtree(scratch.path / "rank-0")
        with tempfile.TemporaryDirectory() as directory:
            assert Path(directory).parent == temporary
        monkeypatch.setattr(tempfile, "tempdir", str(chosen))
        with tempfile.TemporaryDirectory() as directory:
            assert Path(directory).parent == chosen
    monkeypatch.setattr(tempfile, "tempdir", None)
    with tempfile.TemporaryDirectory() as directory:
        assert Path(directory).parent == temporary
    scratch.release()
