"""What can happen to a host, as its peers and its own programs notice it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from tests.hosts.connections import PORT, reaches, serving, talking

from polytrain.testing.hosts import Host, HostsUnavailable, hosts, testbed
from polytrain.testing.hosts.namespaces import freezer_roots
from polytrain.testing.processes import eventually

Pair = tuple[Host, ...]

only_the_sweep_has_this_fault = pytest.mark.only_in_sweep
"""The runs to which it happens are in the sweep alone."""


def test_attempts_to_connect_to_a_host_that_is_cut_off_vanish(two: Pair) -> None:
    a, b = two
    with serving(b):
        b.cut_off()
        assert reaches(a, b) == "TimeoutError"
        assert "state UP" in b.run("ip link show eth0").stdout
        b.heal()
        assert reaches(a, b, seconds=20) == "yes"


def test_a_connection_outlives_a_cut(two: Pair) -> None:
    a, b = two
    with serving(b), talking(a, b) as talk:
        assert talk.say() == "answer"
        b.cut_off()
        assert talk.say(seconds=0.5) == "TimeoutError"
        b.heal()
        assert talk.say(seconds=20) == "answer"


def test_a_frozen_host_is_silent_until_it_is_thawed(two: Pair) -> None:
    a, b = two
    with serving(b), talking(a, b) as talk:
        b.freeze()
        # The kernel of a real paused machine would be silent too; here it still takes the bytes.
        assert talk.say(seconds=0.5) == "TimeoutError"
        b.thaw()
        assert talk.say() == "answer"


@only_the_sweep_has_this_fault
def test_control_groups_of_both_versions_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    for root in freezer_roots():
        monkeypatch.setattr(testbed, "freezer_roots", lambda root=root: [root])
        with hosts(1) as (a,):
            a.freeze()
            with pytest.raises(subprocess.TimeoutExpired):
                a.run("true", timeout=0.5)
            a.thaw()
            a.run("true")
            a.freeze()


def test_peers_see_that_a_host_is_killed(two: Pair) -> None:
    a, b = two
    process = b.start(["sleep", "4331"])
    with serving(b), talking(a, b) as talk:
        assert talk.say() == "answer"
        b.kill()
        assert talk.say() in ("end", "ConnectionResetError", "BrokenPipeError")
    assert process.returncode is not None
    assert not b.is_alive
    assert a.is_alive


def test_a_frozen_host_can_be_killed(two: Pair) -> None:
    two[1].freeze()
    two[1].kill()
    assert not two[1].is_alive


def test_peers_learn_nothing_of_a_crash(two: Pair) -> None:
    a, b = two
    with serving(b), talking(a, b) as talk:
        assert talk.say() == "answer"
        b.crash()
        assert not b.is_alive
        assert talk.say(seconds=1) == "TimeoutError"


def test_connections_are_reset(two: Pair) -> None:
    a, b = two
    with serving(b), talking(a, b) as talk:
        assert talk.say() == "answer"
        b.reset_connections()
        assert talk.say() in ("ConnectionResetError", "BrokenPipeError")
    assert b.is_alive


def test_a_hosts_connections_to_itself_are_not_reset(two: Pair) -> None:
    _, b = two
    with serving(b), talking(b, b) as talk:
        b.reset_connections()
        assert talk.say() == "answer"


def test_a_firewall_refuses_connections_from_outside_alone(two: Pair) -> None:
    a, b = two
    with serving(b), talking(a, b) as talk, serving(b, PORT + 1), serving(a):
        b.block(incoming=True)
        assert reaches(a, b, port=PORT + 1) == "TimeoutError"
        assert reaches(b, a) == "yes"
        assert talk.say() == "answer"
        b.heal()
        assert reaches(a, b, port=PORT + 1, seconds=20) == "yes"


def test_a_firewall_refuses_connections_to_the_outside(two: Pair) -> None:
    a, b = two
    with serving(a), serving(b):
        b.block(incoming=False)
        assert reaches(b, a) == "TimeoutError"
        assert reaches(a, b) == "yes"


def test_a_firewall_spares_other_ports(two: Pair) -> None:
    a, b = two
    with serving(b), serving(b, 19_999):
        b.block(incoming=True, ports=range(20_000, 65_536))
        assert reaches(a, b) == "TimeoutError"
        assert reaches(a, b, port=19_999) == "yes"


def test_a_full_disk_takes_nothing_more(two: Pair) -> None:
    a, b = two
    write = ["dd", "if=/dev/zero", f"of={b.disk}/more", "bs=1M", "count=8"]
    b.run(["cp", sys.executable, b.disk])
    b.fill_disk()
    assert "No space left on device" in b.run(write, check=False).stderr
    a.run(write)
    b.heal()
    b.run(write)


def test_the_shared_directory_is_read_only_on_one_host(two: Pair) -> None:
    a, b = two
    b.read_only()
    assert "Read-only file system" in b.run("touch x", check=False).stderr
    a.run("touch x")
    assert b.run("ls").stdout == "x\n"
    b.heal()
    b.run("touch y")


def test_the_directory_becomes_read_only_once_open_files_are_written(two: Pair) -> None:
    _, b = two
    b.start("exec 3> open; sleep 1; echo text >&3")
    assert eventually(lambda: (b.shared or b.disk).joinpath("open").exists())
    b.read_only()
    assert b.run("cat open").stdout == "text\n"
    assert "Read-only file system" in b.run("touch x", check=False).stderr


@only_the_sweep_has_this_fault
def test_a_slow_host_sends_and_gets_less(two: Pair) -> None:
    a, b = two
    data = 1_000_000
    b.slow(mbit=8)
    with serving(b), talking(a, b) as talk:
        began = time.monotonic()
        assert talk.say(data=data) == "answer"
        # A second, less what the kernel lets through at the beginning.
        assert time.monotonic() - began > 0.7
        b.heal()
        assert talk.say(data=data) == "answer"


@only_the_sweep_has_this_fault
def test_a_host_that_is_far_away_answers_late(two: Pair) -> None:
    a, b = two
    with serving(b), talking(a, b) as talk:
        try:
            b.slow(ms=200)
        except HostsUnavailable as reason:
            pytest.skip(str(reason))
        began = time.monotonic()
        assert talk.say() == "answer"
        assert time.monotonic() - began >= 0.4


@only_the_sweep_has_this_fault
def test_a_clock_goes_wrong(two: Pair) -> None:
    a, b = two
    b.clock(+90)
    assert 60 < seconds_ahead(b, a) < 120
    b.clock(-90)
    assert -120 < seconds_ahead(b, a) < -60
    b.clock(0)
    assert -30 < seconds_ahead(b, a) < 30


@only_the_sweep_has_this_fault
def test_a_clock_changes_while_a_program_runs(two: Pair) -> None:
    _, b = two
    b.clock(0)
    script = "import time\nwhile input(): print(time.time(), flush=True)"
    with b.start(
        [sys.executable, "-c", script], input=subprocess.PIPE, output=subprocess.PIPE
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        times = []
        for ahead in (0, 1000):
            b.clock(ahead)
            program.stdin.write("now\n")
            program.stdin.flush()
            times.append(float(program.stdout.readline()))
        assert times[1] - times[0] > 900
        program.kill()


@only_the_sweep_has_this_fault
def test_waits_are_as_long_as_they_were_with_another_clock(two: Pair) -> None:
    _, b = two
    b.clock(+3600)
    wait = "import threading; threading.Event().wait(0.1); threading.Lock().acquire(timeout=0.1)"
    b.run([sys.executable, "-c", wait], timeout=30)
    b.run("timeout 20 sleep 0.1", timeout=30)


def seconds_ahead(host: Host, other: Host) -> float:
    line = [sys.executable, "-c", "import time; print(time.time())"]
    return float(host.run(line).stdout) - float(other.run(line).stdout)
