"""What a process is doing, read from outside: by py-spy, or by its own handler."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polytrain.linux.processes import is_stopped
from polytrain.linux.progress_page import Page
from polytrain.observe.stacks import stacks_of
from polytrain.testing.processes import eventually

WAITING = """
import sys, threading
from polytrain.observe.stacks import be_readable

def waits_for_ever():
    print("waiting", flush=True)
    threading.Event().wait()

def run_worker():
    waits_for_ever()

def calls_run_worker():
    run_worker()

be_readable(int(sys.argv[1]))
calls_run_worker()
"""


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page()
    yield page
    page.close()


@pytest.fixture
def waiting(page: Page) -> Iterator[subprocess.Popen[str]]:
    """A process that waits in a function of a name that one recognises."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, str(page.descriptor)],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[page.descriptor],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        yield process
        process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: is_stopped(process.pid))


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str, path: Any = None) -> None:
        return None

    monkeypatch.setattr(shutil, "which", nowhere)


def test_native_and_python_frames_are_reported(waiting: subprocess.Popen[str], page: Page) -> None:
    stacks = stacks_of(waiting.pid, page.descriptor, pausing=True)
    assert "waits_for_ever" in stacks
    assert "PyThread_acquire_lock_timed" in stacks


def test_what_has_called_run_worker_is_left_out(waiting: subprocess.Popen[str], page: Page) -> None:
    stacks = stacks_of(waiting.pid, page.descriptor, pausing=False)
    assert "run_worker" in stacks
    assert "calls_run_worker" not in stacks


def test_frames_are_reported_without_a_pause_too(
    waiting: subprocess.Popen[str], page: Page
) -> None:
    assert "waits_for_ever" in stacks_of(waiting.pid, page.descriptor, pausing=False)


@pytest.fixture
def torn_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A py-spy that has no frames of a thread the first time, as of one that calls and returns."""
    program = tmp_path / "py-spy"
    program.write_text(
        "#!/bin/sh\n"
        f"if mkdir {tmp_path}/called 2> /dev/null\n"
        "then printf 'Python v3\\n\\nThread 1 (active)\\nThread 2 (idle)\\n    waits (a.py:1)\\n'\n"
        "else printf 'Python v3\\n\\nThread 1 (active)\\n    works (a.py:9)\\n'\n"
        "fi\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: str(program))


@pytest.mark.usefixtures("torn_at_first")
def test_a_thread_that_had_no_frames_is_looked_at_again(page: Page) -> None:
    stacks = stacks_of(os.getpid(), page.descriptor, pausing=False)
    assert stacks == "Thread 1 (active)\n    works (a.py:9)"


def test_a_stopped_process_is_reported_and_stays_stopped(
    waiting: subprocess.Popen[str], page: Page
) -> None:
    stop(waiting)
    assert "waits_for_ever" in stacks_of(waiting.pid, page.descriptor, pausing=True)
    assert is_stopped(waiting.pid)


@pytest.mark.usefixtures("without_py_spy")
def test_its_own_handler_answers_where_nothing_else_can(
    waiting: subprocess.Popen[str], page: Page
) -> None:
    for _ in range(2):
        stacks = stacks_of(waiting.pid, page.descriptor, pausing=True)
        assert stacks.count("in waits_for_ever") == 1
    assert page.beats == 0
    assert waiting.poll() is None


@pytest.mark.usefixtures("without_py_spy")
def test_its_own_handler_answers_for_a_stopped_process(
    waiting: subprocess.Popen[str], page: Page
) -> None:
    stop(waiting)
    assert "waits_for_ever" in stacks_of(waiting.pid, page.descriptor, pausing=True)


def test_of_a_process_that_is_gone_there_is_a_reason(page: Page) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert stacks_of(process.pid, page.descriptor, pausing=True).startswith("not known: ")


def test_a_crash_says_where_on_standard_error(page: Page) -> None:
    crash = WAITING.replace("threading.Event().wait()", "import os; os.abort()")
    process = subprocess.run(
        [sys.executable, "-c", crash, str(page.descriptor)],
        capture_output=True,
        text=True,
        pass_fds=[page.descriptor],
    )
    assert process.returncode == -signal.SIGABRT
    assert "in waits_for_ever" in process.stderr
