"""Linux calls that inspect processes, and ensure that none is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

_SESSION = 3
_FLAGS = 6
"""Indices of the fields after the name in `/proc/*/stat` with a process's session and kernel
flags."""

_PF_EXITING = 0x4

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a socket's other end, as the kernel reports them."""

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies; exit if the parent is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, to find and kill them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def allow_tracing() -> None:
    """Let all processes of the same user trace this one, not only its ancestors."""
    # Kernels without this restriction lack the call, and don't need it.
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def kill_session(leader: int) -> None:
    """SIGKILL a process and its whole group. No error if they are gone."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def kill_children(is_doomed: Callable[[int], bool]) -> None:
    """SIGKILL and reap this process's children that `is_doomed` selects, until none is left."""
    while strays := set(filter(is_doomed, children_of(os.getpid()))):
        for pid in strays:
            kill_session(pid)
        for pid in strays:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def reap_children_except(spared: set[int]) -> None:
    """Reap children that have ended, except these."""
    for pid in children_of(os.getpid()) - spared:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def session_of(pid: int) -> int:
    """Return the leader of a process's session; 0 if the process is gone."""
    fields = _stat(pid)
    return int(fields[_SESSION]) if fields else 0


def describe_exit(status: int) -> str:
    """Return a description of a process's end, for people, from its wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        # Most real-time signals have no name.
        return f"killed by signal {-code}"


def oom_kills() -> int:
    """Return the number of processes that the machine's out-of-memory killer has killed."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process at the other end of a Unix socket, as the kernel reports it.

    Returns:
        Its process id and its user id.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def started_at(pid: int) -> int | None:
    """Return the start time of a process, in ticks since boot; None if it is gone.

    Raises:
        PermissionError: the process is hidden from this user.
    """
    try:
        status = _status(pid)
    except (FileNotFoundError, ProcessLookupError):
        # Other users' processes may be hidden.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
        return None
    # A zombie has ended, but its parent hasn't reaped it.
    return None if status[0] in "ZX" else int(status[19])


def is_running(child: int) -> bool:
    """Return whether a child of this process hasn't begun to exit. This doesn't reap it.

    An exiting process closes its connections before its parent sees the exit. The kernel sets the
    exiting flag before both.
    """
    if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        return False
    return not _is_exiting(_stat(child))


def is_ending(pid: int) -> bool:
    """Return whether a process is exiting or gone."""
    fields = _stat(pid)
    return not fields or _is_exiting(fields)


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process. A process in a debugger doesn't count."""
    fields = _stat(pid)
    return bool(fields) and fields[0] == "T"


def is_traced(pid: int) -> bool:
    """Return whether a debugger traces a process."""
    fields = _stat(pid)
    return bool(fields) and fields[0] == "t"


def is_held(pid: int) -> bool:
    """Return whether a process can't run: a signal has stopped it, or it waits for a device."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in "TD"


def busy_seconds(pid: int) -> float:
    """Return the seconds that a process's main thread ran or waited for a CPU; 0 if it is gone."""
    try:
        ran, queued, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return (int(ran) + int(queued)) / 1e9


def umask() -> int:
    """Return this process's umask, which `os.umask` would change for all threads."""
    lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process, including shared memory; 0 if it is gone."""
    try:
        _, pages, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and all its descendants, including reaped ones."""
    ticks = sum(map(int, _stat(pid)[11:15]))
    return ticks / _TICKS_PER_SECOND + sum(map(cpu_seconds, children_of(pid)))


def process_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, user and system; 0 if it is gone."""
    return sum(map(int, _stat(pid)[11:13])) / _TICKS_PER_SECOND


def thread_count() -> int:
    """Return the number of this process's threads."""
    return len(os.listdir("/proc/self/task"))


def open_files() -> dict[int, str]:
    """Return this process's open descriptors, with the targets of their links in `/proc`."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        # The descriptor that listed the directory is already closed.
        with contextlib.suppress(OSError):
            found[int(descriptor)] = os.readlink(f"/proc/self/fd/{descriptor}")
    return found


def holds_device() -> bool:
    """Return whether this process has opened an accelerator's device file."""
    return any(name.startswith(("/dev/nvidia", "/dev/kfd")) for name in open_files().values())


def _is_exiting(fields: list[str]) -> bool:
    return bool(int(fields[_FLAGS]) & _PF_EXITING)


def children_of(pid: int) -> set[int]:
    """Return the children of all threads of a process; empty if it is gone, or can't be read."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found.update(map(int, children.read_text().split()))
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/*/stat` from the state on; empty if the process is gone."""
    try:
        return _status(pid)
    except OSError:
        return []


def _status(pid: int) -> list[str]:
    # The name comes first, and may contain any bytes: the kernel cuts it within a character, too.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def is_readable(source: int | _HasDescriptor, timeout_s: float | None = 0) -> bool:
    """Return whether a descriptor can be read, or has reached its end.

    `select.select` refuses descriptors above 1023, which a driver with many open files has.

    Args:
        source: the descriptor, or an object that has one.
        timeout_s: maximum seconds to wait; None for no limit.
    """
    waiting = select.poll()
    waiting.register(source, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else timeout_s * 1000))


class _Closable(Protocol):
    def close(self) -> None:
        """Close it in this process, without an effect on other processes."""


_T = TypeVar("_T", bound=_Closable)

_kept_from: weakref.WeakSet[_Closable] = weakref.WeakSet()


def keep_from_children(owner: _T) -> _T:
    """Close an object in all forked children of this process, as long as the object exists."""
    _kept_from.add(owner)
    return owner


class OwnDescriptor:
    """A descriptor that forked children of this process don't have."""

    def __init__(self, number: int) -> None:
        self._number: int | None = number
        keep_from_children(self)

    def fileno(self) -> int:
        """Return the descriptor's number; -1 if it is closed."""
        return -1 if self._number is None else self._number

    def detach(self) -> int:
        """Return the open descriptor's number, and give up its ownership."""
        number, self._number = self.fileno(), None
        return number

    def close(self) -> None:
        """Close the descriptor, unless it is closed."""
        # Forget it first: in a child that is forked meanwhile, the number may be reused.
        number = self.detach()
        if number != -1:
            os.close(number)


def _close_all() -> None:
    for owner in list(_kept_from):
        owner.close()


os.register_at_fork(after_in_child=_close_all)
