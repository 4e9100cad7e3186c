"""What runs have left behind: processes that are about to end aren't."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from polytrain.testing import processes
from polytrain.testing.processes import is_alive, leftovers


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """The only process that a run has left; it ends with its input."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        one = psutil.Process(process.pid)
        monkeypatch.setattr(processes, "our_processes", lambda: [one] if is_alive(one) else [])
        monkeypatch.setattr(processes, "ray_is_initialized", lambda: False)
        yield process
        process.kill()


def test_a_process_that_is_about_to_end_is_waited_for(
    tmp_path: Path, left: subprocess.Popen[bytes]
) -> None:
    assert left.stdin is not None
    left.stdin.close()
    assert leftovers(tmp_path) == []
    assert left.wait(timeout=0) == 0


def test_a_process_that_does_not_end_is_named(
    tmp_path: Path, left: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_ENDS_WITHIN_S", 0.0)
    [named] = leftovers(tmp_path)
    assert f"pid={left.pid}" in named
    assert not processes._has_ended_by(time.monotonic(), psutil.Process(left.pid))
