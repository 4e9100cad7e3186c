"""Linux calls that make sure that no process is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

_SESSION = 3
_FLAGS = 6
"""Which fields behind the name in `/proc/*/stat` hold a process's session, and the kernel's flags
of it."""

_PF_EXITING = 0x4

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a socket's other end, as the kernel reports them."""

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end it if the parent is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that they are found and killed."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def allow_tracing() -> None:
    """Let all processes of the same user read this one, not only its parents."""
    # Kernels without this restriction don't know the call, and don't need it.
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def kill_session(leader: int) -> None:
    """SIGKILL a process and all of its group. No error if they are gone."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def kill_children_except(spared: set[int]) -> None:
    """SIGKILL and reap every child of this process but these."""
    kill_children(lambda pid: pid not in spared)


def kill_children(is_doomed: Callable[[int], bool]) -> None:
    """SIGKILL and reap every child of this process of which this is so, until there is none."""
    while strays := set(filter(is_doomed, children_of(os.getpid()))):
        for pid in strays:
            kill_session(pid)
        for pid in strays:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def reap_children_except(spared: set[int]) -> None:
    """Take notice of children that have ended, but of these."""
    for pid in children_of(os.getpid()) - spared:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def session_of(pid: int) -> int:
    """The process that leads the session of another; 0 if that is gone."""
    fields = _stat(pid)
    return int(fields[_SESSION]) if fields else 0


def describe_exit(status: int) -> str:
    """How a process ended, for people, from its wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        # Most real-time signals have no name.
        return f"killed by signal {-code}"


def oom_kills() -> int:
    """Processes that this machine's out-of-memory killer has ended since the machine started."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end of a Unix socket, as the kernel reports it.

    Returns:
        Its process id and its user id.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def started_at(pid: int) -> int | None:
    """Return when a process started, in ticks since the boot; None if it is gone.

    Raises:
        PermissionError: the process is hidden from this user.
    """
    try:
        # The name comes before, and may contain any character.
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # Other users' processes may be hidden.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
        return None
    # A zombie has ended, and its parent hasn't read its exit code.
    return None if status[0] in "ZX" else int(status[19])


def is_running(child: int) -> bool:
    """Whether a child of this process hasn't begun to exit. This doesn't reap it.

    An exiting process closes its connections before its parent can see that it exits. The kernel
    sets its own mark before both.
    """
    if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        return False
    return not _is_exiting(_stat(child))


def is_ending(pid: int) -> bool:
    """Whether a process is exiting or gone."""
    fields = _stat(pid)
    return not fields or _is_exiting(fields)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process. A process in a debugger doesn't count."""
    fields = _stat(pid)
    return bool(fields) and fields[0] == "T"


def is_traced(pid: int) -> bool:
    """Whether a debugger holds a process."""
    fields = _stat(pid)
    return bool(fields) and fields[0] == "t"


def is_held(pid: int) -> bool:
    """Whether a process can't run: a signal has stopped it, or it waits for a device."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in "TD"


def busy_seconds(pid: int) -> float:
    """CPU time of a process's main thread, and its time in the queue for a CPU; 0 if it is gone."""
    try:
        ran, queued, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return (int(ran) + int(queued)) / 1e9


def umask() -> int:
    """This process's umask; `os.umask` can't tell it without changing it for all threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)


def resident_bytes(pid: int) -> int:
    """Memory of a process that isn't swapped out, shared memory included; 0 if it is gone."""
    try:
        _, pages, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all its descendants, including those that have been reaped."""
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
        # The descriptor that listed the directory is closed by now.
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
    """The fields of `/proc/*/stat` from the state on; empty if the process is gone."""
    try:
        # The name comes first, and may contain any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
