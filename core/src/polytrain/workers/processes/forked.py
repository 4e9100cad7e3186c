"""Turns a forked process into a worker process, with streams and random numbers of its own.

Where forking is unsafe, it spawns a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import io
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from polytrain.events.output import ERROR_BEGINS, ERROR_ENDS, OutputRoute, flush_output
from polytrain.linux.blas_threads import start_blas_threads
from polytrain.linux.processes import die_with_parent, kill_session
from polytrain.linux.progress_page import write_to
from polytrain.observe.stacks import be_readable
from polytrain.workers.processes.named_memory import have_names_tracked
from polytrain.workers.processes.zygote_connection import started_interpreter


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """The settings of a worker process, in the order of a request for it and of its descriptors."""

    id: int
    environment: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    """The driver's `sys.argv`: a training function may parse it."""

    entry: str
    """Module whose `main` the process runs."""

    connection: int
    stdout: int
    stderr: int
    page: int
    others: tuple[int, ...]
    """Further descriptors for the entry."""

    @classmethod
    def of(cls, request: list[Any], descriptors: list[int]) -> ForkRequest:
        """Parse a message to a zygote, with its descriptors."""
        fields: list[Any] = [*request[1:], *descriptors[:4], tuple(descriptors[4:])]
        return cls(*fields)


def ignore_children() -> None:
    """Undo the zygote's handling of SIGCHLD, which a fork inherits."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def leave_finalizers() -> None:
    """Leave it to the zygote to clean up, at its end, what its imports have made.

    All its forks share it, as a library's temporary directory. For torch with libraries on top of
    it, it would also take 75 ms at the end of each worker process.
    """
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]  # no public list
        finalizer.atexit = False
    # The other exit handlers stay: some end what a worker process begins, as a tracker's run.
    atexit.unregister(_AnyRemoval())  # type: ignore[arg-type]  # it is compared with each


class _AnyRemoval:
    """Equals each function of the standard library that removes files."""

    def __eq__(self, other: object) -> bool:
        function = other.func if isinstance(other, functools.partial) else other
        return getattr(function, "__func__", function) in _REMOVALS

    __hash__ = None  # type: ignore[assignment]  # it equals functions of several hashes


_REMOVALS = [
    *(os.remove, os.unlink, os.rmdir, os.removedirs, Path.unlink, Path.rmdir, shutil.rmtree),
    tempfile.TemporaryDirectory.cleanup,
]


def become_worker(
    request: ForkRequest, variables: Mapping[str, str], parent: int, names: int
) -> NoReturn:
    """Turn a forked copy of the zygote into a worker process. Never returns.

    Args:
        names: descriptor to which it sends the names of what it shares.
    """
    try:
        ignore_children()
        leave_finalizers()
        os.setsid()
        die_with_parent(parent)
        os.dup2(request.stdout, 1)
        os.dup2(request.stderr, 2)
        close_all_but({0, 1, 2, request.connection, request.page, names, *request.others})
        have_names_tracked(names)
        _open_text()
        _have_interrupts_raised()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request.environment)
        os.environ.update(variables)
        sys.path[:] = request.path
        sys.argv[:] = request.argv
        with contextlib.suppress(OSError):  # the driver's directory may not exist on this node
            os.chdir(request.directory)
        _forget_missing_directories()
        reseed()
        start_blas_threads(os.environ)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    run_and_exit(request.entry, request.connection, request.page, *request.others)


def _forget_missing_directories() -> None:
    """Look again for directories of modules that the zygote hasn't found, or has in its own.

    `importlib.invalidate_caches` would have all others listed again, too.
    """
    for place, finder in [*sys.path_importer_cache.items()]:
        if finder is None or not os.path.isabs(place):
            del sys.path_importer_cache[place]


_unseeded: weakref.WeakSet[random.Random] = weakref.WeakSet()
"""Generators that imports have made without a seed: forks inherit their states.

Python seeds its own one itself.
"""


@contextlib.contextmanager
def noting_generators() -> Iterator[None]:
    """Note the generators that imports make meanwhile without a seed.

    With one of its own, a library names files that no other process may have. Generators that have
    a seed go on alike in all processes.
    """
    seed = random.Random.seed

    def noting_seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, a, version)
        if a is None:
            _unseeded.add(self)
        else:
            _unseeded.discard(self)

    of_all: Any = random.Random
    of_all.seed = noting_seed
    try:
        yield
    finally:
        of_all.seed = seed


def reseed() -> None:
    """Seed the generators of NumPy and torch, and those that were noted."""
    for generator in _unseeded:
        generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    # Not torch.seed(), which prepares CUDA. A module that failed to import has no generator.
    of_torch = getattr(sys.modules.get("torch"), "default_generator", None)
    if of_torch is not None:
        of_torch.seed()


def run_and_exit(entry: str, connection: int, page: int, *others: int) -> NoReturn:
    """Run an entry's `main` and exit, without returning into the zygote's frames.

    Args:
        entry: the module's name.
        connection: descriptor of the socket to the process that has requested this one.
        page: descriptor of the progress page.
        others: further descriptors, for `main`.
    """
    code = 1
    try:
        write_to(page)
        be_readable(page)
        main = importlib.import_module(entry).main
        code = main(socket.socket(fileno=connection), others)
        # As at the end of a program, wait for the threads that users' code has started, and then
        # run the libraries' exit handlers. Leave out the interpreter's finalisation, which takes
        # seconds with frameworks and saves nothing.
        threading._shutdown()  # type: ignore[attr-defined]  # typeshed lacks it
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def spawn(request: ForkRequest, names: int) -> int:
    """Spawn a worker process with a new interpreter, which imports everything itself."""
    descriptors = (names, request.connection, request.page, *request.others)
    process = started_interpreter(
        __name__,
        run_spawned.__name__,
        (request.entry, request.argv, *descriptors),
        path=request.path,
        descriptors=descriptors,
        env=request.environment,
        # The driver's directory may not exist on this node.
        cwd=request.directory if os.path.isdir(request.directory) else None,
        stdout=request.stdout,
        stderr=request.stderr,
    )
    # Keep Popen from reaping the child: the zygote does that.
    process.returncode = 0
    return process.pid


def run_spawned(entry: str, argv: Sequence[str], *descriptors: int) -> NoReturn:
    """Call `run_and_exit` in a process that was spawned instead of forked."""
    die_with_parent(os.getppid())
    take_any_text()
    _have_interrupts_raised()
    sys.argv[:] = argv
    names, connection, page, *others = descriptors
    have_names_tracked(names)
    run_and_exit(entry, connection, page, *others)


def watched(pid: int) -> int:
    """Return a child's pidfd; kill the child if none can be opened."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        kill_session(pid)
        os.waitpid(pid, 0)
        raise


def _have_interrupts_raised() -> None:
    """Let SIGINT raise `KeyboardInterrupt`, as in any program: the zygote ignores it.

    None comes from a terminal, but libraries send it to their own process, to stop training.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def close_all_but(kept: set[int]) -> None:
    """Close all descriptors of this process except these."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


_MARKS = ERROR_BEGINS.encode(), ERROR_ENDS.encode()


def take_any_text() -> None:
    """Let this process's first streams take any text, whatever the driver's terminal takes.

    Libraries keep these objects. Each line is written at once: the process may be killed.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]  # a text file
            encoding="utf-8", errors="backslashreplace", line_buffering=True
        )


def _open_text() -> None:
    """Open standard streams of a forked process, which take any text as well."""
    sys.stdout, sys.stderr = (
        _text(io.FileIO(descriptor, "w", closefd=False), shows_bars=False) for descriptor in (1, 2)
    )


def open_streams(route: OutputRoute) -> None:
    """Make this process's `sys.stdout` and `sys.stderr` those of a route."""
    sys.stdout.flush()
    sys.stderr.flush()
    # What both streams share is a terminal if bars are shown there; else standard error alone is.
    if route.one_pipe and route.shows_bars:
        sys.stdout = _text(io.FileIO(1, "w", closefd=False), shows_bars=True)
    if route.one_pipe:
        sys.stderr = marked_errors(2, shows_bars=route.shows_bars)
    elif route.shows_bars:
        sys.stderr = _text(io.FileIO(2, "w", closefd=False), shows_bars=True)


def marked_errors(descriptor: int, *, shows_bars: bool = False) -> io.TextIOWrapper:
    """Return a stream that marks what it writes to a descriptor as standard error.

    Args:
        descriptor: the descriptor, which stays open.
        shows_bars: whether bars that are written to it are shown while they move.
    """
    return _text(_MarkedErrors(descriptor, "w", closefd=False), shows_bars=shows_bars)


class _MarkedErrors(io.FileIO):
    """Marks what it writes, in the same call of the system: nothing comes in between."""

    def write(self, data: Any, /) -> int:
        """Write all data."""
        left = b"".join((_MARKS[0], data, _MARKS[1]))
        while left:
            left = left[os.writev(self.fileno(), [left]) :]
        return len(data)


class _ShownText(io.TextIOWrapper):
    """Text of a stream that looks like a terminal to libraries whose bars move only there.

    To the system it is a pipe: programs in other languages, and terminal settings, take it for one.
    """

    def isatty(self) -> bool:
        """Return that the user sees it on a terminal."""
        return True


def _text(raw: io.FileIO, *, shows_bars: bool) -> io.TextIOWrapper:
    kind = _ShownText if shows_bars else io.TextIOWrapper
    return kind(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
