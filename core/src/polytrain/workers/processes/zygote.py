"""The zygote: an interpreter with the workers' modules imported, which forks worker processes.

There is one per node, started with exec: no Ray, no thread, no device. Agents connect to its
socket. It forks worker processes for them, and notifies them when one ends. It ends with its last
client.

    ["fork", id, environment, directory, sys.path, sys.argv, entry]
    ["kill", id]
    ["preload", entry, modules, variables, environment, directory]
    ["reset"]
    ["is current"]

"fork" comes with descriptors: the worker's end of a socket pair, its standard output and error, its
page, and further ones for its entry, the module whose `main` the process runs. `channel`
sends and receives these. The zygote answers

    ["forked", id, pid]
    ["ended", id, how, killed]      when a worker process ends, or can't be started
    ["is current", bool]            whether the code files that it imported are unchanged
    ["dying", why]                  when the zygote fails with an unexpected error

If the system refuses a process or file descriptor, only that request fails.

On "preload" it forks a second zygote, the preloaded zygote, which imports the modules, so that only
new ones take time and memory. If modules keep that one from forking safely, it ends, and another
imports the rest. Once that is done, it forks the
processes of this entry that clients request here (`Preloaded`). It ends with this zygote, or on
"reset", because the next run may need other modules.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import gc
import importlib
import os
import selectors
import signal
import socket
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NoReturn

from polytrain.linux.processes import (
    adopt_orphans,
    describe_exit,
    die_with_parent,
    holds_device,
    is_readable,
    is_running,
    kill_children,
    kill_session,
    reap_children_except,
    session_of,
    thread_count,
)
from polytrain.workers.processes.channel import LacksDescriptorsError, pack, receive_request
from polytrain.workers.processes.forked import (
    ForkRequest,
    become_worker,
    close_all_but,
    ignore_children,
    leave_finalizers,
    noting_generators,
    spawn,
    take_any_text,
    watched,
)
from polytrain.workers.processes.named_memory import NamedMemory
from polytrain.workers.processes.preload import (
    Answer,
    CodeFiles,
    Preloaded,
    PreloadRequest,
    preload,
)
from polytrain.workers.processes.zygote_clients import Clients
from polytrain.workers.processes.zygote_connection import BACKLOG


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A child that hasn't been reaped."""

    id: int
    pid: int
    pidfd: int
    client: socket.socket
    named_memory: NamedMemory
    killed: bool = False
    """Whether it was alive when a client requested to kill it."""


@dataclass(slots=True)
class Zygote:
    """Accepts clients, serves requests, and notifies clients of ended worker processes."""

    listener: socket.socket | None
    """The socket to which clients connect; None for the preloaded zygote."""

    client: socket.socket | None = None
    """The preloaded zygote's only client: the node's zygote."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that its imports set, which worker processes get."""

    children: socket.socket | None = None
    """Becomes readable when a child has ended; None in tests without it."""

    code_files: CodeFiles = field(default_factory=CodeFiles)
    """The code files that it has imported."""

    _has_preloaded: bool = False
    _preloaded: Preloaded | None = None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _clients: Clients = field(init=False)
    _workers: dict[int, _Worker] = field(default_factory=dict)
    """Pidfd → worker."""

    def __post_init__(self) -> None:
        self._clients = Clients(self._selector)

    def serve(self) -> None:
        """Serve until the last client leaves. The first one connected before this call."""
        if self.children is not None:
            self._selector.register(self.children, selectors.EVENT_READ)
        if self.listener is not None:
            self._selector.register(self.listener, selectors.EVENT_READ)
            self._accept(self.listener)
        if self.client is not None:
            self._clients.add(self.client)
        try:
            while self._clients:
                for key, _ in self._selector.select():
                    # Serving another source may have closed this one, and a new one may have its
                    # number.
                    if self._selector.get_map().get(key.fd) is key:
                        self._serve_source(key.fileobj)
        except Exception as error:
            # Send the reason to clients that wait for worker processes.
            for client in self._clients:
                self._answer(client, ["dying", "".join(traceback.format_exception(error))])
            raise
        if self._preloaded is not None:
            self._preloaded.end()
        kill_children(lambda pid: True)
        for worker in self._workers.values():
            worker.named_memory.remove()

    def _serve_source(self, source: Any) -> None:
        if self.listener is not None and source is self.listener:
            self._accept(self.listener)
        elif source is self.children:
            self._reap_strays()
        elif source in self._clients:
            self._serve_client(source)
        elif self._preloaded is not None and source is self._preloaded.connection:
            self._pass_on(self._preloaded.read())
        elif self._preloaded is not None and source == self._preloaded.pidfd:
            self._preloaded_ended(self._preloaded)
        elif source in self._workers:
            self._reap(self._workers[source])
        elif isinstance(source, NamedMemory):
            source.read()
        else:
            for client in self._clients.of_process(source):
                self._serve_the_rest(client)

    def _answer(self, client: socket.socket, message: list[Any]) -> None:
        # A client that is gone is dropped when its connection is read.
        with contextlib.suppress(OSError):
            client.sendall(pack(message))

    def _pass_on(self, answers: Sequence[Answer]) -> None:
        for client, message in answers:
            if client in self._clients:
                self._answer(client, message)

    def _accept(self, listener: socket.socket) -> None:
        orphan = self._clients.accept(listener)
        if orphan is not None:
            self._serve_the_rest(orphan)

    def _serve_the_rest(self, client: socket.socket) -> None:
        """Serve the remaining requests of a client whose process has ended, and drop it."""
        while client in self._clients and is_readable(client):
            self._serve_client(client)
        if client in self._clients:
            self._drop(client)

    def _serve_client(self, client: socket.socket) -> None:
        try:
            request, descriptors = receive_request(client)
        except LacksDescriptorsError as error:
            if error.kind == "fork":
                lack = OSError(errno.EMFILE, "too many open files")
                self._not_started(client, error.details[0], lack)
            return
        except (EOFError, IndexError, OSError, ValueError):
            self._drop(client)
            return
        try:
            self._serve_request(client, request, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _serve_request(
        self, client: socket.socket, request: list[Any], descriptors: list[int]
    ) -> None:
        if request[0] == "fork":
            self._fork(client, request, descriptors)
        elif request[0] == "kill":
            self._kill(client, request[1])
        elif request[0] == "reset":
            self._reset()
        elif request[0] == "is current":
            self._answer(client, ["is current", self.code_files.are_current()])
        else:
            self._preload(request)

    def _drop(self, client: socket.socket) -> None:
        """Drop an agent that is gone, and kill its worker processes."""
        for worker in self._workers.values():
            if worker.client is client:
                kill_session(worker.pid)
        if self._preloaded is not None:
            with contextlib.suppress(OSError):
                self._preloaded.kill(client)
        self._clients.drop(client)

    def _kill(self, client: socket.socket, process_id: int) -> None:
        for worker in self._workers.values():
            if worker.client is client and worker.id == process_id:
                # A process that has just died by itself may be the cause: it wasn't killed. One
                # that was killed before may be dying.
                worker.killed = worker.killed or is_running(worker.pid)
                kill_session(worker.pid)
        if self._preloaded is not None:
            with contextlib.suppress(OSError):
                self._preloaded.kill(client, process_id)

    def _reap(self, worker: _Worker) -> None:
        # Kill the session before reaping its leader: afterwards the id may be reused.
        kill_session(worker.pid)
        _, status = os.waitpid(worker.pid, 0)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        del self._workers[worker.pidfd]
        self._kill_strays(worker.pid)
        self._selector.unregister(worker.named_memory)
        worker.named_memory.remove()
        if worker.client in self._clients:
            how = describe_exit(status)
            self._answer(worker.client, ["ended", worker.id, how, worker.killed])

    def _known(self) -> set[int]:
        known = {worker.pid for worker in self._workers.values()}
        return known if self._preloaded is None else {*known, self._preloaded.pid}

    def _reap_strays(self) -> None:
        """Reap orphans of worker processes, which this process has adopted."""
        assert self.children is not None
        # Clear the wake-ups of all ends so far; later ends wake it again.
        self.children.recv(4096)
        reap_children_except(self._known())

    def _kill_strays(self, session: int) -> None:
        """Kill the orphans of an ended worker process in its session.

        An orphan that left its session may be any worker's: it is killed with the last worker.
        """
        known, is_last = self._known(), not self._workers
        kill_children(lambda pid: pid not in known and (is_last or session_of(pid) == session))

    def _preload(self, request: list[Any]) -> None:
        # Preload only once: imports that made forking unsafe would do so again.
        if self._has_preloaded or thread_count() > 1 or holds_device():
            return
        self._has_preloaded = True
        _, entry, *others = request
        self._fork_preloaded(entry, PreloadRequest(*others))

    def _fork_preloaded(self, entry: str, preload_request: PreloadRequest) -> None:
        parent = os.getpid()
        self._preloaded = Preloaded.forked(
            entry, lambda client: _become_preloaded(preload_request, client, parent)
        )
        if self._preloaded is not None:
            self._selector.register(self._preloaded.pidfd, selectors.EVENT_READ)
            self._selector.register(self._preloaded.connection, selectors.EVENT_READ)

    def _reset(self) -> None:
        if self._preloaded is not None:
            self._end_preloaded(self._preloaded)
        self._has_preloaded = False

    def _preloaded_ended(self, preloaded: Preloaded) -> None:
        """Handle the preloaded zygote's end; if it asks for it, start one with fewer modules."""
        self._end_preloaded(preloaded)
        if preloaded.second is not None and thread_count() == 1 and not holds_device():
            self._fork_preloaded(preloaded.entry, preloaded.second)

    def _end_preloaded(self, preloaded: Preloaded) -> None:
        """End the preloaded zygote."""
        self._selector.unregister(preloaded.pidfd)
        self._selector.unregister(preloaded.connection)
        self._pass_on(preloaded.read())
        preloaded.end()
        self._preloaded = None
        # Its worker processes die with it; this process adopts their children.
        known = self._known()
        kill_children(lambda pid: known.isdisjoint((pid, session_of(pid))))
        self._pass_on(preloaded.unanswered())

    def _fork(self, client: socket.socket, request: list[Any], descriptors: list[int]) -> None:
        fork_order = ForkRequest.of(request, descriptors)
        preloaded = self._preloaded
        if preloaded is not None and preloaded.is_ready and preloaded.entry == fork_order.entry:
            try:
                preloaded.fork(client, request, descriptors)
            except OSError:
                # It has died, or was stopped. Do without it: it only saves time.
                self._end_preloaded(preloaded)
            else:
                return
        try:
            with contextlib.ExitStack() as unless_forked:
                named_memory = NamedMemory()
                unless_forked.callback(named_memory.close)
                pid = self._forked(fork_order, named_memory.writer)
                pidfd = watched(pid)
                unless_forked.pop_all()
        except OSError as error:
            self._not_started(client, fork_order.id, error)
            return
        self._answer(client, ["forked", fork_order.id, pid])
        self._workers[pidfd] = _Worker(
            id=fork_order.id, pid=pid, pidfd=pidfd, client=client, named_memory=named_memory
        )
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._selector.register(named_memory, selectors.EVENT_READ)

    def _not_started(self, client: socket.socket, process_id: int, error: OSError) -> None:
        how = f"could not be started: {error.strerror}"
        self._answer(client, ["ended", process_id, how, False])

    def _forked(self, request: ForkRequest, names: int) -> int:
        # A forked child would inherit other threads' locks and an unusable device context.
        if thread_count() > 1 or holds_device():
            return spawn(request, names)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            become_worker(request, self.variables, parent, names)
        return pid


def _become_preloaded(
    preload_request: PreloadRequest, client: socket.socket, parent: int
) -> NoReturn:
    """Turn a forked copy of the zygote into the preloaded zygote. Never returns."""
    try:
        ignore_children()
        leave_finalizers()
        die_with_parent(parent)
        adopt_orphans()
        close_all_but({0, 1, 2, client.fileno()})
        with noting_generators():
            variables = preload(preload_request)
        if isinstance(variables, PreloadRequest):
            client.sendall(pack(["preload", *astuple(variables)]))
        elif variables is not None:
            gc.collect()
            gc.freeze()
            client.sendall(pack(["ready"]))
            with _woken_by_children() as children:
                Zygote(None, client=client, variables=variables, children=children).serve()
        # It cleans up what its imports have made.
        atexit._run_exitfuncs()
    finally:
        os._exit(0)


def _preload(modules: Sequence[str]) -> None:
    # Garbage collections during imports free almost nothing, and take a fifth of the time.
    gc.disable()
    for module in modules:
        # An import that fails is repeated in the worker process, which reports the error.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    # Frozen objects stay shared between all forks: the collector doesn't touch them.
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def _woken_by_children() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable whenever a child of this process ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        # Without a Python handler the signal doesn't write to the wake-up descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            yield ours
        finally:
            ignore_children()


def main(listener_descriptor: int, modules: Sequence[str]) -> None:
    """Run a zygote.

    Args:
        listener_descriptor: a listening Unix socket to which the starter has connected.
    """
    # The driver handles Ctrl-C in the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If an import crashes, its stack is in the output that agents show.
    faulthandler.enable()
    # Forks write to their own outputs through these streams, too.
    take_any_text()
    adopt_orphans()
    with socket.socket(fileno=listener_descriptor) as listener:
        # From here on the kernel reports this process as the listener to its clients.
        listener.listen(BACKLOG)
        code_files = CodeFiles()
        code_files.note_imported()
        with code_files.noting(), noting_generators():
            _preload(modules)
        # Some modules insert their own finders before all others, so note all modules again.
        code_files.note_imported()
        with _woken_by_children() as children:
            Zygote(listener, children=children, code_files=code_files).serve()
