"""Connects to a node's zygote, and starts it if needed.

The zygote's address has no permissions, and every user on the node can see it. Agents send the
run's environment, so each end first checks with the kernel that the other has the same user.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import marshal
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polytrain.linux.processes import is_ending, keep_from_children, peer_of
from polytrain.workers.processes.channel import SocketChannel, send_request

logger = logging.getLogger(__name__)

SAFE_TO_FORK = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables that keep a process safe to fork after its imports: these libraries start no threads.

`linux.blas_threads` starts those of OpenBLAS in forks.
"""

_UNLESS_SET = {
    # Row groups are allocated and freed many times a second. By default Arrow's allocator returns
    # memory to the system after 10 ms, and mapping it again takes longer than filling it.
    "MIMALLOC_PURGE_DELAY": "10000",
    # Tensors are allocated and freed in every step. glibc raises these limits itself, but only
    # after it has freed such a large block; until then it may return memory after each step.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}

_ANSWER_S = 1.0

_TAKEN_WITHIN_S = 10.0
"""Seconds to wait for a zygote to read when its socket has no room for a request."""

_ENDED_WITHIN_S = 10.0
"""Seconds within which an unused zygote ends."""

CLEANED_UP_WITHIN_S = 0.2
"""Seconds within which a zygote without clients must have removed what its imports have made."""

_REACHED_S = 30.0
"""Seconds within which the owner of an address must answer or release it."""

PAUSE_S = 0.001
"""Seconds between two attempts to connect."""

_LAST_OUTPUT = 4000
"""Maximum bytes of a zygote's output to show."""

_PROGRAM = """import marshal, os, sys
with os.fdopen(int(sys.argv[1]), "rb") as file:
    sys.path[:], arguments = marshal.load(file)
from {module} import {function}
{function}(*arguments)
"""
"""It uses only built-in modules until `sys.path` is set: files in the working directory could
shadow other modules.
"""

BACKLOG = 1024
"""Connections that may wait while the zygote imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteSpec:
    """The settings of a node's zygote, the same in every agent of the node."""

    name: str
    """The address: an abstract Unix socket, which has no file and ends with its owner."""

    environment: Mapping[str, str]
    """Variables to set before any import, unless the user has set them."""

    modules: tuple[str, ...]
    path: tuple[str, ...]
    """The zygote's `sys.path`."""

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables to set before any import, which override the user's environment."""


def zygote_name(token: str, node_id: str) -> str:
    """Return the address of this user's zygote with this token on one node.

    The address doesn't reveal the token, or the addresses on other nodes.
    """
    named = hashlib.sha256(f"{os.getuid()} {token} {node_id}".encode()).hexdigest()
    return f"\0polytrain-{named[:32]}"


def preload_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a preloaded zygote imports modules for worker processes."""
    return {**_UNLESS_SET, **environment, **SAFE_TO_FORK}


class ZygoteConnection:
    """A client's connection to a zygote. The zygote ends with its last connection."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        process: subprocess.Popen[bytes] | None = None,
        output: int | None = None,
    ) -> None:
        """
        Args:
            process: the zygote, if this process started it.
            output: a descriptor of its standard error's file, which this object closes.
        """
        # A forked child that outlives this process must not keep the zygote alive.
        self.socket = keep_from_children(connection)
        self._process = process
        self._output = output

    @classmethod
    def open(cls, spec: ZygoteSpec, *, within_s: float = _REACHED_S) -> ZygoteConnection:
        """Connect to the zygote; start it if needed.

        Raises:
            PermissionError: another user's process has the address.
            OSError: nobody answers at the address within `within_s` seconds, or the system can't
                start the process.
        """
        attempts = attempts_to_connect(spec, within_s=within_s)
        while (connection := next(attempts)) is None:
            time.sleep(PAUSE_S)
        return connection

    def request(self, message: list[object], descriptors: Sequence[int] = ()) -> None:
        """Send a request, together with open descriptors.

        This doesn't wait for the zygote, which may be importing.

        Raises:
            OSError: the zygote is gone, or doesn't read its requests; the connection is then shut.
        """
        limit_s = self.socket.gettimeout()
        self.socket.settimeout(_TAKEN_WITHIN_S)
        try:
            send_request(self.socket, message, descriptors)
        except TimeoutError:
            # Shut it down: after a partly sent request, the next would be read as its rest.
            self.socket.shutdown(socket.SHUT_RDWR)
            raise TimeoutError(
                errno.ETIMEDOUT, f"the zygote has taken no request for {_TAKEN_WITHIN_S:g} s"
            ) from None
        finally:
            self.socket.settimeout(limit_s)

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return self.socket.fileno() != -1

    @property
    def pid(self) -> int | None:
        """Process id of the zygote; None if another process started it."""
        return None if self._process is None else self._process.pid

    def last_output(self) -> str:
        """Return the end of the zygote's standard error, even if it has died."""
        if self._output is None:
            return ""
        start = max(0, os.fstat(self._output).st_size - _LAST_OUTPUT)
        return os.pread(self._output, _LAST_OUTPUT, start).decode(errors="replace").strip()

    def leave(self) -> None:
        """Disconnect. The zygote lives while it has other clients."""
        self.socket.close()
        if self._output is not None:
            os.close(self._output)
            self._output = None

    def is_current(self) -> bool:
        """Return whether the code files that the zygote has imported are unchanged.

        Return False if it is gone, or doesn't answer at once.
        """
        self.socket.settimeout(_ANSWER_S)
        try:
            self.request(["is current"])
            return SocketChannel(self.socket).receive() == ["is current", True]
        except (EOFError, OSError):
            return False
        finally:
            self.socket.settimeout(None)

    def detach(self) -> subprocess.Popen[bytes] | None:
        """Give up ownership of the zygote; return its process if this process started it."""
        process, self._process = self._process, None
        return process

    def end(self) -> None:
        """Disconnect. If this process started the zygote, let it clean up, then kill it."""
        self.leave()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLEANED_UP_WITHIN_S)
            self._process.kill()
            if not has_ended(self._process):
                logger.warning("A zygote, process %d, isn't gone after SIGKILL", self._process.pid)

    def close(self) -> None:
        """Disconnect. If this process started the zygote, wait for its end, then kill it."""
        self.leave()
        if self._process is not None and not has_ended(self._process):
            self.end()


def attempts_to_connect(
    spec: ZygoteSpec, *, within_s: float = _REACHED_S
) -> Iterator[ZygoteConnection | None]:
    """Yield the connection, or None, of each attempt; the caller pauses `PAUSE_S` in between.

    Raises:
        OSError: see `ZygoteConnection.open`.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        yield _attempt(spec)
    raise ConnectionError(
        f"the process at the zygote's address {spec.name[1:]!r} doesn't answer within "
        f"{within_s:g} s. If it is another user's, start the run again"
    )


def _attempt(spec: ZygoteSpec) -> ZygoteConnection | None:
    """Connect to the zygote, or start it; return None if neither is possible now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            # Only one process can bind the name; it starts the zygote.
            listener.bind(spec.name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(
                    error.errno,
                    f"this system refuses an abstract Unix socket ({error.strerror}), which is "
                    "needed to start worker processes",
                ) from error
            return _connected(spec.name)
        with contextlib.ExitStack() as unless_started:
            # Create it before anybody can connect and look for it.
            output = os.memfd_create(_output_name(spec.name))
            unless_started.callback(os.close, output)
            listener.listen(BACKLOG)
            connection = unless_started.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            )
            # Connect before it runs: a zygote without clients ends.
            connection.connect(spec.name)
            process = _start(spec, listener, output)
            unless_started.pop_all()
    return ZygoteConnection(connection, process=process, output=output)


def _connected(name: str) -> ZygoteConnection | None:
    """Connect to the zygote at an address, without waiting.

    Returns:
        The connection; None if the zygote is ending or isn't listening yet, or if its backlog is
        full.

    Raises:
        PermissionError: another user's process has the address.
    """
    with contextlib.ExitStack() as unless_connected:
        connection = unless_connected.enter_context(
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        )
        connection.setblocking(False)
        try:
            connection.connect(name)
        except (BlockingIOError, ConnectionRefusedError):
            return None
        peer = _listener_of(connection)
        # An ending zygote may still listen, and accept connections.
        if is_ending(peer):
            return None
        connection.setblocking(True)
        unless_connected.pop_all()
    return ZygoteConnection(connection, output=_output_of(peer, name))


def _listener_of(connection: socket.socket) -> int:
    """Return the process that listens at the other end.

    Raises:
        PermissionError: the process belongs to another user.
    """
    pid, uid = peer_of(connection)
    if uid != os.getuid():
        raise PermissionError(
            f"a process of user {uid} listens at the address of this run's zygote, and this is "
            f"user {os.getuid()}: nothing was sent to it. Have it ended, or start the run again"
        )
    return pid


def has_ended(zygote: subprocess.Popen[bytes]) -> bool:
    """Wait for the end of a zygote that this process started; return whether it has ended."""
    try:
        zygote.wait(_ENDED_WITHIN_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _output_name(name: str) -> str:
    """Return the name of the memory file that is a zygote's standard error."""
    return f"polytrain-output-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _output_of(process: int, name: str) -> int | None:
    """Open a zygote's standard error through a process that has it open; None if it hasn't."""
    descriptors = Path(f"/proc/{process}/fd")
    with contextlib.suppress(OSError):
        for descriptor in descriptors.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _output_name(name) in os.readlink(descriptor):
                    return os.open(descriptor, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _start(spec: ZygoteSpec, listener: socket.socket, output: int) -> subprocess.Popen[bytes]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return started_interpreter(
        "polytrain.workers.processes.zygote",
        "main",
        (listener.fileno(), spec.modules),
        path=spec.path,
        descriptors=[listener.fileno()],
        env={
            **_UNLESS_SET,
            **spec.environment,
            **inherited,
            **spec.variables,
            **SAFE_TO_FORK,
        },
        stdout=subprocess.DEVNULL,
        stderr=output,
    )


def is_started_interpreter() -> bool:
    """Return whether this process, or one that has forked it, is by `started_interpreter`."""
    return len(sys.orig_argv) > 2 and sys.orig_argv[2].startswith(_PROGRAM.partition("{")[0])


def started_interpreter(
    module: str,
    function: str,
    arguments: Sequence[Any],
    *,
    path: Sequence[str],
    descriptors: Sequence[int],
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a new interpreter that calls a function.

    Args:
        module: the function's module.
        arguments: plain values. They aren't on the command line, which every user on the node can
            read, and which has room for 128 KiB.
        path: the new process's `sys.path`.
        descriptors: those that it inherits.
        options: further ones of `subprocess.Popen`.
    """
    settings = os.memfd_create("polytrain-settings")
    try:
        with os.fdopen(settings, "wb", closefd=False) as file:
            marshal.dump((list(path), tuple(arguments)), file)
        os.lseek(settings, 0, os.SEEK_SET)
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                _PROGRAM.format(module=module, function=function),
                str(settings),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[*descriptors, settings],
            start_new_session=True,
            **options,
        )
    finally:
        os.close(settings)
