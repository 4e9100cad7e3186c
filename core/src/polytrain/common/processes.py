"""What Linux offers to never leave a process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

_FLAGS = 6
"""Which field behind the name in `/proc/*/stat` holds the kernel's flags of a process."""

_PF_EXITING = 0x4

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as the kernel tells them of a socket's other end."""

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end it if the parent is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies: so they are found and killed."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def allow_tracing() -> None:
    """Let processes of the same user read this one, where only its parents could."""
    # Kernels without this restriction don't know the call, and don't need it.
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def kill_session(leader: int) -> None:
    """SIGKILL a process and all of its group. No error if they are gone."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def kill_children_except(spared: set[int]) -> None:
    """SIGKILL and reap every child of this process but these."""
    while strays := children_of(os.getpid()) - spared:
        for pid in strays:
            kill_session(pid)
        for pid in strays:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def describe_exit(status: int) -> str:
    """How a process ended, for people, from its wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    return f"killed by {signal.Signals(-code).name}"


def oom_kills() -> int:
    """Processes that this machine's kernel has ended for want of memory since it started."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Whom the kernel says a Unix socket is connected to: the process that listens, or connected.

    Returns:
        Its id, and that of its user.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def is_running(child: int) -> bool:
    """Whether a child of this process hasn't begun to end yet. It stays to be reaped.

    A process that ends closes its connections, which others notice, before its parent can see that
    it ends: the kernel's own mark is set before both.
    """
    if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        return False
    return not _is_exiting(_stat(child))


def wait_if_ending(pid: int) -> bool:
    """Whether a process is on its way out, or gone; it is gone when this returns."""
    fields = _stat(pid)
    if fields and not _is_exiting(fields):
        return False
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
        try:
            select.select([ended], [], [])
        finally:
            os.close(ended)
    return True


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; one that a debugger holds isn't."""
    fields = _stat(pid)
    return bool(fields) and fields[0] == "T"


def is_traced(pid: int) -> bool:
    """Whether a debugger holds a process."""
    fields = _stat(pid)
    return bool(fields) and fields[0] == "t"


def is_held(pid: int) -> bool:
    """Whether a process can't go on: a signal has stopped it, or it waits for a device."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in "TD"


def busy_seconds(pid: int) -> float:
    """CPU time of a process's main thread, and its time in the queue for a CPU; 0 if it is gone."""
    try:
        ran, queued, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return (int(ran) + int(queued)) / 1e9


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all its descendants, with those of them that have been reaped."""
    ticks = sum(map(int, _stat(pid)[11:15]))
    return ticks / _TICKS_PER_SECOND + sum(map(cpu_seconds, children_of(pid)))


def thread_count() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def has_children() -> bool:
    """Whether this process has a child that it hasn't reaped."""
    return bool(children_of(os.getpid()))


def open_files() -> dict[int, str]:
    """What this process has open, by descriptor."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        # The one that the directory itself is read with is gone by now.
        with contextlib.suppress(OSError):
            found[int(descriptor)] = os.readlink(f"/proc/self/fd/{descriptor}")
    return found


def holds_device() -> bool:
    """Whether this process has opened an accelerator's device file."""
    return any(name.startswith(("/dev/nvidia", "/dev/kfd")) for name in open_files().values())


def _is_exiting(fields: list[str]) -> bool:
    return bool(int(fields[_FLAGS]) & _PF_EXITING)


def children_of(pid: int) -> set[int]:
    """Children of any thread of a process; none if it is gone."""
    found: set[int] = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, children.read_text().split()))
    return found


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; nothing if it is gone."""
    try:
        # Its name comes before, and may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
