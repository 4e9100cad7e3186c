"""The connection over which an agent sends its worker process parts of a streaming data set.

The worker process sends requests. The agent answers with a part in shared memory, the end, or an
error. The agent's side runs on its own thread while the worker process lives.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polytrain.data.plan.stream_partitioner import Segment
from polytrain.data.shards.stream_shard import PartSource
from polytrain.data_errors import StreamLostError
from polytrain.workers.processes.channel import SocketChannel, pack

if TYPE_CHECKING:
    import pyarrow as pa


class StreamConnection(PartSource):
    """The worker process's end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._channel = SocketChannel(connection)
        # The next epoch may be requested before the last part of this one arrives.
        self._lock = threading.Lock()

    def begin(self, epoch: int, segments: Sequence[Segment]) -> None:
        with self._lock:
            self._channel.send(["begin", epoch, [list(segment) for segment in segments]])

    def next_part(self, epoch: int, index: int) -> pa.Table | int:
        from polytrain.data.shards.shared_memory import from_shared_memory

        with self._lock:
            self._channel.send(["next", epoch, index])
            # One byte precedes the answer, and carries the descriptor if there is one.
            _, ancillary, _, _ = self._connection.recvmsg(1, socket.CMSG_SPACE(4))
            try:
                answer = self._channel.receive()
            except EOFError as error:
                raise StreamLostError("the agent that reads the stream is gone") from error
        if answer[0] == "end":
            rows: int = answer[1]
            return rows
        if answer[0] == "failed":
            raise StreamLostError(answer[1])
        descriptor = array.array("i", ancillary[0][2])[0]
        try:
            return from_shared_memory(descriptor)
        finally:
            os.close(descriptor)


def serve_stream(
    connection: socket.socket,
    *,
    begin: Callable[[int, tuple[Segment, ...]], None],
    next_part: Callable[[int, int], Any],
) -> None:
    """Answer requests until the worker process is gone; called in the agent.

    Args:
        connection: the connection to the worker process; closed at the end.
        begin: starts an epoch.
        next_part: returns a part as a table, or at the end the number of rows of all ranks.
    """
    from polytrain.data.shards.shared_memory import to_shared_memory

    channel = SocketChannel(connection)
    with contextlib.closing(connection), contextlib.suppress(EOFError, OSError):
        failure = ""
        while True:
            what, epoch, argument = channel.receive()
            try:
                if what == "begin":
                    begin(epoch, tuple(Segment(*segment) for segment in argument))
                    continue
                part = next_part(epoch, argument) if not failure else None
            except Exception as error:  # the worker process reports any error of a user's pipeline
                failure = str(error)
                if what == "begin":
                    continue
            if failure:
                connection.sendmsg([b"."])
                connection.sendall(pack(["failed", failure]))
            elif isinstance(part, int):
                connection.sendmsg([b"."])
                connection.sendall(pack(["end", part]))
            else:
                descriptor = to_shared_memory(part)
                try:
                    socket.send_fds(connection, [b"."], [descriptor])
                finally:
                    os.close(descriptor)
                connection.sendall(pack(["part"]))
