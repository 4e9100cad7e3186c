"""Zygotes that outlive their run: real processes, no Ray."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from polytrain.linux.processes import peer_of
from polytrain.testing.processes import eventually
from polytrain.workers.processes import cache
from polytrain.workers.processes.cache import keep, let_go, warm_zygote
from polytrain.workers.processes.client import ZygoteConnection, ZygoteSpec, zygote_name
from polytrain.workers.processes.lifetime import Description
from polytrain.workers.processes.warm import (
    find,
    serves,
    start,
    warm_problems,
    warm_seconds,
    warm_token,
)

SPEC = ZygoteSpec(
    name="", environment={"COLOUR": "red"}, modules=("json", "csv"), path=tuple(sys.path)
)
HELD = Description(
    pid=1,
    modules=("json", "csv"),
    environment={"COLOUR": "red"},
    kept_s=1,
    left_s=1,
    users=0,
    is_current=True,
)


@pytest.fixture(autouse=True)
def _addresses_of_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    let_go()
    monkeypatch.setenv("MARK", secrets.token_hex(8))
    yield
    connection = find(SPEC, "node")
    if connection is not None:
        os.kill(peer_of(connection.socket)[0], signal.SIGKILL)
    let_go()


def started(kept_s: float = 60.0) -> int:
    connection = start(SPEC, "node", kept_s=kept_s)
    held = connection.description(within_s=30)
    assert held is not None
    connection.leave()
    return held.pid


def used_by_a_run(spec: ZygoteSpec = SPEC) -> tuple[int, bool]:
    zygote = warm_zygote(spec, "node")
    held = zygote.connection.description(within_s=30)
    assert held is not None
    keep(zygote)
    return held.pid, zygote.is_shared


def test_runs_use_it_and_leave_it_alive() -> None:
    pid = started()
    assert used_by_a_run() == (pid, True)
    assert used_by_a_run(replace(SPEC, modules=("json",))) == (pid, True)
    assert psutil.pid_exists(pid)


def test_it_ends_by_itself() -> None:
    connection = start(SPEC, "node", kept_s=0.1)
    held = connection.description(within_s=30)
    assert held is not None
    pid = held.pid
    connection.leave()
    assert eventually(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
    )


def test_a_killed_one_is_replaced_by_the_runs_own() -> None:
    pid = started()
    os.kill(pid, signal.SIGKILL)
    own, is_shared = used_by_a_run()
    assert own != pid
    assert not is_shared


def test_after_an_edit_runs_have_their_own_and_it_ends(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text("import other_one")
    (tmp_path / "other_one.py").touch()
    spec = replace(SPEC, modules=("named",), path=(str(tmp_path), *SPEC.path))
    connection = start(spec, "node", kept_s=60.0)
    held = connection.description(within_s=30)
    connection.leave()
    assert held is not None
    assert used_by_a_run(spec) == (held.pid, True)
    (tmp_path / "other_one.py").write_text("edited = True")
    own, is_shared = used_by_a_run(spec)
    assert own != held.pid
    assert not is_shared
    assert eventually(lambda: psutil.Process(held.pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, modules=("json", "decimal")),
        replace(SPEC, environment={"COLOUR": "blue"}),
        replace(SPEC, environment={"COLOUR": "red", "SIZE": "2"}),
    ],
)
def test_a_run_that_needs_something_else_has_its_own(other: ZygoteSpec) -> None:
    assert serves(HELD, SPEC)
    assert not serves(HELD, other)


def a_variable(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    monkeypatch.setenv("COLOUR", "green")


def an_installed_version(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    (site / "library-1.dist-info").rename(site / "library-2.dist-info")


def the_interpreter(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/other-python")


@pytest.mark.parametrize("change", [a_variable, an_installed_version, the_interpreter])
def test_each_thing_that_imports_depend_on_changes_the_address(
    change: Callable[[pytest.MonkeyPatch, Path], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "library-1.dist-info").mkdir()
    path = [str(tmp_path), *sys.path]
    before = warm_token(path)
    assert warm_token(path) == before
    assert warm_token(path[1:]) != before
    change(monkeypatch, tmp_path)
    assert warm_token(path) != before


def test_another_users_process_is_not_taken_for_a_warm_zygote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"\0{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(name)
        impostor.listen()
        me = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
        assert ZygoteConnection.existing(name) is None
        connection, _ = impostor.accept()
        with connection:
            assert connection.recv(1 << 16) == b""


@pytest.mark.parametrize("backlog", [0, 10])
def test_a_run_whose_warm_zygote_has_no_address_has_its_own(
    monkeypatch: pytest.MonkeyPatch, backlog: int
) -> None:
    """Another user may have seen the address before, and take it in between."""
    monkeypatch.setenv("POLYTRAIN_WARM", "1")
    monkeypatch.setattr(cache, "_GETS_ADDRESS_WITHIN_S", 0.05)
    name = zygote_name(warm_token(SPEC.path), "node")
    with socket.socket(socket.AF_UNIX) as squatter, ExitStack() as stack:
        squatter.bind(name)
        squatter.listen(backlog)
        with suppress(BlockingIOError):
            for _ in range(3):
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(name)
        _, is_shared = used_by_a_run()
    assert not is_shared


@pytest.mark.parametrize("given", ["soon", "-1", "0", "inf", "nan"])
def test_a_time_that_is_none(given: str) -> None:
    [problem] = warm_problems({"POLYTRAIN_WARM": given})
    assert problem.field == "POLYTRAIN_WARM"
    assert repr(given) in problem.what


def test_minutes() -> None:
    assert warm_seconds({"POLYTRAIN_WARM": "1.5"}) == 90
    assert warm_seconds({}) is None
    assert list(warm_problems({})) == []


def test_help_imports_no_framework() -> None:
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "polytrain", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "warm" in shown.stdout
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert imported.isdisjoint({"ray", "torch", "numpy", "pyarrow", "polytrain.workers"})
