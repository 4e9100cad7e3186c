"""Hosts out of namespaces: each has its own network, files and processes, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.hosts.connections import reaches, serving

from polytrain.testing.hosts import Host, HostsUnavailable, hosts
from polytrain.testing.hosts.namespaces import freezer_roots
from polytrain.testing.processes import eventually, title

_SCRIPT = """
import sys
from pathlib import Path
from polytrain.testing.hosts import hosts
here = Path(__file__).parent
with hosts(1, shared=Path(sys.argv[1])) as (a,):
    a.run("touch written; touch ../not-written || true")
    imported = a.run([sys.executable, "-c", "import beside"], env={"PYTHONPATH": str(here)})
    print(imported.stdout, end="")
"""
_OWNER = """
import sys, time
from polytrain.testing.hosts import hosts
with hosts(2) as (a, b):
    b.start(["sleep", "4321"])
    if "freeze" in sys.argv:
        b.freeze()
    print("ready", flush=True)
    time.sleep(600)
"""


def test_hosts_reach_each_other_by_address_and_by_name(two: tuple[Host, ...]) -> None:
    a, b = two
    with serving(b):
        assert reaches(a, b) == "yes"
        a.run(f"getent hosts b | grep {b.address}")
        assert a.run("hostname").stdout == "a\n"


def test_a_host_reaches_neither_the_machine_nor_the_world(two: tuple[Host, ...]) -> None:
    line = "import socket; socket.create_connection(('{}', {}), timeout=20)"
    for address in ("192.0.2.1", "8.8.8.8"):
        done = two[0].run([sys.executable, "-c", line.format(address, 80)], check=False)
        assert "Network is unreachable" in done.stderr or "No route to host" in done.stderr
    names = psutil.net_if_addrs()
    assert not any(name.startswith(("port", "switch", "sink")) for name in names)


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/var/tmp"])
def test_a_host_has_files_of_its_own(two: tuple[Host, ...], place: str) -> None:
    a, b = two
    a.run(f"echo a > {place}/polytrain-mine")
    assert not b.run(f"cat {place}/polytrain-mine", check=False).stdout
    assert not Path(place, "polytrain-mine").exists()


def test_the_shared_directory_is_at_the_same_path_everywhere(
    two: tuple[Host, ...], tmp_path: Path
) -> None:
    a, b = two
    a.run(["touch", tmp_path / "from-a"])
    assert b.run("ls").stdout == "from-a\n"
    assert (tmp_path / "from-a").exists()


@pytest.mark.parametrize("shared", ["shared", "."], ids=["beside", "there"])
def test_a_script_finds_its_modules_beside_the_shared_directory(
    shared: str, tmp_path: Path
) -> None:
    """Below the /tmp of which each host has its own, too."""
    place = tmp_path / "script"
    (place / shared).mkdir(parents=True)
    (place / "beside.py").write_text("print('imported')")
    (place / "script.py").write_text(_SCRIPT)
    command = [sys.executable, place / "script.py", place / shared]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr
    assert (place / shared / "written").exists()
    assert not list(tmp_path.rglob("not-written"))


def test_the_machines_own_files_stay_as_they_are(two: tuple[Host, ...]) -> None:
    done = two[0].run("touch /etc/hosts-were-here", check=False)
    assert "Read-only file system" in done.stderr


def test_a_host_sees_no_process_of_another(two: tuple[Host, ...]) -> None:
    a, b = two
    b.start(["sleep", "4322"])
    assert "sleep 4322" in b.run("ps ax").stdout
    assert "sleep 4322" not in a.run("ps ax").stdout


def test_a_command_that_fails_shows_what_it_printed(two: tuple[Host, ...]) -> None:
    with pytest.raises(subprocess.CalledProcessError, match="what went wrong"):
        two[0].run("echo what went wrong >&2; exit 3")


def test_a_command_that_takes_too_long_is_ended(two: tuple[Host, ...]) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        two[0].run("sleep 4323; true", timeout=0.5)
    assert eventually(lambda: "sleep 4323" not in two[0].run("ps ax").stdout)


def test_a_started_process_can_be_signalled_by_its_number(two: tuple[Host, ...]) -> None:
    process = two[0].start(["sleep", "4324"])
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = _namespaces()
    with hosts(2, shared=tmp_path) as (a, b):
        a.start(["sleep", "4325"])
        b.freeze()
        assert _groups(os.getpid())
        assert _namespaces() > before
    assert not _groups(os.getpid())
    assert _namespaces() == before
    assert not _processes("sleep 4325")
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        _fail_with_a_host()
    assert not _groups(os.getpid())
    assert not _processes("sleep 4326")


def _fail_with_a_host() -> None:
    with hosts(1) as (a,):
        a.start(["sleep", "4326"])
        raise ZeroDivisionError


@pytest.mark.parametrize("state", ["run", "freeze"])
def test_hosts_end_with_a_process_that_is_killed(state: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, state], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert _groups(owner.pid)
        owner.kill()
    assert eventually(lambda: not _groups(owner.pid))
    assert eventually(lambda: not _processes("sleep 4321"))
    assert eventually(lambda: not _processes(f"polytrain-hosts-{owner.pid}"))


@pytest.mark.usefixtures("many_open_files")
def test_hosts_live_though_many_files_are_open() -> None:
    with hosts(2) as (a, b), serving(b):
        assert reaches(a, b) == "yes"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "polytrain.testing.hosts.testbed.why_no_hosts", lambda: "only root may do that"
    )
    with pytest.raises(HostsUnavailable, match="only root"), hosts(2):
        pass


def _groups(owner: int) -> list[Path]:
    groups = f"polytrain-hosts-{owner}-*"
    return [group for root in freezer_roots() for group in root.glob(groups)]


def _processes(words: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if words in title(process)]


def _namespaces() -> set[str]:
    """The networks of this process's descendants."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            found.add(os.readlink(f"/proc/{process.pid}/ns/net"))
        except OSError:
            continue
    return found
