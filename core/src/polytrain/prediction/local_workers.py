"""Workers on this machine: processes that the zygote forks, without Ray."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import socket
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from polytrain.linux.forked_children import keep_from_children
from polytrain.prediction.parts import Unit
from polytrain.prediction.scheduling import (
    Event,
    Lost,
    PickledTask,
    Predicted,
    Raised,
    Ready,
    RowsOf,
    Workers,
)
from polytrain.workers.processes.forked_group import ForkedGroup

_ENTRY = "polytrain.prediction.worker_process"


class LocalWorkers(Workers):
    """Forked processes. None is left behind, also if this process is killed."""

    def __init__(
        self,
        task: PickledTask,
        *,
        count: int,
        modules: Sequence[str],
        environment: Mapping[str, str],
        rows_of: RowsOf,
    ) -> None:
        """
        Args:
            task: what the workers have to know.
            count: number of workers.
            modules: imported once for all of them.
            environment: variables of the processes, besides those of this one.
            rows_of: the rows of a unit that has to be sent with them.
        """
        self._task, _ = task
        self._count = count
        self._rows_of = rows_of
        self._group = ForkedGroup(_ENTRY, modules, environment)
        self._numbers = itertools.count()
        self._processes: dict[int, int] = {}
        """Worker → number of its process."""

        self._connections: dict[int, Connection] = {}

    def __enter__(self) -> LocalWorkers:
        self._group.__enter__()
        try:
            for worker in range(self._count):
                self.replace(worker)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for connection in self._connections.values():
            connection.close()
        self._group.__exit__(kind, error, traceback)

    def give(self, worker: int, unit: Unit) -> None:
        self._send(worker, (unit, self._rows_of(unit)))

    def replace(self, worker: int) -> None:
        mine, theirs = socket.socketpair()
        # In a child that another thread forks it would hide the worker's end.
        keep_from_children(theirs)
        self._connections[worker] = Connection(mine.detach())
        self._processes[worker] = next(self._numbers)
        with theirs:
            self._group.fork(self._processes[worker], theirs)
        # A process that dies at once is lost, as any other.
        with contextlib.suppress(OSError):
            self._connections[worker].send_bytes(self._task)

    def next(self) -> Event:
        workers = {connection: worker for worker, connection in self._connections.items()}
        # Without a limit: a part takes as long as it takes, and a lost worker's connection ends.
        # How its process ended is asked for then.
        connection = next(each for each in wait([*workers]) if isinstance(each, Connection))
        worker = workers[connection]
        try:
            kind, content = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return self._lost(worker)
        match kind:
            case "ready":
                return Ready(worker=worker)
            case "predicted":
                return Predicted(worker=worker, part=content)
            case _:
                return Raised(error=content)

    def _lost(self, worker: int) -> Lost:
        self._connections.pop(worker).close()
        return Lost(worker=worker, reason=self._group.end_of(self._processes.pop(worker)))

    def _send(self, worker: int, message: Any) -> None:
        # If the worker is lost, its connection ends, which `next` finds.
        with contextlib.suppress(OSError):
            self._connections[worker].send_bytes(pickle.dumps(message, protocol=5))
