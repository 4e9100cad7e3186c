"""Reads the stacks of a worker process that can't report them itself.

py-spy reads a process from outside, native frames included. If the system doesn't allow that, the
worker process's `faulthandler`, which handles a signal, writes the Python frames into the memory
after the progress page.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from polytrain.linux.processes import allow_tracing, is_stopped
from polytrain.linux.progress_page import SIZE

_OUR_FRAMES = re.compile(r"^( +run_worker \(.*\)\n)(?: +.*\n)+", re.MULTILINE)
"""The frames below `run_worker`, which are the same in all worker processes."""

_THREAD_WITHOUT_FRAMES = re.compile(r"^Thread .*(?:\Z|\n(?! ))", re.MULTILINE)

_PLAIN_TIMEOUT_S = 3.0
_NATIVE_TIMEOUT_S = 5.0
_HANDLER_TIMEOUT_S = 1.0
_LOOKS_AT_WHAT_RUNS = 3

_LOOK_S = 0.02


def be_readable(descriptor: int) -> None:
    """Let others read this process's stacks, and print them to standard error when it crashes.

    Args:
        descriptor: descriptor of the memory with this process's page.
    """
    allow_tracing()
    faulthandler.enable(file=2)
    faulthandler.register(_asking_signal(), file=descriptor, all_threads=True)


def stacks_of(pid: int, descriptor: int, *, pausing: bool) -> str:
    """Return the stacks of a worker process's threads, or why they are unknown, within ten seconds.

    Args:
        descriptor: descriptor of the memory with its page.
        pausing: whether it may be paused, and sent a signal for its own dump.
    """
    if not pausing:
        return _unpaused(pid)
    stopped = is_stopped(pid)
    # A stopped process can't be paused, and needn't be.
    plain, why = _py_spy(pid, *(("--nonblocking",) if stopped else ()), timeout=_PLAIN_TIMEOUT_S)
    if stopped or not plain:
        return plain or _by_handler(pid, descriptor, stopped=stopped) or f"not known: {why}"
    # Reading the symbols of a large framework may take too long.
    return _py_spy(pid, "--native", timeout=_NATIVE_TIMEOUT_S)[0] or plain


def _unpaused(pid: int) -> str:
    """Read the running process. Changing frames can't be read, so try several times."""
    found = ""
    for _ in range(_LOOKS_AT_WHAT_RUNS):
        stacks, why = _py_spy(pid, "--nonblocking", timeout=_PLAIN_TIMEOUT_S)
        found = stacks or found
        if stacks and not _THREAD_WITHOUT_FRAMES.search(stacks):
            break
    return found or f"not known: {why}"


def _py_spy(pid: int, *options: str, timeout: float) -> tuple[str, str]:
    """Return the stacks and "", or "" and py-spy's error."""
    program = shutil.which("py-spy", path=Path(sys.executable).parent) or shutil.which("py-spy")
    if program is None:
        return "", "py-spy is not installed"
    try:
        dump = subprocess.run(
            [program, "dump", *options, "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    # Skip the command line and Python's version, before the first thread.
    _, thread, stacks = dump.stdout.partition("\nThread ")
    if dump.returncode == 0 and stacks:
        return _OUR_FRAMES.sub(r"\1", f"{thread.lstrip()}{stacks.rstrip()}\n").rstrip(), ""
    return "", next(iter(dump.stderr.splitlines()), f"py-spy exited with {dump.returncode}")


def _asking_signal() -> int:
    """Return an unnamed real-time signal: frameworks and schedulers use named ones."""
    return signal.SIGRTMAX - 2


def _by_handler(pid: int, descriptor: int, *, stopped: bool) -> str:
    """Return the output of the worker's own handler. A stopped process has to run for it."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, SIZE)
        # Processes that inherited the descriptor share its position.
        os.lseek(descriptor, SIZE, os.SEEK_SET)
        os.kill(pid, _asking_signal())
        if stopped:
            os.kill(pid, signal.SIGCONT)
        deadline, written = time.monotonic() + _HANDLER_TIMEOUT_S, SIZE
        while time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            before, written = written, os.fstat(descriptor).st_size
            # The output has no end mark, but is written without a pause.
            if written == before > SIZE:
                break
        return os.pread(descriptor, written - SIZE, SIZE).decode(errors="replace").strip()
    return ""
