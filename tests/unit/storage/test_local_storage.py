"""What is particular to directories: other names, other file systems, and what others do there."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.descriptors import opened, since

from polytrain.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "run", retry_s=0)


def everything(storage: LocalStorage) -> set[str]:
    root = Path(storage.root)
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_a_file_that_nobody_needs_is_moved_and_not_copied(
    storage: LocalStorage, tmp_path: Path
) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    inode = file.stat().st_ino
    storage.put(file, "c/model", move=True)
    assert (tmp_path / "run" / "c" / "model").stat().st_ino == inode
    assert not file.exists()


WRITER = """
import os, signal, sys
from pathlib import Path
from polytrain.storage.local import LocalStorage

def sync(descriptor):
    print("written", flush=True)
    signal.pause()

os.fsync = sync
LocalStorage(Path(sys.argv[1]), retry_s=0).write("c/model", bytes(1 << 20))
"""


def test_what_was_being_written_when_its_writer_died_is_no_file(storage: LocalStorage) -> None:
    storage.write("c/before", b"1")
    command = [sys.executable, "-c", WRITER, storage.root]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        writer.send_signal(signal.SIGKILL)
    assert len(everything(storage)) == 2
    assert storage.list("") == {"c/before": 1}
    with pytest.raises(FileNotFoundError):
        storage.read("c/model")


def test_what_could_not_be_written_leaves_nothing(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write("c/model", b"before")
    (tmp_path / "file").write_bytes(b"after")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writes: tuple[Callable[[], object], ...] = (
        lambda: storage.write("c/model", b"after"),
        lambda: storage.create("c/new", b"after"),
        lambda: storage.put(tmp_path / "file", "c/model", move=False),
        lambda: storage.put(tmp_path / "file", "c/model", move=True),
    )
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        for write in writes:
            with pytest.raises(OSError, match="No space left"):
                write()
    assert everything(storage) == {"c/model"}
    assert storage.read("c/model") == b"before"


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_a_file_is_created_once_where_there_are_no_hard_links(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.link", link)
    assert storage.create("leases/1", b"first") == "leases/1"
    assert storage.create("leases/1", b"second") is None
    assert storage.read("leases/1") == b"first"
    assert everything(storage) == {"leases/1"}


def test_a_link_that_is_there_although_its_maker_was_reported_otherwise_is_its_own(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an answer of NFS gets lost, and its client asks once more."""
    make_link = os.link

    def link(source: Any, target: Any, **options: Any) -> None:
        make_link(source, target, **options)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr("os.link", link)
    assert storage.create("leases/1", b"mine") == "leases/1"
    monkeypatch.setattr("os.link", make_link)
    assert storage.create("leases/1", b"theirs") is None


def test_a_directory_that_others_delete_while_it_is_listed_isnt_there(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write("checkpoints/1/model", b"1")
    storage.write("checkpoints/2/model", b"22")
    open_ = os.open

    def others_come_first(path: Any, *arguments: Any, **options: Any) -> int:
        if path == "1":
            shutil.rmtree(Path(storage.root, "checkpoints", "1"))
        return open_(path, *arguments, **options)

    monkeypatch.setattr("os.open", others_come_first)
    assert storage.list("checkpoints") == {"checkpoints/2/model": 2}


class Failing:
    """A call of the system that fails in between, and works for everybody else's files."""

    def __init__(self, call: Callable[..., Any], *, directory: Path, at: int = 0) -> None:
        self._call = call
        self._directory = str(directory)
        self._left = at

    def __call__(self, descriptor: int, *arguments: Any) -> Any:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(self._directory):
            return self._call(descriptor, *arguments)
        self._left -= 1
        if self._left == -1:
            raise OSError(errno.EIO, "Input/output error")
        if self._left >= 0 and arguments:
            # Some of it: the error comes with the rest.
            return self._call(descriptor, arguments[0][:7])
        return self._call(descriptor, *arguments)


def content(storage: LocalStorage) -> str:
    return b"".join(storage.read_log("journal")).decode()


def test_a_log_goes_on_after_an_error_in_the_middle_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path / "run", retry_s=30)
    with storage.open_log("journal", series="1") as log:
        log.write('{"line": 1}\n')
        monkeypatch.setattr("os.write", Failing(os.write, directory=tmp_path, at=1))
        log.write('{"line": "two é"}\n')
        log.write('{"line": 3}\n')
    assert (
        b"".join(storage.read_log("journal")).decode()
        == '{"line": 1}\n{"line": "two é"}\n{"line": 3}\n'
    )


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_log_is_opened_again_on_another_file_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """The server doesn't know the open file any more; without its last lines that is an error."""
    path, write = tmp_path / "run" / "journal", os.write
    storage = LocalStorage(tmp_path / "run", retry_s=30 if is_whole else 0)
    with storage.open_log("journal", series="1") as log:
        log.write('{"line": 1}\n')
        old = tmp_path / "old"
        path.rename(old)
        path.write_bytes(old.read_bytes() if is_whole else b"")

        def is_stale(descriptor: int, data: bytes) -> int:
            if os.path.samestat(old.stat(), os.fstat(descriptor)):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return write(descriptor, data)

        monkeypatch.setattr("os.write", is_stale)
        if is_whole:
            log.write('{"line": 2}\n')
            log.sync()
            assert b"".join(storage.read_log("journal")) == b'{"line": 1}\n{"line": 2}\n'
        else:
            for _ in range(2):
                with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                    log.write('{"line": 2}\n')


def test_a_log_is_synced_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path / "run", retry_s=30)
    with storage.open_log("journal", series="1") as log:
        log.write("line\n")
        monkeypatch.setattr("os.fsync", Failing(os.fsync, directory=tmp_path))
        log.sync()


@pytest.mark.parametrize(("call", "at"), [("fstat", 0), ("fstat", 1), ("write", 0)])
def test_a_log_that_cannot_be_opened_leaves_no_descriptor_open(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    """The writer that left drafts is gone: the next one has to write them."""
    before = opened()
    with storage.open_log("journal", series="1") as gone:
        gone.draft("draft\n")
    monkeypatch.setattr(f"os.{call}", Failing(getattr(os, call), directory=tmp_path, at=at))
    with pytest.raises(OSError, match="Input/output error"):
        storage.open_log("journal", series="2")
    # What earlier tests have left is closed at any time, and its number is free then.
    assert since(before) == {}


def test_a_log_that_cannot_be_closed_leaves_no_descriptor_open(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened()
    close, log = os.close, storage.open_log("journal", series="1")
    log.draft("draft\n")

    def closed_with_error(descriptor: int) -> None:
        # As NFS does: the descriptor is released all the same.
        close(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.close", closed_with_error)
        with pytest.raises(OSError, match="Input/output error"):
            log.__exit__()
    # What earlier tests have left is closed at any time, and its number is free then.
    assert since(before) == {}


def test_what_could_not_be_appended_comes_before_the_next_line(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody repeats it here; whoever writes on after the error loses nothing."""
    with storage.open_log("journal", series="1") as log:
        with monkeypatch.context() as patch:
            patch.setattr("os.write", Failing(os.write, directory=tmp_path, at=1))
            with pytest.raises(OSError, match="Input/output error"):
                log.write("first line\n")
        log.write("second line\n")
    assert content(storage) == "first line\nsecond line\n"


def test_a_draft_is_repeated_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path / "run", retry_s=30)
    with storage.open_log("journal", series="1") as log:
        log.write("line\n")
        log.draft("draft 1\n")
        monkeypatch.setattr("os.write", Failing(os.write, directory=tmp_path, at=1))
        log.draft("draft 2, longer\n")
        assert content(storage) == "line\n\ndraft 1\ndraft 2, longer\n"


def test_the_drafts_of_a_writer_that_is_gone_are_kept(storage: LocalStorage) -> None:
    gone = storage.open_log("journal", series="1")
    gone.write("one\n")
    gone.draft("draft\n")
    with storage.open_log("journal", series="2") as log:
        log.write("two\n")
        # It wasn't gone.
        gone.draft("late\n")
        gone.write("later\n")
        log.draft("draft 2\n")
        assert content(storage) == "one\ndraft\ntwo\nlater\n\ndraft 2\n"
        # One that was still paused before it had opened the log takes nothing from a later one.
        with storage.open_log("journal", series="1"):
            assert content(storage) == "one\ndraft\ntwo\nlater\n\ndraft 2\n"
    gone.__exit__(None, None, None)
