"""The zygote that a run leaves for the next: real processes, no Ray."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from polytrain.testing.processes import eventually
from polytrain.workers.processes import zygote_connection
from polytrain.workers.processes.cache import (
    KeptZygote,
    keep,
    kept_or_new_zygote,
    kept_processes,
    let_go,
)
from polytrain.workers.processes.zygote_connection import ZygoteSpec

SPEC = ZygoteSpec(name="", environment={}, modules=("json",), path=tuple(sys.path))


@pytest.fixture(autouse=True)
def _none_is_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # On a busy machine a zygote that has just been started doesn't answer, or end, within a second.
    monkeypatch.setattr(zygote_connection, "_ANSWER_S", 60.0)
    monkeypatch.setattr(zygote_connection, "CLEANED_UP_WITHIN_S", 60.0)
    let_go()
    yield
    let_go()


def pid_of(zygote: KeptZygote) -> int:
    pid = zygote.connection.pid
    assert pid is not None, "it was there before"
    return pid


def left_by_a_run(spec: ZygoteSpec = SPEC) -> int:
    zygote = kept_or_new_zygote(spec, "node")
    pid = pid_of(zygote)
    keep(zygote)
    return pid


def test_the_next_run_has_the_same() -> None:
    pid = left_by_a_run()
    assert kept_processes() == {pid}
    assert left_by_a_run() == pid
    let_go()
    assert kept_processes() == set()
    assert not psutil.pid_exists(pid)


def test_two_runs_at_a_time_have_one_each() -> None:
    first, second = kept_or_new_zygote(SPEC, "node"), kept_or_new_zygote(SPEC, "node")
    pids = {pid_of(first), pid_of(second)}
    assert len(pids) == 2
    kept = pid_of(second)
    keep(first)
    keep(second)
    assert {pid for pid in pids if psutil.pid_exists(pid)} == {kept}


def needs(*modules: str) -> ZygoteSpec:
    return replace(SPEC, modules=modules)


def test_what_a_library_makes_when_it_is_imported_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "makes_one.py").write_text(
        "import os, tempfile\n"
        "directory = tempfile.TemporaryDirectory(dir=os.path.dirname(__file__), prefix='made-')\n"
    )
    left_by_a_run(replace(SPEC, modules=("makes_one",), path=(str(tmp_path), *SPEC.path)))
    assert eventually(lambda: [*tmp_path.glob("made-*")] != [])
    let_go()
    assert [*tmp_path.glob("made-*")] == []


def test_a_run_that_needs_others_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pid, another = left_by_a_run(), left_by_a_run(needs("csv"))
    assert another != pid
    # Libraries look at the environment while they are imported.
    monkeypatch.setenv("COLOUR", "red")
    assert left_by_a_run(needs("csv")) not in (pid, another)


def limit_files() -> Callable[[], None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def use_one_core() -> Callable[[], None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    return lambda: os.sched_setaffinity(0, cores)


def hide_files() -> Callable[[], None]:
    before = os.umask(0o077)

    def undo() -> None:
        os.umask(before)

    return undo


@pytest.mark.parametrize("change", [limit_files, use_one_core, hide_files])
def test_a_run_has_what_its_program_has_by_then(change: Callable[[], Callable[[], None]]) -> None:
    """A notebook's cell raises the limit of open files after a run that lacked some."""
    pid = left_by_a_run()
    undo = change()
    try:
        assert left_by_a_run() != pid
    finally:
        undo()


def test_runs_that_take_turns_have_theirs_and_the_one_unused_for_longest_ends() -> None:
    trains, predicts = left_by_a_run(), left_by_a_run(needs("csv"))
    assert left_by_a_run() == trains
    assert left_by_a_run(needs("csv")) == predicts
    assert left_by_a_run() == trains
    other = left_by_a_run(needs("string"))
    assert kept_processes() == {trains, other}
    assert not psutil.pid_exists(predicts)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_gone_or_stands_still_is_replaced(
    blow: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    zygote = kept_or_new_zygote(SPEC, "node")
    pid = pid_of(zygote)
    # It has begun to serve: what it is asked from now on, it answers.
    assert zygote.connection.is_current()
    os.kill(pid, blow)
    monkeypatch.setattr(zygote_connection, "_ANSWER_S", 0.05)
    monkeypatch.setattr(zygote_connection, "CLEANED_UP_WITHIN_S", 0.05)
    keep(zygote)
    assert left_by_a_run() != pid
    assert not psutil.pid_exists(pid)


def test_a_fork_of_the_driver_does_not_keep_it() -> None:
    zygote = kept_or_new_zygote(SPEC, "node")
    pid = pid_of(zygote)
    keep(zygote)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        zygote.connection.leave()
        assert eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_fork_of_the_driver_has_zygotes_of_its_own() -> None:
    pid = left_by_a_run()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            other = kept_or_new_zygote(SPEC, "node")
            is_another = pid_of(other) != pid
            other.connection.end()
            os._exit(0 if is_another else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert left_by_a_run() == pid


def test_a_run_after_an_edit_does_not_have_old_code(tmp_path: Path) -> None:
    """Of a module that a backend names, and of one that it imports."""
    (tmp_path / "named.py").write_text("import other_one")
    (tmp_path / "other_one.py").touch()
    spec = replace(SPEC, modules=("named",), path=(str(tmp_path), *SPEC.path))
    pid = left_by_a_run(spec)
    assert left_by_a_run(spec) == pid
    (tmp_path / "other_one.py").write_text("edited = True")
    assert left_by_a_run(spec) != pid
    assert not psutil.pid_exists(pid)


def test_a_run_after_an_installation_does_not_have_the_version_before(tmp_path: Path) -> None:
    spec = replace(SPEC, path=(str(tmp_path), *SPEC.path))
    (tmp_path / "library-1.dist-info").mkdir()
    pid = left_by_a_run(spec)
    assert left_by_a_run(spec) == pid
    (tmp_path / "library-1.dist-info").rename(tmp_path / "library-2.dist-info")
    assert left_by_a_run(spec) != pid
