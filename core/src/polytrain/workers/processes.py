"""What Linux offers to never leave a process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end it if the parent is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies: so they are found and killed."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_session(leader: int) -> None:
    """SIGKILL a process and all of its group. No error if they are gone."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def kill_children_except(spared: set[int]) -> None:
    """SIGKILL and reap every child of this process but these."""
    while strays := _children() - spared:
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


def is_running(child: int) -> bool:
    """Whether a child of this process hasn't ended yet. It stays to be reaped."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def thread_count() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def holds_device() -> bool:
    """Whether this process has opened an accelerator's device file."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(("/dev/nvidia", "/dev/kfd")):
                return True
    return False


def _children() -> set[int]:
    children = Path("/proc/self/task") / str(os.getpid()) / "children"
    return {int(pid) for pid in children.read_text().split()}
