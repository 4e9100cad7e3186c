"""One host, and what can happen to it."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from polytrain.testing.hosts.namespaces import (
    DISK,
    DISK_MB,
    Freezer,
    HostsUnavailable,
    Switch,
    address_of,
)
from polytrain.testing.processes import eventually

_SHIFT = Path("/tmp/.polytrain-clock-shift")
_LIBRARY = Path("/tmp/.polytrain-clock.so")

_NEW_PID_NAMESPACE = 0x20000000  # CLONE_NEWPID in <linux/sched.h>

Command = str | Sequence[str | Path]
"""A program with its arguments, or a line for the shell."""


class Host:
    """Processes that have a network, a name, a /tmp, a /dev/shm and a disk of their own.

    `heal` and `thaw` undo what the other methods do; nothing undoes `kill` and `crash`.
    """

    def __init__(
        self,
        *,
        number: int,
        name: str,
        shared: Path | None,
        switch: Switch,
        freezer: Freezer,
        # Of process 1, as this process numbers it, and the program that waits for its end.
        pid: int,
        waiter: subprocess.Popen[str],
    ) -> None:
        self.name = name
        self.address = address_of(number)
        """Where other hosts reach this one. They know its name too."""
        self.disk = DISK
        """The directory of this host's own disk, where TMPDIR and HOME of its processes are."""
        self.shared = shared
        """The directory that all hosts have, if they were asked for one."""
        self._number = number
        self._switch = switch
        self._freezer = freezer
        self._pid = pid
        self._waiter = waiter
        self._clock: HostClock | None = None
        self._started: list[subprocess.Popen[str]] = []

    def __repr__(self) -> str:
        return f"Host({self.name}, {self.address})"

    @property
    def is_alive(self) -> bool:
        return self._waiter.poll() is None

    def run(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this host, and return what it printed.

        Its directory is the shared one, or the host's disk.

        Args:
            command: a program and its arguments, or a line for the shell.
            env: variables besides those of this process.
            check: whether to raise if the command fails; the message has what it printed.
            timeout: seconds, after which `subprocess.TimeoutExpired` is raised.
        """
        pipe = subprocess.PIPE
        process = self._start(command, env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        return finish(process, words_of(command), check=check, timeout=timeout)

    def start(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        input: int = subprocess.DEVNULL,
        output: int | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command in this host, in a session of its own, and don't wait for it.

        It dies with the host. Its directory is that of `run`.

        Args:
            command: a program and its arguments, or a line for the shell.
            env: variables besides those of this process.
            input: as `stdin` of `subprocess.Popen`.
            output: as `stdout`, for its errors too.
        """
        errors = None if output is None else subprocess.STDOUT
        return self._start(command, env, stdin=input, stdout=output, stderr=errors)

    def cut_off(self) -> None:
        """Let all packets to and from this host vanish, as a broken switch does."""
        self._switch.cut(self._number)

    def block(self, *, incoming: bool = True, ports: range = range(1, 65536)) -> None:
        """Drop attempts to connect to this host's ports, as its firewall would.

        Open connections stay, and this host may open others.

        Args:
            incoming: False drops attempts of this host to connect to others' ports.
            ports: those to which nobody can connect.
        """
        self._switch.block(self._number, incoming=incoming, ports=ports)

    def read_only(self) -> None:
        """Mount the shared directory read-only on this host, once it has no file open to write."""
        self._mount("ro")

    def fill_disk(self) -> None:
        """Leave no room on this host's own disk (`disk`)."""
        used = self.run(["du", "-s", "-B", "4096", DISK]).stdout.split()[0]
        self._resize_disk(f"{int(used) * 4096}")

    def slow(self, *, mbit: float | None = None, ms: float = 0) -> None:
        """Limit the rate of packets to this host, and of those from it, and delay each.

        Args:
            mbit: megabits per second in either direction; None doesn't limit them.
            ms: milliseconds that a packet takes longer, in either direction.

        Raises:
            HostsUnavailable: the kernel can't delay packets.
        """
        self._switch.slow(self._number, mbit=mbit, ms=ms)

    def clock(self, seconds: int) -> None:
        """Set the clock forward by some seconds, or back, against the machine's.

        It counts for programs that are started after the first call; later calls count for these
        at once.

        Raises:
            HostsUnavailable: there is no C compiler.
        """
        if self._clock is None:
            self._clock = HostClock(Path(f"/proc/{self._pid}/root"))
        self._clock.set(seconds)

    def heal(self) -> None:
        """Undo `cut_off`, `block`, `slow`, `read_only` and `fill_disk`."""
        self._switch.restore(self._number)
        self._resize_disk(f"{DISK_MB}m")
        if self.shared is not None:
            self._mount("rw")

    def freeze(self) -> None:
        """Stop all processes of this host, as a paused virtual machine. Its network stays up."""
        self._freezer.freeze()

    def thaw(self) -> None:
        """Let a frozen host go on."""
        self._freezer.thaw()

    def reset_connections(self) -> None:
        """Reset this host's open connections to others, as a firewall that forgets them does."""
        before = self._connections()
        self._connections("--kill")
        # Programs may have made new ones meanwhile.
        if before & self._connections():
            raise HostsUnavailable("the kernel resets no connection (INET_DIAG_DESTROY)")

    def kill(self) -> None:
        """End all processes of this host at once. Others see its connections end."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        # A frozen process dies only when it is thawed.
        self._freezer.thaw()
        # Process 1 ends after all others of its namespace, and those end when they are waited for.
        for process in self._started:
            process.wait()
        self._waiter.wait()

    def crash(self) -> None:
        """End this host as a power failure does: no other learns of it by a packet."""
        self.cut_off()
        self.kill()

    def _connections(self, *options: str) -> set[tuple[str, str]]:
        """Both ends of the open connections to other hosts."""
        others = f"( dst 10.77.0.0/24 and not dst {self.address} )"
        command = ["ss", "--tcp", "--numeric", "--no-header", *options]
        lines = self.run([*command, "state", "established", others]).stdout.splitlines()
        return {(line.split()[2], line.split()[3]) for line in lines}

    def _start(
        self,
        command: Command,
        env: Mapping[str, str] | None,
        **streams: int | None,
    ) -> subprocess.Popen[str]:
        own = {"HOME": f"{DISK}/home", "TMPDIR": str(DISK), "RAY_TMPDIR": "/tmp"}
        clock = self._clock.env if self._clock is not None else {}
        process = start_in(
            self._pid,
            self._freezer.members,
            words_of(command),
            cwd=self.shared or DISK,
            inside=clock,
            env={**_without_ray(os.environ), **own, **(env or {})},
            **streams,
        )
        self._started.append(process)
        return process

    def _mount(self, option: str) -> None:
        if self.shared is None:
            raise ValueError("there is no shared directory: hosts(..., shared=directory)")
        command = ["mount", "-o", f"remount,bind,{option}", str(self.shared)]
        # While a file is open for writing, its mount can't become read-only.
        if not eventually(lambda: self.run(command, check=False).returncode == 0):
            self.run(command)

    def _resize_disk(self, size: str) -> None:
        self.run(["mount", "-o", f"remount,size={size}", DISK])


def _without_ray(variables: Mapping[str, str]) -> dict[str, str]:
    """Leave out what a Ray in this process has set for its own cluster, such as its token."""
    return {name: value for name, value in variables.items() if not name.startswith("RAY_")}


class HostClock:
    """Shifts the clock of all programs that a host starts from now on.

    The kernel's clock stays: times of files, and programs that don't use the C library, have it.

    Args:
        root: the host's file system, as this process sees it.
    """

    def __init__(self, root: Path) -> None:
        self._shift = root / _SHIFT.relative_to("/")
        self.set(0)
        (root / _LIBRARY.relative_to("/")).write_bytes(_library())
        self.env = {"LD_PRELOAD": str(_LIBRARY)}
        """What a program needs to have the clock."""

    def set(self, seconds: int) -> None:
        """Shift it, for programs that run already too."""
        # Programs have mapped the file: it must never be empty.
        with self._shift.open("r+b" if self._shift.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))


def _library() -> bytes:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise HostsUnavailable("a clock takes a C compiler, and neither cc nor gcc is installed")
    source = Path(__file__).with_name("clock.c")
    define = f'-DSHIFT_FILE="{_SHIFT}"'
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory, "clock.so")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", define, "-o", built, source, "-ldl"], check=True
        )
        return built.read_bytes()


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
