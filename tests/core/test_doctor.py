"""The checks of `polytrain doctor`: each finds its fault, and nothing where there is none."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polytrain.storage.location import Location, Refusal
from polytrain.storage.protocol import Storage
from polytrain.view.cli import main
from polytrain.view.doctor import machine, nodes, stored, worlds
from polytrain.view.doctor.finding import Finding, Verdict, checked


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    findings = [checked(name, check) for name, check in machine.CHECKS.items()]
    assert [each for each in findings if each.verdict is Verdict.FAILED] == []
    assert all(each.what for each in findings)


def refused(*_: object, **__: object) -> Any:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("owner", "name", "check"),
    [
        (os, "memfd_create", machine.memory_without_files),
        (os, "pidfd_open", machine.ends_of_processes),
        (socket.socket, "bind", machine.local_sockets),
    ],
)
def test_what_the_kernel_refuses(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, check: Callable[[], str]
) -> None:
    monkeypatch.setattr(owner, name, refused)
    finding = checked("the check", check)
    assert finding.verdict is Verdict.FAILED
    assert "Operation not permitted" in finding.what


@contextmanager
def lowered(limit: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def test_few_open_files() -> None:
    with lowered(resource.RLIMIT_NOFILE, 512):
        finding = checked("open files", machine.open_files)
    assert (finding.verdict, finding.what) == (Verdict.FAILED, "a process may open 512 files")
    assert finding.remedy.startswith("ulimit -n ")


def test_few_processes() -> None:
    with lowered(resource.RLIMIT_NPROC, 100):
        finding = checked("processes", machine.processes)
    assert finding.verdict is Verdict.FAILED
    assert "100 processes" in finding.what


def test_a_small_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=64 * 2**20))
    nowhere = partial(machine.shared_memory, Path("/nowhere/shm"))
    for check in (machine.shared_memory, nowhere):
        finding = checked("/dev/shm", check)
        assert (finding.verdict, finding.remedy) == (
            Verdict.WARNING,
            "Start the container with --shm-size=2g",
        )


def test_stacks_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    finding = checked("stacks", machine.stacks)
    assert finding.verdict is Verdict.WARNING
    assert "py-spy is not installed" in finding.what


def test_a_wrong_number_of_cpus() -> None:
    finding = checked("resources", lambda: machine.resources({"POLYTRAIN_LOCAL_CPUS": "many"}))
    assert finding.verdict is Verdict.FAILED
    assert "POLYTRAIN_LOCAL_CPUS" in finding.what


def findings_in(path: Path) -> list[Finding]:
    checks = stored.checks_of(Location.of(path, retry_s=0))
    return [checked(name, check) for name, check in checks.items()]


def test_a_storage_is_left_as_it_was(tmp_path: Path) -> None:
    findings = findings_in(tmp_path)
    assert [each.verdict for each in findings] == [Verdict.OK] * 3
    assert list(tmp_path.rglob("*")) == []


def test_a_storage_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = findings_in(tmp_path / "file")
    assert [each.verdict for each in findings] == [Verdict.FAILED] * 3


class Faulty:
    """A storage one of whose methods does something else."""

    def __init__(self, storage: Storage, **instead: Any) -> None:
        self._storage, self._instead = storage, instead

    def __getattr__(self, name: str) -> Any:
        return self._instead.get(name, getattr(self._storage, name))


@pytest.mark.parametrize(
    ("check", "instead", "message"),
    [
        (stored.exclusive_create, {"create": lambda path, _: path}, "can be created twice"),
        (stored.write_read_delete, {"read": lambda _: b"other"}, "isn't read back"),
        (stored.write_read_delete, {"delete": lambda _: None}, "still listed"),
    ],
)
def test_a_storage_that_does_something_else(
    tmp_path: Path, check: Callable[[Storage], str], instead: dict[str, Any], message: str
) -> None:
    storage: Any = Faulty(Location.of(tmp_path).open(), **instead)
    if "create" in instead:
        storage.write("lease", b"2")
    finding = checked("storage", lambda: check(storage))
    assert finding.verdict is Verdict.FAILED
    assert message in finding.what


def test_a_clock_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 100)
    finding = checked("clock", lambda: stored.clock(Location.of(tmp_path)))
    assert finding.verdict is Verdict.WARNING
    assert "differs by -100 s" in finding.what


def test_a_backend_whose_framework_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "missing_modules", dict)
    finding = checked("backend", lambda: worlds.backend("torch"))
    assert (finding.verdict, finding.what) == (Verdict.FAILED, "torch isn't installed")
    assert "pip install" in finding.remedy


def test_a_backend_whose_ranks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "_ranks", fails)
    # A machine with one CPU has room for both.
    monkeypatch.setenv("POLYTRAIN_LOCAL_CPUS", "1")
    finding = checked("backend", lambda: worlds.backend("reference"))
    assert finding.verdict is Verdict.FAILED
    assert "the interface is down" in finding.what


def test_a_backend_that_no_run_can_have_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTRAIN_LOCAL_CPUS", "many")
    finding = checked("backend", lambda: worlds.backend("reference"))
    assert finding.verdict is Verdict.FAILED
    assert finding.what.startswith("POLYTRAIN_LOCAL_CPUS: it is 'many'")
    assert finding.remedy.startswith("Set it to a number above 0")


def fails() -> None:
    raise OSError("the interface is down")


def test_nodes_that_differ(tmp_path: Path) -> None:
    finding = checked("versions", lambda: nodes.same_versions({"ray": "2.59"}, {"ray": "2.60"}))
    assert finding.what == "other versions: ray 2.59 (driver: 2.60)"
    location = Location.of(tmp_path)
    answer = nodes.NodeReport(findings=(), versions={}, time=0.0, read=None, refusal=None)
    unseen = checked("storage", lambda: nodes.usable_storage(answer, b"x", location))
    assert "doesn't see a file" in unseen.what
    refused = replace(answer, read=b"x", refusal=Refusal(what="can't write to x", remedy="Mount"))
    unwritable = checked("storage", lambda: nodes.usable_storage(refused, b"x", location))
    assert (unwritable.what, unwritable.remedy) == ("it can't write to x", "Mount")
    late = checked("clock", lambda: nodes.same_time(-60.0))
    assert "differs by -60 s" in late.what
    findings = (finding, unseen, unwritable, late)
    assert {each.verdict for each in findings} == {Verdict.FAILED}


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--storage", str(tmp_path), "--backend", "reference"]
    assert main([*arguments, "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["data"]
    assert findings[-1]["check"] == "backend reference"
    assert {each["verdict"] for each in findings} <= {"ok", "warning"}
    (tmp_path / "file").touch()
    monkeypatch.setattr(nodes, "running_ray", nullcontext)
    arguments = ["doctor", "--storage", str(tmp_path / "file"), "--backend", "reference"]
    assert main([*arguments, "--nodes", "all"]) == 1
    printed = capsys.readouterr().out
    assert "failed   storage: exclusive create: " in printed
    assert "failed   nodes: NotADirectoryError: " in printed
    assert printed.endswith("13 checks, 4 failed.\n")


# In `make test`, `test_doctor_links` has the nodes of a cluster checked.
@pytest.mark.on_ray
@pytest.mark.only_in_sweep
def test_every_node_is_checked(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "polytrain", "doctor", "--nodes", "all", "--json"),
            *("--storage", str(tmp_path), "--backend", "reference"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(done.stdout[done.stdout.index("{") :])["data"]
    on_node = [each["check"].partition(": ")[2] for each in findings[12:]]
    assert on_node == [*machine.CHECKS, "versions", "storage", "clock"]
    assert list(tmp_path.iterdir()) == []
