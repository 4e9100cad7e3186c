"""What the kernel is asked about processes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from polytrain.linux.processes import (
    cpu_seconds,
    is_ending,
    is_running,
    process_cpu_seconds,
    resident_bytes,
    session_of,
    started_at,
    umask,
)

CHILD = """
import os, resource, sys
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
# Closing them takes the kernel a while, after it has closed the connection.
many = [os.open("/dev/null", os.O_RDONLY) for _ in range(min(limit, 100_000) - 100)]
os.write(int(sys.argv[1]), b"!")
END
"""


def start(end: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A child that has said that it is there, and a connection to it."""
    ours, theirs = socket.socketpair()
    script = CHILD.replace("END", end)
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    assert ours.recv(1) == b"!"
    return child, ours


def test_without_descriptors_a_process_seems_to_have_no_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its watch would end otherwise, for a lack that may last a second."""

    def lacks(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "glob", lacks)
    assert cpu_seconds(os.getpid()) > 0


def test_who_has_hung_up_is_ending() -> None:
    """Whoever notices first that a process is gone: it has ended by itself, and wasn't killed."""
    child, connection = start("os._exit(0)")
    with connection:
        assert connection.recv(1) == b""
        assert not is_running(child.pid)
    child.wait()


def test_who_waits_is_running() -> None:
    child, connection = start("import signal; signal.pause()")
    with connection:
        assert is_running(child.pid)
        child.send_signal(signal.SIGKILL)
        assert connection.recv(1) == b""
    child.wait()


def test_the_memory_of_a_process_that_is_there_and_of_one_that_is_gone() -> None:
    script = "kept = b'x' * 100_000_000; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 100e6 < resident_bytes(process.pid) < 300e6
        process.kill()
    assert resident_bytes(process.pid) == 0


TWO_THREADS = """
import sys, threading, time
spun = threading.Barrier(3)
def spin():
    while time.thread_time() < 0.3:
        pass
    spun.wait()
    time.sleep(1000)
for _ in range(2):
    threading.Thread(target=spin, daemon=True).start()
spun.wait()
print("spun", flush=True)
sys.stdin.readline()
"""


def test_the_cpu_seconds_of_a_process_are_those_of_all_its_threads() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TWO_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"spun\n"
            main = Path(f"/proc/{process.pid}/task/{process.pid}/schedstat").read_text().split()
            # The kernel counts in ticks of 10 ms.
            others = process_cpu_seconds(process.pid) - int(main[0]) / 1e9
            assert others > 0.5, "the main thread has waited for the two others"
        finally:
            process.kill()
    assert process_cpu_seconds(process.pid) == 0.0


@pytest.fixture
def odd_name() -> Iterator[None]:
    """This process has the name of a script, which the kernel has cut within a character."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes("trainings_größen".encode()[:15])
    yield
    name.write_bytes(before.strip())


def test_a_name_that_is_no_text_hides_nothing(odd_name: None) -> None:
    pid = os.getpid()
    with pytest.raises(UnicodeDecodeError):
        Path("/proc/self/stat").read_text()
    assert started_at(pid)
    assert session_of(pid) == os.getsid(0)
    assert not is_ending(pid)
    assert cpu_seconds(pid) > 0
    assert umask() >= 0
