"""A process that has imported what ranks need, and forks them, as a zygote does for trainers."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from polytrain.common.processes import die_with_parent, kill_session, thread_count
from polytrain.testing.local_rank import run_rank
from polytrain.workers.messages import SocketChannel, pack, receive_exactly, unpack
from polytrain.workers.processes.client import SAFE_TO_FORK

_LENGTH_SIZE = 4


class Forker:
    """The process, as who needs ranks sees it. It serves one request at a time."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """
        Args:
            modules: imported before. One that can't be imported fails again in the rank.
            environment: all variables that the ranks have.
        """
        self._environment = dict(environment)
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                _command("serve", theirs.fileno(), json.dumps(list(modules))),
                env={**environment, **SAFE_TO_FORK},
                pass_fds=[theirs.fileno()],
            )

    def fork(self, connection: socket.socket) -> int:
        """Have a process that is a rank, with a copy of this socket, and return its id."""
        frame = pack(["fork", self._environment])
        socket.send_fds(self._connection, [frame[:_LENGTH_SIZE]], [connection.fileno()])
        self._connection.sendall(frame[_LENGTH_SIZE:])
        return self._answer()

    def wait(self, pid: int) -> int:
        """Wait, once, for the end of a process that it has forked.

        Returns:
            Its exit code; below zero, the signal that has ended it.
        """
        self._connection.sendall(pack(["wait", pid]))
        return self._answer()

    def kill(self, pid: int) -> None:
        """End a process that it has forked and nobody has waited for."""
        self._connection.sendall(pack(["kill", pid]))
        self._answer()

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be asked of it any more."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End it, and with it all that it has forked."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _answer(self) -> int:
        answer: int
        try:
            [answer] = SocketChannel(self._connection).receive()
        except BaseException:
            # Such as a time limit of the test's: the next one would take this answer for its own.
            self.close()
            raise
        return answer


_kept: tuple[object, Forker] | None = None


def warm_forker(modules: Sequence[str], environment: Mapping[str, str]) -> Forker:
    """One like this: an earlier world's, if that was alike, and a new one otherwise.

    The last one is kept until this process ends. Its arguments are those of `Forker`.
    """
    global _kept
    # pytest names each test in a variable.
    lasting = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    likeness = (tuple(modules), lasting, tuple(sys.path))
    if _kept is not None and (_kept[0] != likeness or _kept[1].has_ended):
        _kept[1].close()
        _kept = None
    if _kept is None:
        _kept = likeness, Forker(modules, lasting)
    return _kept[1]


def serve(descriptor: int, modules: str) -> NoReturn:
    """The process itself.

    Args:
        descriptor: of the socket on which it is asked.
        modules: JSON list of what to import first.
    """
    # Ctrl-C is for who runs the tests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in json.loads(modules):
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(EOFError, OSError):
        while True:
            header, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_SIZE, 1)
            header += receive_exactly(connection, _LENGTH_SIZE - len(header))
            request = unpack(receive_exactly(connection, int.from_bytes(header, "big")))
            connection.sendall(pack([_served(request, descriptors)]))
    # The kernel ends what it has forked.
    os._exit(0)


def _served(request: Sequence[object], descriptors: Sequence[int]) -> int:
    match request:
        case ["fork", dict(environment)]:
            [descriptor] = descriptors
            pid = _forked(descriptor, environment)
            os.close(descriptor)
            return pid
        case ["kill", int(pid)]:
            kill_session(pid)
        case ["wait", int(pid)]:
            pass
        case _:
            raise ValueError(f"{request!r} is no request")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _forked(descriptor: int, environment: Mapping[str, str]) -> int:
    # A second thread's locks would be broken in a forked child.
    if thread_count() > 1:
        process = subprocess.Popen(
            _command("spawned", descriptor),
            env=environment,
            pass_fds=[descriptor],
            start_new_session=True,
        )
        # Who has asked for it waits for it; this keeps Popen from doing it too.
        process.returncode = 0
        return process.pid
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            die_with_parent(parent)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(environment)
            run_rank(socket.socket(fileno=descriptor))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def spawned(descriptor: int) -> NoReturn:
    """A rank that was exec'd because nothing could be forked."""
    die_with_parent(os.getppid())
    run_rank(socket.socket(fileno=descriptor))


def _command(function: str, *arguments: object) -> list[str]:
    """What runs a function of this module in a new interpreter, with this one's path."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from polytrain.testing import forker; forker.{function}(*{arguments!r})"
    )
    return [sys.executable, "-c", code]
