"""Processes that are started inside a host, from outside of it."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

_NEW_PID_NAMESPACE = 0x20000000  # CLONE_NEWPID in <linux/sched.h>

Command = str | Sequence[str | Path]
"""A program with its arguments, or a line for the shell."""


class CommandFailed(subprocess.CalledProcessError):
    """A command in a host has failed; its message has what the command printed."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.stdout or ''}{self.stderr or ''}"


def words_of(command: Command) -> list[str]:
    if isinstance(command, str):
        return ["sh", "-c", command]
    return [str(word) for word in command]


def start_in(
    pid: int,
    group: Path,
    command: list[str],
    *,
    cwd: Path,
    inside: Mapping[str, str],
    **options: Any,
) -> subprocess.Popen[str]:
    """Start a command in the namespaces of process `pid` and in a control group.

    The command is a child of this process, with this process's number for it: its parent can signal
    and wait for it. So a thread enters the namespace of processes, of which only its children
    notice, and the command enters the others, which a process with several threads can't.

    Args:
        pid: process 1 of the host.
        group: the file that takes members of the control group.
        command: a program and its arguments.
        cwd: its directory.
        inside: variables that name files of the host: what leads there must not have them.
        options: of `subprocess.Popen`.
    """
    variables = [f"{name}={value}" for name, value in inside.items()]
    enter = ["nsenter", "-t", str(pid), "--mount", "--uts", "--ipc", "--net", "--"]
    line = shlex.join([*enter, "env", "-C", str(cwd), *variables, *command])
    # A process that is moved from outside could start others before.
    joining = f"echo 0 > {shlex.quote(str(group))} && exec {line}"

    def start() -> subprocess.Popen[str]:
        with open(f"/proc/{pid}/ns/pid") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _NEW_PID_NAMESPACE):
                raise OSError(ctypes.get_errno(), "setns")
        return subprocess.Popen(["sh", "-c", joining], text=True, start_new_session=True, **options)

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(start).result()


def finish(
    process: subprocess.Popen[str], command: list[str], *, check: bool, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Wait for a command; after `timeout` seconds, kill it with its session."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # In a frozen host it stays until the host is thawed.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check and done.returncode:
        raise CommandFailed(done.returncode, command, output, errors)
    return done
