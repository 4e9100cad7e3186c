"""The way to a node's zygote: connect to it, or start it if nobody has."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polytrain.common.processes import children_of, peer_of, wait_if_ending
from polytrain.workers.messages import SocketChannel, pack

# Threads that libraries start while they are imported would make forking unsafe.
_NO_ARROW_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
SAFE_TO_FORK = {"OPENBLAS_NUM_THREADS": "1", **_NO_ARROW_THREAD}
"""Variables of a process that imports what it is to fork."""

_UNLESS_SET = {
    # Row groups come and go many times a second. Arrow's allocator gives memory back to the system
    # after 10 ms by default, and having it mapped again takes longer than reading it full.
    "MIMALLOC_PURGE_DELAY": "10000",
    # Tensors come and go with every step. glibc raises these two by itself, but as far as here only
    # after it has freed a block as large; until then it may give a step's memory back at its end.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}

_ANSWER_S = 1.0

BACKLOG = 1024
"""Agents of one node that may connect while the zygote still imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteSpec:
    """What a node's zygote is like. The same from whoever starts it."""

    name: str
    """Its address: an abstract Unix socket, which has no file and vanishes with its owner."""

    environment: Mapping[str, str]
    """Variables that must be set before anything is imported, unless the user has set them."""

    modules: tuple[str, ...]
    path: tuple[str, ...]
    """Its `sys.path`."""


def zygote_name(token: str, node_id: str) -> str:
    """Address of the zygote with this token on one node."""
    return f"\0polytrain-{token}-{node_id}"


def preload_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables under which a zygote imports what workers with these have imported themselves.

    BLAS libraries keep the threads that they are loaded with: as many as in a worker process, here.
    """
    return {**_UNLESS_SET, **environment, **_NO_ARROW_THREAD}


def preloaded_name(name: str) -> str:
    """Address of the zygote that has also imported what a worker process of this zygote has."""
    return f"{name}-learned"


class ZygoteConnection:
    """A client's connection to its node's zygote, which ends when the last of them is closed."""

    def __init__(
        self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.socket = connection
        self._process = process

    @classmethod
    def open(cls, spec: ZygoteSpec) -> ZygoteConnection:
        """Connect to the zygote, or start it."""
        return cls(*_connect(spec))

    @classmethod
    def to_preloaded(cls, spec: ZygoteSpec) -> ZygoteConnection | None:
        """Connect to the one that has learned; None if there is none, or it isn't ready.

        One that an earlier zygote of this name has left, by being killed, is still there for a
        moment: the kernel ends it, but not before everybody has heard of the other's end.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):
            connection.connect(preloaded_name(spec.name))
            listener = _listener_of(connection)
            is_ours = listener in children_of(_listener_at(spec.name))
            if is_ours and not wait_if_ending(listener):
                return cls(connection)
        connection.close()
        return None

    def request(self, message: list[object], descriptors: Sequence[int] = ()) -> None:
        """Send a request, together with open descriptors."""
        frame = pack(message)
        # The descriptors travel with the first bytes; the rest may need several messages.
        socket.send_fds(self.socket, [frame[:4]], list(descriptors))
        self.socket.sendall(frame[4:])

    @property
    def is_open(self) -> bool:
        """Whether it hasn't been left."""
        return self.socket.fileno() != -1

    @property
    def pid(self) -> int | None:
        """Process id of the zygote; None if it was there when this connected."""
        return None if self._process is None else self._process.pid

    def leave(self) -> None:
        """Be its client no more. It lives as long as there are others."""
        self.socket.close()

    def has_forgotten(self) -> bool:
        """Whether it has done what it was asked to do last: to forget what a run was about.

        False if it is gone, or doesn't answer at once.
        """
        self.socket.settimeout(_ANSWER_S)
        try:
            return SocketChannel(self.socket).receive() == ["forgotten"]
        except (EOFError, OSError):
            return False
        finally:
            self.socket.settimeout(None)

    def end(self) -> None:
        """End the zygote, which nobody needs any more."""
        self.leave()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Leave. Whoever has started the zygote waits for its end, and so for all other clients."""
        self.leave()
        if self._process is not None:
            self._process.wait()


def _connect(spec: ZygoteSpec) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                # Only one can bind the name: that one starts the zygote.
                listener.bind(spec.name)
            except OSError:
                # Refused: bound but not listening yet, or just ended. The name tells next time.
                with contextlib.suppress(ConnectionRefusedError):
                    connection.connect(spec.name)
                    if not wait_if_ending(_listener_of(connection)):
                        return connection, None
                connection.close()
                continue
            listener.listen(BACKLOG)
            # Connected before it runs: a zygote without a client ends.
            connection.connect(spec.name)
            return connection, _start(spec, listener)


def _listener_of(connection: socket.socket) -> int:
    """The process that listens where this is connected to.

    One that ends may close its connections before it closes the socket on which it has listened:
    whoever has heard of its end can still connect to it.
    """
    pid, _ = peer_of(connection)
    return pid


def _listener_at(name: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(name)
        return _listener_of(connection)


def _start(spec: ZygoteSpec, listener: socket.socket) -> subprocess.Popen[bytes]:
    listener.set_inheritable(True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:] = {list(spec.path)!r}\n"
            "from polytrain.workers.processes.zygote import main\n"
            f"main({listener.fileno()}, {spec.name!r}, {json.dumps(list(spec.modules))!r})",
        ],
        env={**_UNLESS_SET, **spec.environment, **inherited, **SAFE_TO_FORK},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
