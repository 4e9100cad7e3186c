"""Faults as data: what goes wrong, on which rank, where and when; and what each kind does.

`injection` makes them happen, in the worker process that they are injected into. Nothing here
sleeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import psutil

from polytrain.linux.processes import peer_of

Kind = Literal[
    "sigkill",
    "sigstop",
    "held",
    "segfault",
    "exit",
    "os_exit",
    "exception",
    "user_error",
    "memory",
    "disk_full",
    "slow",
    "ports_closed",
    "ports_stolen",
    "services_lost",
    "zygote_killed",
    "agent_killed",
    "raylet_killed",
    "driver_killed",
]

DRIVER = "POLYTRAIN_TESTING_DRIVER"
"""Variable with the driver's process id, while faults are injected."""

_CPU_S_OF_A_SLOW_STEP = 0.5

_HEADROOM = 1 << 28
"""Bytes that may still be allocated once memory is limited."""


class InjectedError(Exception):
    """What a fault of the kinds "exception" and "user_error" raises."""


def _sigkill(where: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sigstop(where: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _segfault(where: str) -> None:
    ctypes.string_at(0)


def _exit(where: str) -> None:
    sys.exit(1)


def _os_exit(where: str) -> None:
    os._exit(0)


def _exception(where: str) -> None:
    """A different message at every attempt."""
    raise InjectedError(f"injected: {where}")


def _user_error(where: str) -> None:
    """The same on every rank and at every attempt."""
    raise InjectedError("injected into the training function")


def _memory(where: str) -> None:
    """Run into a memory limit of this process, so that other processes aren't affected."""
    limit = psutil.Process().memory_info().vms + _HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    filled = bytearray()
    while True:
        filled += bytes(_HEADROOM // 8)


def _disk_full(where: str) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        full.write(b"a checkpoint")


def _slow(where: str) -> None:
    end = time.thread_time() + _CPU_S_OF_A_SLOW_STEP
    while time.thread_time() < end:
        pass


def _ports_closed(where: str) -> None:
    """Close the ports that were offered."""
    for _, service in _services():
        _cut(service)


def _ports_stolen(where: str) -> None:
    """A different process takes the offered ports, and closes every connection."""
    held = [(descriptor, service.getsockname()[:2]) for descriptor, service in _services()]
    for descriptor, address in held:
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), descriptor)
        ours, theirs = socket.socketpair()
        code = f"import {__name__} as faults; faults.thief({address!r}, {theirs.fileno()})"
        # It belongs to the worker process's session, and ends with it.
        subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        with ours:
            if not ours.recv(1):
                raise RuntimeError(f"{address} can't be stolen")


def thief(address: tuple[str, int], notify: int) -> NoReturn:
    """The body of the process that has taken a port."""
    with socket.socket() as listener, socket.socket(fileno=notify) as ready:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address[:2])
        listener.listen()
        ready.sendall(b"!")
        while True:
            listener.accept()[0].close()


def _services_lost(where: str) -> None:
    """Close all ports on which this process listens, and the connections to them."""
    ports = {service.getsockname()[1] for _, service in _services()}
    for _, connection in _sockets(socket.AF_INET, socket.AF_INET6):
        if connection.getsockname()[1] in ports:
            _cut(connection)


def _zygote_killed(where: str) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def _agent_killed(where: str) -> None:
    os.kill(_agent(), signal.SIGKILL)
    signal.pause()


def _raylet_killed(where: str) -> None:
    """Kill the node's raylet, and with it everything that Ray runs on the node."""
    os.kill(psutil.Process(_agent()).ppid(), signal.SIGKILL)
    signal.pause()


def _driver_killed(where: str) -> None:
    os.kill(int(os.environ[DRIVER]), signal.SIGKILL)
    signal.pause()


FAULT_ACTIONS: Mapping[Kind, Callable[[str], None]] = {
    "sigkill": _sigkill,
    "sigstop": _sigstop,
    # It expects that somebody lets the process continue.
    "held": _sigstop,
    "segfault": _segfault,
    "exit": _exit,
    "os_exit": _os_exit,
    "exception": _exception,
    "user_error": _user_error,
    "memory": _memory,
    "disk_full": _disk_full,
    "slow": _slow,
    "ports_closed": _ports_closed,
    "ports_stolen": _ports_stolen,
    "services_lost": _services_lost,
    "zygote_killed": _zygote_killed,
    "agent_killed": _agent_killed,
    "raylet_killed": _raylet_killed,
    "driver_killed": _driver_killed,
}
"""What each kind does. It is called with the place and time, as text."""


def count_services() -> int:
    """Number of ports on which this process listens."""
    return len(list(_services()))


_Open = tuple[int, socket.socket]
"""A socket's descriptor, and a duplicate that can be closed separately."""


def _services() -> Iterator[_Open]:
    """TCP sockets with a port and no peer: servers, or sockets that hold a port for one."""
    for descriptor, opened in _sockets(socket.AF_INET, socket.AF_INET6):
        try:
            opened.getpeername()
        except OSError:
            if opened.getsockname()[1]:
                yield descriptor, opened


def _sockets(*families: socket.AddressFamily) -> Iterator[_Open]:
    """All stream sockets of this process of some families."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            duplicate = os.dup(descriptor)
        except OSError:  # that of the listing itself, or closed meanwhile by a framework's thread
            continue
        if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
            os.close(duplicate)
            continue
        with socket.socket(fileno=duplicate) as opened:
            if opened.family in families and opened.type == socket.SOCK_STREAM:
                yield descriptor, opened


def _cut(connection: socket.socket) -> None:
    """Shut down a connection or a service without its owner."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _agent() -> int:
    """Process id of this worker's agent, which has made the socket pair between the two."""
    for _, connection in _sockets(socket.AF_UNIX):
        pid, _ = peer_of(connection)
        if pid not in (0, os.getpid()):
            return pid
    raise RuntimeError("this process has no agent")


Point = Literal[
    "offering",
    "offered",
    "joining",
    "joined",
    "before_report",
    "saving",
    "after_report",
]
"""A point in a worker process's life: before and after it offers and joins; before it reports a
step, when half of the step's checkpoint is written, and after the report."""

WITHOUT_STEP: frozenset[Point] = frozenset({"offering", "offered", "joining", "joined"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that a worker process does to itself or to something that it depends on."""

    rank: int
    at_step: int = 0
    """The step that is about to be reported, or was just reported. Unused before training."""

    kind: Kind = "sigkill"
    point: Point = "after_report"
    attempt: int | None = 0
    """Number of the attempt, counted over all drivers; None is every attempt."""

    def is_due(self, *, rank: int, step: int, attempt: int, point: Point) -> bool:
        """Whether the fault is due here."""
        return (
            rank == self.rank
            and point == self.point
            and attempt == (attempt if self.attempt is None else self.attempt)
            and (point in WITHOUT_STEP or step == self.at_step)
        )

    def inject(self, *, rank: int, step: int, attempt: int, point: Point = "after_report") -> None:
        """Inject the fault, if it is due here."""
        if self.is_due(rank=rank, step=step, attempt=attempt, point=point):
            FAULT_ACTIONS[self.kind](f"rank {rank}, step {step}, attempt {attempt}")
