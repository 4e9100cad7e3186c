"""The zygote: a bare interpreter that has imported what workers need, and forks them on request.

One per node, exec'd fresh: no Ray, no thread, no device. Agents connect to its socket; it forks
for them and tells them when a worker process has ended. It ends when its last client has gone.

    ["fork", id, environment, directory, sys.path]
    ["kill", id]
    ["learn", modules, variables, environment, directory]
    ["forget"]

The first comes with descriptors: the worker's end of a socket pair, its standard output and error,
its page, and one for each shard.

It answers

    ["forked", id, pid]
    ["ended", id, how, killed]      at a worker process's end, whatever the cause
    ["forgotten"]

What it is told to learn a fork of it imports, so that only what is new takes time and memory.
Once that is done, and if a process can be forked from it, that is a zygote as well: it has an
address of its own, which doesn't exist before, and ends with the first one, or when that is told
to forget: the next run needn't import the same.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from polytrain.common.processes import (
    adopt_orphans,
    describe_exit,
    die_with_parent,
    holds_device,
    is_running,
    kill_children_except,
    kill_session,
    peer_of,
    thread_count,
)
from polytrain.workers.messages import pack, receive_exactly, unpack
from polytrain.workers.processes.client import BACKLOG, preloaded_name
from polytrain.workers.processes.preload import PreloadRequest, preload
from polytrain.workers.worker_process import run_and_exit

_MAX_DESCRIPTORS = 250
"""Descriptors that one message can carry; the kernel's limit is 253."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """What a worker process is to be like."""

    id: int
    environment: dict[str, str]
    directory: str
    path: list[str]
    connection: int
    stdout: int
    stderr: int
    page: int
    shards: tuple[int, ...]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Every descriptor that came with the request."""
        return (self.connection, self.stdout, self.stderr, self.page, *self.shards)


@dataclass(slots=True, kw_only=True)
class _Trainer:
    """A child that hasn't been reaped."""

    id: int
    pid: int
    pidfd: int
    client: socket.socket
    killed: bool = False
    """Whether it was still alive when a client had it killed."""


@dataclass(slots=True)
class Zygote:
    """The event loop: connections come and go, requests are served, ends are told."""

    listener: socket.socket
    name: str
    """The address."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """What its imports have set, and set in a worker process if that imports them itself."""

    is_second: bool = False
    """Whether it is the one that has learned. That stays when its clients go."""

    _has_preloaded: bool = False
    _second: tuple[int, int] | None = None
    """Its process, and the descriptor that becomes readable when that ends."""

    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _clients: set[socket.socket] = field(default_factory=set)
    _trainers: dict[int, _Trainer] = field(default_factory=dict)
    """By the descriptor that becomes readable when the process ends."""

    def serve(self) -> None:
        """Serve until the last client has gone. The first has connected before the zygote ran."""
        self._selector.register(self.listener, selectors.EVENT_READ)
        if not self.is_second:
            self._accept()
        while self._clients or self.is_second:
            for key, _ in self._selector.select():
                source = key.fileobj
                if source is self.listener:
                    self._accept()
                elif isinstance(source, socket.socket):
                    self._serve_client(source)
                elif self._second is not None and source == self._second[1]:
                    self._reap_second(*self._second)
                elif isinstance(source, int):
                    self._reap(self._trainers[source])
        kill_children_except(set())

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        # An abstract address has no permissions of its own: the kernel says who has connected.
        _, uid = peer_of(client)
        if uid != os.getuid():
            client.close()
            return
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ)

    def _serve_client(self, client: socket.socket) -> None:
        try:
            header, descriptors, _, _ = socket.recv_fds(client, 4, _MAX_DESCRIPTORS)
            header += receive_exactly(client, 4 - len(header))
            request = unpack(receive_exactly(client, int.from_bytes(header, "big")))
        except (EOFError, OSError):
            self._drop(client)
            return
        if request[0] == "fork":
            self._fork(client, _fork_request(request, descriptors))
        elif request[0] == "kill":
            self._kill(client, request[1])
        elif request[0] == "forget":
            self._forget(client)
        else:
            self._preload(request)

    def _drop(self, client: socket.socket) -> None:
        """An agent is gone: its worker processes go too."""
        for trainer in self._trainers.values():
            if trainer.client is client:
                kill_session(trainer.pid)
        self._selector.unregister(client)
        self._clients.discard(client)
        client.close()

    def _kill(self, client: socket.socket, process_id: int) -> None:
        for trainer in self._trainers.values():
            if trainer.client is client and trainer.id == process_id:
                # One that has just died of itself is a cause, not a victim.
                trainer.killed = is_running(trainer.pid)
                kill_session(trainer.pid)

    def _reap(self, trainer: _Trainer) -> None:
        # The group before its leader is reaped: afterwards the number may be somebody else's.
        kill_session(trainer.pid)
        _, status = os.waitpid(trainer.pid, 0)
        self._selector.unregister(trainer.pidfd)
        os.close(trainer.pidfd)
        del self._trainers[trainer.pidfd]
        self._kill_strays()
        if trainer.client in self._clients:
            with contextlib.suppress(OSError):
                trainer.client.sendall(
                    pack(["ended", trainer.id, describe_exit(status), trainer.killed])
                )

    def _kill_strays(self) -> None:
        known = {trainer.pid for trainer in self._trainers.values()}
        kill_children_except(known if self._second is None else {*known, self._second[0]})

    def _preload(self, request: list[Any]) -> None:
        # Once: what didn't get along with forking then wouldn't the next time.
        if self._has_preloaded or self.is_second or thread_count() > 1 or holds_device():
            return
        self._has_preloaded = True
        _, modules, variables, environment, directory = request
        preload_request = PreloadRequest(
            modules=tuple(modules),
            variables=variables,
            environment=environment,
            directory=directory,
        )
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_second(preload_request, self.name, parent)
        self._second = pid, os.pidfd_open(pid)
        self._selector.register(self._second[1], selectors.EVENT_READ)

    def _forget(self, client: socket.socket) -> None:
        if self._second is not None:
            pid, pidfd = self._second
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._reap_second(pid, pidfd)
        self._has_preloaded = False
        with contextlib.suppress(OSError):
            client.sendall(pack(["forgotten"]))

    def _reap_second(self, pid: int, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)
        self._second = None
        # Its worker processes are dying with it; what they had started is ours now.
        self._kill_strays()

    def _fork(self, client: socket.socket, request: ForkRequest) -> None:
        # A second thread's locks, or a device's context, would be broken in a forked child.
        if thread_count() > 1 or holds_device():
            pid = _spawn(request)
        else:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become_trainer(request, self.variables, parent)
        for descriptor in request.descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            client.sendall(pack(["forked", request.id, pid]))
        pidfd = os.pidfd_open(pid)
        self._trainers[pidfd] = _Trainer(id=request.id, pid=pid, pidfd=pidfd, client=client)
        self._selector.register(pidfd, selectors.EVENT_READ)


def _fork_request(request: list[Any], descriptors: list[int]) -> ForkRequest:
    _, process_id, environment, directory, path = request
    connection, stdout, stderr, page, *shards = descriptors
    return ForkRequest(
        id=process_id,
        environment=environment,
        directory=directory,
        path=path,
        connection=connection,
        stdout=stdout,
        stderr=stderr,
        page=page,
        shards=tuple(shards),
    )


def _become_second(preload_request: PreloadRequest, name: str, parent: int) -> NoReturn:
    """Turn a forked copy of the zygote into the one that has learned. Never returns."""
    try:
        die_with_parent(parent)
        adopt_orphans()
        _close_all_but({0, 1, 2})
        variables = preload(preload_request)
        if variables is not None:
            gc.collect()
            gc.freeze()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(preloaded_name(name))
                listener.listen(BACKLOG)
                Zygote(listener, name, variables=variables, is_second=True).serve()
    finally:
        os._exit(0)


def _become_trainer(request: ForkRequest, variables: Mapping[str, str], parent: int) -> NoReturn:
    """Turn a forked copy of the zygote into a worker process. Never returns."""
    try:
        os.setsid()
        die_with_parent(parent)
        os.dup2(request.stdout, 1)
        os.dup2(request.stderr, 2)
        _close_all_but({0, 1, 2, request.connection, request.page, *request.shards})
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request.environment)
        os.environ.update(variables)
        sys.path[:] = request.path
        with contextlib.suppress(OSError):  # the driver's directory may not exist on this node
            os.chdir(request.directory)
        _reseed()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    run_and_exit(socket.socket(fileno=request.connection), request.page, request.shards)


def _spawn(request: ForkRequest) -> int:
    """Start a worker process that inherits nothing. Slower: it imports everything itself."""
    descriptors = (request.connection, request.page, *request.shards)
    with contextlib.suppress(OSError):
        os.chdir(request.directory)
    process = subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-c",
            f"import sys; sys.path[:] = {request.path!r}\n"
            "from polytrain.workers.worker_process import spawned\n"
            f"spawned(*{descriptors!r})",
        ],
        env=request.environment,
        stdin=subprocess.DEVNULL,
        stdout=request.stdout,
        stderr=request.stderr,
        pass_fds=descriptors,
        start_new_session=True,
    )
    # The zygote waits for its children itself; this keeps Popen from doing it too.
    process.returncode = 0
    return process.pid


def _close_all_but(kept: set[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _reseed() -> None:
    """NumPy's global generator would go on alike in all forks; Python's reseeds itself."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _preload(modules: Sequence[str]) -> None:
    for module in modules:
        # A module that can't be imported fails again in the worker process, where it can be told.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    # What was imported stays shared between all forks: the collector doesn't touch it any more.
    gc.collect()
    gc.freeze()


def main(listener_descriptor: int, name: str, modules: str) -> None:
    """Run a zygote.

    Args:
        listener_descriptor: a listening Unix socket to which the starter has connected.
        name: the address that this socket is bound to.
        modules: JSON list of the modules to import first.
    """
    # Ctrl-C in the terminal is for the driver; it decides what becomes of the rest.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    with socket.socket(fileno=listener_descriptor) as listener:
        # From here on the kernel tells whoever connects that it is this process that listens.
        listener.listen(BACKLOG)
        _preload(json.loads(modules))
        Zygote(listener, name).serve()
