"""What a worker process is doing, frame by frame, where it can't say so itself.

py-spy reads a process from outside, native frames included. Where it isn't allowed to, Python's own
`faulthandler`, which every worker has listening on a signal, writes its frames into the memory
behind the worker process's page.
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

from polytrain.common.processes import allow_tracing, is_stopped
from polytrain.monitoring.progress_page import SIZE

_OUR_FRAMES = re.compile(r"^( +run_trainer \(.*\)\n)(?: +.*\n)+", re.MULTILINE)
"""How a worker process has come to run is the same for all of them."""

_PLAIN_TIMEOUT_S = 3.0
_NATIVE_TIMEOUT_S = 5.0
_HANDLER_TIMEOUT_S = 1.0
_LOOKS_AT_WHAT_RUNS = 3

_LOOK_S = 0.02


def be_readable(descriptor: int) -> None:
    """Let others see what this process is doing, and say it on standard error when it crashes.

    Args:
        descriptor: of the memory with this process's page.
    """
    allow_tracing()
    faulthandler.enable(file=2)
    faulthandler.register(_asking_signal(), file=descriptor, all_threads=True)


def stacks_of(pid: int, descriptor: int, *, pausing: bool) -> str:
    """The stacks of a worker's threads; if they can't be had, why. Takes ten seconds at most.

    Args:
        pid: of the worker process.
        descriptor: of the memory with its page.
        pausing: whether it may be paused for that, and asked by a signal.
    """
    if not pausing:
        return _unpaused(pid)
    stopped = is_stopped(pid)
    # What is stopped already can't be paused, and needn't be.
    plain, why = _py_spy(pid, *(("--nonblocking",) if stopped else ()), timeout=_PLAIN_TIMEOUT_S)
    if stopped or not plain:
        return plain or _by_handler(pid, descriptor, stopped=stopped) or f"not known: {why}"
    # The symbols of a large framework may take longer to read than there is time.
    return _py_spy(pid, "--native", timeout=_NATIVE_TIMEOUT_S)[0] or plain


def _unpaused(pid: int) -> str:
    """Read while it goes on: what changes meanwhile can't be read, so it may take another look."""
    why = ""
    for _ in range(_LOOKS_AT_WHAT_RUNS):
        stacks, why = _py_spy(pid, "--nonblocking", timeout=_PLAIN_TIMEOUT_S)
        if stacks:
            return stacks
    return f"not known: {why}"


def _py_spy(pid: int, *options: str, timeout: float) -> tuple[str, str]:
    """The stacks, or nothing and what was said instead."""
    program = shutil.which("py-spy", path=Path(sys.executable).parent) or shutil.which("py-spy")
    if program is None:
        return "", "py-spy is not installed"
    try:
        told = subprocess.run(
            [program, "dump", *options, "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    # Before the first thread comes what is known: the command line, and Python's version.
    _, thread, stacks = told.stdout.partition("\nThread ")
    if told.returncode == 0 and stacks:
        return _OUR_FRAMES.sub(r"\1", f"{thread.lstrip()}{stacks.rstrip()}\n").rstrip(), ""
    return "", next(iter(told.stderr.splitlines()), f"py-spy exited with {told.returncode}")


def _asking_signal() -> int:
    """Frameworks and schedulers use the signals that have names."""
    return signal.SIGRTMAX - 2


def _by_handler(pid: int, descriptor: int, *, stopped: bool) -> str:
    """What the worker's own handler writes; a process that was stopped has to go on for it."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, SIZE)
        # The place to write at is common to all who have the descriptor from us.
        os.lseek(descriptor, SIZE, os.SEEK_SET)
        os.kill(pid, _asking_signal())
        if stopped:
            os.kill(pid, signal.SIGCONT)
        deadline, written = time.monotonic() + _HANDLER_TIMEOUT_S, SIZE
        while time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            before, written = written, os.fstat(descriptor).st_size
            # It has no last word; it is written at one go.
            if written == before > SIZE:
                break
        return os.pread(descriptor, written - SIZE, SIZE).decode(errors="replace").strip()
    return ""
