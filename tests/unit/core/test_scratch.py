"""The node's own disk: what nobody holds doesn't stay there, and what somebody holds does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polytrain.checkpoint.scratch import Scratch

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
    return sorted(path.name for path in temporary.glob("polytrain-*/*"))


def test_a_directory_is_its_users_alone() -> None:
    scratch = Scratch.hold("run")
    for directory in (scratch.path, scratch.path.parent):
        assert directory.stat().st_mode & 0o777 == 0o700
    scratch.release()


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
    assert (scratch.path.parent / "living" / "snapshot").exists()
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
