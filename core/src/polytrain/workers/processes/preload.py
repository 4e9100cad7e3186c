"""Preloads modules for later attempts and runs, and notices that their files have changed.

Only installed modules are preloaded: users expect that only their script imports modules beside it.
A shared import must have the same effect as one per process: the function must not have changed
`sys.path` or variables, and the imports must not start a thread or child, open a file, load Ray,
import a module beside the script, or set a variable to another value each time. Modules that do,
and all that import them, are left out in a second attempt; each worker process imports those. Not
noticed is a module that looks in `sys.modules` for one of those, which comes later then.

A zygote may serve several runs. Between them a user may edit modules beside the script, or
installed in editable mode: worker processes forked from earlier imports would run old code. Files
of installed distributions aren't noted: those are replaced as a whole.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from polytrain.functions.users_code import is_installed
from polytrain.linux.processes import (
    children_of,
    holds_device,
    is_readable,
    open_files,
    thread_count,
)
from polytrain.workers.processes.channel import FrameBuffer, Message, SocketChannel, send_request
from polytrain.workers.processes.forked import watched
from polytrain.workers.processes.import_watch import Effects, ImportWatch
from polytrain.workers.processes.zygote_connection import CLEANED_UP_WITHIN_S, preload_environment

_State = tuple[int, int] | None
"""Modification time and size of a file; None if it doesn't exist."""


class CodeFiles:
    """Files of modules outside installed distributions, with their states before the import.

    While it notes them it is the process's first import finder, and delegates to the others. So a
    file's state is read before its content, and an edit in between is noticed later.
    """

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        """File → its state before the import."""

        self._linked: set[str] = set()
        """Packages that are links in a directory of installed packages."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the files of all modules that are imported meanwhile."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)

    def note_imported(self) -> None:
        """Note the files of modules that this process has already imported."""
        for name, module in list(sys.modules.items()):
            # Read `__dict__` directly: some modules import others on attribute access.
            with contextlib.suppress(AttributeError):
                self._note(name, object.__getattribute__(module, "__dict__").get("__spec__"))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module with the other finders, and note its file."""
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._note(name, spec)
                    return spec
        return None

    def are_current(self) -> bool:
        """Return whether all files are unchanged."""
        return all(_state(file) == state for file, state in self._states.items())

    def _note(self, name: str, spec: ModuleSpec | None) -> None:
        if spec is None or not spec.has_location or spec.origin is None:
            return
        top, _, below = name.partition(".")
        if is_installed(spec.origin):
            if not below and os.path.islink(os.path.dirname(spec.origin)):
                self._linked.add(top)
            if top not in self._linked:
                return
        file = os.path.abspath(spec.origin)
        while not os.path.exists(file) and file != os.path.dirname(file):
            # It is in an archive: note the archive.
            file = os.path.dirname(file)
        self._states.setdefault(file, _state(file))


def _state(file: str) -> _State:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


_WORTH_IT = 30
"""Minimum number of modules: with fewer, a preloaded zygote saves only milliseconds."""

_OF_ONE_WORKER = "VISIBLE"
"""Part of the names of variables with a worker's devices, which differ between workers."""


@dataclass(frozen=True, slots=True)
class PreloadRequest:
    """The modules to import for worker processes, and the environment to do it in.

    The fields are in the order of a "preload" message.
    """

    modules: Sequence[str]
    """Names, in the order of the first worker process's imports."""

    variables: Mapping[str, str | None]
    """Variables that changed in that process, with their new values; None if they were deleted."""

    environment: Mapping[str, str]
    directory: str
    is_second: bool = False
    """Whether modules that a first attempt couldn't share are left out."""


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that differ, with their new values; None for deleted ones."""
    return {
        name: after.get(name)
        for name in (*before, *(name for name in after if name not in before))
        if before.get(name) != after.get(name)
    }


class ImportRecorder(SocketChannel):
    """A worker process's channel to its agent, which also reports the imported modules once.

    It does so after the first report: by then the training function has imported the modules that
    it, and the next attempt, needs.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last_module: str | None = next(reversed(sys.modules))
        """That which was there last before the function's; None once these are reported.

        All names would have to be touched to know them: that copies a fork's memory.
        """

        self._path = list(sys.path)
        self._before = dict(os.environ)
        self._variables: dict[str, str | None] = {}

    def send(self, *messages: Message) -> None:
        super().send(*messages)
        if self._last_module is None:
            return
        match messages[0][0]:
            case "offer":
                # Compare now: the collective then sets variables that differ between ranks.
                self._variables = changed(self._before, os.environ)
            case "joined":
                self._before = dict(os.environ)
            case "report":
                modules = _installed_modules(after=self._last_module)
                self._last_module = None
                if len(modules) >= _WORTH_IT and sys.path == self._path:
                    variables = {**self._variables, **changed(self._before, os.environ)}
                    super().send(["imported", list(modules), dict(variables)])


def _installed_modules(*, after: str) -> list[str]:
    """Return the names of installed modules that were imported after another one."""
    found = []
    for name in reversed(_names_after(after)):
        # Read `__dict__` directly: some modules import others on attribute access.
        with contextlib.suppress(AttributeError):
            spec = object.__getattribute__(sys.modules.get(name), "__dict__").get("__spec__")
            # Ray has its own threads and connections: each worker process imports it itself.
            is_ray = name.partition(".")[0] == "ray"
            if spec.name == name and is_installed(spec.origin or "") and not is_ray:
                found.append(name)
    return found


def _names_after(last: str) -> list[str]:
    """Return the names of modules that were imported after another one, newest first."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread imports one meanwhile
            return list(itertools.takewhile(lambda name: name != last, reversed(sys.modules)))


def preload(preload_request: PreloadRequest) -> dict[str, str] | PreloadRequest | None:
    """Import the requested modules in this process.

    Returns:
        The variables that the imports set, for the forks. If a fork of this process would differ
        from the first worker process, or could not work: the request without the modules that are
        the reason; None if that leaves too few, or they aren't known.
    """
    os.environ.clear()
    common = {k: v for k, v in preload_request.environment.items() if _OF_ONE_WORKER not in k}
    os.environ.update(preload_environment(common))
    with contextlib.suppress(OSError):  # the driver's directory may not exist on this node
        os.chdir(preload_request.directory)
    before, held, own_code = dict(os.environ), open_files(), CodeFiles()
    variables = preload_request.variables
    known = _faults(variables, own_code)
    watch = ImportWatch(lambda: _faults(variables, own_code) - known | _set_by_now(variables))
    with own_code.noting(), watch.watching():
        for module in preload_request.modules:
            # Not every name in `sys.modules` can be imported.
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    if holds_device() or watch.is_blind:
        return None
    faults = _faults(variables, own_code) - known
    if faults:
        return _reduced(preload_request, watch, faults)
    if not all(_is_set(name, value) for name, value in variables.items()):
        # The function set this variable, and its imports may depend on it.
        return None
    if open_files() != held or thread_count() > 1:
        return None
    return {
        name: value
        for name, value in changed(before, os.environ).items()
        if value is not None and _OF_ONE_WORKER not in name
    }


_VARIABLE = "variable "
_SET = "set "


def _set_by_now(variables: Mapping[str, str | None]) -> Effects:
    """Return which of these variables have their values."""
    return frozenset(_SET + name for name, value in variables.items() if _is_set(name, value))


def _is_set(name: str, value: str | None) -> bool:
    return os.environ.get(name) == value


def _faults(variables: Mapping[str, str | None], own_code: CodeFiles) -> Effects:
    """Return what makes forks of this process differ from a worker process, or unable to work."""
    pid = os.getpid()
    return frozenset(
        (
            *(f"thread {thread}" for thread in os.listdir("/proc/self/task")),
            *(f"file {number} {target}" for number, target in open_files().items()),
            *(f"child {child}" for child in children_of(pid)),
            *(
                _VARIABLE + name
                for name, value in variables.items()
                if os.environ.get(name) not in (None, value)
            ),
            # Don't preload modules beside the script: the next attempt must see edits.
            *(f"own {file}" for file in own_code),
            *(("Ray",) if "ray" in sys.modules else ()),
        )
    )


def _reduced(
    preload_request: PreloadRequest, watch: ImportWatch, faults: Effects
) -> PreloadRequest | None:
    """Return the request without the modules that left these faults, and those that import them."""
    culprits = {fault: watch.culprits(fault) for fault in faults}
    if preload_request.is_second or not all(culprits.values()):
        return None
    for fault, modules in culprits.items():
        name = fault.removeprefix(_VARIABLE)
        if name != fault and not _is_named_after(name, modules):
            # The function set this variable, and other imports may depend on it.
            return None
    left_out = watch.dependents(frozenset().union(*culprits.values()))
    variables = {
        name: value
        for name, value in preload_request.variables.items()
        if _VARIABLE + name not in faults and not _is_left(watch.culprits(_SET + name), left_out)
    }
    kept = tuple(module for module in preload_request.modules if module not in left_out)
    if len(kept) < _WORTH_IT:
        return None
    return replace(preload_request, modules=kept, variables=variables, is_second=True)


def _is_left(setters: Collection[str], left_out: Collection[str]) -> bool:
    """Return whether only modules that are left out set a variable."""
    return bool(setters) and all(module in left_out for module in setters)


def _is_named_after(variable: str, modules: Iterable[str]) -> bool:
    """Return whether a variable begins with the name of one of these modules' packages.

    Others read no such variable.
    """
    packages = {module.partition(".")[0].lower() for module in modules}
    first, *_ = variable.lower().strip("_").split("_")
    return first in packages - {each.lower() for each in sys.stdlib_module_names}


_TAKEN_WITHIN_S = 10.0
"""Seconds within which it must read a request."""

_READ_SIZE = 1 << 16

Answer = tuple[socket.socket, list[Any]]
"""A client, and a message for it."""


@dataclass(slots=True)
class Preloaded:
    """The preloaded zygote: its process, the connection to it, and the clients of its workers.

    Clients connect only to the node's zygote. It forwards their requests over a socket that the
    fork has inherited, so the preloaded zygote needs no address, which others could take.
    """

    pid: int
    pidfd: int
    connection: socket.socket
    entry: str
    """The entry whose processes it forks; others, such as validations, outlive it."""

    is_ready: bool = False
    """Whether it has imported everything, and can fork."""

    second: PreloadRequest | None = None
    """What another one can import, if this one can't fork."""

    _why: str = ""
    """Its reason for its end; empty if it gave none."""

    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _workers: dict[int, tuple[socket.socket, int]] = field(default_factory=dict)
    """Its number for a worker process → the client, and the client's number for it."""

    _frames: FrameBuffer = field(default_factory=FrameBuffer)

    @classmethod
    def forked(cls, entry: str, become: Callable[[socket.socket], NoReturn]) -> Preloaded | None:
        """Fork this process.

        Args:
            become: called in the fork, with its connection to this process.

        Returns:
            The preloaded zygote, which only saves time; None if the system refuses the fork.
        """
        with contextlib.suppress(OSError), contextlib.ExitStack() as unless_forked:
            ours, theirs = map(unless_forked.enter_context, socket.socketpair())
            pid = os.fork()
            if pid == 0:
                become(theirs)
            preloaded = cls(pid, watched(pid), ours, entry)
            unless_forked.pop_all()
            theirs.close()
            return preloaded
        return None

    def fork(self, client: socket.socket, request: Sequence[Any], descriptors: list[int]) -> None:
        """Pass on a client's request for a worker process.

        Raises:
            OSError: it is gone, or takes no request.
        """
        number = next(self._numbers)
        kind, client_number, *others = request
        self._send([kind, number, *others], descriptors)
        self._workers[number] = client, client_number

    def kill(self, client: socket.socket, client_number: int | None = None) -> None:
        """Kill a client's worker process with this number, by default all of the client's.

        Raises:
            OSError: it is gone, or takes no request.
        """
        for number, worker in self._workers.items():
            if worker == (client, client_number) or (client_number is None and worker[0] is client):
                self._send(["kill", number])

    def read(self) -> list[Answer]:
        """Read all its messages; return its answers to clients."""
        answers = []
        while data := self._received():
            for message in self._frames.feed(data):
                match message:
                    case ["ready"]:
                        self.is_ready = True
                    case ["preload", *second]:
                        self.second = PreloadRequest(*second)
                    case ["dying", why]:
                        self._why = why
                    case [kind, number, *others]:
                        client, client_number = self._workers[number]
                        if kind == "ended":
                            del self._workers[number]
                        answers.append((client, [kind, client_number, *others]))
        return answers

    def end(self) -> None:
        """End it, and wait for its end. Its worker processes die with it."""
        if self.is_ready:
            # It cleans up what its imports have made.
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
            is_readable(self.pidfd, CLEANED_UP_WITHIN_S)
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        # No time limit: a client waits a second for its answer, then kills this process.
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.connection.close()

    def unanswered(self) -> list[Answer]:
        """Return the answers to clients whose worker processes have died with it."""
        how = f"its zygote died{self._why and ': '}{self._why}".strip()
        return [
            (client, ["ended", client_number, how, False])
            for client, client_number in self._workers.values()
        ]

    def _received(self) -> bytes:
        try:
            return self.connection.recv(_READ_SIZE, socket.MSG_DONTWAIT)
        except OSError:
            return b""

    def _send(self, request: Sequence[Any], descriptors: Sequence[int] = ()) -> None:
        self.connection.settimeout(_TAKEN_WITHIN_S)
        try:
            send_request(self.connection, request, descriptors)
        finally:
            self.connection.settimeout(None)
