"""Somebody else writes to a run's directory, too: nothing there is followed out of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from polytrain.checkpoint.manifest import MANIFEST_NAME
from polytrain.storage.local import LocalStorage

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
